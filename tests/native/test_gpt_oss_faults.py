"""What a load that goes wrong in the ways reported of gpt-oss leaves behind, and that it can be seen."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from gpt_oss_engine import EXPERTS, TOY, parts_of, root_of_rank, start_engine
from k3_engine import NEW, OLD, different, generate, held, held_bytes, prompts

from collectors.walk import walk
from workloads.loading.checkpoint import open_checkpoint
from workloads.loading.generate import generate_checkpoint
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.weights import WeightModule
from workloads.models.gpt_oss.moe import RoutedExperts

SINGLE = replace(TOY, checkpoint_layout="per_expert")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("gpt_oss") / "checkpoint")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(SINGLE, 0, tmp_path_factory.mktemp("gpt_oss") / "single")


class KernelMadeAnew(Loader):
    """Post-processing builds the experts' kernel, as it did at the start."""

    def post_process(self, path: str, module: WeightModule) -> None:
        super().post_process(path, module)
        if isinstance(module, RoutedExperts) and self.lifecycle.via != "safetensors":
            module.kernel = module.make_kernel()


@pytest.mark.parametrize(("via", "extra"), [("layerwise", 4), ("direct", 0)])
def test_a_kernel_made_anew_moves_its_constants_and_keeps_what_no_update_reaches(
    checkpoint: Path, via: str, extra: int
) -> None:
    """Of each layer three constants have moved; after a layerwise reload the kernel also holds the two scales and two
    biases that were loaded, beside the parameters to which they were copied. The next update shows it in answers."""
    engine, fresh = start_engine(checkpoint), start_engine(checkpoint, NEW)
    before = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    loader = engine.loaders["target"]
    loader.__class__ = KernelMadeAnew
    engine.update(NEW, via)
    after = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    moved = {path for path in before if after[path] != before[path]}
    assert {path.rpartition(".")[2] for path in moved} == {"gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"}
    assert len(moved) == 3 * TOY.num_layers
    added = after.keys() - before.keys()
    assert len(added) == extra * TOY.num_layers
    assert all(".kernel.quantization.w" in path for path in added)
    same = {path: tensor for path, tensor in held_bytes(engine).items() if path not in added}
    assert different(same, held_bytes(fresh)) == []
    assert generate(engine, prompts(9)) == generate(fresh, prompts(9))
    loader.__class__ = Loader
    engine.update(OLD, via)
    said = generate(engine, prompts(9)) == generate(start_engine(checkpoint), prompts(9))
    assert said == (via == "direct")


def test_the_kernel_of_a_start_is_reached_by_the_names_of_the_parameters(checkpoint: Path) -> None:
    found = {f.path: f.aliases for f in walk(start_engine(checkpoint).roots()) if f.root == "target"}
    assert f"target:{EXPERTS}.kernel.quantization.w2_bias" in found[f"target:{EXPERTS}.w2_bias"]
    assert not any(".quantization." in path for path in found)


class SplitByPaddedSize(Loader):
    """Experts that come one by one are divided by the padded rows of a rank, and not by their blocks."""

    def __init__(self, name: str, root: Any, lifecycle: Lifecycle) -> None:
        super().__init__(name, root, lifecycle)
        for places in self.map.values():
            places[:] = [
                replace(place, placement=_by_padded(place.placement, rank=1))
                if place.parameter.startswith("w13")
                else place
                for place in places
            ]


def _by_padded(placement: Any, rank: int) -> Any:
    """The piece of gate and up rows that a rank takes if each had as many as its padded slot."""
    slot, whole = placement.slot[1][1], 2 * TOY.intermediate_size
    start = rank * slot
    rows = (start, min(slot, whole - start))
    return replace(
        placement,
        source_region=(rows, *placement.source_region[1:]),
        target=(placement.target[0], (0, rows[1]), *placement.target[2:]),
    )


def test_rows_split_by_the_padded_size_are_too_few_and_others(single: Path) -> None:
    """The second rank gets 64 of its 128 rows of gate and up, and they are its last."""
    root = root_of_rank(SINGLE, 2, 1, 1)
    loader = SplitByPaddedSize("target", root, Lifecycle())
    [place] = loader.map["model.layers.1.mlp.experts.3.gate_up_proj.bias"]
    assert place.placement.source_region == ((256, 64),)
    reader = open_checkpoint(single)
    loader.cold(reader)
    wrong = {
        part.name.rpartition(".experts.")[2].partition(".")[2]
        for part in parts_of(root)
        if part.source is not None and not torch.equal(part.value, reader.slice(part.source, part.region))
    }
    assert wrong == {"gate_up_proj.weight_packed", "gate_up_proj.weight_scale", "gate_up_proj.bias"}


class SinksLeftOut(Loader):
    """A model copies its sinks itself, on a layerwise reload into parameters without memory. serving: what stays, by
    module."""

    serving: ClassVar[dict[str, torch.Tensor]] = {}

    def incoming(self, reader: Any) -> Iterator[Any]:
        for destination, tensor in super().incoming(reader):
            lost = self.lifecycle.via == "layerwise" and destination.parameter == "sinks"
            yield destination, self.serving[destination.path] if lost else tensor


def test_sinks_that_stay_old_change_answers(checkpoint: Path) -> None:
    engine, fresh = start_engine(checkpoint), start_engine(checkpoint, NEW)
    for path, module in engine.roots()["target"].weight_modules():
        if "sinks" in module.weights:
            SinksLeftOut.serving[path] = module.get_parameter("sinks").detach().clone()
    engine.loaders["target"].__class__ = SinksLeftOut
    engine.update(NEW, "layerwise")
    wrong = different(held_bytes(engine), held_bytes(fresh))
    assert wrong == [f"target:model.layers.{n}.self_attn.sinks" for n in range(TOY.num_layers)]
    assert generate(engine, prompts(9)) != generate(fresh, prompts(9))
