"""The DSpark drafter of DeepSeek-V4: decoder layers whose window holds keys of the target's states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workloads.kernels.compressed_attention import sink_attention
from workloads.kernels.interleaved_rope import rotate
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import CompressedAttention, Tokens, WindowCache, leave
from workloads.models.deepseek_v4.compressor import rounded_key
from workloads.models.deepseek_v4.decoder import DecoderLayer, RotaryTables, V4Setting
from workloads.models.deepseek_v4.mhc import HyperHead
from workloads.models.deepseek_v4.model import DeepseekV4ForCausalLM
from workloads.models.dspark.drafter import BlockDrafter
from workloads.models.dspark.heads import ConfidenceHead, MarkovHead
from workloads.models.fp8_linear import replicated
from workloads.models.layers import RMSNorm


class BlockAttention(CompressedAttention):
    """Every token of a block sees a whole window before the block, and the whole block. The window holds keys of the
    target's tokens, of the block's none."""

    def write_context(
        self, context: torch.Tensor, batch: Batch, cache: WindowCache, table: torch.Tensor
    ) -> None:
        """context: BF16 [T, H] of the target's tokens. table: FP32 [positions, 2, rope/2]."""
        _, kv = self.fused_wqa_wkv.split(context)
        keys = rounded_key(rotate(self.kv_norm(kv), table[batch.positions]), self.rope)
        for segment in batch.segments:
            leave(segment, keys[segment.rows], cache.window)

    def attend(
        self, piece: Segment, batch: Batch, tokens: Tokens, cache: Any, table: torch.Tensor
    ) -> torch.Tensor:
        before = torch.arange(max(0, piece.start - self.window), piece.start, device=table.device)
        keys = torch.cat([cache.window[piece.slot, before % self.window], tokens.keys[piece.rows]])
        seen = torch.ones(piece.length, len(keys), dtype=torch.bool, device=table.device)
        return sink_attention(tokens.q[piece.rows], keys, seen, self.attn_sink.weight[: self.heads])


class DeepseekV4DSpark(BlockDrafter):
    """Its stages are the `mtp` layers of the target's checkpoint: the first has the context projection, the last what
    makes proposals of its output."""

    def __init__(self, setting: V4Setting, target: DeepseekV4ForCausalLM) -> None:
        config, tp = setting.config, setting.groups.tp
        super().__init__(config, tp, target.model.embed_tokens, target.lm_head)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.copies, self.min_confidence = config.hc_mult, config.dspark_min_confidence
        self.rotary = RotaryTables(config)
        width = len(config.dspark_target_layer_ids) * hidden
        self.main_proj = replicated(width, ("mtp.0.main_proj", hidden))
        self.main_norm = RMSNorm(hidden, eps, "mtp.0.main_norm.weight")
        stages = config.num_dspark_layers
        self.stages = nn.ModuleList(
            DecoderLayer(setting, config.num_layers + stage, f"mtp.{stage}.", attention=BlockAttention)
            for stage in range(stages)
        )
        last, rank = f"mtp.{stages - 1}.", config.dspark_markov_rank
        self.hc_head = HyperHead(config, f"{last}hc_head")
        self.norm = RMSNorm(hidden, eps, f"{last}norm.weight")
        self.markov_head = MarkovHead(config.vocab_size, rank, f"{last}markov_head.")
        self.confidence_head = ConfidenceHead(hidden, rank, f"{last}confidence_head.")

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        for stage in self._stages():
            stage.finalize_model_state()

    def make_caches(self, slots: int, positions: int) -> list[WindowCache]:
        self.rotary.require(positions + self.block_size)
        return [stage.make_cache(slots, positions) for stage in self._stages()]

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: BF16 [n, copies + taps, H], the copies of the residual stream first."""
        out: torch.Tensor = self.main_norm(self.main_proj(hidden[:, self.copies :].flatten(1)))
        return out

    def write_context(self, context: torch.Tensor, batch: Batch, caches: Sequence[WindowCache]) -> None:
        for stage, cache in zip(self._stages(), caches, strict=True):
            attention = stage.attn
            assert isinstance(attention, BlockAttention)
            attention.write_context(context, batch, cache, self.rotary.of(attention.ratio))

    def draft(self, embedded: torch.Tensor, block: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        x = embedded.unsqueeze(1).repeat(1, self.copies, 1)
        for stage, cache in zip(self.stages, caches, strict=True):
            x = stage(x, block, cache, self.rotary)
        out: torch.Tensor = self.hc_head(x)
        return out

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().logits(self.norm(hidden), rows, batch)

    def kept(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.confidence_head(hidden, embedded) >= self.min_confidence
        return kept

    def _stages(self) -> list[DecoderLayer]:
        return [stage for stage in self.stages if isinstance(stage, DecoderLayer)]
