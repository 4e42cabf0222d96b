"""Block formats of quantised rows and experts: UE8M0 scales, FP8 E4M3, E2M1, MXFP4, FP8 in tiles, NVFP4.

Every function accepts any leading dimensions; blocks run along the last one. Decoding is to float64, in
which each of these formats (and each product of two of their values) is exact.
"""

import torch
from torch import Tensor

BLOCK = 32  # columns that share one UE8M0 scale, in MXFP4 and in MegaMoE's activations
FP8_BLOCK = 128  # rows and columns of a tile of FP8 weights that shares one scale, and columns of an activation's group
NVFP4_BLOCK = 16  # columns that share one E4M3 scale
E8M0_BIAS = 127
E8M0_NAN = 255
FP8_MAX = 448.0  # largest finite E4M3
FP8_AMAX_FLOOR = 1e-4  # amax below this is treated as this, so that an all-zero block has a scale
FP8_GROUP_FLOOR = 1e-10  # the same for groups with float scales
E4M3_SMALLEST = 2.0**-9  # smallest positive E4M3: a block scale below it would make its block vanish
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 of a code is the sign
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _e8m0_table() -> Tensor:
    """float64 [256] by exponent byte. Assembled from bits: exp2 is not promised to be exact, and 2^-127 is a
    normal float64."""
    exponents = torch.arange(256, dtype=torch.int64) + (1023 - E8M0_BIAS)
    return (exponents << 52).view(torch.float64).index_fill_(0, torch.tensor(E8M0_NAN), torch.nan)


def _e2m1_pairs() -> Tensor:
    """float64 [256, 2]: (low, high) nibble by packed byte."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    values = torch.cat([values, -values])
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)


_E8M0_TABLE = _e8m0_table()
_E2M1_PAIRS = _e2m1_pairs()
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)  # by byte


def _blocks(x: Tensor, size: int) -> Tensor:
    """View [..., K] as [..., K/size, size]. ValueError when K is no multiple of `size`."""
    columns = x.shape[-1]
    if columns % size:
        raise ValueError(
            f"The last dimension is {columns}, which is no multiple of the scale block {size}: pad the columns first."
        )
    return torch.unflatten(x, -1, (columns // size, size))


def encode_e8m0_ceil(x: Tensor) -> Tensor:
    """Exponent byte of the smallest power of two >= x: float32 (positive) -> int32, not clamped.

    Infinity gives 255 and NaN 256; the caller's clamp says what becomes of them.
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def decode_e8m0(scales: Tensor) -> Tensor:
    """uint8 bytes b -> float64 2^(b-127); 255 -> NaN."""
    return (
        _E8M0_TABLE.to(scales.device)
        .index_select(0, scales.reshape(-1).to(torch.int32))
        .reshape(scales.shape)
    )


def quantize_fp8_rows(x: Tensor, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise [..., K] bf16/float32 to (float8_e4m3fn [..., K], UE8M0 uint8 [..., K/group]).

    Per group: amax = max(|x|, 1e-4); s = 2^ceil(log2(amax/448)); q = e4m3(x * (1/s)), ties to even (DeepGEMM's
    per-token cast). Exponent bytes are clamped to 1..254. NaN stays NaN; infinity saturates to 448 * 2^127, as the
    hardware's conversion does.
    """
    blocks = _blocks(x.to(torch.float32), group)
    amax = blocks.abs().amax(dim=-1).clamp_min_(FP8_AMAX_FLOOR)
    exponents = encode_e8m0_ceil(amax / FP8_MAX).clamp_(1, 254)
    inverse = decode_e8m0(2 * E8M0_BIAS - exponents).to(torch.float32)  # 1/s is the mirrored exponent
    scaled = (blocks * inverse.unsqueeze(-1)).flatten(-2)
    # Clamped here, because versions of torch differ in whether their conversion saturates or gives NaN.
    q = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q, exponents.to(torch.uint8)


def dequantize_fp8_rows(q: Tensor, scales: Tensor) -> Tensor:
    """(float8_e4m3fn [..., K], UE8M0 uint8 [..., K/group]) -> float64 [..., K], exact."""
    blocks = _e4m3_values(q).view(*scales.shape, q.shape[-1] // scales.shape[-1])
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def encode_e2m1(x: Tensor) -> Tensor:
    """Round [...] to the nearest E2M1 value -> uint8 codes 0..15; beyond 6 saturates.

    Exact midpoints go towards zero (DeepGEMM's cast: the code counts the midpoints strictly below |x|; hardware
    conversion would round half to even). The sign bit is kept on zero too. E2M1 has no NaN: mark it in the scale.
    """
    midpoints = torch.tensor(E2M1_MIDPOINTS, dtype=x.dtype, device=x.device)
    codes = torch.bucketize(x.abs(), midpoints, out_int32=True).to(torch.uint8)
    return codes | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., K/2], low nibble = even column -> float64 [..., K]."""
    pairs = _E2M1_PAIRS.to(packed.device)
    return pairs.index_select(0, packed.reshape(-1).to(torch.int32)).reshape(
        *packed.shape[:-1], 2 * packed.shape[-1]
    )


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., N, K] to (packed uint8 [..., N, K/2], UE8M0 uint8 [..., N, K/32]).

    s = 2^ceil(log2(max(amax, 6*2^-126)/6)), so nothing saturates (OCP's floor rule would). A block that holds a
    NaN or an infinity gets the scale byte 255 (NaN).
    """
    blocks = _blocks(w.to(torch.float32), BLOCK)
    amax = blocks.abs().amax(dim=-1).clamp_min_(E2M1_MAX * 2.0**-126)
    scales = encode_e8m0_ceil(amax / E2M1_MAX).clamp_(max=E8M0_NAN).to(torch.uint8)
    codes = encode_e2m1((blocks.to(torch.float64) / decode_e8m0(scales).unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def dequantize_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """(packed uint8 [..., N, K/2], UE8M0 uint8 [..., N, K/32]) -> float64 [..., N, K], exact."""
    blocks = _blocks(decode_e2m1(packed), BLOCK)
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def quantize_fp8_groups(x: Tensor, group: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Quantise [..., K] bf16/float32 to (float8_e4m3fn [..., K], float32 scales [..., K/group]).

    Per group: s = max(|x|, 1e-10) / 448, q = e4m3(x / s): how activations meet weights in 128 x 128 tiles.
    """
    blocks = _blocks(x.to(torch.float32), group)
    amax = blocks.abs().amax(dim=-1).clamp_min_(FP8_GROUP_FLOOR)
    scales = amax / torch.full_like(amax, FP8_MAX)  # by a plain number CUDA would multiply with its inverse
    return _to_e4m3(blocks.to(torch.float64), scales.unsqueeze(-1)).flatten(-2), scales


def dequantize_fp8_groups(q: Tensor, scales: Tensor) -> Tensor:
    """(float8_e4m3fn [..., K], float32 [..., K/group]) -> float64 [..., K], exact."""
    blocks = _e4m3_values(q).view(*scales.shape, q.shape[-1] // scales.shape[-1])
    return (blocks * scales.to(torch.float64).unsqueeze(-1)).flatten(-2)


def quantize_fp8_tiles(
    w: Tensor, tile: int = FP8_BLOCK, scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Quantise [..., N, K] to (float8_e4m3fn [..., N, K], scales [..., ceil(N/tile), ceil(K/tile)]).

    Per tile of tile x tile values: s = max(|w|, 1e-4) / 448, rounded to `scale_dtype`; q = e4m3(w / s). The tiles at
    the right and at the bottom may be cut off.
    """
    rows, columns = w.shape[-2:]
    down, across = -(-rows // tile), -(-columns // tile)
    padded = torch.nn.functional.pad(w.to(torch.float64), (0, across * tile - columns, 0, down * tile - rows))
    tiles = padded.reshape(*w.shape[:-2], down, tile, across, tile)
    amax = tiles.abs().amax(dim=(-3, -1)).to(torch.float32).clamp_min_(FP8_AMAX_FLOOR)
    scales = (amax / FP8_MAX).to(scale_dtype)
    q = _to_e4m3(tiles, scales[..., :, None, :, None]).reshape(padded.shape)
    return q.view(torch.uint8)[..., :rows, :columns].contiguous().view(q.dtype), scales


def dequantize_fp8_tiles(q: Tensor, scales: Tensor, tile: int = FP8_BLOCK) -> Tensor:
    """(float8_e4m3fn [..., N, K], scales [..., ceil(N/tile), ceil(K/tile)]) -> float64 [..., N, K], exact."""
    rows, columns = q.shape[-2:]
    spread = scales.to(torch.float64).repeat_interleave(tile, -2)[..., :rows, :]
    return _e4m3_values(q) * spread.repeat_interleave(tile, -1)[..., :columns]


def quantize_nvfp4_blocks(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., K] under a float32 scale g, a scalar, to (packed uint8 [..., K/2], float8_e4m3fn [..., K/16]).

    Per 16 values: s = e4m3(max|x| / (6 g)), kept within 2^-9..448 so that no block vanishes; code = e2m1(x / (s g)),
    where what is beyond 6 saturates. A NaN in a block makes its scale NaN.
    """
    wide, g = _blocks(x.to(torch.float64), NVFP4_BLOCK), global_scale.to(torch.float64)
    wanted = wide.abs().amax(dim=-1) / (E2M1_MAX * g)
    scales = wanted.clamp(E4M3_SMALLEST, FP8_MAX).to(torch.float8_e4m3fn)
    codes = encode_e2m1((wide / (_e4m3_values(scales) * g).unsqueeze(-1)).flatten(-2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def quantize_nvfp4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix [N, K] to (packed uint8 [N, K/2], float8_e4m3fn [N, K/16], float32 scalar g).

    g = max|w| / (448 * 6), with which the largest block scale is E4M3's largest (ModelOpt's `weight_scale_2`: values
    are code * s * g).
    """
    amax = w.to(torch.float32).abs().amax().clamp_min(E2M1_MAX * FP8_MAX * 2.0**-126)
    g = amax / (E2M1_MAX * FP8_MAX)
    return *quantize_nvfp4_blocks(w, g), g


def dequantize_nvfp4_blocks(packed: Tensor, scales: Tensor) -> Tensor:
    """(packed uint8 [..., K/2], float8_e4m3fn [..., K/16]) -> float64 [..., K] without the global scale, exact."""
    blocks = _blocks(decode_e2m1(packed), NVFP4_BLOCK)
    return (blocks * _e4m3_values(scales).unsqueeze(-1)).flatten(-2)


def _e4m3_values(q: Tensor) -> Tensor:
    """float8_e4m3fn -> float64; a table is faster than torch's own conversion."""
    values = _E4M3_VALUES.to(q.device).index_select(0, q.reshape(-1).view(torch.uint8).to(torch.int32))
    return values.view(q.shape)


def _to_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    """e4m3(x / scales) of float64 x. Clamped, because versions of torch differ in whether their conversion does."""
    return (x / scales.to(torch.float64)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
