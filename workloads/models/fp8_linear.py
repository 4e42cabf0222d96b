"""Linear layers in FP8 with UE8M0 scales, by how they are divided over ranks.

The scales are loaded as the checkpoint has them, one for a square block (of 128 x 128, or of 32 x 32), and consumed by
the layer's own post-processing into the form the FP8 kernel reads, one for each row, packed and MN-major.
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
    `STEM.scale` are its tensors. slot: rows and columns set aside for it, of which it takes the first; None: no more
    than it has."""

    stem: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    slot: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.slot or (self.rows[1], self.columns[1])


class Fp8Matrix(WeightModule):
    """Parts of matrices, one under another. `weight` float8_e4m3fn [N, K]; `weight_scale_inv` U8 [B, ceil(K/block)],
    where each matrix begins a block of its own. What the slots have beyond the parts is zero, in scales one.

    `post_process` consumes `weight_scale_inv` into `weight_scale` int32 [N, ceil(K/4/block)], MN-major.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor | None

    def __init__(self, pieces: Sequence[_Piece], block: int = BLOCK) -> None:
        super().__init__()
        self.block = block
        self.sizes = [piece.size[0] for piece in pieces]
        self.columns = pieces[0].size[1]
        self.weight_scale = None
        weights, scales, row, block_row = [], [], 0, 0
        for piece in pieces:
            region = piece.rows, piece.columns
            weights.append(_placement(f"{piece.stem}.weight", region, row, piece.size))
            blocks = _blocks(piece.rows, block), _blocks(piece.columns, block)
            slot = -(-piece.size[0] // block), -(-piece.size[1] // block)
            scales.append(_placement(f"{piece.stem}.scale", blocks, block_row, slot))
            row += piece.size[0]
            block_row += slot[0]
        padded = 0.0 if any(piece.slot for piece in pieces) else None
        self.add_weight("weight", Weight((row, self.columns), torch.float8_e4m3fn, tuple(weights), padded))
        shape = (block_row, -(-self.columns // block))
        self.add_weight("weight_scale_inv", Weight(shape, torch.uint8, tuple(scales), E8M0_ONE))

    def post_process(self) -> None:
        if self.live("weight_scale_inv") is not None:
            self.set_derived("weight_scale", pack_scales(self.served_scales(self.row_scales(self.block))))
            self.consume("weight_scale_inv")

    def served_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        """Scales U8 [N, ceil(K/block)] of the weight as loaded, for the weight as it serves. Overridden together with
        `loaded_scales` where post-processing changes the order of the weight."""
        return by_row

    def loaded_scales(self, by_row: torch.Tensor) -> torch.Tensor:
        """The inverse of `served_scales`."""
        return by_row

    def block_scales(self) -> torch.Tensor:
        """The scales as loaded, whether they have been packed yet or not: U8 [B, ceil(K/block)]."""
        raw = self.live("weight_scale_inv")
        if raw is not None:
            return raw
        by_row = self.loaded_scales(unpack_scales(self.packed_scales(), -(-self.columns // self.block)))
        return torch.cat([piece[:: self.block] for piece in torch.split(by_row, self.sizes)])

    def row_scales(self, group: int) -> torch.Tensor:
        """One scale for each row and `group` columns of the weight as loaded: U8 [N, ceil(K/group)]."""
        blocks = torch.split(self.block_scales(), [-(-rows // self.block) for rows in self.sizes])
        expanded = [
            expand_scales(scales, rows, self.columns, self.block, group)
            for scales, rows in zip(blocks, self.sizes, strict=True)
        ]
        return torch.cat(expanded)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, K] -> float64 [T, N], not rounded."""
        return fp8_linear_partial(x, self.weight, self.packed_scales(), self.block)

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

    multiples: to which the rows of each share and the columns are padded. Raises ValueError when a share begins inside
    a block of rows, whose scale two ranks would have to hold.
    """

    def __init__(
        self,
        group: Group,
        in_features: int,
        rows: Sequence[Rows],
        block: int = BLOCK,
        multiples: tuple[int, int] = (1, 1),
    ) -> None:
        shares = [group.share(r.count, f"Rows of {r.source}") if r.sharded else (0, r.count) for r in rows]
        columns = (0, in_features)
        slots = [_padded((length, in_features), multiples) for _, length in shares]
        pieces = zip(rows, shares, slots, strict=True)
        super().__init__([_Piece(r.source, share, columns, slot) for r, share, slot in pieces], block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features] -> BF16 [T, rows]."""
        return round_to_bf16(self.product(x))

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`forward`, divided into the outputs of the matrices."""
        return torch.split(self(x), self.sizes, dim=-1)


class Fp8GroupedLinear(Fp8Matrix):
    """A matrix whose rows fall into groups with inputs of their own; each rank has a share of the groups."""

    def __init__(
        self, group: Group, groups: int, in_features: int, rows: int, stem: str, block: int = BLOCK
    ) -> None:
        first, self.groups = group.share(groups, f"Groups of {stem}")
        super().__init__([_Piece(stem, (first * rows, self.groups * rows), (0, in_features))], block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, groups, in_features] -> BF16 [T, groups * rows]."""
        weights = self.weight.chunk(self.groups)
        scales = self.packed_scales().chunk(self.groups)
        parts = zip(x.unbind(1), weights, scales, strict=True)
        return round_to_bf16(torch.cat([fp8_linear_partial(*part, self.block) for part in parts], dim=-1))


class Fp8RowParallelLinear(Fp8Matrix):
    """A matrix divided along its inputs."""

    def __init__(
        self, group: Group, in_features: int, out_features: int, stem: str, block: int = BLOCK
    ) -> None:
        share = group.share(in_features, f"Columns of {stem}")
        super().__init__([_Piece(stem, (0, out_features), share)], block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, in_features / ranks] -> this rank's part of the sum, float64 [T, out_features]."""
        return self.product(x)


def replicated(
    in_features: int,
    *rows: tuple[str, int],
    block: int = BLOCK,
    multiples: tuple[int, int] = (1, 1),
) -> Fp8Linear:
    """Matrices (stem, rows), fused, that every rank holds whole. multiples: see `Fp8Linear`."""
    return Fp8Linear(ALONE, in_features, [Rows(stem, count) for stem, count in rows], block, multiples)


def _padded(size: tuple[int, int], multiples: tuple[int, int]) -> tuple[int, int] | None:
    rows, columns = (-(-n // multiple) * multiple for n, multiple in zip(size, multiples, strict=True))
    return None if (rows, columns) == size else (rows, columns)


def _placement(source: str, region: Region, start: int, slot: tuple[int, int]) -> Placement:
    (_, rows), (_, columns) = region
    return Placement(source, region, ((start, rows), (0, columns)), ((start, slot[0]), (0, slot[1])))


def _blocks(share: tuple[int, int], block: int) -> tuple[int, int]:
    """The blocks of some rows or columns. ValueError when they do not begin with a block."""
    start, length = share
    if start % block:
        raise ValueError(
            f"A rank's share begins at {start}, inside a block of {block} that shares one FP8 scale: choose a "
            "parallelism or dimensions whose shares are multiples of the block."
        )
    return start // block, -(-length // block)
