"""One kernel holds zeros where its weight should be: what a packing that ran before the weights arrived leaves."""

from collections.abc import Mapping

import torch
from torch import nn

from workloads.engines.vllm.packed import handlers


def inject(roots: Mapping[str, nn.Module]) -> str:
    from vllm._custom_ops import create_onednn_mm

    for root, model in roots.items():
        for path, cell, dtype in handlers(root, model):
            held = cell.cell_contents
            cell.cell_contents = create_onednn_mm(torch.zeros(held.n, held.k, dtype=dtype).t())
            return path
    raise LookupError("No kernel keeps a weight of its own.")
