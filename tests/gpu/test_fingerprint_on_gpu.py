"""The fingerprint of a tensor on a GPU is the one of the same tensor on the CPU, and sees what it is said to see."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from collectors.fingerprint import fingerprint, fingerprints
from collectors.row_sums import GROUP_BYTES, ROW_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(), (0,), (1,), (7,), (2048,), (100_003,), (600, 256), (33, 5, 77), (8, 1024, 512), (5, 3 << 20)]
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex64),
    *(torch.float4_e2m1fn_x2, torch.uint16, torch.uint32, torch.complex32, torch.complex128),
]
SAMPLE = 64 << 20  # bytes


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """uint8 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64, device="cuda")
    return words.random_(-(1 << 62), 1 << 62, generator=generator).view(torch.uint8)[:nbytes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_cpu(dtype: torch.dtype) -> None:
    """Of random bits, of values among which there is no NaN, and of constant bytes."""
    generator = torch.Generator().manual_seed(0)
    size = dtype.itemsize
    tensors = []
    for shape in SHAPES:
        count = size * torch.Size(shape).numel()
        octets = torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)
        tensors.append((octets % 2 if dtype is torch.bool else octets).view(dtype).view(shape))
        tensors.append((octets % 2 if dtype is torch.bool else octets % 60).view(dtype).view(shape))
    tensors += [tensor.transpose(-1, -2) for tensor in tensors if tensor.ndim > 1]
    tensors += [
        torch.zeros(9001 * size, dtype=torch.uint8).view(dtype),
        torch.full((5000 * size,), 1 if dtype is torch.bool else 255, dtype=torch.uint8).view(dtype),
    ]
    on_gpu = [tensor.cuda() for tensor in tensors]
    for whole in (False, True):
        got, want = fingerprints(on_gpu, whole), fingerprints(tensors, whole)
        assert [i for i in range(len(tensors)) if got[i] != want[i]] == []


@pytest.mark.parametrize("offset", [1, 2, 8, 16, 4095])
def test_memory_that_is_not_aligned(offset: int) -> None:
    raw = noise(3 * GROUP_BYTES + 5 * ROW_BYTES + 77)
    rows = raw[offset : offset + 9 * 5000].view(9, 50, 100)
    parts = [raw[offset:], raw[offset : offset + 100], rows, raw[offset : offset + GROUP_BYTES]]
    assert fingerprints(parts) == fingerprints([part.cpu() for part in parts])


def test_strided_tensors_larger_than_a_copy_may_be() -> None:
    matrix = noise(600 << 20).view(torch.bfloat16).view(-1, 3 << 10)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous()) == fingerprint(matrix.t().cpu())


def test_more_than_two_to_the_31_elements() -> None:
    """Held against the parts of which the definition makes it: 4 GiB of bytes would take the CPU too long."""
    octets = noise((4 << 30) + 4096)
    base = fingerprint(octets)
    for place in (0, (1 << 31) - 1, 1 << 31, (1 << 32) + 4095):
        octets[place] ^= 1
        assert fingerprint(octets) != base
        octets[place] ^= 1
    experts = octets[: 4 << 30].view(1024, 2048, 2048)
    digest = fingerprints([experts])[0]
    assert [digest.slices[i] for i in (0, 511, 512, 1023)] == [
        fingerprint(experts[i].cpu()) for i in (0, 511, 512, 1023)
    ]
    assert digest.fp == hashlib.sha256(bytes.fromhex("".join(digest.slices))).hexdigest()[:32]


# The error model -----------------------------------------------------------------------------------


def test_every_bit_of_a_large_sample_counts() -> None:
    """4096 random places in 64 MiB, the start of a row, the ends of a group, and a last row that is not full."""
    octets = noise(SAMPLE + 1001)
    seen = {fingerprint(octets)}
    places = np.random.default_rng(0).integers(0, 8 * len(octets), 4096).tolist()
    places += range(8 * 5 * ROW_BYTES, 8 * 5 * ROW_BYTES + 512)
    places += range(8 * (GROUP_BYTES - 8), 8 * (GROUP_BYTES + 8))
    places += range(8 * SAMPLE, 8 * len(octets), 7)
    places = sorted(set(places))
    for bit in places:
        octets[bit // 8] ^= 1 << bit % 8
        seen.add(fingerprint(octets))
        octets[bit // 8] ^= 1 << bit % 8
    assert len(seen) == len(places) + 1


def test_every_single_bit_of_two_rows_counts() -> None:
    """All 65,536 of them, as slices of one tensor."""
    row = noise(2 * ROW_BYTES)
    seen = {fingerprint(row)}
    for start in range(0, 8 * len(row), 4096):
        bits = torch.arange(start, start + 4096, device="cuda")
        flipped = row.repeat(4096, 1)
        flipped[torch.arange(4096, device="cuda"), bits // 8] ^= (1 << bits % 8).to(torch.uint8)
        seen.update(fingerprints([flipped.view(4096, 2, -1)])[0].slices)
    assert len(seen) == 8 * len(row) + 1


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 64, ROW_BYTES, GROUP_BYTES, 3 << 20])
def test_swaps_are_seen(width: int) -> None:
    """Of words, cache lines, rows of sums, groups of rows, and experts."""
    octets = noise(48 << 20)
    parts = octets.view(-1, width)
    base = fingerprint(octets)
    generator = np.random.default_rng(width)
    for _ in range(200):
        i, j = generator.choice(len(parts), 2, replace=False).tolist()
        if torch.equal(parts[i], parts[j]):
            continue
        parts[[i, j]] = parts[[j, i]]
        assert fingerprint(octets) != base
        parts[[i, j]] = parts[[j, i]]
    assert fingerprint(octets) == base


def test_swapped_tensors_and_experts_are_located() -> None:
    experts = noise(64 * 5000).view(64, 50, 100)
    order = list(range(64))
    order[3], order[60] = 60, 3
    before, after = fingerprints([experts, experts[order]])
    assert [i for i in range(64) if before.slices[i] != after.slices[i]] == [3, 60]
    one, other = noise(100_000, seed=1), noise(100_000, seed=2)
    first, second = fingerprints([one, other]), fingerprints([other, one])
    assert (first[0], first[1]) == (second[1], second[0])
    assert first[0].fp != first[1].fp


def test_shifts_and_zeroed_blocks_are_seen() -> None:
    octets = noise(SAMPLE)
    seen, count = {fingerprint(octets)}, 1
    for shift in (
        1,
        2,
        3,
        4,
        8,
        16,
        64,
        ROW_BYTES,
        GROUP_BYTES,
        GROUP_BYTES + ROW_BYTES,
        SAMPLE // 2,
        SAMPLE - 1,
    ):
        seen.add(fingerprint(octets.roll(shift)))
        count += 1
    generator = np.random.default_rng(3)
    for length in (2, 4, 16, 100, ROW_BYTES, 3 * ROW_BYTES, GROUP_BYTES, 5 << 20):
        for _ in range(40):
            start = int(generator.integers(0, SAMPLE - length))
            zeroed = octets.clone()
            zeroed[start : start + length] = 0
            assert not torch.equal(zeroed, octets)
            seen.add(fingerprint(zeroed))
            count += 1
    for length in (1, 15, 16, ROW_BYTES, GROUP_BYTES):  # zeros behind
        seen.add(fingerprint(torch.cat([octets, octets.new_zeros(length)])))
        count += 1
    assert len(seen) == count


def test_no_collision_among_small_inputs() -> None:
    """16,384 inputs of 64 bytes: 1.3 * 10^8 pairs. Counters, single bits, and random bytes beside them."""
    words = torch.zeros(16_384, 8, dtype=torch.int64, device="cuda")
    words[:4000, 0] = torch.arange(4000, device="cuda")
    words[4000:8000, 3] = torch.arange(1, 4001, device="cuda") << 40
    words[8000:8384, 7] = -1 - torch.arange(384, device="cuda")
    words[8384:] = noise(8000 * 64).view(torch.int64).view(8000, 8)
    digests = fingerprints([words.view(4, 4096, 1, 8)[i] for i in range(4)])
    assert len({slice_ for digest in digests for slice_ in digest.slices}) == len(words)


# Launches ------------------------------------------------------------------------------------------


def test_a_model_takes_few_launches_and_waits_once() -> None:
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e8m0fnu]
    sizes = np.random.default_rng(0).integers(1, 100_000, 2000).tolist()
    tensors = [noise(4 * size).view(dtypes[i % 4]) for i, size in enumerate(sizes)]
    tensors += [noise(40 << 20), noise(3 * 70_000).view(3, 700, 100)]
    fingerprints(tensors)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        fingerprints(tensors)
    events = {event.key: event.count for event in profiled.key_averages()}
    kernels = sum(count for name, count in events.items() if "row_sums_kernel" in name)
    waits = sum(count for name, count in events.items() if "Synchronize" in name)
    assert 0 < kernels <= 10, events
    assert waits <= 4, events  # for the last sums, for the flags, and where the profiler ends


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_another_device_than_the_current_one() -> None:
    tensors = [noise(300_000).cpu(), noise(5000).cpu().view(torch.float32)]
    assert torch.cuda.current_device() == 0
    spread = [tensor.to(f"cuda:{i}") for tensor in tensors for i in (1, 0)]
    assert fingerprints(spread) == fingerprints([tensor for tensor in tensors for _ in (1, 0)])
    assert torch.cuda.current_device() == 0
