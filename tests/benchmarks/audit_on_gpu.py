"""A whole audit of one rank's tensors on a GPU: a Kimi-K3 of 38 layers with 56 experts each, 40 GB in 570 tensors.

Walk, classes, digests of 8,500 experts' slices, NaN and constants, records on disk; no comparison with a checkpoint.
Beside it the shortest update there can be, the same bytes from pinned host memory: no figure is held against it, since
an update also reads, places and transforms.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectors.tensors import TensorAuditor
from tests.benchmarks.device import kernels, report, require_gpu, wall_seconds
from workloads.engines.protocol import Rule
from workloads.kernels.mega_moe_layout import empty_scale

LAYERS, EXPERTS, LATENT, HIDDEN, INTERMEDIATE = 38, 56, 3584, 7168, 3072
PACKED = {"w13": (EXPERTS, 2 * INTERMEDIATE, LATENT // 2), "w2": (EXPERTS, LATENT, INTERMEDIATE // 2)}
SCALES = {"w13_scale": (2 * INTERMEDIATE, LATENT), "w2_scale": (LATENT, INTERMEDIATE)}
BF16: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("input_norm", "mlp_norm", "attention_res_norm", "mlp_res_norm"), (HIDDEN,)),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (24 * 128, 4)),
    "in_proj": (12_448, HIDDEN // 4),
    "o_proj": (HIDDEN, 24 * 128 // 4),
    "down_proj": (LATENT, HIDDEN // 4),
    "up_proj": (HIDDEN, LATENT // 4),
}


class Engine:
    """Random weights, experts' scales as MegaMoE lays them out."""

    def __init__(self) -> None:
        device = torch.device("cuda")
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.model.layers:
            for name, shape in PACKED.items():
                layer.register_buffer(name, torch.randint(0, 256, shape, dtype=torch.uint8, device=device))
            for name, (rows, columns) in SCALES.items():
                layer.register_buffer(name, empty_scale(EXPERTS, rows, columns, device).random_())
            for name, shape in BF16.items():
                layer.register_buffer(name, torch.randn(shape, dtype=torch.bfloat16, device=device))

    def roots(self) -> dict[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> list[Any]:
        return []

    def rules(self) -> list[Rule]:
        return [Rule("target:layers.*", "weight", "all that there is")]

    def runtime_tensors(self) -> dict[str, torch.Tensor]:
        return {}


class NoCheckpoint:
    """There are no parts, so nothing is read."""


def main() -> int:
    require_gpu()
    engine = Engine()
    auditor = TensorAuditor(engine)
    nbytes = sum(buffer.nbytes for buffer in engine.model.buffers())
    with tempfile.TemporaryDirectory() as folder:

        def audit() -> None:
            auditor.observe(Path(folder), 0, "again", NoCheckpoint())

        audit()
        seconds = {"audit": wall_seconds(audit), "its kernels": kernels(audit, "row_sums_kernel", 3)[0]}
        launches = kernels(audit, "row_sums_kernel", 1)[1]
    host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    rate = host.nbytes / wall_seconds(lambda: device.copy_(host, non_blocking=True))
    seconds["shortest update"] = nbytes / rate
    print(f"{nbytes / 1e9:.1f} GB in {len(list(engine.model.buffers()))} tensors, {launches} launches")
    for name, value in seconds.items():
        print(f"  {name:16} {1e3 * value:9.1f} ms {nbytes / value / 1e12:8.3f} TB/s")
    figures = {"bytes": nbytes, "seconds": seconds, "launches": launches, "host to device, GB/s": rate / 1e9}
    return report("audit_on_gpu", {}, figures)
