"""Boxes of strided tensors filled and copied by one table, in Triton's interpreter, against torch's own operations."""

import random
import sys
from collections.abc import Callable

import pytest
import torch

from workloads.kernels import regions as regions_module
from workloads.kernels.mega_moe_layout import empty_l1_weight, empty_scale, l1_scale_view, l1_weight_view
from workloads.kernels.regions import Regions, Writes, write
from workloads.loading import padding
from workloads.loading.padding import fill_padding, filled_together, record_padding
from workloads.loading.weights import Placement, Weight, WeightModule, narrow, whole

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [
    torch.bfloat16,
    torch.float32,
    torch.uint8,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bool,
]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:, ::2, 3:],
    "two dimensions": lambda t: t[2, :, 1:].t(),
    "one element wide": lambda t: t[:, :, 4:5],
}


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    octets = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return (octets % 2 if dtype is torch.bool else octets).view(dtype).view(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def random_box(shape: torch.Size, generator: random.Random) -> tuple[tuple[int, int], ...]:
    starts = [generator.randrange(size) for size in shape]
    return tuple(
        (start, generator.randrange(size - start + 1)) for start, size in zip(starts, shape, strict=True)
    )


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fills_are_those_of_torch(dtype: torch.dtype, view: str) -> None:
    """All of the memory is compared, so that nothing is written beside the boxes."""
    memory = noise((5, 12, 16), dtype)
    want = memory.clone()
    mine, theirs = VIEWS[view](memory), VIEWS[view](want)
    generator = random.Random(view)
    boxes = {random_box(mine.shape, generator): 1.0 for _ in range(4)}
    boxes[(*whole(mine.shape[:-1]), (mine.shape[-1] - 1, 1))] = 1.0
    regions = Regions(CPU)
    regions.fill(mine, list(boxes), list(boxes.values()))
    write(regions.plan())
    for box, value in boxes.items():
        narrow(theirs, box).fill_(value)
    assert same(memory, want)


def test_boxes_of_many_tensors_take_a_launch_for_each_width() -> None:
    regions = Regions(CPU)
    tensors = [noise((9, 32), dtype) for dtype in DTYPES] + [noise((7, 3), torch.uint8)]
    want = [tensor.clone() for tensor in tensors]
    for i, (mine, theirs) in enumerate(zip(tensors, want, strict=True)):
        value = float(i % 2)
        regions.fill(mine, [((1, 3), (0, mine.shape[1])), ((0, 0), (0, 1))], [value, 1.0])
        theirs[1:4] = value
    launches = regions.plan()
    assert sorted(launch.unit for launch in launches) == [1, 8]
    write(launches)
    assert all(same(mine, theirs) for mine, theirs in zip(tensors, want, strict=True))
    for tensor in tensors:
        tensor.view(torch.uint8).zero_()
    write(launches)  # a plan can run again
    assert same(tensors[1][1:4], want[1][1:4])


@pytest.mark.parametrize(("width", "unit"), [(16, 8), (12, 4), (6, 2), (5, 1)])
def test_units_are_as_wide_as_rows_and_addresses_allow(width: int, unit: int) -> None:
    memory = noise((6, 32), torch.uint8)
    regions = Regions(CPU)
    regions.fill(memory, [((0, 6), (8, width))], [7.0])
    (launch,) = regions.plan()
    assert launch.unit == unit
    write([launch])
    assert (memory[:, 8 : 8 + width] == 7).all()


@pytest.mark.parametrize("most", [1, 7, 100])
def test_large_boxes_are_split(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_MOST_UNITS", most)
    mine, source = noise((4, 5, 3), torch.int64), noise((3, 5, 4), torch.int64).flip(0)
    want = mine.clone()
    regions = Regions(CPU)
    regions.fill(mine, [((1, 3), (1, 3), (0, 2))], [9.0])
    target = torch.zeros(4, 5, 3, dtype=torch.int64)
    regions.copy(target, source.transpose(0, 2))
    write(regions.plan())
    want[1:, 1:4, :2] = 9
    assert same(mine, want)
    assert same(target, source.transpose(0, 2))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_copies_are_those_of_torch(dtype: torch.dtype, view: str) -> None:
    source, memory = noise((5, 12, 16), dtype), torch.zeros(5, 12, 16, dtype=dtype)
    want = memory.clone()
    regions = Regions(CPU)
    regions.copy(VIEWS[view](memory), VIEWS[view](source))
    regions.copy(memory[:0], source[:0])
    write(regions.plan())
    VIEWS[view](want).copy_(VIEWS[view](source))
    assert same(memory, want)


def test_the_fused_layout_of_experts_is_one_table() -> None:
    """Its views have up to eight dimensions, of which merging leaves seven."""
    experts, hidden, intermediate = 2, 128, 128
    weight, scale = noise((2, 256, 64), torch.uint8), noise((2, 256, 4), torch.uint8)
    targets = [
        l1_weight_view(empty_l1_weight(experts, hidden, intermediate, CPU)),
        l1_scale_view(empty_scale(experts, 2 * intermediate, hidden, CPU)),
    ]
    regions = Regions(CPU)
    for target, raw in zip(targets, (weight, scale), strict=True):
        regions.copy(target, raw.view(target.shape))
    write(regions.plan())
    for target, raw in zip(targets, (weight, scale), strict=True):
        assert torch.equal(target, raw.view(target.shape))


def test_bad_boxes_and_copies_are_refused() -> None:
    regions, tensor = Regions(CPU), torch.zeros(4, 6)
    for box in (((0, 5), (0, 1)), ((-1, 2), (0, 1)), ((3, 1), (4, 3))):
        with pytest.raises(ValueError, match=r"leaves a tensor of shape \(4, 6\)"):
            regions.fill(tensor, [((0, 1), (0, 1)), box], [0.0, 0.0])
    with pytest.raises(ValueError, match="equally many, at most 8"):
        regions.fill(tensor, [((0, 1),)], [0.0])
    with pytest.raises(ValueError, match="values at most 8 bytes"):
        regions.fill(torch.zeros(4, dtype=torch.complex128), [((0, 1),)], [0.0])
    for other in (torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.int32), torch.zeros(4, 6, device="meta")):
        with pytest.raises(ValueError, match="shape, dtype and device must be equal"):
            regions.copy(tensor, other)
    with pytest.raises(ValueError, match="takes 9 loops"):
        regions.copy(torch.zeros(9 * (2,)), torch.zeros(9 * (2,)).permute(*reversed(range(9))))


# Padding -------------------------------------------------------------------------------------------


def padded_modules() -> list[WeightModule]:
    modules = []
    for i in range(3):
        module = WeightModule()
        for name, dtype, value in (("weight", torch.bfloat16, 0.0), ("scale", torch.uint8, 127.0)):
            piece = Placement("t", whole((3, 5 + i)), whole((3, 5 + i)), slot=((0, 4), (0, 9)))
            module.add_weight(name, Weight((4, 9), dtype, (piece,), creation_value=value))
            module.get_parameter(name).view(torch.uint8).fill_(1)
            record_padding(module, name, piece)
        modules.append(module)
    return modules


def test_padding_on_a_gpu_is_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    want, alone, together = padded_modules(), padded_modules(), padded_modules()
    counts = [fill_padding(module) for module in want]
    launched: list[Writes] = []
    monkeypatch.setattr(padding, "write", lambda launches: (launched.extend(launches), write(launches)))
    monkeypatch.setattr(padding, "on_gpu", lambda parameter: True)
    assert [fill_padding(module) for module in alone] == counts
    separate = len(launched)
    with filled_together():
        assert [fill_padding(module) for module in together] == counts
        assert len(launched) == separate
        assert (together[0].get_parameter("scale") == 1).all()
    assert len(launched) - separate < separate
    for one, two, three in zip(want, alone, together, strict=True):
        for name in one.weights:
            assert same(one.get_parameter(name), two.get_parameter(name))
            assert same(one.get_parameter(name), three.get_parameter(name))


def test_nothing_is_written_when_a_fill_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "on_gpu", lambda parameter: True)
    module, consumed, after = padded_modules()
    consumed.consume("weight")

    def fill_both() -> None:
        with filled_together():
            fill_padding(module)
            fill_padding(consumed)

    with pytest.raises(RuntimeError, match="fill padding before post-processing"):
        fill_both()
    assert (module.get_parameter("scale") == 1).all()
    fill_padding(after)  # alone again
    assert (after.get_parameter("scale")[3] == 127).all()


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, module, None)
    regions = Regions(CPU)
    regions.fill(torch.zeros(5), [((0, 5),)], [1.0])
    with pytest.raises(RuntimeError, match="install the triton that belongs to this torch"):
        write(regions.plan())
