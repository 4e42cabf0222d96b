"""Speed of the fingerprint on one core, as ratios within one run: seconds here say nothing about other machines."""

import hashlib
import time
from collections.abc import Callable

import pytest
import torch
import xxhash

from collectors.fingerprint import fingerprint, fingerprints

torch.set_num_threads(1)

NBYTES = 128 << 20
ROUNDS = 10


def gigabytes_per_second(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Best of several rounds in processor time, the actions alternating so that they meet the same neighbours."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(ROUNDS):
        for name, action in actions.items():
            start = time.process_time()
            action()
            best[name] = min(best[name], time.process_time() - start)
    return {name: NBYTES / seconds / 1e9 for name, seconds in best.items()}


def test_large_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (NBYTES // 8,), generator=torch.Generator().manual_seed(0))
    tensor = words.view(torch.bfloat16)
    experts, buffer, target = tensor.view(1024, -1, 256), words.numpy(), torch.empty_like(tensor)
    speeds = gigabytes_per_second(
        {
            "fingerprint": lambda: fingerprint(tensor),
            "fingerprint, NaN and constants": lambda: fingerprints([tensor]),
            "fingerprint of 1024 slices, NaN and constants": lambda: fingerprints([experts]),
            "sha256": lambda: hashlib.sha256(buffer).digest(),
            "xxh3_128": lambda: xxhash.xxh3_128(buffer).digest(),
            "memory copy": lambda: target.copy_(tensor),
        }
    )
    with capsys.disabled():
        print(f"\n{NBYTES >> 20} MiB, one core:")
        for name, speed in speeds.items():
            print(f"  {name:46} {speed:6.2f} GB/s  {speed / speeds['sha256']:5.2f} x sha256")
    assert speeds["fingerprint"] >= 2.5 * speeds["sha256"]
    assert speeds["fingerprint, NaN and constants"] >= speeds["sha256"]
