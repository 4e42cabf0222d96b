"""Experts that lie in more than one slot, and that change slots, give the same answers and take their own updates."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_engine import TOY as DEEPSEEK_V4
from family_engine import make_spec, parts_of
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.loading.perturb import open_view
from workloads.models.expert_slots import chosen_slots, first_slots, shuffled, sources, tables
from workloads.models.experts import RoutedExperts
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Checkpoint, GangSpec, Parallelism

GIVEN = prompts(1, 13, 6)
NEW_TOKENS = 3
FAMILIES: dict[str, Any] = {
    "kimi_k3": KimiK3Config(vocab_size=512, num_experts=8),
    "deepseek_v4": replace(DEEPSEEK_V4, num_layers=2, compress_ratios=[0, 8, 0]),
}
TWO = Parallelism(tp=2, ep=2, redundant_experts=2, rebalance_seed=7)
SpecOf = Callable[..., GangSpec]


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory: pytest.TempPathFactory) -> SpecOf:
    folder = tmp_path_factory.mktemp("redundant")
    folders: dict[str, Path] = {}

    def spec(name: str, parallelism: Parallelism, **backend: Any) -> GangSpec:
        if name not in folders:
            folders[name] = generate_checkpoint(FAMILIES[name], 0, folder / name)
        return make_spec(folders[name], FAMILIES[name], parallelism, **backend)

    return spec


def said_through_updates(spec: GangSpec, rank: int) -> tuple[list[Any], list[str]]:
    """What is said after a start and after updates of all kinds, and parts that are then not the checkpoint's."""
    engine = NativeEngine(spec, rank)
    engine.start(OLD, "safetensors")
    said = [generate(engine, GIVEN, NEW_TOKENS)]
    for checkpoint, via in ((OLD, "direct"), (NEW, "layerwise")):
        engine.update(checkpoint, via)
        said.append(generate(engine, GIVEN, NEW_TOKENS))
    return said, wrong_parts(engine)


def wrong_parts(engine: NativeEngine) -> list[str]:
    reader = open_view(Checkpoint(perturbation="every_tensor"), Path(engine.spec.checkpoint_dirs[NEW]))
    parts = [part for name, root in engine.roots().items() for part in parts_of(name, root)]
    assert parts
    return [
        f"{part.tensor} {part.source}"
        for part in parts
        if part.source is not None
        and ".experts." in part.source
        and not torch.equal(bits(part.value), bits(reader.slice(part.source, part.region)))
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "kernel"), [("kimi_k3", "mega_moe"), ("kimi_k3", "reference"), ("deepseek_v4", "mega_moe")]
)
def test_experts_that_moved_answer_as_before(
    name: str, kernel: str, spec_of: SpecOf, run_ranks: RanksRunner
) -> None:
    """One rank without redundancy says the same, to the last bit, and every slot holds its expert's new weights."""
    expected, _ = said_through_updates(spec_of(name, Parallelism(), moe_kernel=kernel), 0)
    assert expected[0] == expected[1] != expected[2]
    results = run_ranks(2, partial(said_through_updates, spec_of(name, TWO, moe_kernel=kernel)))
    assert results[0][0] == expected
    assert [wrong for _, wrong in results] == [[], []]


def test_experts_change_slots_between_ranks_in_place(spec_of: SpecOf, run_ranks: RanksRunner) -> None:
    """Their padding comes with them; each module has an order of its own."""
    spec = spec_of("kimi_k3", TWO, moe_kernel="mega_moe")

    def move(rank: int) -> tuple[list[tuple[int, ...]], bool]:
        engine = NativeEngine(replace(spec, parallelism=replace(TWO, rebalance_seed=0)), rank)
        engine.start(NEW, "safetensors")
        modules = [one for one in engine.roots()["target"].modules() if isinstance(one, RoutedExperts)]
        addresses = [t.data_ptr() for module in modules for t in module.expert_weights()]
        for loader in engine.loaders.values():
            loader.rebalance(3)
        still = [t.data_ptr() for module in modules for t in module.expert_weights()] == addresses
        assert wrong_parts(engine) == []
        padding = [part for part in parts_of("target", engine.roots()["target"]) if part.name == "padding"]
        assert padding
        assert all(torch.all(torch.eq(part.value, part.padding_value or 0)) for part in padding)
        return [module.slots for module in modules], still

    (slots, still), other = run_ranks(2, move)
    assert other == (slots, True)
    assert still
    assert len(set(slots)) == len(slots)
    assert all(sorted(one) == sorted(first_slots(8, 2)) for one in slots)


def test_experts_that_are_not_finalised_are_not_handed_out(spec_of: SpecOf) -> None:
    engine = NativeEngine(spec_of("kimi_k3", Parallelism(), moe_kernel="mega_moe"), 0)
    experts = engine.roots()["target"].get_submodule("model.layers.1.block_sparse_moe.experts")
    assert isinstance(experts, RoutedExperts)
    with pytest.raises(RuntimeError, match="not finalised and cannot be handed out"):
        experts.expert_weights()
    engine.start(OLD, "safetensors")
    assert len(experts.expert_weights()) == 4
    engine.loaders["target"].restore_consumed(experts)  # as an update in place begins
    with pytest.raises(RuntimeError, match="not finalised and cannot be handed out"):
        experts.expert_weights()


def test_slots_are_shared_out_and_found() -> None:
    slots = first_slots(4, 2)
    assert slots == (0, 1, 2, 3, 0, 1)
    of_expert, counts = tables(slots)
    assert of_expert[:, :2].tolist() == [[0, 4], [1, 5], [2, -1], [3, -1]]
    assert counts.tolist() == [2, 2, 1, 1]
    moved = shuffled(slots, "seed")
    assert sorted(moved) == sorted(slots)
    assert moved != slots
    assert tables(moved)[0].shape == of_expert.shape
    chosen = chosen_slots(torch.tensor([[0, 2], [0, -1], [1, 0]]), of_expert, counts)
    assert chosen.tolist() == [[0, 2], [4, -1], [1, 0]]
    assert all(
        slots[slot] == expert
        for row, idx in zip(chosen.tolist(), [[0, 2], [0], [1, 0]], strict=True)
        for slot, expert in zip(row, idx, strict=False)
    )


def test_an_expert_is_taken_from_its_own_rank_where_it_is() -> None:
    assert sources((0, 1, 2, 0), (2, 0, 0, 1), per_rank=2) == [2, 0, 3, 1]
