"""The DSpark drafter of Kimi-K3: dense MLA layers with rotation, over a context projected from the target's layers."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from workloads.kernels.activations import SwigluParameters
from workloads.kernels.interleaved_rope import Yarn, cos_sin_rows, deepseek_frequencies, rotate, yarn_gain
from workloads.kernels.linear import linear
from workloads.kernels.mla import mla_absorbed
from workloads.kernels.norm import rms_norm
from workloads.models.batch import Batch
from workloads.models.dspark.drafter import BlockDrafter
from workloads.models.dspark.heads import MarkovHead
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.decoder import KimiSetting
from workloads.models.kimi_k3.mla import KvBProj, MlaCache
from workloads.models.kimi_k3.model import KimiK3ForCausalLM
from workloads.models.layers import (
    ColumnParallelLinear,
    GatedMLP,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    Rows,
    over_all_tokens,
)
from workloads.models.parallel import Group


class Rotation(nn.Module):
    """`inv_freq` float64 [rope/2]: a buffer that no checkpoint holds. gain: of the scores, which goes with YaRN."""

    inv_freq: torch.Tensor

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        yarn = Yarn(
            config.dspark_rope_factor,
            config.dspark_rope_original_positions,
            config.dspark_rope_beta_fast,
            config.dspark_rope_beta_slow,
        )
        frequencies = deepseek_frequencies(config.qk_rope_head_dim, config.dspark_rope_theta, yarn)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.gain = yarn_gain(config.dspark_rope_factor, config.dspark_rope_mscale_all_dim)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> FP32 [T, 2, rope/2] for `rotate`."""
        return cos_sin_rows(positions, self.inv_freq)


class DraftAttention(nn.Module):
    """Absorbed MLA of one layer without an output gate: every token of a block sees the context and the whole block."""

    def __init__(self, config: KimiK3Config, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps, heads = config.hidden_size, config.rms_norm_eps, config.dspark_num_heads
        self.latent, self.rope = config.kv_lora_rank, config.qk_rope_head_dim
        _, self.heads = group.share(heads, "dspark_num_heads")
        self.fused_qkv_a_proj = ReplicatedLinear(
            hidden,
            [
                Rows(f"{prefix}q_a_proj.weight", config.q_lora_rank),
                Rows(f"{prefix}kv_a_proj_with_mqa.weight", self.latent + self.rope),
            ],
        )
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, f"{prefix}q_a_layernorm.weight")
        self.kv_a_layernorm = RMSNorm(self.latent, eps, f"{prefix}kv_a_layernorm.weight")
        q_b = Rows(f"{prefix}q_b_proj.weight", heads * (config.qk_nope_head_dim + self.rope))
        self.q_b_proj = ColumnParallelLinear(group, config.q_lora_rank, [q_b])
        self.kv_b_proj = KvBProj(config, heads, group, f"{prefix}kv_b_proj.weight")
        self.o_proj = RowParallelLinear(group, heads * config.v_head_dim, hidden, f"{prefix}o_proj.weight")

    def make_cache(self, slots: int, positions: int) -> MlaCache:
        return MlaCache(
            torch.empty(slots, positions, self.latent, dtype=torch.bfloat16),
            torch.empty(slots, positions, self.rope, dtype=torch.bfloat16),
        )

    def kv_rows(self) -> torch.Tensor:
        """What projects to the latents and their shared key channels, [latent + rope, hidden]."""
        q_a, *_ = self.fused_qkv_a_proj.sizes
        return self.fused_qkv_a_proj.matrix()[q_a:]

    def write(
        self, c: torch.Tensor, k_pe: torch.Tensor, batch: Batch, cache: MlaCache, cos_sin: torch.Tensor
    ) -> None:
        """Normalised latents BF16 [T, latent] and key channels BF16 [T, rope] of the batch's tokens, not yet turned."""
        turned = rotate(k_pe, cos_sin)
        for segment in batch.segments:
            cache.c[segment.slot, segment.start : segment.end] = c[segment.rows]
            cache.k_pe[segment.slot, segment.start : segment.end] = turned[segment.rows]

    def forward(self, x: torch.Tensor, block: Batch, cache: MlaCache, rotation: Rotation) -> torch.Tensor:
        """x: BF16 [T, hidden], all tokens of the blocks -> this rank's part of the sum, float64 [T, hidden]."""
        cos_sin = rotation(block.positions)
        q_a, kv, _ = self.fused_qkv_a_proj.split(x)
        q = rotate(self.q_b_proj(self.q_a_layernorm(q_a)).view(len(x), self.heads, -1), cos_sin)
        self.write(self.kv_a_layernorm(kv[:, : self.latent]), kv[:, self.latent :], block, cache, cos_sin)
        slots, ends = zip(*((s.slot, s.end) for s in block.segments for _ in range(s.length)), strict=True)
        latents, keys = [cache.c[slot] for slot in slots], [cache.k_pe[slot] for slot in slots]
        out = mla_absorbed(q, latents, keys, *self.kv_b_proj.absorbed(), ends, rotation.gain)
        partial: torch.Tensor = self.o_proj(out.flatten(1))
        return partial


class DraftLayer(nn.Module):
    """Attention and a dense MLP with ordinary residual connections."""

    def __init__(self, config: KimiK3Config, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps, self.tp = config.hidden_size, config.rms_norm_eps, group
        self.input_layernorm = RMSNorm(hidden, eps, f"{prefix}input_layernorm.weight")
        self.self_attn = DraftAttention(config, group, f"{prefix}self_attn.")
        self.post_attention_layernorm = RMSNorm(hidden, eps, f"{prefix}post_attention_layernorm.weight")
        self.mlp = GatedMLP(hidden, config.dspark_intermediate_size, SwigluParameters(), f"{prefix}mlp.")

    def forward(self, x: torch.Tensor, block: Batch, cache: MlaCache, rotation: Rotation) -> torch.Tensor:
        """BF16 [n, hidden] -> BF16 [n, hidden]. Collective over the TP group."""
        x = x + over_all_tokens(
            self.tp,
            block,
            self.input_layernorm(x),
            lambda tokens: self.self_attn(tokens, block, cache, rotation),
        )
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class ContextProjection(ReplicatedLinear):
    """From the tapped layers' states, side by side, to the drafter's width.

    Derived: `context_kv_proj` BF16 [layers * (latent + rope), hidden], the latent projections of all layers under one
    another, and `_context_kv_norm_weights` BF16 [layers, latent], the norms of their latents. They follow from other
    modules' weights, so that nothing but the hook of the root can build them, when all weights are in place.

    sources: the attention of every layer, in order. They are modules of the root, not of this one.
    """

    def __init__(self, config: KimiK3Config, sources: Sequence[DraftAttention]) -> None:
        taps = len(config.dspark_target_layer_ids)
        super().__init__(taps * config.hidden_size, [Rows("context_proj.weight", config.hidden_size)])
        self.sources = tuple(sources)
        self.context_kv_proj: torch.Tensor | None = None
        self._context_kv_norm_weights: torch.Tensor | None = None

    def derivations(self) -> Mapping[str, torch.Tensor]:
        norms = [source.kv_a_layernorm.weight.detach() for source in self.sources]
        return {
            "context_kv_proj": torch.cat([source.kv_rows() for source in self.sources]).detach(),
            "_context_kv_norm_weights": torch.stack(norms),
        }

    def post_process(self) -> None:
        """Left to the hook."""

    def kv(self, context: torch.Tensor, eps: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """BF16 [T, hidden] -> of each layer, normalised latents BF16 [T, latent] and key channels BF16 [T, rope].

        Raises RuntimeError when the hook has not run.
        """
        if self.context_kv_proj is None or self._context_kv_norm_weights is None:
            raise RuntimeError(
                "context_kv_proj does not exist: the load path did not call the drafter's "
                "process_weights_after_loading."
            )
        layers, latent = self._context_kv_norm_weights.shape
        joined = linear(context, self.context_kv_proj).chunk(layers, dim=-1)
        return [
            (rms_norm(kv[:, :latent], norm, eps), kv[:, latent:])
            for kv, norm in zip(joined, self._context_kv_norm_weights, strict=True)
        ]


class KimiK3DSpark(BlockDrafter):
    """Its checkpoint is published apart from the target's, whose names it does not use."""

    def __init__(self, setting: KimiSetting, target: KimiK3ForCausalLM) -> None:
        config, tp = setting.config, setting.groups.tp
        super().__init__(config, tp, target.model.embed_tokens, target.lm_head)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.rotation = Rotation(config)
        layers = [DraftLayer(config, tp, f"layers.{layer}.") for layer in range(config.num_dspark_layers)]
        self.context_proj = ContextProjection(config, [layer.self_attn for layer in layers])
        self.context_norm = RMSNorm(hidden, eps, "context_norm.weight")
        self.layers = nn.ModuleList(layers)
        self.final_norm = RMSNorm(hidden, eps, "final_norm.weight")
        self.markov_head = MarkovHead(config.vocab_size, config.dspark_markov_rank, "markov_head.")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        self.context_proj.derive()

    def make_caches(self, slots: int, positions: int) -> list[MlaCache]:
        """With room for a block after the last position."""
        return [layer.self_attn.make_cache(slots, positions + self.block_size) for layer in self._layers()]

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: BF16 [n, 1 + taps, H], the final state first."""
        out: torch.Tensor = self.context_norm(self.context_proj(hidden[:, 1:].flatten(1)))
        return out

    def write_context(self, context: torch.Tensor, batch: Batch, caches: Sequence[MlaCache]) -> None:
        cos_sin = self.rotation(batch.positions)
        per_layer = self.context_proj.kv(context, self.eps)
        for layer, (c, k_pe), cache in zip(self._layers(), per_layer, caches, strict=True):
            layer.self_attn.write(c, k_pe, batch, cache, cos_sin)

    def draft(self, embedded: torch.Tensor, block: Batch, caches: Sequence[MlaCache]) -> torch.Tensor:
        x = embedded
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, block, cache, self.rotation)
        out: torch.Tensor = self.final_norm(x)
        return out

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
