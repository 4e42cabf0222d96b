"""The fingerprint against a naive reference, over strides, dtypes and sizes, and against every kind of change."""

import hashlib
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from collectors import leaves
from collectors.fingerprint import MAX_SLICES, fingerprint, fingerprints
from collectors.lanes import BLOCK_BYTES, BLOCK_WORDS, RowHasher, keys, rows_by_torch, splitmix64

torch.set_num_threads(1)

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


def naive_fingerprint(data: bytes) -> str:
    key = [int(k) & MASK for k in keys()[0]]
    odd_key = [int(k) & MASK for k in keys()[1]]
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    lanes = b""
    for start in range(0, len(words), BLOCK_WORDS):
        s1 = s2 = s3 = 0
        for position, word in enumerate(words[start : start + BLOCK_WORDS]):
            t = word ^ key[position]
            signed = t - (1 << 64) if t >> 63 else t
            p = signed * (signed >> 32)
            s1, s2, s3 = s1 + p, s2 + p * odd_key[position], s3 + t
        lanes += b"".join((lane & MASK).to_bytes(8, "little") for lane in (s1, s2, s3))
    return hashlib.sha256(lanes + len(data).to_bytes(8, "little")).hexdigest()[:32]


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        7,
        8,
        9,
        4096,
        32 << 10,
        (32 << 10) + 3,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        BLOCK_BYTES + 1,
        3 * BLOCK_BYTES + 5,
    ],
)
def test_equals_the_naive_reference(nbytes: int) -> None:
    data = random_bytes(nbytes, seed=nbytes)
    assert fingerprint(data) == naive_fingerprint(data.numpy().tobytes())


def test_keys_come_from_splitmix64() -> None:
    assert splitmix64(1234567, 4).tolist() == naive_splitmix64(1234567, 4)
    key, odd_key = keys()
    assert len(set(key.tolist())) == BLOCK_WORDS
    assert bool((odd_key & 1).all())


def test_bits_are_pinned() -> None:
    """Stored references are compared with later runs: a change of these bits must be deliberate."""
    data = torch.arange(300_000, dtype=torch.int32)
    assert fingerprint(data) == "69fcf7af0b0a7baa57eec13f9b995579"
    assert fingerprint(data.view(3, 100, 1000)) == "89ba4b687e1b5ae915d99b9bdf8033b9"


def test_device_operations_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.lanes._DEVICE_CHUNK_WORDS", 3 * 100)  # several groups, the last smaller
    raw = random_bytes(8 * 100 * 8).view(8, -1)
    raw[3], raw[4, :797] = 7, 9
    words = raw.view(torch.int64)
    for dtype in (*FLOATS, torch.uint8, None):
        for ours, theirs in zip(
            RowHasher()(words, 797, dtype), rows_by_torch(words, 797, dtype), strict=True
        ):
            assert np.array_equal(ours, theirs), dtype


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
    monkeypatch.setattr(leaves, "_PIECE", BLOCK_BYTES)
    assert [fingerprint(view) for view in views] == want


def test_memory_that_is_not_aligned() -> None:
    for nbytes in (100, 4096, 5 * BLOCK_BYTES + 3):
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
    z = random_tensor(torch.float32, 20, 30, 2)
    z = torch.view_as_complex(z.nan_to_num())
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj()) != fingerprint(z)
    assert fingerprint(z.conj().imag) == fingerprint(z.conj().imag.clone())


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
    base = random_tensor(torch.bfloat16, 600, 256)  # 2.3 blocks
    flat = base.reshape(-1)
    variants = [base]
    for i, j in ((0, 1), (3, 599), (255, 256)):  # rows
        variants.append(base[[j if row == i else i if row == j else row for row in range(600)]])
    for i, j in ((0, 1), (5, 4005), (0, 16384 * 4)):  # values within and across blocks
        variants.append(flat.clone())
        variants[-1][[i, j]] = flat[[j, i]]
    variants += [base.view(torch.uint8).view(-1, 2).flip(1), base.flip(0), base.flip(1), base.t(), -base]
    for start, stop in ((0, 10), (10, 20), (10, 21), (70_000, 90_000)):  # runs of zeros
        variants.append(flat.clone())
        variants[-1][start:stop] = 0
    for count in (1, 3, 4, 5, 70_000):  # appended zeros
        variants.append(torch.cat([flat, flat.new_zeros(count)]))
    variants.append(torch.cat([flat[: 8192 * 8], flat[8192 * 8 : 8192 * 16].flip(0), flat[8192 * 16 :]]))
    blocks = flat[: 2 * BLOCK_BYTES // 2].view(2, -1)
    variants.append(torch.cat([blocks[1], blocks[0], flat[BLOCK_BYTES:]]))
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
    data = random_bytes(3 * BLOCK_BYTES)
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


def lanes(words: torch.Tensor) -> list[list[int]]:
    """One row of lanes for each row of int64 words."""
    return RowHasher()(words, 8 * words.shape[1], None).lanes.tolist()


@pytest.mark.parametrize(
    "sign_bits", [1 << 63, 1 << 31, 1 << 15, 1 << 7, 0x8000800080008000, 0x8080808080808080]
)
def test_sign_flips_of_two_words_are_seen_by_two_lanes(sign_bits: int) -> None:
    """The plain sum alone would miss them all: two flips of the top bit cancel modulo 2^64."""
    flip = sign_bits - (1 << 64) if sign_bits >> 63 else sign_bits
    word = random_tensor(torch.int64, 1, 48)
    pairs = torch.combinations(torch.arange(48))
    rows = word.repeat(len(pairs), 1)
    rows[torch.arange(len(pairs))[:, None], pairs] ^= flip
    base = lanes(word)[0]
    found = lanes(rows)
    assert all(row[0] != base[0] and row[1] != base[1] for row in found)
    if sign_bits == 1 << 63:
        assert all(row[2] == base[2] for row in found)


def test_a_change_that_the_products_miss_is_seen_by_the_sum() -> None:
    """Where the upper half of a word equals its key's, the product is 0 whatever the lower half."""
    high = int(keys()[0][0]) >> 32 << 32
    first, second = lanes(torch.tensor([[high | 5], [high | 6]]))
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_structured_inputs_do_not_collide() -> None:
    """Counters, one-hot values and small sums of pairs: what a weak mixer confuses."""
    rows = torch.zeros(60_000, 8, dtype=torch.int64)
    rows[:20_000, 0] = torch.arange(20_000)
    rows[20_000:40_000, 3] = torch.arange(1, 20_001) << 40
    rows[40_000:, 5], rows[40_000:, 6] = torch.arange(1, 20_001), 20_001 - torch.arange(1, 20_001)
    assert len({digest.fp for digest in fingerprints(list(rows))}) == len(rows)
    found = np.array(lanes(rows))
    for lane in range(2):
        assert len(np.unique(found[:, lane])) == len(rows)


# Flags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in FLOATS if torch.empty(0, dtype=dtype).element_size() < 4]
)
def test_nan_is_found_for_every_bit_pattern(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    patterns = torch.arange(256**size, dtype=torch.int64)
    values = patterns.to(torch.uint8 if size == 1 else torch.uint16).view(dtype)
    # A row holds one pattern and zeros; 0x80 bytes, NaN in some formats, are in no other.
    want = torch.isnan(values.float() if size == 1 else values).numpy()
    assert want.any()
    words = patterns[:, None]
    assert np.array_equal(RowHasher()(words, 8, dtype).nan, want)
    assert np.array_equal(rows_by_torch(words, 8, dtype).nan, want)


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


@pytest.mark.parametrize("nbytes", [1, 3, 8, 9, 4099, BLOCK_BYTES, 2 * BLOCK_BYTES + 9])
@pytest.mark.parametrize("byte", [0, 127, 255])
def test_the_byte_that_all_bytes_equal(nbytes: int, byte: int) -> None:
    data = torch.full((nbytes,), byte, dtype=torch.uint8)
    assert fingerprints([data])[0].const == byte
    for place in {0, nbytes // 2, nbytes - 2, nbytes - 1} if nbytes > 1 else ():
        other = data.clone()
        other[place] ^= 1
        assert fingerprints([other])[0].const is None


def test_constant_slices_of_different_bytes_are_not_constant() -> None:
    stack = torch.zeros(3, 4, 5, dtype=torch.uint8)
    assert fingerprints([stack])[0].const == 0
    stack[1] = 1
    assert fingerprints([stack])[0].const is None
    assert fingerprints([torch.empty(0)])[0].const is None


# Memory --------------------------------------------------------------------------------------------


def peak_growth(tensor: torch.Tensor) -> int:
    """Bytes by which the resident peak rises above the present size while `tensor` is hashed."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    before = status("VmRSS")
    fingerprint(tensor)
    return status("VmHWM") - before


def status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match.group(1)) << 10


def test_temporary_memory_is_bounded() -> None:
    large = torch.ones(96 << 20, dtype=torch.uint8)
    fingerprint(large[:1000])
    for view in (large, large[1:], large.view(8192, -1).t(), large.view(2, 3, -1).transpose(1, 2)):
        assert peak_growth(view) < 48 << 20, view.stride()
