"""The fingerprint against a naive reference, over strides, dtypes and sizes, and against every kind of change."""

import functools
import hashlib
import operator
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from collectors import leaves
from collectors.byte_flags import NAN_WORDS, nan_rows
from collectors.fingerprint import MAX_SLICES, fingerprint, fingerprints
from collectors.row_sums import (
    GROUP,
    GROUP_BYTES,
    MOST_BYTES,
    ROW_BYTES,
    SUMS,
    factors,
    fold,
    keys,
    row_sums,
    splitmix64,
)

torch.set_num_threads(1)

REPOSITORY = Path(__file__).parents[2]
CPU = torch.device("cpu")
FOLDED = GROUP_BYTES + 1  # bytes of the smallest leaf whose sums are folded
MASK = (1 << 64) - 1
FLOATS = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
DTYPES = (
    *FLOATS,
    *(
        torch.uint8,
        torch.int8,
        torch.bool,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.int64,
        torch.complex64,
    ),
    *(torch.complex128, torch.float4_e2m1fn_x2),
)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = random_bytes(size * int(np.prod(shape)), seed)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


# The reference: nothing but Python's integers ------------------------------------------------------


def naive_splitmix64(seed: int, count: int) -> list[int]:
    out = []
    for _ in range(count):
        seed = seed + 0x9E3779B97F4A7C15 & MASK
        z = seed
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        out.append(z ^ z >> 31)
    return out


@functools.cache
def naive_columns(level: int) -> list[list[int]]:
    words = naive_splitmix64(0x7265666974737461 + level, ROW_BYTES * SUMS // 8)
    values = [(octet >> 1) - 64 for word in words for octet in word.to_bytes(8, "little")]
    return [values[column * ROW_BYTES :][:ROW_BYTES] for column in range(SUMS)]


@functools.cache
def naive_factors(level: int) -> list[int]:
    return [word | 1 for word in naive_splitmix64(0x666F6C6473 + level, 64 * SUMS)]


def naive_fold(sums: list[int], level: int) -> bytes:
    """64 rows of 16 sums at a time: 16 numbers modulo 2^64."""
    folded = b""
    for start in range(0, len(sums), 64 * SUMS):
        products = list(map(operator.mul, sums[start:], naive_factors(level)))
        folded += b"".join((sum(products[j::SUMS]) & MASK).to_bytes(8, "little") for j in range(SUMS))
    return folded


def naive_fingerprint(data: bytes) -> str:
    sums, level = data, 0
    while True:
        padded = sums + bytes(-len(sums) % ROW_BYTES)
        rows = [padded[i : i + ROW_BYTES] for i in range(0, len(padded), ROW_BYTES)]
        signed = [[octet - 256 if octet > 127 else octet for octet in row] for row in rows]
        values = [sum(map(operator.mul, row, column)) for row in signed for column in naive_columns(level)]
        sums = b"".join(value.to_bytes(4, "little", signed=True) for value in values)
        if len(sums) > 4096:
            sums = naive_fold(values, level)
        if len(sums) <= 4096:
            return hashlib.sha256(sums + len(data).to_bytes(8, "little")).hexdigest()[:32]
        level += 1


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        7,
        8,
        9,
        4095,
        4096,
        4097,
        32 << 10,
        (32 << 10) + 3,
        FOLDED - 1,
        FOLDED,
        FOLDED + 5000,
    ],
)
def test_equals_the_naive_reference(nbytes: int) -> None:
    data = random_bytes(nbytes, seed=nbytes)
    assert fingerprint(data) == naive_fingerprint(data.numpy().tobytes())


def test_sums_of_folded_sums() -> None:
    """Two levels, as tensors of more than 8 MiB have, by the parts that the reference checks on small ones."""
    data = random_bytes(9 << 20)
    first = row_sums(data.view(-1, ROW_BYTES), 0)[0]
    folded = fold(first.view(1, -1, SUMS), 0).view(torch.uint8).view(-1)
    assert len(folded) > MOST_BYTES
    padded = torch.zeros(2, ROW_BYTES, dtype=torch.uint8)
    padded.view(-1)[: len(folded)] = folded
    second = row_sums(padded, 1)[0].numpy().tobytes()
    assert fingerprint(data) == hashlib.sha256(second + data.nbytes.to_bytes(8, "little")).hexdigest()[:32]


def test_factors_are_odd_and_their_products_wrap() -> None:
    """Odd, so that no change of a single row can vanish."""
    assert (factors(0, CPU) % 2 != 0).all()
    assert (factors(0, CPU) != factors(1, CPU)).all()
    sums = torch.full((1, GROUP, SUMS), -(1 << 25), dtype=torch.int32)
    want = [
        sum(-(1 << 25) * factor for factor in naive_factors(0)[column::SUMS]) & MASK for column in range(SUMS)
    ]
    assert [value & MASK for value in fold(sums, 0).view(-1).tolist()] == want


def test_keys_come_from_splitmix64() -> None:
    assert splitmix64(1234567, 4).tolist() == naive_splitmix64(1234567, 4)
    tables = [keys(level, CPU) for level in range(3)]
    assert all(table.min() == -64 and table.max() == 63 for table in tables)
    assert len({tuple(row) for table in tables for row in table.tolist()}) == 3 * ROW_BYTES


def test_products_are_exact_where_they_are_largest() -> None:
    """Bytes that drive every sum to its extreme: wider keys would saturate on processors without VNNI."""
    key = keys(0, CPU).to(torch.int64)
    highest = torch.where(key > 0, 127, -128)
    rows = torch.cat([highest.T, -1 - highest.T, torch.full((1, ROW_BYTES), -128)]).to(torch.int8)
    sums, _ = row_sums(rows.view(torch.uint8), 0)
    assert torch.equal(sums.to(torch.int64), rows.to(torch.int64) @ key)


def test_bits_are_the_same_on_a_processor_without_vnni() -> None:
    script = (
        "import torch; from collectors.fingerprint import fingerprint; from collectors.row_sums import keys; "
        "key = keys(0, torch.device('cpu')).T; "
        "print(fingerprint(torch.where(key > 0, 127, -128).to(torch.int8)))"
    )
    environment = {"PYTHONPATH": str(REPOSITORY), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    key = keys(0, CPU).T
    assert done.stdout.strip() == fingerprint(torch.where(key > 0, 127, -128).to(torch.int8))


def test_bits_are_pinned() -> None:
    """Stored references are compared with later runs: a change of these bits must be deliberate."""
    data = torch.arange(300_000, dtype=torch.int32)
    assert fingerprint(data) == "ee995cdda5bf569f23360783bdb1066d"
    assert fingerprint(data.view(3, 100, 1000)) == "8abb13b40ac0f69ce42306794f3f33c7"


def test_rows_do_not_depend_on_how_many_are_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_bytes(70 * ROW_BYTES).view(70, ROW_BYTES)
    want, nan = row_sums(rows, 0, torch.bfloat16)
    assert nan.any()
    for step in (1, 3, 32, 69):
        monkeypatch.setattr("collectors.row_sums._ROWS_AT_ONCE", step)
        sums, found = row_sums(rows, 0, torch.bfloat16)
        assert torch.equal(sums, want)
        assert torch.equal(found, nan)


# Layout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    for shape in ((37, 53), (5, 7, 11)):
        base = random_tensor(dtype, *shape)
        for view in (base, base.transpose(-1, -2), base[1:, 2:], base[::2, ::3], base[..., 1]):
            assert fingerprint(view) == fingerprint(view.clone(memory_format=torch.contiguous_format))
    row = random_tensor(dtype, 1, 53)
    assert fingerprint(row.expand(9, 53)) == fingerprint(torch.cat([row] * 9))


@pytest.mark.parametrize("shape", [(5, 3), (300, 700), (2, 400_000), (3, 7, 50_000), (2, 2, 600, 300)])
def test_pieces_of_strided_tensors_join(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    base = random_tensor(torch.int16, *shape)
    views = [base.flip(0).transpose(0, -1), base.transpose(0, -1), base[..., 1:], base[:, 1:], base[1:]]
    want = [fingerprint(view.contiguous()) for view in views]
    monkeypatch.setattr(leaves, "_PIECE", 16 * ROW_BYTES)
    assert [fingerprint(view) for view in views] == want


def test_memory_that_is_not_aligned() -> None:
    for nbytes in (100, 4096, 5 * ROW_BYTES + 3, FOLDED + 3):
        raw = random_bytes(nbytes + 16)
        for offset in (1, 2, 8, 13):
            part = raw[offset : offset + nbytes]
            assert fingerprint(part) == fingerprint(part.clone())
        outside = torch.frombuffer(
            bytearray(raw.numpy().tobytes()), dtype=torch.uint8, offset=5, count=nbytes
        )
        assert fingerprint(outside) == fingerprint(outside.clone())
    odd = random_bytes(1 + 9 * 4100).narrow(0, 1, 9 * 4100).view(9, 4100)  # rows at odd addresses
    assert fingerprints([odd.view(9, 41, 100)])[0].slices == tuple(fingerprint(row.clone()) for row in odd)


def test_lazy_conjugation_and_negation_are_resolved() -> None:
    z = torch.view_as_complex(random_tensor(torch.float32, 20, 30, 2).nan_to_num())
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj()) != fingerprint(z)
    x = random_tensor(torch.float32, 20, 30).nan_to_num()
    for view in (x, x.t()):
        negated = torch._neg_view(view)
        assert negated.is_neg()
        assert fingerprint(negated) == fingerprint(-view) != fingerprint(view)


def test_scalars_empty_and_dtypes_of_equal_bytes() -> None:
    assert (
        fingerprint(torch.tensor(1.5)) == fingerprint(torch.tensor([1.5])) != fingerprint(torch.tensor(-1.5))
    )
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(3, 0)) == naive_fingerprint(b"")
    data = random_bytes(64)
    assert fingerprint(data) == fingerprint(data.view(torch.bfloat16)) == fingerprint(data.view(8, 8))


def test_many_tensors_of_mixed_sizes_keep_their_order() -> None:
    generator = random.Random(5)
    sizes = [generator.choice([0, 1, 8, 60, 4096, 40_000, 200_000]) for _ in range(700)]
    tensors = [random_bytes(size, seed=i) for i, size in enumerate(sizes)]
    assert [digest.fp for digest in fingerprints(tensors)] == [fingerprint(tensor) for tensor in tensors]


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (64, 64), (300, 500)])
def test_leading_slices_have_the_fingerprint_of_their_bytes(rows: int, columns: int) -> None:
    stack = random_tensor(torch.bfloat16, 6, rows, columns)
    for view in (stack, stack.transpose(1, 2)):
        digest = fingerprints([view])[0]
        assert digest.slices == tuple(fingerprint(part.clone()) for part in view)
        assert digest.fp == hashlib.sha256(bytes.fromhex("".join(digest.slices))).hexdigest()[:32]
    whole = fingerprints([stack, stack.transpose(1, 2)], whole=True)
    assert [d.fp for d in whole] == [
        fingerprint(stack.reshape(-1)),
        fingerprint(stack.transpose(1, 2).reshape(-1)),
    ]


def test_which_tensors_have_slices() -> None:
    shapes = [(2, 3), (2, 3, 4), (MAX_SLICES, 1, 1), (MAX_SLICES + 1, 1, 1), (0, 2, 2), (3, 0, 2)]
    digests = fingerprints([torch.zeros(shape) for shape in shapes])
    assert [len(d.slices) for d in digests] == [0, 2, MAX_SLICES, 0, 0, 3]


# What has no bytes ---------------------------------------------------------------------------------


def released(offset: int, transposed: bool = False) -> torch.Tensor:
    tensor = torch.zeros(8, 8).t() if transposed else torch.zeros(64)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(2, 3, device="meta"), "on the meta device"),
        (torch.eye(3).to_sparse(), "its layout is torch.sparse_coo"),
        (released(0), "its storage holds 0 bytes of the 256"),
        (released(7), "its storage holds 0 bytes of the 256"),  # the address of such a view is not null
        (released(0, transposed=True), "its storage holds 0 bytes of the 256"),
    ],
)
def test_tensors_without_bytes_are_refused(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        fingerprint(tensor)


# Changes -------------------------------------------------------------------------------------------


def test_every_kind_of_change_is_seen() -> None:
    base = random_tensor(torch.bfloat16, 600, 256)  # 75 rows of 4 KiB, so two levels
    flat = base.reshape(-1)
    variants = [base]
    for i, j in ((0, 1), (3, 599), (255, 256)):  # rows
        variants.append(base[[j if row == i else i if row == j else row for row in range(600)]])
    for i, j in ((0, 1), (5, 2005), (0, 2048), (7, 64 * 2048 + 7)):  # values within and across rows of sums
        variants.append(flat.clone())
        variants[-1][[i, j]] = flat[[j, i]]
    variants += [base.view(torch.uint8).view(-1, 2).flip(1), base.flip(0), base.flip(1), base.t(), -base]
    for start, stop in ((0, 10), (10, 20), (10, 21), (70_000, 90_000)):  # runs of zeros
        variants.append(flat.clone())
        variants[-1][start:stop] = 0
    for count in (1, 3, 4, 5, 70_000):  # appended zeros
        variants.append(torch.cat([flat, flat.new_zeros(count)]))
    lines = flat.view(-1, 2048)  # 4 KiB each
    variants += [lines[[1, 0, *range(2, 75)]], lines[[64, *range(1, 64), 0, *range(65, 75)]], lines.flip(0)]
    digests = [fingerprint(variant) for variant in variants]
    assert len(set(digests)) == len(digests)


def test_swapped_experts_are_located_by_their_slices() -> None:
    experts = random_tensor(torch.uint8, 8, 64, 48)
    swapped = experts[[0, 1, 6, 3, 4, 5, 2, 7]]
    before, after = fingerprints([experts, swapped])
    assert before.fp != after.fp
    assert [i for i in range(8) if before.slices[i] != after.slices[i]] == [2, 6]
    assert (after.slices[2], after.slices[6]) == (before.slices[6], before.slices[2])


def test_every_single_bit_counts() -> None:
    data = random_bytes(64 * 8 + 5)
    seen = {fingerprint(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(fingerprint(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * len(data) + 1


def test_one_bit_changes_half_of_the_digest() -> None:
    data = random_bytes(3 * FOLDED)
    base = int(fingerprint(data), 16)
    generator = random.Random(1)
    distances = []
    for _ in range(100):
        byte, bit = generator.randrange(len(data)), generator.randrange(8)
        data[byte] ^= 1 << bit
        distances.append((int(fingerprint(data), 16) ^ base).bit_count())
        data[byte] ^= 1 << bit
    assert 61 < np.mean(distances) < 67
    assert min(distances) > 30


def sums_of(rows: torch.Tensor) -> torch.Tensor:
    """int32 [n, 16] of uint8 [n, k], k <= ROW_BYTES."""
    return row_sums(torch.nn.functional.pad(rows, (0, ROW_BYTES - rows.shape[1])), 0)[0]


@pytest.mark.parametrize("flip", [0x80, 0x01, 0x7F, 0xFF])
def test_changes_of_two_bytes_never_cancel(flip: int) -> None:
    """Sign flips and the like in every pair of 64 bytes: no pair leaves all sums, and few leave any, as they were."""
    row = random_bytes(64)[None]
    pairs = torch.combinations(torch.arange(64))
    rows = row.repeat(len(pairs), 1)
    rows[torch.arange(len(pairs))[:, None], pairs] ^= flip
    unchanged = (sums_of(rows) == sums_of(row)).sum(1)
    assert unchanged.max() <= 3
    assert unchanged.float().mean() < 3 * SUMS / 128  # 1/128 for each sum, were the keys random


def test_every_byte_of_a_row_counts_in_most_sums() -> None:
    """A byte that no key multiplies would be invisible."""
    assert (keys(0, CPU) != 0).sum(1).min() >= SUMS - 4


def test_structured_inputs_do_not_collide() -> None:
    """Counters, one-hot values and pairs of equal sum: what a weak mixer confuses."""
    rows = torch.zeros(60_000, 8, dtype=torch.int64)
    rows[:20_000, 0] = torch.arange(20_000)
    rows[20_000:40_000, 3] = torch.arange(1, 20_001) << 40
    rows[40_000:, 5], rows[40_000:, 6] = torch.arange(1, 20_001), 20_001 - torch.arange(1, 20_001)
    assert len({digest.fp for digest in fingerprints(list(rows))}) == len(rows)


# Flags ---------------------------------------------------------------------------------------------


def nan_in_words(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """bool [n]: what the words of `NAN_WORDS` find in values uint8 [n, size], each alone in a word, in every place."""
    flip, magnitude, carry, either, top = NAN_WORDS[dtype]
    found = []
    for place in range(0, 4, values.shape[1]):
        octets = torch.zeros(len(values), 4, dtype=torch.uint8)
        octets[:, place : place + values.shape[1]] = values
        word = octets.view(torch.int32).view(-1).to(torch.int64) & 0xFFFFFFFF ^ flip
        found.append(((word & magnitude) + carry & 0xFFFFFFFF) & (word | either) & top != 0)
    assert all(torch.equal(one, found[0]) for one in found)
    return found[0]


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in FLOATS if torch.empty(0, dtype=dtype).element_size() < 4]
)
def test_nan_is_found_for_every_bit_pattern(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    patterns = torch.arange(256**size, dtype=torch.int32).to(torch.uint8 if size == 1 else torch.uint16)
    want = torch.isnan(patterns.view(dtype).float())
    assert want.any()
    rows = torch.zeros(len(patterns), 8, dtype=torch.uint8)
    rows.view(patterns.dtype)[:, 1] = patterns
    assert torch.equal(nan_rows(rows, dtype), want)
    assert torch.equal(nan_in_words(patterns.view(torch.uint8).view(-1, size), dtype), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_nan_among_wide_floats(dtype: torch.dtype) -> None:
    real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    bits = torch.int64 if real is torch.float64 else torch.int32
    inf = torch.tensor([float("inf")], dtype=real).view(bits)
    lowest = torch.iinfo(bits).min
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf")], dtype=real)
    for pattern in (
        inf + 1,
        (inf + 1) | lowest,
        torch.full_like(inf, -1),
        torch.full_like(inf, -1) & ~lowest,
    ):
        for place in range(6):
            values = numbers.clone()
            assert not fingerprints([values.view(dtype)])[0].nan
            values.view(bits)[place] = pattern
            assert fingerprints([values.view(dtype)])[0].nan


def test_nan_in_any_block_slice_and_stride_but_not_of_integers() -> None:
    big = torch.zeros(5, 3, 9001)
    assert not fingerprints([big])[0].nan
    big[4, 2, 9000] = float("nan")
    digests = fingerprints(
        [big, big.reshape(-1), big.transpose(0, 2), big.view(torch.int32), big[:4], big[4, 2, 9000:]]
    )
    assert [d.nan for d in digests] == [True, True, True, False, False, True]


@pytest.mark.parametrize("nbytes", [1, 3, 8, 9, 4099, 8192, (1 << 20) + 9])
@pytest.mark.parametrize("byte", [0, 127, 255])
def test_the_byte_that_all_bytes_equal(nbytes: int, byte: int) -> None:
    data = torch.full((nbytes,), byte, dtype=torch.uint8)
    assert fingerprints([data])[0].const == byte
    for place in {0, nbytes // 2, nbytes - 2, nbytes - 1} if nbytes > 1 else ():
        other = data.clone()
        other[place] ^= 1
        assert fingerprints([other])[0].const is None


def test_flags_of_a_leaf_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the first piece only; two pieces, each of one byte, that differ."""
    monkeypatch.setattr(leaves, "_PIECE", ROW_BYTES)
    values = torch.zeros(3, 3000).t()
    assert (fingerprints([values])[0].nan, fingerprints([values])[0].const) == (False, 0)
    values[0, 0] = float("nan")
    assert fingerprints([values])[0].nan
    halves = torch.zeros(ROW_BYTES // 4, 8, dtype=torch.uint8)
    halves[:, 4:] = 1
    assert fingerprints([halves.t()])[0].const is None


def test_nan_before_a_tail() -> None:
    values = torch.zeros(40_001)
    values[0] = float("nan")
    assert fingerprints([values])[0].nan


def test_constant_slices_of_different_bytes_are_not_constant() -> None:
    stack = torch.zeros(3, 4, 5, dtype=torch.uint8)
    assert fingerprints([stack])[0].const == 0
    stack[1] = 1
    assert fingerprints([stack])[0].const is None
    assert fingerprints([torch.empty(0)])[0].const is None


# Memory --------------------------------------------------------------------------------------------

PEAKS = """
import re
from pathlib import Path
import torch
from collectors.fingerprint import fingerprint

def status(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text()).group(1)) << 10

torch.set_num_threads(1)
large = torch.ones(128 << 20, dtype=torch.uint8)
views = [large, large[1:], large.view(8192, -1).t(), large.view(2, 4, -1).transpose(1, 2), large.view(2, -1)[:, 1:]]
for view in views:
    fingerprint(view[:1000] if view.ndim < 3 else view[:, :2, :1000])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    before = status("VmRSS")
    fingerprint(view)
    print(status("VmHWM") - before)
"""


def test_temporary_memory_is_bounded() -> None:
    """In a process of its own, where freed memory goes back to the system at once."""
    environment = {"PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", PEAKS], env=environment, capture_output=True, text=True, check=True
    )
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 5
    assert max(peaks) < 32 << 20, peaks
