"""The fingerprint's kernel in Triton's interpreter, on memory of the CPU: the same digests and flags as without it."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_fingerprint import FLOATS, random_bytes, random_tensor

from collectors import device_sums, leaves
from collectors.fingerprint import Digest, fingerprints
from collectors.leaves import Leaves
from collectors.row_sums import GROUP_BYTES, ROW_BYTES


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def kernel(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    from collectors import row_sums_kernel

    counted = Counted(row_sums_kernel.row_sums_kernel)
    monkeypatch.setattr(row_sums_kernel, "row_sums_kernel", counted)
    monkeypatch.setattr(device_sums, "STEP", ROW_BYTES)  # few operations: the interpreter's time
    yield counted
    assert counted.launches


def both(tensors: list[torch.Tensor], whole: bool = False) -> tuple[list[Digest], list[Digest]]:
    """Digests by the kernel and without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "on_device", lambda tensor: True)
        kernels = fingerprints(tensors, whole)
    return kernels, fingerprints(tensors, whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_equals_the_cpu(kernel: Counted, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    shapes = [(1,), (0, 3), (7,), (2048,), (70_001 // size,), (3, 5, 7), (2, 33, 4096 // size), (2, 0, 4)]
    tensors = [random_tensor(dtype, *shape, seed=i) for i, shape in enumerate(shapes) if 0 not in shape]
    tensors += [torch.empty(shape, dtype=dtype) for shape in shapes if 0 in shape]
    tensors += [tensor.transpose(-1, -2) for tensor in tensors if tensor.ndim > 1]
    tensors += [
        torch.zeros(9001, dtype=dtype),
        torch.ones(2, 3, 4, dtype=dtype),
        torch.tensor(1, dtype=dtype),
    ]
    tensors.append(torch.full((5000 * size,), 255, dtype=torch.uint8).view(dtype))
    kernels, cpu = both(tensors)
    assert kernels == cpu
    assert kernel.launches <= 6


@pytest.mark.parametrize("nbytes", [GROUP_BYTES, GROUP_BYTES + 16, 3 * GROUP_BYTES + 5])
def test_folded_sums_equal_the_cpus(kernel: Counted, nbytes: int) -> None:
    constant = torch.full((nbytes,), 7, dtype=torch.uint8)
    constant_but_last = constant.clone()
    constant_but_last[-1] = 6
    kernels, cpu = both([random_bytes(nbytes), constant, constant_but_last])
    assert kernels == cpu


def test_sums_of_folded_sums(kernel: Counted) -> None:
    """As leaves of more than 8 MiB have, which take the interpreter too long: 256 bytes are too much, not 4096."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (leaves, device_sums):
            patch.setattr(module, "MOST_BYTES", 256)
        kernels, cpu = both([random_bytes(5 * GROUP_BYTES + 4100)])
    assert kernels == cpu


def test_memory_that_is_not_aligned(kernel: Counted) -> None:
    raw = random_bytes(GROUP_BYTES + 3 * ROW_BYTES + 20)
    kernels, cpu = both([raw[1:], raw[2 : 2 + 5 * ROW_BYTES], raw[16 : 16 + 100], raw[8:40]])
    assert kernels == cpu
    rows = raw[1 : 1 + 9 * 4100].view(9, 41, 100)
    kernels, cpu = both([rows, rows.view(9, -1)])
    assert kernels == cpu


def test_leaves_in_pieces(kernel: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_PIECE_ON_DEVICE", GROUP_BYTES + ROW_BYTES)
    nan_at_the_end = torch.zeros(GROUP_BYTES // 4, 3, dtype=torch.float64).t()
    nan_at_the_end[2, -1] = float("nan")
    halves = torch.zeros(GROUP_BYTES, 2, dtype=torch.uint8)
    halves[:, 1] = 1
    views = [
        random_tensor(torch.int16, 3, GROUP_BYTES // 2).t(),
        torch.zeros(3, GROUP_BYTES // 2).t(),
        nan_at_the_end,
        halves.t(),
        random_tensor(torch.uint8, 2, 1000, 300).transpose(1, 2),  # slices that fit, one by one
    ]
    kernels, cpu = both(views)
    assert kernels == cpu
    assert (kernels[1].const, kernels[2].nan, kernels[3].const) == (0, True, None)


def test_copies_of_strided_tensors_are_launched_before_they_are_many(
    kernel: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sums, "_COPIES_AT_ONCE", 5000)
    kernels, cpu = both([random_tensor(torch.int16, 60, 50, seed=i).t() for i in range(4)])
    assert kernels == cpu
    assert kernel.launches == 4  # of two copies each: single rows, and those that no aligned copy can read


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.itemsize == 1])
def test_nan_is_found_for_every_byte(kernel: Counted, dtype: torch.dtype) -> None:
    values = torch.zeros(256, 1, 32, dtype=torch.uint8)
    values[:, 0, 13] = torch.arange(256)
    found = Leaves(flags=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "on_device", lambda tensor: True)
        found.add(values.view(dtype), 256)
        found.flush()
    assert found.nan == values.view(dtype)[:, 0, 13].float().isnan().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_is_found_among_infinities(kernel: Counted, dtype: torch.dtype) -> None:
    """Between numbers of other kinds, which share tiles neither with them nor with each other."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    infinity = torch.full((16,), float("inf"), dtype=dtype)
    bits = infinity.view(integer)
    nan, negative = bits.clone(), -infinity
    nan[5] += 1
    negative_nan = negative.view(integer).clone()
    negative_nan[15] += 1
    values = [infinity, nan.view(dtype), negative, negative_nan.view(dtype), nan, torch.full((16,), 0x7F80)]
    kernels, cpu = both([value.contiguous() for value in values])
    assert kernels == cpu
    assert [digest.nan for digest in kernels] == [False, True, False, True, False, False]


def test_every_kind_of_change_is_seen(kernel: Counted) -> None:
    base = random_bytes(GROUP_BYTES + 2 * ROW_BYTES)
    short = random_bytes(40, seed=1)
    variants = [short]
    for bit in range(8 * len(short)):
        variants.append(short.clone())
        variants[-1][bit // 8] ^= 1 << bit % 8
    words = short.view(torch.int32)
    for i, j in ((0, 1), (3, 9), (4, 8)):
        variants.append(words.clone().view(torch.uint8))
        variants[-1].view(torch.int32)[[i, j]] = words[[j, i]]
    rows = base.view(-1, ROW_BYTES)
    order = list(range(len(rows)))
    swapped = [order[:], order[:], order[:]]
    for change, (i, j) in zip(swapped, ((0, 1), (0, 64), (63, 65)), strict=True):
        change[i], change[j] = j, i
    variants += [base, *(rows[change].reshape(-1) for change in swapped), base.roll(1), base.roll(ROW_BYTES)]
    variants.append(torch.cat([base[: 9 * ROW_BYTES], base.new_zeros(100), base[9 * ROW_BYTES + 100 :]]))
    kernels, cpu = both(variants)
    assert kernels == cpu
    assert len({digest.fp for digest in kernels}) == len(variants)


def test_swapped_experts_and_tensors_are_located(kernel: Counted) -> None:
    experts = random_tensor(torch.uint8, 6, 64, 48)
    other = random_tensor(torch.uint8, 6, 64, 48, seed=1)
    before, after, first, second = both([experts, experts[[0, 4, 2, 3, 1, 5]], other, experts])[0]
    assert [i for i in range(6) if before.slices[i] != after.slices[i]] == [1, 4]
    assert (after.slices[1], after.slices[4]) == (before.slices[4], before.slices[1])
    assert (first.fp, second.fp) != (before.fp, before.fp)
    assert second.fp == before.fp


def test_a_model_of_many_tensors_takes_few_launches(kernel: Counted) -> None:
    generator = np.random.default_rng(2)
    sizes = generator.integers(1, 9000, 300)
    dtypes = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e8m0fnu]
    tensors = [random_tensor(dtypes[i % 4], int(size), seed=i) for i, size in enumerate(sizes)]
    kernels, cpu = both([*tensors, random_bytes(GROUP_BYTES + 1), random_bytes(1 << 17)])
    assert kernels == cpu
    assert kernel.launches <= 5


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "on_device", lambda tensor: True)
    for module in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match="install the triton that belongs to this torch"):
        fingerprints([torch.zeros(5)])


def test_other_devices_are_refused() -> None:
    tensor: Any = SimpleNamespace(device=torch.device("xpu", 0))
    with pytest.raises(ValueError, match="Tensors on xpu:0 cannot be fingerprinted there"):
        Leaves(flags=True)._device(tensor)
