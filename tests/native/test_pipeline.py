"""However the layers of a model are divided over pipeline stages, it says the same, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepseek_v4_engine import TOY as DEEPSEEK_V4
from dspark_engine import TOYS as DSPARK
from family_engine import make_spec, parts_of
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, generate, prompts
from qwen3_engine import CONFIGS

from workloads.engines.native import NativeEngine
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.generate import generate_checkpoint
from workloads.loading.tensor_table import every_tensor
from workloads.models.architectures import tensor_table
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.stages import staged
from workloads.spec import Arrival, GangSpec, Parallelism

GIVEN = prompts(1, 13, 6)
NEW_TOKENS = 3
FAMILIES: dict[str, Any] = {
    "qwen3": CONFIGS["dense_fp8"],  # its head is its embedding
    "qwen3_moe": CONFIGS["moe_bf16"],
    "kimi_k3": KimiK3Config(vocab_size=512, num_experts=8),
    "deepseek_v4": DEEPSEEK_V4,
    **{  # whose drafters read layers of every stage
        f"{name}_dspark": replace(config, **({"vision": False} if name == "deepseek_v41" else {}))
        for name, config in DSPARK.items()
    },
}
#: Stages with one layer and with several, and every other kind of division beside them.
LAYOUTS = {
    "qwen3": Parallelism(tp=2, pp=2),
    "qwen3_moe": Parallelism(dp=2, ep=2, pp=2),
    "kimi_k3": Parallelism(pp=3),
    "deepseek_v4": Parallelism(tp=2, ep=2, pp=2),
    "kimi_k3_dspark": Parallelism(pp=3),
    "deepseek_v4_dspark": Parallelism(pp=2),
    "deepseek_v41_dspark": Parallelism(tp=2, ep=2, pp=2),
}
Said = list[tuple[Any, ...]]
SpecOf = Callable[[str, Parallelism], GangSpec]


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory) -> SpecOf:
    folder = tmp_path_factory.mktemp("pipeline")
    folders: dict[str, Path] = {}

    def spec(name: str, parallelism: Parallelism) -> GangSpec:
        if name not in folders:
            folders[name] = generate_checkpoint(FAMILIES[name], 0, folder / name)
        return make_spec(folders[name], FAMILIES[name], parallelism)

    return spec


def started_and_updated(spec: GangSpec, rank: int) -> list[Said]:
    """What is said after a start, and after an update by each way that keeps what serves in its place."""
    engine = NativeEngine(spec, rank)
    engine.start(OLD, "safetensors")
    said = [generate(engine, GIVEN, NEW_TOKENS)]
    for checkpoint, via in ((NEW, "layerwise"), (OLD, "direct")):
        engine.update(checkpoint, via)
        said.append(generate(engine, GIVEN, NEW_TOKENS))
    return said


@pytest.mark.parametrize("name", list(FAMILIES))
def test_stages_together_equal_one_rank(name: str, spec_of: SpecOf, run_ranks: RanksRunner) -> None:
    expected = started_and_updated(spec_of(name, Parallelism()), 0)
    assert expected[0] == expected[2] != expected[1]
    layout = LAYOUTS[name]
    results = run_ranks(layout.ranks, partial(started_and_updated, spec_of(name, layout)))
    assert results[0] == expected
    assert not any(said for of_rank in results[1:] for said in of_rank)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_tensor_has_its_stages(name: str, spec_of: SpecOf, run_ranks: RanksRunner) -> None:
    """What a stage declares is what the table says of it, and all stages together hold the whole checkpoint."""
    stages, config = 2, FAMILIES[name]
    spec = spec_of(name, Parallelism(pp=stages))
    architecture = spec.model.architecture

    def sources(rank: int) -> set[str]:
        roots = NativeEngine(spec, rank).roots()
        return {part.source for root in roots for part in parts_of(root, roots[root]) if part.source}

    held = run_ranks(stages, sources)
    names = {one.name for one in every_tensor(tensor_table(architecture).sections(config))}
    for stage, found in enumerate(held):
        assert found == {one for one in names if staged(architecture).holds(config, one, stages, stage)}
    assert held[0] | held[1] == names
    ends = held[0] & held[1]
    assert all("embed" in one for one in ends)
    assert bool(ends) == (name != "qwen3_moe")


def test_the_drafter_alone_is_updated_on_the_last_stage(spec_of: SpecOf, run_ranks: RanksRunner) -> None:
    """The other stage takes part in the update and has nothing to do in it."""

    def update(parallelism: Parallelism) -> Callable[[int], Said]:
        spec = spec_of("kimi_k3", parallelism)

        def on_rank(rank: int) -> Said:
            engine = NativeEngine(spec, rank)
            engine.start(OLD, "safetensors")
            for root in ("target", "draft"):
                engine.update(NEW, "layerwise", Arrival(roots=(root,)))
            return generate(engine, GIVEN, NEW_TOKENS)

        return on_rank

    assert run_ranks(2, update(Parallelism(pp=2)))[0] == update(Parallelism())(0)


def test_an_update_that_one_stage_cannot_take_is_refused_by_all(
    spec_of: SpecOf, run_ranks: RanksRunner
) -> None:
    """Half of a fused matrix of the last layer arrives, which the first stage does not have."""
    spec = spec_of("kimi_k3", Parallelism(pp=2))
    half = Arrival(tensors=("*.layers.3.block_sparse_moe.shared_experts.gate_proj.weight",))

    def refused(rank: int) -> tuple[str, Said]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        with pytest.raises(CheckpointError, match="would be half new") as refusal:
            engine.update(NEW, "layerwise", half)
        return str(refusal.value), generate(engine, GIVEN, NEW_TOKENS)

    messages, said = zip(*run_ranks(2, refused), strict=True)
    assert messages[0] == messages[1]
    assert said[0]
