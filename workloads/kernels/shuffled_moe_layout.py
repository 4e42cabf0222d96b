"""The layout in which a fused MXFP4 MoE kernel reads gpt-oss's experts, of the kind that TensorRT-LLM's kernels have.

It permutes bytes over the padded sizes and computes nothing, so that it is done in place and undone for an audit:

- of the first matrix, whose loaded rows are (gate 0, up 0, gate 1, up 1, ...), all up rows come first, then all gate
  rows;
- rows are then shuffled in tiles of 128, so that a thread's registers hold neighbours: row i of a tile lands at
  (i % 4) * 32 + i // 4;
- scales are stored in tiles of 128 rows x 4 columns of their own: row r and column c of a tile are byte
  (r % 32) * 16 + (r // 32) * 4 + c of it. Tiles follow one another along the columns, then along the rows.

So padding does not stay at the end: it stands between real rows. The order of bytes is this project's own, not that of
a released kernel.
"""

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 4  # of scales; a column of scales is 32 columns of weights


def row_order(rows: int, pairs: bool, device: torch.device) -> Tensor:
    """int64 [rows]: which loaded row stands in each row of the layout. pairs: gate and up rows alternate."""
    place = torch.arange(rows, device=device).view(-1, TILE_ROWS // 4, 4).transpose(1, 2).flatten()
    if not pairs:
        return place
    half = rows // 2
    return torch.where(place < half, 2 * place + 1, 2 * (place - half))


def shuffle_rows(x: Tensor, pairs: bool) -> Tensor:
    """Loaded rows [E, N, ...] -> the kernel's order, a new tensor. N is a multiple of 128."""
    return x.index_select(1, row_order(x.shape[1], pairs, x.device))


def unshuffle_rows(x: Tensor, pairs: bool) -> Tensor:
    """The inverse of `shuffle_rows`."""
    return x.index_select(1, torch.argsort(row_order(x.shape[1], pairs, x.device)))


def shuffle_scale(scale: Tensor, pairs: bool) -> Tensor:
    """Loaded scales uint8 [E, N, K/32] -> rows shuffled, then tiled; same shape, a new tensor. N is a multiple of 128,
    K of 128."""
    experts, rows, columns = scale.shape
    tiles = shuffle_rows(scale, pairs).view(
        experts, rows // TILE_ROWS, TILE_ROWS // 32, 32, columns // TILE_COLUMNS, TILE_COLUMNS
    )
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(scale.shape)


def unshuffle_scale(scale: Tensor, pairs: bool) -> Tensor:
    """The inverse of `shuffle_scale`."""
    experts, rows, columns = scale.shape
    tiles = scale.reshape(
        experts, rows // TILE_ROWS, columns // TILE_COLUMNS, 32, TILE_ROWS // 32, TILE_COLUMNS
    )
    return unshuffle_rows(tiles.permute(0, 1, 4, 3, 2, 5).reshape(scale.shape), pairs)
