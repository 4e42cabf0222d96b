"""The layouts in which gpt-oss's checkpoints come give the same parameters, whatever the ranks hold of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_engine import make_spec
from gpt_oss_engine import (
    CONFIGS,
    EXPERTS,
    PARAMETERS,
    TOY,
    is_filled,
    parts_of,
    root_of_rank,
    start_engine,
    write_layouts,
)
from k3_engine import OLD, different, generate, held_bytes, prompts

from workloads.engines.native import NativeEngine
from workloads.kernels.shuffled_moe import ShuffledMoE
from workloads.loading.checkpoint import CheckpointError, check_finite, open_checkpoint
from workloads.loading.generate import generate_checkpoint
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import Region, WeightModule, narrow
from workloads.models.gpt_oss.config import CHECKPOINT_LAYOUTS, GptOssConfig
from workloads.models.gpt_oss.moe import RoutedExperts
from workloads.models.gpt_oss.tensors import sections
from workloads.spec import Checkpoint

SPLITS = [(1, 1), (2, 1), (1, 4), (4, 4), (2, 2)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("gpt_oss"))


def load(config: GptOssConfig, folder: Path, tp: int, ep: int, rank: int) -> dict[str, torch.Tensor]:
    """Everything that one rank holds after a cold start, by path."""
    root = root_of_rank(config, tp, ep, rank)
    Loader("target", root, Lifecycle()).cold(open_checkpoint(folder))
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    for path, module in root.named_modules():
        kernel = getattr(module, "kernel", None)
        if isinstance(kernel, ShuffledMoE):
            names = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
            tensors |= {f"{path}.kernel.{name}": getattr(kernel, name) for name in names}
    return {name: t.detach().reshape(-1).view(torch.uint8) for name, t in tensors.items()}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2)], ids=["tp2", "tp2-ep2"])
def test_all_layouts_give_the_same_live_tensors(
    checkpoints: dict[str, Path], tp: int, ep: int, rank: int
) -> None:
    loaded = {
        layout: load(CONFIGS[layout], checkpoints[layout], tp, ep, rank) for layout in CHECKPOINT_LAYOUTS
    }
    for layout in ("per_expert", "quark"):
        assert different(loaded[layout], loaded["combined"]) == []
    assert not any((t == 0xFF).all() for t in loaded["quark"].values())


def test_each_layout_serves_the_same_answers(checkpoints: dict[str, Path]) -> None:
    said = [
        generate(start_engine(checkpoints[layout], config=CONFIGS[layout]), prompts(3, 12))
        for layout in CHECKPOINT_LAYOUTS
    ]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_every_loader_divides_an_expert_by_its_blocks(layout: str) -> None:
    """Five blocks over two ranks: 192 and 128 rows of gate and up. A split by the padded 128 a rank would leave the
    second rank 64 of its 128 rows."""
    for rank, (start, length) in enumerate([(0, 96), (96, 64)]):
        experts = root_of_rank(CONFIGS[layout], 2, 1, rank).get_submodule(EXPERTS)
        assert isinstance(experts, WeightModule)
        rows = {p.source_region[-2] for p in experts.weights["w13_weight_scale"].placements}
        assert rows == {(2 * start, 2 * length)}
        columns = {p.source_region[-1] for p in experts.weights["w2_weight_scale"].placements}
        assert columns == {(start // 32, length // 32)}
        assert {name: weight.shape for name, weight in experts.weights.items()} == {
            "w13_weight": (8, 256, 64),
            "w13_weight_scale": (8, 256, 4),
            "w13_bias": (8, 256),
            "w2_weight": (8, 128, 64),
            "w2_weight_scale": (8, 128, 4),
            "w2_bias": (8, 128),
        }


@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_parts_of_all_ranks_are_the_checkpoint(
    checkpoints: dict[str, Path], layout: str, tp: int, ep: int
) -> None:
    """Every part equals its slice of the checkpoint, the ranks together hold every element, and all padding of the
    experts holds what it was created with."""
    reader = open_view(Checkpoint(), checkpoints[layout])
    covered = {
        s.name: torch.zeros(s.shape, dtype=torch.bool) for s in every_tensor(sections(CONFIGS[layout]))
    }
    padded: set[tuple[str, float | None]] = set()
    for rank in range(max(tp, ep)):
        root = root_of_rank(CONFIGS[layout], tp, ep, rank)
        Loader("target", root, Lifecycle()).cold(reader)
        for part in parts_of(root):
            if part.source is None:
                assert is_filled(part), part.tensor
                padded.add((part.tensor.rpartition(".")[2], part.padding_value))
                continue
            expected = reader.slice(part.source, part.region)
            assert part.value.dtype == expected.dtype
            assert torch.equal(part.value, expected), part.name
            narrow(covered[part.source], part.region).fill_(True)
    assert all(seen.all() for seen in covered.values())
    assert padded == {(name, 1.0 if name.endswith("scale") else 0.0) for name in PARAMETERS}


def test_a_checkpoint_of_another_layout_or_model_is_refused_untouched(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    other = generate_checkpoint(replace(TOY, intermediate_size=128), 0, tmp_path / "other")
    spec = make_spec(checkpoints["combined"], TOY)
    for name, folder in (("other", other), ("quark", checkpoints["quark"])):
        spec.checkpoints[name], spec.checkpoint_dirs[name] = Checkpoint(), str(folder)
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "safetensors")
    before = held_bytes(engine)
    for name, problem in (
        ("other", "gate_up_proj_blocks' has shape (8, 256, 3, 16), expected (8, 320, 3, 16)"),
        ("quark", "experts.0.down_proj.weight' is unexpected"),
    ):
        with pytest.raises(CheckpointError) as refusal:
            engine.update(name, "direct")
        assert problem in "\n".join(refusal.value.problems)
    assert different(held_bytes(engine), before) == []


@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_every_element_of_a_perturbed_checkpoint_changes_and_stays_valid(
    checkpoints: dict[str, Path], layout: str
) -> None:
    base = open_checkpoint(checkpoints[layout])
    view = open_view(Checkpoint(perturbation="every_tensor"), checkpoints[layout])
    check_finite(view)
    for name in base.names():
        before, after = base.get(name), view.get(name)
        if before.dtype is torch.uint8 and not name.endswith(("weight_scale", "_scales")):  # two codes a byte
            for nibble in (0x0F, 0xF0):
                assert ((before & nibble) != (after & nibble)).all(), name
        else:
            assert (before != after).all(), name
        region: Region = tuple((size // 3, size - size // 3) for size in before.shape)
        assert torch.equal(view.slice(name, region), narrow(after, region))


@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_tagged_experts_spell_their_number(checkpoints: dict[str, Path], layout: str) -> None:
    """So that an expert which a rank took for another's shows which one it is."""
    view = open_view(Checkpoint(perturbation="expert_tagged"), checkpoints[layout])
    root = root_of_rank(CONFIGS[layout], 1, 4, 2)
    Loader("target", root, Lifecycle()).cold(view)
    experts = root.get_submodule(EXPERTS)
    assert isinstance(experts, RoutedExperts)
    loaded = experts.loaded_weights()
    for i, number in enumerate((4, 5)):  # of eight, those of the third of four ranks
        assert (loaded["w13_weight"][i, :320, 0] == number).all()
        assert (loaded["w2_weight"][i, :96, :2] == torch.tensor([number, 0])).all()
        assert loaded["w13_weight_scale"][i, 0, :3].tolist() == [117 + number, 117, 117]
    check_finite(view)


def test_a_rank_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="so that the last has none"):
        root_of_rank(TOY, 4, 1, 0)
