"""Boxes on a GPU: filled and copied as torch does it, and nothing written beside them."""

import random

import pytest
import torch

from workloads.kernels import mega_moe_layout as layout
from workloads.kernels.regions import Regions, write
from workloads.loading.padding import fill_padding, filled_together, record_padding
from workloads.loading.weights import Placement, Weight, WeightModule, narrow, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=GPU).view(dtype).view(shape)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fills_are_those_of_torch(dtype: torch.dtype) -> None:
    memory = noise((64, 96, 130), dtype)
    want = memory.clone()
    generator, regions = random.Random(0), Regions(GPU)
    for mine, theirs in ((memory, want), (memory.transpose(0, 2)[1:], want.transpose(0, 2)[1:])):
        starts = [[generator.randrange(size - 8) for size in mine.shape] for _ in range(300)]
        boxes = [tuple((start, generator.randrange(9)) for start in place) for place in starts]
        regions.fill(mine, boxes, [1.0] * len(boxes))
        for box in boxes:
            narrow(theirs, box).fill_(1.0)
    write(regions.plan())
    assert torch.equal(octets(memory), octets(want))


def test_the_fused_layout_of_experts() -> None:
    """As `fuse_l1_weight` and `fuse_l1_scale` make it, by one table."""
    experts, hidden, intermediate = 8, 1024, 512
    weight = noise((experts, 2 * intermediate, hidden // 2), torch.uint8)
    scale = noise((experts, 2 * intermediate, hidden // 32), torch.uint8)
    down = noise((experts, hidden, intermediate // 32), torch.uint8)
    fused = [
        layout.empty_l1_weight(experts, hidden, intermediate, GPU),
        layout.empty_scale(experts, 2 * intermediate, hidden, GPU),
        layout.empty_scale(experts, hidden, intermediate, GPU),
    ]
    views = [layout.l1_weight_view(fused[0]), layout.l1_scale_view(fused[1]), layout.l2_scale_view(fused[2])]
    regions = Regions(GPU)
    for view, raw in zip(views, (weight, scale, down), strict=True):
        regions.copy(view, raw.view(view.shape))
    launches = regions.plan()
    assert len(launches) <= 2
    write(launches)
    assert torch.equal(layout.unfuse_l1_weight(fused[0]), weight)
    assert torch.equal(layout.unfuse_l1_scale(fused[1]), scale)
    assert torch.equal(layout.unfuse_l2_scale(fused[2]), down)


def test_a_copy_of_more_than_two_to_the_31_bytes() -> None:
    source = noise((3 << 30,), torch.uint8).view(3, -1)
    target = torch.zeros(1 << 30, 3, dtype=torch.uint8, device=GPU)
    regions = Regions(GPU)
    regions.copy(target.t(), source)
    write(regions.plan())
    assert torch.equal(target.t(), source)


def test_padding_of_a_load() -> None:
    modules = []
    with GPU:
        for i in range(5):
            module = WeightModule()
            piece = Placement("t", whole((3, 500 + i)), whole((3, 500 + i)), slot=((0, 4), (0, 512)))
            module.add_weight("weight", Weight((4, 512), torch.bfloat16, (piece,), creation_value=0.0))
            module.add_weight("scale", Weight((4, 512), torch.uint8, (piece,), creation_value=127.0))
            modules.append(module)
    for alone in (True, False):
        for module in modules:
            for name, weight in module.weights.items():
                module.get_parameter(name).view(torch.uint8).fill_(1)
                record_padding(module, name, weight.placements[0])
        if alone:
            assert [fill_padding(module) for module in modules] == 5 * [4]
        else:
            with filled_together():
                assert [fill_padding(module) for module in modules] == 5 * [4]
        for i, module in enumerate(modules):
            for name, weight in module.weights.items():
                got = module.get_parameter(name)
                rest = torch.ones_like(got, dtype=torch.bool)
                rest[:3, : 500 + i] = False
                assert (got[rest] == weight.creation_value).all()
                assert (got[:3, : 500 + i].contiguous().view(torch.uint8) == 1).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_of_another_device_than_the_current_one() -> None:
    tensor = noise((64, 64), torch.uint8).to("cuda:1")
    want = tensor.clone()
    regions = Regions(tensor.device)
    regions.fill(tensor, [((3, 5), (0, 64))], [7.0])
    write(regions.plan())
    want[3:8] = 7
    assert torch.equal(tensor, want)
