"""Padding fills and layout transforms on a GPU, a table of boxes against a loop over them.

Floor: the bytes over the rate of a plain fill, or of a plain copy, of the same run.
"""

from typing import Any

import torch

from tests.benchmarks.device import kernels, queued_seconds, report, require_gpu, wall_seconds
from workloads.kernels import mega_moe_layout as layout
from workloads.kernels.regions import Regions, write
from workloads.loading.weights import narrow

KERNEL = "regions_kernel"
BOXES = 100_000
GPU = torch.device("cuda", 0)


def main() -> int:
    require_gpu()
    fill, transform = fills(), transforms()
    bars = {"100,000 boxes, ms": (fill["ms"]["table, kernel"], -1.0), "launches": (fill["launches"], -4)}
    return report("regions_on_gpu", bars, {"fill": fill, "layout of experts": transform})


def fills() -> dict[str, Any]:
    """Of 200 parameters of each of two dtypes, 250 boxes each, of 16 rows of 24 elements at the ends of rows of 512."""
    parameters = [
        torch.empty((250, 16, 512), dtype=dtype, device=GPU).view(torch.uint8).fill_(1).view(dtype)
        for dtype in (torch.bfloat16, torch.uint8)
        for _ in range(BOXES // 500)
    ]
    boxes = [((i, 1), (0, 16), (488, 24)) for i in range(250)]
    values = [127.0] * len(boxes)

    def planned() -> list[Any]:
        regions = Regions(GPU)
        for parameter in parameters:
            regions.fill(parameter, boxes, values)
        return regions.plan()

    def looped() -> None:
        for parameter in parameters:
            for box in boxes:
                narrow(parameter, box).fill_(127.0)

    launches = planned()
    kernel, count = kernels(lambda: write(launches), KERNEL)
    for parameter in parameters:
        assert (parameter[:, :, 488:] == 127).all()
        assert (parameter[:, :, :488].contiguous().view(torch.uint8) == 1).all()
    nbytes = sum(parameter[:, :, 488:].numel() * parameter.element_size() for parameter in parameters)
    plain = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    rate = plain.nbytes / kernels(lambda: plain.fill_(3))[0]
    milliseconds = {
        "floor": 1e3 * nbytes / rate,
        "table, kernel": 1e3 * kernel,
        "table, queued": 1e3 * queued_seconds(lambda: write(launches)),
        "table, made and queued": 1e3 * wall_seconds(lambda: write(planned())),
        "loop of fill_": 1e3 * wall_seconds(looped, 1),
    }
    return shown(f"{BOXES} boxes filled, {nbytes / 1e6:.0f} MB", milliseconds) | {
        "launches": count,
        "bytes": nbytes,
    }


def transforms() -> dict[str, Any]:
    """MegaMoE's layout of 56 experts of Kimi-K3: gate and up rows in turn, scales packed and K-major to MN-major."""
    experts, hidden, intermediate = 56, 3584, 3072
    raw = [
        torch.randint(0, 256, shape, dtype=torch.uint8, device=GPU)
        for shape in (
            (experts, 2 * intermediate, hidden // 2),
            (experts, 2 * intermediate, hidden // 32),
            (experts, hidden, intermediate // 32),
        )
    ]
    fused = [
        layout.empty_l1_weight(experts, hidden, intermediate, GPU),
        layout.empty_scale(experts, 2 * intermediate, hidden, GPU),
        layout.empty_scale(experts, hidden, intermediate, GPU),
    ]
    views = [layout.l1_weight_view(fused[0]), layout.l1_scale_view(fused[1]), layout.l2_scale_view(fused[2])]
    regions = Regions(GPU)
    for view, source in zip(views, raw, strict=True):
        regions.copy(view, source.view(view.shape))
    launches = regions.plan()
    kernel, count = kernels(lambda: write(launches), KERNEL)
    assert torch.equal(layout.unfuse_l1_weight(fused[0]), raw[0])
    assert torch.equal(layout.unfuse_l1_scale(fused[1]), raw[1])
    assert torch.equal(layout.unfuse_l2_scale(fused[2]), raw[2])

    def looped() -> None:
        for view, source in zip(views, raw, strict=True):
            view.copy_(source.view(view.shape))

    nbytes = 2 * sum(tensor.nbytes for tensor in raw)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / kernels(lambda: target.copy_(source))[0]
    milliseconds = {
        "floor": 1e3 * nbytes / rate,
        "table, kernel": 1e3 * kernel,
        "table, queued": 1e3 * queued_seconds(lambda: write(launches)),
        "copy_ of each": 1e3 * kernels(looped)[0],
    }
    return shown(f"layout of {experts} experts, {nbytes / 1e6:.0f} MB", milliseconds) | {
        "launches": count,
        "bytes": nbytes,
    }


def shown(name: str, milliseconds: dict[str, float]) -> dict[str, Any]:
    print(name)
    for what, value in milliseconds.items():
        print(f"  {what:28} {value:10.3f} ms {value / milliseconds['floor']:10.2f} x the floor")
    return {"ms": milliseconds}
