"""The fingerprint on a GPU: large tensors, a hundred thousand small ones, and the tensors of one model.

Floor: the bytes over the fastest plain read of the same run. Peers: torch.hash_tensor, which does not see swaps, on one
tensor and in a loop; copying to the host and SHA-256. Times are those of the kernels; "whole call" also has what the
host does: table, launches, digests.
"""

import hashlib
from typing import Any

import torch

from collectors.fingerprint import fingerprints
from tests.benchmarks.device import kernels, report, require_gpu, wall_seconds

KERNEL = "row_sums_kernel"
MANY, EACH = 100_000, 64 << 10


def main() -> int:
    require_gpu()
    figures: dict[str, Any] = {}
    bars: dict[str, tuple[float, float]] = {}
    for gib in (4, 8):
        one = large(gib << 30)
        figures[f"one tensor of {gib} GiB"] = one
        best = one["TB/s"]["fingerprint, kernel"]
        bars[f"{gib} GiB, TB/s"] = (best, 4.3)
        bars[f"{gib} GiB, of torch.hash_tensor"] = (best / one["TB/s"]["torch.hash_tensor"], 0.97)
    many = small()
    figures[f"{MANY} tensors of {EACH >> 10} KiB"] = many
    bars["small tensors, TB/s"] = (many["TB/s"]["fingerprint, NaN and constants, kernel"], 3.0)
    bars["small tensors, launches"] = (many["launches"], -10)
    figures["poisoned, 4 GiB"] = poisoned()
    return report("fingerprint_on_gpu", bars, figures)


def bf16(nbytes: int) -> torch.Tensor:
    """Normal numbers, none of them NaN."""
    return torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda").normal_()


def large(nbytes: int) -> dict[str, Any]:
    tensor = bf16(nbytes)
    words, target = tensor.view(torch.int64), torch.empty_like(tensor)
    host, sample = (
        torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True),
        tensor.view(torch.uint8)[: 256 << 20],
    )

    def copied_and_hashed() -> None:
        host.copy_(sample)
        hashlib.sha256(host.numpy()).digest()

    seconds = {
        "plain read (sum)": kernels(lambda: words.sum())[0],
        "plain read (maximum)": kernels(lambda: words.amax())[0],
        "torch.hash_tensor": kernels(lambda: torch.hash_tensor(words))[0],
        "fingerprint, kernel": kernels(lambda: fingerprint_only([tensor]), KERNEL)[0],
        "fingerprint, NaN and constants, kernel": kernels(lambda: fingerprints([tensor]), KERNEL)[0],
        "fingerprint, NaN and constants, whole call": wall_seconds(lambda: fingerprints([tensor])),
        "copy to the host and SHA-256": wall_seconds(copied_and_hashed, 1) * nbytes / len(host),
    }
    speeds = {name: nbytes / value / 1e12 for name, value in seconds.items()}
    speeds["memory copy, bytes read and written"] = (
        2 * nbytes / kernels(lambda: target.copy_(tensor))[0] / 1e12
    )
    return shown(f"one tensor of {nbytes >> 30} GiB", nbytes, speeds, max(list(speeds.values())[:3]))


def small() -> dict[str, Any]:
    memory = bf16(MANY * EACH)
    tensors = list(memory.view(MANY, -1).unbind())
    words = [tensor.view(torch.int64) for tensor in tensors]
    nbytes = MANY * EACH
    read = kernels(lambda: memory.view(torch.int64).sum())[0]
    kernel, launches = kernels(lambda: fingerprints(tensors), KERNEL, 3)
    speeds = {
        "plain read of all as one (sum)": nbytes / read / 1e12,
        "fingerprint, NaN and constants, kernel": nbytes / kernel / 1e12,
        "fingerprint, NaN and constants, whole call": nbytes
        / wall_seconds(lambda: fingerprints(tensors), 3)
        / 1e12,
        "torch.hash_tensor in a loop": nbytes
        / wall_seconds(lambda: [torch.hash_tensor(w) for w in words], 2)
        / 1e12,
    }
    name = f"{MANY} tensors of {EACH >> 10} KiB"
    return shown(name, nbytes, speeds, speeds["plain read of all as one (sum)"]) | {"launches": launches}


def poisoned() -> dict[str, Any]:
    """Every value NaN: the kernel marks what it finds, and must not be slowed down by it."""
    tensor = torch.full((2 << 30,), float("nan"), dtype=torch.bfloat16, device="cuda")
    seconds = kernels(lambda: fingerprints([tensor]), KERNEL)[0]
    return {"TB/s": {"fingerprint, NaN and constants, kernel": tensor.nbytes / seconds / 1e12}}


def fingerprint_only(tensors: list[torch.Tensor]) -> None:
    from collectors.fingerprint import fingerprint

    for tensor in tensors:
        fingerprint(tensor)


def shown(name: str, nbytes: int, speeds: dict[str, float], ceiling: float) -> dict[str, Any]:
    print(f"{name}: floor {nbytes / ceiling / 1e9:.3f} ms")
    for what, speed in speeds.items():
        print(
            f"  {what:46} {nbytes / speed / 1e9:10.3f} ms {speed:8.4f} TB/s {speed / ceiling:8.4f} of the floor's"
        )
    return {"bytes": nbytes, "floor_ms": nbytes / ceiling / 1e9, "TB/s": speeds}
