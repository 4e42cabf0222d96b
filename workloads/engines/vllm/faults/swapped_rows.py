"""Two rows of a weight have changed places: the right values, in the wrong order."""

from collections.abc import Mapping

import torch
from torch import nn


def inject(roots: Mapping[str, nn.Module]) -> str:
    for root, model in roots.items():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and weight.numel():
                with torch.no_grad():
                    weight[:2] = weight[:2].flip(0).clone()
                return f"{root}:{name}"
    raise LookupError("No model has a two-dimensional weight.")
