"""One weight holds other values than those that were loaded."""

from collections.abc import Mapping

import torch
from torch import nn


def inject(roots: Mapping[str, nn.Module]) -> str:
    for root, model in roots.items():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and weight.numel():
                with torch.no_grad():
                    weight.mul_(1.5)
                return f"{root}:{name}"
    raise LookupError("No model has a one-dimensional weight.")
