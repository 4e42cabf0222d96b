"""Row-wise functions a block of rows at a time, so that their float64 temporaries stay in the cache."""

from collections.abc import Callable

import torch

ROWS = 256


def by_rows(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """function(*inputs), where row i of the result depends on row i of each input only.

    inputs: tensors [T, ...] of one length. Many rows are computed in blocks: temporaries of some megabytes are new
    memory for every operation, which costs several times what the operation does.
    """
    if len(inputs[0]) <= ROWS:
        return function(*inputs)
    pieces = zip(*(torch.split(rows, ROWS) for rows in inputs), strict=True)
    return torch.cat([function(*block) for block in pieces])
