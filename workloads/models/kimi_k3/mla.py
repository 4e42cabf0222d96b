"""Multi-head latent attention of one layer: this rank's heads, prefill expanded, decode absorbed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from workloads.kernels.mla import mla_absorbed, mla_expanded, mla_output, split_kv_b
from workloads.models.batch import Batch
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.layers import ColumnParallelLinear, ReplicatedLinear, RMSNorm, RowParallelLinear, Rows
from workloads.models.parallel import Group


@dataclass
class MlaCache:
    """Per request slot and position: normalised latents BF16 [slots, positions, L] and the shared
    unrotated key channels BF16 [slots, positions, R]."""

    c: torch.Tensor
    k_pe: torch.Tensor


class KvBProj(ColumnParallelLinear):
    """Expansion of the latents. Derived, as plain attributes: `W_UK_T` BF16 [heads, nope, L] and `W_UV`
    BF16 [heads, L, v], which absorbed decode reads."""

    def __init__(self, config: KimiK3Config, heads: int, group: Group, source: str) -> None:
        """heads: of the layer, on all ranks."""
        rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        super().__init__(group, config.kv_lora_rank, [Rows(source, rows)])
        self.heads, self.nope = heads // group.size, config.qk_nope_head_dim
        self.W_UK_T: torch.Tensor | None = None
        self.W_UV: torch.Tensor | None = None

    def post_process(self) -> None:
        """Never in FP8, as other linear layers may be: prefill reads `weight`."""
        self.derive()

    def derivations(self) -> Mapping[str, torch.Tensor]:
        up_keys, up_values = split_kv_b(self.weight, self.heads, self.nope)
        return {"W_UK_T": up_keys, "W_UV": up_values}

    def absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(W_UK_T, W_UV). Raises RuntimeError before the first load."""
        if self.W_UK_T is None or self.W_UV is None:
            raise RuntimeError(
                "W_UK_T and W_UV do not exist: load weights, which post-processes them, before decode."
            )
        return self.W_UK_T, self.W_UV


class MultiHeadLatentAttention(nn.Module):
    """Without rotation: the "rope" channels of queries and keys carry no position."""

    def __init__(self, config: KimiK3Config, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.latent, self.rope = config.kv_lora_rank, config.qk_rope_head_dim
        _, self.heads = group.share(config.num_heads, "num_heads")
        query, values = config.qk_nope_head_dim + self.rope, config.num_heads * config.v_head_dim
        self.fused_qkv_a_proj = ReplicatedLinear(
            hidden,
            [
                Rows(f"{prefix}q_a_proj.weight", config.q_lora_rank),
                Rows(f"{prefix}kv_a_proj_with_mqa.weight", self.latent + self.rope),
            ],
        )
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, f"{prefix}q_a_layernorm.weight")
        self.kv_a_layernorm = RMSNorm(self.latent, eps, f"{prefix}kv_a_layernorm.weight")
        q_b = Rows(f"{prefix}q_b_proj.weight", config.num_heads * query)
        self.q_b_proj = ColumnParallelLinear(group, config.q_lora_rank, [q_b])
        self.kv_b_proj = KvBProj(config, config.num_heads, group, f"{prefix}kv_b_proj.weight")
        self.g_proj = ColumnParallelLinear(group, hidden, [Rows(f"{prefix}g_proj.weight", values)])
        self.o_proj = RowParallelLinear(group, values, hidden, f"{prefix}o_proj.weight")

    def make_cache(self, slots: int, positions: int) -> MlaCache:
        return MlaCache(
            torch.empty(slots, positions, self.latent, dtype=torch.bfloat16),
            torch.empty(slots, positions, self.rope, dtype=torch.bfloat16),
        )

    def forward(self, x: torch.Tensor, batch: Batch, cache: MlaCache) -> torch.Tensor:
        """x: BF16 [T, hidden], all tokens of the batch -> this rank's part of the sum, float64 [T, hidden]."""
        q_a, kv, _ = self.fused_qkv_a_proj.split(x)
        q = self._heads(self.q_b_proj(self.q_a_layernorm(q_a)))
        c, k_pe = self.kv_a_layernorm(kv[:, : self.latent]), kv[:, self.latent :]
        gate = self._heads(self.g_proj(x))
        for segment in batch.segments:
            cache.c[segment.slot, segment.start : segment.end] = c[segment.rows]
            cache.k_pe[segment.slot, segment.start : segment.end] = k_pe[segment.rows]
        out = torch.empty_like(gate)
        for segment in batch.prefills:
            latents, keys = cache.c[segment.slot], cache.k_pe[segment.slot]
            out[segment.rows] = mla_expanded(
                q[segment.rows], latents, keys, self.kv_b_proj.weight, segment.start
            )
        if batch.decodes:
            latents_of, keys_of, lengths = zip(
                *((cache.c[s.slot], cache.k_pe[s.slot], s.end) for s in batch.decodes), strict=True
            )
            rows = batch.decode_rows
            out[rows] = mla_absorbed(q[rows], latents_of, keys_of, *self.kv_b_proj.absorbed(), lengths)
        partial: torch.Tensor = self.o_proj(mla_output(out, gate).flatten(1))
        return partial

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads*d] -> [T, heads, d]."""
        return x.view(x.shape[0], self.heads, x.shape[1] // self.heads)
