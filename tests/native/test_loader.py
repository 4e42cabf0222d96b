"""The loading core on a toy model: placement, padding, poison, raw bytes, every load path, lifecycle."""

from collections.abc import Iterator

import pytest
import torch
from toy_weights import (
    EXPERTS,
    ROWS,
    ToyExperts,
    ToyLinear,
    ToyModel,
    ToyReader,
    addresses,
    state,
    toy_checkpoint,
)

from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Incoming, Loader, Reader, ReloadError
from workloads.loading.padding import fill_padding, record_padding
from workloads.loading.weights import POISON, ModelRoot, Placement, Weight, WeightModule, whole

OLD, NEW = toy_checkpoint(1), toy_checkpoint(2)


def make(model: ModelRoot | None = None, loader: type[Loader] = Loader) -> Loader:
    return loader("toy", model or ToyModel(), Lifecycle())


def loaded(reader: ToyReader) -> Loader:
    one = make()
    one.lifecycle.start_load("safetensors")
    one.cold(reader)
    return one


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# Placement and padding -----------------------------------------------------------------------------


def test_padding_is_what_a_piece_leaves_of_its_slot() -> None:
    slot = ((2, 4), (0, 6))
    piece = Placement("t", whole((3, 5)), target=((2, 3), (0, 5)), slot=slot)
    assert piece.padding(torch.Size((8, 6))) == [((5, 1), (0, 6)), ((2, 3), (5, 1))]
    covered = Placement("t", whole((4, 6)), target=slot, slot=slot)
    assert covered.padding(torch.Size((8, 6))) == []


def test_padding_of_stacked_experts_is_one_box_for_all() -> None:
    experts = ToyExperts()
    boxes = {
        box for p in experts.weights["packed"].placements for box in p.padding(torch.Size((EXPERTS, 4, 4)))
    }
    assert boxes == {((0, EXPERTS), (ROWS, 1), (0, 4)), ((0, EXPERTS), (0, ROWS), (2, 2))}


def test_padding_without_a_creation_value_is_refused() -> None:
    module = WeightModule()
    piece = Placement("t", whole((3,)), whole((3,)), slot=((0, 4),))
    with pytest.raises(ValueError, match="has padding but no creation_value"):
        module.add_weight("weight", Weight((4,), torch.float32, (piece,)))


def test_parameters_are_created_poisoned_or_with_their_creation_value() -> None:
    model = ToyModel()
    assert model.linear.get_parameter("bias").isnan().all()
    assert (model.linear.get_parameter("weight") == 0).all()
    assert (model.experts.get_parameter("scale") == 127).all()
    assert (model.experts.rematerialize("scale") == POISON).all()


def test_one_fill_serves_the_experts_of_a_box() -> None:
    module = ToyExperts()
    for name, weight in module.weights.items():
        for placement in weight.placements:
            record_padding(module, name, placement)
    assert fill_padding(module) == 2 * len(module.weights)


def test_only_the_latest_load_has_a_say_in_what_is_padding() -> None:
    module = WeightModule()
    short = Placement("t", whole((2,)), ((0, 2),), slot=((0, 6),))
    long = Placement("t", whole((5,)), ((0, 5),), slot=((0, 6),))
    module.add_weight("weight", Weight((6,), torch.float32, (short,), creation_value=0.0))
    record_padding(module, "weight", short)
    fill_padding(module)
    weight = module.get_parameter("weight")
    weight.fill_(7.0)
    record_padding(module, "weight", long)  # another loader splits it differently
    fill_padding(module)
    assert weight.tolist() == [7.0] * 5 + [0.0]


def test_padding_is_refused_after_the_parameter_was_consumed() -> None:
    module = ToyExperts()
    record_padding(module, "packed", module.weights["packed"].placements[0])
    module.consume("packed")
    with pytest.raises(RuntimeError, match="fill padding before post-processing"):
        fill_padding(module)
    with pytest.raises(RuntimeError, match="was consumed; restore it"):
        record_padding(module, "packed", module.weights["packed"].placements[0])


# Loads ---------------------------------------------------------------------------------------------


def test_a_cold_load_places_every_piece_and_fills_padding() -> None:
    model = loaded(OLD).root
    linear, experts = model.get_submodule("linear"), model.get_submodule("experts")
    assert isinstance(linear, ToyLinear)
    assert isinstance(experts, ToyExperts)
    weight = linear.get_parameter("weight")
    assert torch.equal(weight[:ROWS], OLD.tensors["a"])
    assert (weight[ROWS:] == 0).all()
    assert torch.equal(linear.get_parameter("bias"), torch.cat([OLD.tensors["b0"], OLD.tensors["b1"]]))
    assert linear.transposed is not None
    assert torch.equal(linear.transposed, weight.t())
    assert experts.fused is not None
    scale = experts.fused[1].transpose(1, 2)
    assert torch.equal(scale[1, :ROWS, :2], OLD.tensors["1.scale"])
    assert (scale[:, ROWS:] == 127).all()
    assert (scale[:, :, 2:] == 127).all()
    assert experts.live("packed") is None


@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_a_reload_equals_a_cold_start_in_the_same_storage(via: str) -> None:
    one = loaded(OLD)
    before = addresses(one.root)
    one.lifecycle.start_load(via)
    getattr(one, via)(NEW)
    assert same(state(one.root), state(loaded(NEW).root))
    assert not same(state(one.root), state(loaded(OLD).root))
    assert addresses(one.root) == before


@pytest.mark.parametrize("via", ["layerwise", "direct"])
def test_a_reload_over_random_weights_equals_a_cold_start(via: str) -> None:
    one = make()
    one.lifecycle.start_load("dummy")
    one.dummy(seed=3)
    random = state(one.root)
    getattr(one, via)(NEW)
    assert same(state(one.root), state(loaded(NEW).root))
    assert not same(random, state(one.root))


def test_random_weights_follow_the_seed_and_keep_padding() -> None:
    first, second, other = make(), make(), make()
    for one, seed in ((first, 1), (second, 1), (other, 2)):
        one.dummy(seed)
    assert same(state(first.root), state(second.root))
    assert not same(state(first.root), state(other.root))
    assert (first.root.get_parameter("linear.weight")[ROWS:] == 0).all()


class _Drops(Loader):
    """Leaves one tensor of the checkpoint out."""

    left_out = "b1"

    def incoming(self, reader: Reader) -> Iterator[Incoming]:
        return (
            (place, t) for place, t in super().incoming(reader) if place.placement.source != self.left_out
        )


def test_memory_that_no_load_wrote_shows_its_poison() -> None:
    one = make(loader=_Drops)
    one.cold(OLD)
    bias = one.root.get_parameter("linear.bias")
    assert bias.view(torch.uint8)[8:].eq(POISON).all()
    assert torch.equal(bias[:2], OLD.tensors["b0"])
    one.layerwise(NEW)  # the module's memory is fresh, and again one piece is missing
    assert bias.view(torch.uint8)[8:].eq(POISON).all()
    assert torch.equal(bias[:2], NEW.tensors["b0"])


class _OnlyLinear(Loader):
    """A reload brings nothing for the experts."""

    def incoming(self, reader: Reader) -> Iterator[Incoming]:
        arriving = super().incoming(reader)
        return (
            (place, t) for place, t in arriving if self.lifecycle.via != "layerwise" or place.path == "linear"
        )


def test_layerwise_keeps_modules_that_got_nothing() -> None:
    one = make(loader=_OnlyLinear)
    one.cold(OLD)
    one.lifecycle.start_load("layerwise")
    one.layerwise(NEW)
    mixed, old, new = state(one.root), state(loaded(OLD).root), state(loaded(NEW).root)
    assert torch.equal(mixed["experts.fused"], old["experts.fused"])
    assert torch.equal(mixed["linear.weight"], new["linear.weight"])


def test_e8m0_scales_arrive_as_bytes() -> None:
    as_exponents = ToyReader(
        {n: t.view(torch.float8_e8m0fnu) if "scale" in n else t for n, t in OLD.tensors.items()}
    )
    assert same(state(loaded(as_exponents).root), state(loaded(OLD).root))

    class Casts(Loader):
        def raw(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor

    cast = make(loader=Casts)
    cast.cold(as_exponents)
    assert not same(state(cast.root), state(loaded(OLD).root))


def test_a_reload_that_moves_storage_is_refused() -> None:
    class Moves(Loader):
        def post_process(self, path: str, module: WeightModule) -> None:
            if self.lifecycle.via == "direct" and path == "linear":
                module.row_sums = None
            super().post_process(path, module)

    one = make(loader=Moves)
    one.cold(OLD)
    one.lifecycle.start_load("direct")
    with pytest.raises(
        ReloadError, match=r"1 tensors of toy moved during the reload, first 'linear\.row_sums'"
    ):
        one.direct(NEW)


def test_a_consumed_parameter_must_be_restored_before_it_is_loaded() -> None:
    class Forgets(Loader):
        def restore_consumed(self, module: WeightModule) -> None:
            return

    one = make(loader=Forgets)
    one.cold(OLD)
    with pytest.raises(
        ReloadError, match=r"was consumed by post-processing and not restored before '0\.packed'"
    ):
        one.direct(NEW)


def test_a_derived_tensor_of_another_shape_is_refused() -> None:
    linear = ToyLinear()
    linear.set_derived("transposed", torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="cannot be refreshed in place"):
        linear.set_derived("transposed", torch.zeros(3, 2))


# Lifecycle -----------------------------------------------------------------------------------------


def test_every_step_happens_once_and_in_order() -> None:
    one = loaded(OLD)
    for via in ("layerwise", "direct"):
        one.lifecycle.start_load(via)
        getattr(one, via)(NEW)
    for load, via in enumerate(("safetensors", "layerwise", "direct")):
        events = [e for e in one.lifecycle.events if e["load"] == load]
        assert {e["via"] for e in events} == {via}
        assert {e["phase"] for e in events} == {"load"}
        names = [(e["event"], e["module"]) for e in events]
        assert names[0] == ("load_start", "")
        assert names[-2:] == [("finalize", ""), ("load_end", "")]
        for path in ("linear", "experts"):
            assert names.count(("fill_padding", path)) == names.count(("post_process", path)) == 1
            assert names.index(("fill_padding", path)) < names.index(("post_process", path))
        by_model = [event for event, module in names if not module]
        assert by_model == ["load_start", "finalize", "load_end"]


def test_what_happens_while_serving_says_so() -> None:
    one = loaded(OLD)
    with one.lifecycle.forward():
        one.finalize()
    one.finalize()
    assert [e["phase"] for e in one.lifecycle.events[-2:]] == ["forward", "load"]


def test_an_interrupted_load_has_no_end() -> None:
    class Breaks(Loader):
        def fill(self, path: str, module: WeightModule) -> None:
            raise OSError("the disk is gone")

    one = make(loader=Breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        one.cold(OLD)
    assert {e["event"] for e in one.lifecycle.events} == {"load_start", "place"}


def test_statistics_count_the_bytes_placed() -> None:
    one = make()
    stats = one.cold(OLD)
    assert stats.nbytes == sum(tensor.nbytes for tensor in OLD.tensors.values())
    assert stats.read_s > 0
    assert stats.install_s > 0


# Parts ---------------------------------------------------------------------------------------------


def test_parts_are_the_checkpoint_and_the_padding() -> None:
    one = loaded(OLD)
    parts = [part for path, module in one.root.weight_modules() for part in module.parts(f"toy:{path}")]
    sources = {part.source: part for part in parts if part.source is not None}
    assert sources.keys() == OLD.tensors.keys()
    for name, part in sources.items():
        assert torch.equal(part.value, OLD.tensors[name])
    assert sources["1.scale"].tensor == "toy:experts.fused"
    padding = [part for part in parts if part.source is None]
    assert len(padding) == 5
    for part in padding:
        assert part.padding_value is not None
        assert (part.value == part.padding_value).all()


def test_padding_parts_do_not_trust_what_loads_recorded() -> None:
    class Skips(Loader):
        def fill(self, path: str, module: WeightModule) -> None:
            module.padding_regions.clear()
            super().fill(path, module)

    one = make(loader=Skips)
    one.cold(OLD)
    one.lifecycle.start_load("layerwise")
    one.layerwise(NEW)
    parts = [part for path, module in one.root.weight_modules() for part in module.parts(f"toy:{path}")]
    assert any((part.value != part.padding_value).any() for part in parts if part.source is None)
