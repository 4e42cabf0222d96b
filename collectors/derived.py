"""Builds derived tensors again from the weights that stand beside them, to hold what serves against it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from collectors.fingerprint import fingerprint, why_unreadable
from workloads.loading.weights import WeightModule

Record = dict[str, Any]


def derivations(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(audit path, tensor that serves, what follows from the weights) of every derived tensor whose module says how it
    follows. One module's are in memory at a time."""
    for root, model in roots.items():
        for path, module in model.named_modules():
            if not isinstance(module, WeightModule):
                continue
            for name, value in module.derivations().items():
                live = getattr(module, name, None)
                if live is not None and not why_unreadable(live):
                    yield f"{root}:{path}.{name}".replace(":.", ":"), live, value


def follows(roots: Mapping[str, nn.Module]) -> dict[str, Record]:
    """By audit path: `follows`, the fingerprint that a derived tensor must have; and where it has not, `deviation`, the
    largest absolute difference (None where it is not finite, or shape or dtype differ)."""
    found: dict[str, Record] = {}
    with torch.no_grad():
        for path, live, value in derivations(roots):
            found[path] = {"follows": fingerprint(value)}
            if fingerprint(live) != found[path]["follows"]:
                found[path]["deviation"] = _deviation(live, value)
    return found


def _deviation(live: Tensor, value: Tensor) -> float | None:
    if (live.shape, live.dtype) != (value.shape, value.dtype) or not live.dtype.is_floating_point:
        return None
    largest = (live.to(torch.float64) - value.to(torch.float64)).abs().max()
    return float(largest) if bool(largest.isfinite()) else None
