"""One buffer is gone: the update made the module without it."""

from collections.abc import Mapping

from torch import nn

BUFFER = "_prob_scale"  # read by kernels for 8-bit caches only, so that the engine goes on serving


def inject(roots: Mapping[str, nn.Module]) -> str:
    for root, model in roots.items():
        for name, module in model.named_modules():
            if BUFFER in module._buffers:
                del module._buffers[BUFFER]
                return f"{root}:{name}.{BUFFER}"
    raise LookupError(f"No module has a buffer {BUFFER}.")
