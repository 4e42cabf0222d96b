"""Matrix products of BF16 tensors that round once, so that results do not depend on how the work is split."""

import torch

from workloads.kernels.blocks import by_rows

_WEIGHT_BYTES = 64 << 20  # float64 copy of the weight rows that are multiplied at once
_DROPPED = (1 << 42) - 1  # low significand bits of a float64 that one sticky bit stands for


def round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Nearest BF16 of a float64 tensor, ties to even, in a single rounding.

    `x.to(torch.bfloat16)` goes through float32 and rounds twice: 1 + 2^-8 + 2^-30 first becomes the tie
    1 + 2^-8 and then 1, although 1 + 2^-7 is nearer. Here the significand is cut to 10 stored bits whose last is
    set if anything was cut ("round to odd"); that is three bits more than BF16 keeps, which leaves the second
    rounding correct, and few enough to pass through float32 exactly wherever the result is not zero, BF16's
    subnormals included. NaN, infinities and signed zeros are kept; what exceeds the range becomes infinite.
    """
    bits = x.to(torch.float64).view(torch.int64)
    odd = bits & _DROPPED
    odd += _DROPPED  # carries into the sticky bit if any dropped bit is set
    odd |= bits
    odd &= ~_DROPPED
    return odd.view(torch.float64).to(torch.bfloat16)  # which torch does through float32


def linear_partial(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T,K] times weight [N,K] transposed, as float64 [T,N] without rounding to BF16.

    For row-parallel layers, whose ranks add their partial sums before the one rounding, and for outputs that stay
    wide (router logits). Rows of the weight are widened a bounded number at a time.

    Why float64: the product of two BF16 numbers has 16 significant bits and is exact, and so is any sum of K
    products whose magnitudes span less than 2^(37 - log2 K), in any order. Beyond that an order of summation moves
    the result by about K * 2^-53 of the sum of magnitudes, which changes a BF16 result only if it lies that near
    to a rounding boundary: about once in 2^44 elements. Sharding, batch shape and thread count therefore leave
    the bits alone, where float32 accumulation would not.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"The input has {x.shape[-1]} columns and the weight {weight.shape[1]}; both must have the K that "
            "is summed over, so pass the shard of the input that belongs to this shard of the weight."
        )
    wide = x.to(torch.float64)
    rows = max(1, _WEIGHT_BYTES // (8 * max(1, weight.shape[1])))
    if weight.shape[0] <= rows:
        return wide @ weight.to(torch.float64).t()
    starts = range(0, weight.shape[0], rows)
    return torch.cat([wide @ weight[n : n + rows].to(torch.float64).t() for n in starts], dim=-1)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x BF16 [T,K] times weight BF16 [N,K] transposed, as BF16 [T,N]: summed in float64, rounded once."""
    return by_rows(lambda block: round_to_bf16(linear_partial(block, weight)), x)
