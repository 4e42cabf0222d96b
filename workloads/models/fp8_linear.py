"""Linear layers in FP8 with UE8M0 scales, by how they are divided over ranks.

The scales are loaded as the checkpoint has them, one for a block of 128 x 128, and consumed by the layer's own
post-processing into the form the FP8 kernel reads, one for each row, packed and MN-major.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workloads.kernels.fp8_blocks import BLOCK, expand_scales, fp8_linear_partial, pack_scales, unpack_scales
from workloads.kernels.linear import round_to_bf16
from workloads.loading.weights import Placement, Region, Weight, WeightModule
from workloads.models.experts import E8M0_ONE
from workloads.models.layers import Rows
from workloads.models.parallel import ALONE, Group


@dataclass(frozen=True)
class _Piece:
    """A part of one checkpoint matrix: (first, length) of its rows and of its columns. stem: `STEM.weight` and
    `STEM.scale` are its tensors."""

    stem: str
    rows: tuple[int, int]
    columns: tuple[int, int]


class Fp8Matrix(WeightModule):
    """Parts of matrices, one under another. `weight` float8_e4m3fn [N, K]; `weight_scale_inv` U8 [B, ceil(K/128)],
    where each matrix begins a block of its own.

    `post_process` consumes `weight_scale_inv` into `weight_scale` int32 [N, ceil(K/512)], MN-major.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor | None

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        super().__init__()
        self.sizes = [piece.rows[1] for piece in pieces]
        self.columns = pieces[0].columns[1]
        self.weight_scale = None
        weights, scales, row, block = [], [], 0, 0
        for piece in pieces:
            region = piece.rows, piece.columns
            weights.append(_placement(f"{piece.stem}.weight", region, row))
            scales.append(_placement(f"{piece.stem}.scale", tuple(map(_blocks, region)), block))
            row += piece.rows[1]
            block += -(-piece.rows[1] // BLOCK)
        self.add_weight("weight", Weight((row, self.columns), torch.float8_e4m3fn, tuple(weights)))
        shape = (block, -(-self.columns // BLOCK))
        self.add_weight("weight_scale_inv", Weight(shape, torch.uint8, tuple(scales), E8M0_ONE))

    def post_process(self) -> None:
        if self.live("weight_scale_inv") is not None:
            self.set_derived("weight_scale", pack_scales(self.row_scales(BLOCK)))
            self.consume("weight_scale_inv")

    def block_scales(self) -> torch.Tensor:
        """The scales as loaded, whether they have been packed yet or not: U8 [B, ceil(K/128)]."""
        raw = self.live("weight_scale_inv")
        if raw is not None:
            return raw
        by_row = unpack_scales(self.packed_scales(), -(-self.columns // BLOCK))
        return torch.cat([piece[::BLOCK] for piece in torch.split(by_row, self.sizes)])

    def row_scales(self, group: int) -> torch.Tensor:
        """One scale for each row and `group` columns: U8 [N, ceil(K/group)]."""
        blocks = torch.split(self.block_scales(), [-(-rows // BLOCK) for rows in self.sizes])
        expanded = [
            expand_scales(scales, rows, self.columns, BLOCK, group)
            for scales, rows in zip(blocks, self.sizes, strict=True)
        ]
        return torch.cat(expanded)

    def packed_scales(self) -> torch.Tensor:
        """Raises RuntimeError before the first post-processing."""
        if self.weight_scale is None:
            raise RuntimeError(
                "The FP8 scales are not packed: the load path did not post-process the layer before its first "
                "forward."
            )
        return self.weight_scale

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        if self.weight_scale is None:
            return {}
        return {"weight_scale_inv": ("weight_scale", self.block_scales())}


class Fp8Linear(Fp8Matrix):
    """Several checkpoint matrices fused row under row; each rank has a share of the rows of each.

    Raises ValueError when a share begins inside a block of 128 rows, whose scale two ranks would have to hold.
    """

    def __init__(self, group: Group, in_features: int, rows: Sequence[Rows]) -> None:
        shares = [group.share(r.count, f"Rows of {r.source}") if r.sharded else (0, r.count) for r in rows]
        columns = (0, in_features)
        super().__init__([_Piece(r.source, share, columns) for r, share in zip(rows, shares, strict=True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features] -> BF16 [T, rows]."""
        return round_to_bf16(fp8_linear_partial(x, self.weight, self.packed_scales()))

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`forward`, divided into the outputs of the matrices."""
        return torch.split(self(x), self.sizes, dim=-1)


class Fp8GroupedLinear(Fp8Matrix):
    """A matrix whose rows fall into groups with inputs of their own; each rank has a share of the groups."""

    def __init__(self, group: Group, groups: int, in_features: int, rows: int, stem: str) -> None:
        first, self.groups = group.share(groups, f"Groups of {stem}")
        super().__init__([_Piece(stem, (first * rows, self.groups * rows), (0, in_features))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, groups, in_features] -> BF16 [T, groups * rows]."""
        weights = self.weight.chunk(self.groups)
        scales = self.packed_scales().chunk(self.groups)
        parts = zip(x.unbind(1), weights, scales, strict=True)
        return round_to_bf16(torch.cat([fp8_linear_partial(*part) for part in parts], dim=-1))


class Fp8RowParallelLinear(Fp8Matrix):
    """A matrix divided along its inputs."""

    def __init__(self, group: Group, in_features: int, out_features: int, stem: str) -> None:
        share = group.share(in_features, f"Columns of {stem}")
        super().__init__([_Piece(stem, (0, out_features), share)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features / ranks] -> this rank's part of the sum, float64 [T, out_features]."""
        return fp8_linear_partial(x, self.weight, self.packed_scales())


def replicated(in_features: int, *rows: tuple[str, int]) -> Fp8Linear:
    """Matrices (stem, rows), fused, that every rank holds whole."""
    return Fp8Linear(ALONE, in_features, [Rows(stem, count) for stem, count in rows])


def _placement(source: str, region: Region, start: int) -> Placement:
    (_, rows), (_, columns) = region
    target = ((start, rows), (0, columns))
    return Placement(source, region, target, target)


def _blocks(share: tuple[int, int]) -> tuple[int, int]:
    """The blocks of some rows or columns. ValueError when they do not begin with a block."""
    start, length = share
    if start % BLOCK:
        raise ValueError(
            f"A rank's share begins at {start}, inside a block of {BLOCK} that shares one FP8 scale: choose a "
            "parallelism or dimensions whose shares are multiples of the block."
        )
    return start // BLOCK, -(-length // BLOCK)
