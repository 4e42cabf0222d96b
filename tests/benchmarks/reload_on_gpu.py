"""An in-place reload of one GPU from pinned host memory: Kimi-K3 at its real widths, of fewer layers and experts.

Floor: the bytes over the rate of one large copy from pinned memory of the same run. Ours: `direct`, into storage that
serves, experts packed for our MegaMoE. Peer: `layerwise`, which loads into fresh memory layer by layer and copies over.
Beside them an audit of what the update left: walk, classes, digests, records on disk, without a checkpoint. Values
are random bytes with scales that are no NaN: nothing is computed with them.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collectors.tensors import TensorAuditor
from tests.benchmarks.device import report, require_gpu, wall_seconds
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Part, Rule
from workloads.loading.checkpoint import TORCH_DTYPES
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import Region, narrow
from workloads.models.architectures import tensor_table
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism

CONFIG = KimiK3Config(
    num_layers=9,
    full_attention_layers=[3, 7],
    hidden_size=7168,
    vocab_size=16_384,
    num_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    kda_gate_rank=128,
    kda_a_log_size=96,
    attn_res_block_size=12,
    dense_intermediate_size=33_792,
    moe_latent_size=3584,
    num_experts=56,
    num_experts_per_token=16,
    moe_intermediate_size=3072,
    shared_intermediate_size=6144,
    num_mtp_layers=0,
)
GPU = Backend(device="cuda", arch="sm90", communication="nccl", moe_fallback=False, max_requests=1)


class Pinned:
    """A checkpoint that lies in host memory, pinned where there is a GPU to copy it to."""

    def __init__(self, config: KimiK3Config, pinned: bool) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for spec in every_tensor(tensor_table("kimi_k3").sections(config)):
            octets = torch.empty(spec.nbytes, dtype=torch.uint8, pin_memory=pinned)
            low, high = (110, 122) if spec.name.endswith("weight_scale") else (0, 64)  # no exponent of a NaN
            octets.random_(low, high)
            self._tensors[spec.name] = octets.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def slice(self, name: str, region: Region) -> torch.Tensor:
        return narrow(self._tensors[name], region)


class Engine:
    """An engine whose weights come from `Pinned`, as the auditor sees it: without a checkpoint to compare with."""

    def __init__(self, config: KimiK3Config, backend: Backend, checkpoint: Pinned) -> None:
        spec = GangSpec(
            name="candidate",
            output="",
            model=Model("kimi_k3_reduced", "kimi_k3", kimi_k3=config),
            parallelism=Parallelism(),
            backend=backend,
            checkpoints={"old": Checkpoint()},
            checkpoint_dirs={"old": ""},
            steps=[],
        )
        self._engine, self._checkpoint = NativeEngine(spec, 0), checkpoint
        self.load("safetensors")

    def load(self, via: str) -> None:
        self._engine.lifecycle.start_load(via)
        for loader in self._engine.loaders.values():
            ways = {"safetensors": loader.cold, "direct": loader.direct, "layerwise": loader.layerwise}
            with torch.no_grad():
                ways[via](self._checkpoint)

    def roots(self) -> dict[str, nn.Module]:
        return dict(self._engine.roots())

    def parts(self, root: str) -> list[Part]:
        return []

    def rules(self) -> list[Rule]:
        return list(self._engine.rules())

    def runtime_tensors(self) -> dict[str, torch.Tensor]:
        return {}


class NoCheckpoint:
    """There are no parts, so nothing is read."""


def host_to_device() -> float:
    """Bytes a second of one large copy from pinned memory."""
    host = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.nbytes / wall_seconds(lambda: device.copy_(host, non_blocking=True))


def main() -> int:
    require_gpu()
    rate = host_to_device()
    checkpoint = Pinned(CONFIG, pinned=True)
    engine = Engine(CONFIG, GPU, checkpoint)
    auditor: Any = TensorAuditor(engine)
    with tempfile.TemporaryDirectory() as folder:

        def audit() -> None:
            auditor.observe(Path(folder), 0, "again", NoCheckpoint())

        seconds = {
            "direct": wall_seconds(lambda: engine.load("direct"), 3),
            "layerwise": wall_seconds(lambda: engine.load("layerwise"), 3),
            "audit": wall_seconds(audit, 3),
        }
    nbytes = checkpoint.nbytes
    floor = nbytes / rate
    print(f"{nbytes / 1e9:.1f} GB, host to device {rate / 1e9:.1f} GB/s: floor {1e3 * floor:.0f} ms")
    for name, value in seconds.items():
        print(
            f"  {name:10} {1e3 * value:9.1f} ms {nbytes / value / 1e9:8.2f} GB/s {value / floor:8.2f} x the floor"
        )
    bars = {
        "in place, of the rate from host to device": (floor / seconds["direct"], 0.85),
        "audit, of an update in place": (seconds["audit"] / seconds["direct"], -0.03),
    }
    return report("reload_on_gpu", bars, {"bytes": nbytes, "GB/s": rate / 1e9, "seconds": seconds})
