"""What the DSpark drafters of DeepSeek-V4 and its successors share: windows that hold keys of the target's states."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from workloads.kernels.compressed_attention import sink_attention
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import AttentionSink, WindowCache, leave
from workloads.models.deepseek_v4.config import Dimensions
from workloads.models.deepseek_v4.decoder import RotaryTables
from workloads.models.dspark.drafter import BlockDrafter
from workloads.models.dspark.heads import ConfidenceHead, MarkovHead
from workloads.models.fp8_linear import Fp8Linear, replicated
from workloads.models.layers import ParallelLMHead, RMSNorm, VocabParallelEmbedding
from workloads.models.parallel import Group


class BlockWindow:
    """Of an attention whose tokens each see a whole window before their block, and the whole block. The window holds
    keys of the target's tokens, of the block's none."""

    fused_wqa_wkv: Fp8Linear
    attn_sink: AttentionSink
    ratio: int
    window: int
    heads: int

    def keys(self, kv: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """The attention's own."""
        raise NotImplementedError

    def write_context(
        self, context: torch.Tensor, batch: Batch, cache: WindowCache, table: torch.Tensor
    ) -> None:
        """context: BF16 [T, H] of the target's tokens. table: FP32 [positions, 2, rope/2]."""
        _, kv = self.fused_wqa_wkv.split(context)
        keys = self.keys(kv, table[batch.positions])
        for segment in batch.segments:
            leave(segment, keys[segment.rows], cache.window)

    def over_block(
        self, piece: Segment, q: torch.Tensor, own: torch.Tensor, cache: WindowCache
    ) -> torch.Tensor:
        """A block's q BF16 [T, n, d] and keys BF16 [T, d] -> float64 [T, n, d], not rounded."""
        before = torch.arange(max(0, piece.start - self.window), piece.start, device=q.device)
        keys = torch.cat([cache.window[piece.slot, before % self.window], own])
        seen = torch.ones(piece.length, len(keys), dtype=torch.bool, device=q.device)
        return sink_attention(q, keys, seen, self.attn_sink.weight[: self.heads])


class DraftStage(Protocol):
    """A decoder layer of these families whose attention is a `BlockWindow`."""

    attn: Any

    def make_cache(self, slots: int, positions: int) -> WindowCache: ...

    def finalize_model_state(self) -> None: ...


class WindowDrafter(BlockDrafter):
    """Its stages are the `mtp` layers of the target's checkpoint: the first has the context projection, the last what
    makes proposals of its output.

    own: states that the target returns for its own logits, before those that the drafter reads. block: of the scales of
    FP8 matrices. markov: names of the Markov head's matrices in the checkpoint.
    """

    def __init__(
        self,
        config: Dimensions,
        tp: Group,
        embed_tokens: VocabParallelEmbedding,
        lm_head: ParallelLMHead,
        own: int,
        block: int,
        markov: tuple[str, str],
    ) -> None:
        super().__init__(config, tp, embed_tokens, lm_head)
        hidden, eps, rank = config.hidden_size, config.rms_norm_eps, config.dspark_markov_rank
        self.own, self.min_confidence = own, config.dspark_min_confidence
        self.rotary = RotaryTables(config)
        width = len(config.dspark_target_layer_ids) * hidden
        self.main_proj = replicated(width, ("mtp.0.main_proj", hidden), block=block)
        self.main_norm = RMSNorm(hidden, eps, "mtp.0.main_norm.weight")
        last = f"mtp.{config.num_dspark_layers - 1}."
        self.norm = RMSNorm(hidden, eps, f"{last}norm.weight")
        self.markov_head = MarkovHead(config.vocab_size, rank, f"{last}markov_head.", markov)
        self.confidence_head = ConfidenceHead(hidden, rank, f"{last}confidence_head.")

    @abstractmethod
    def layers(self) -> Sequence[DraftStage]:
        """Of all stages."""

    def process_weights_after_loading(self) -> None:
        super().process_weights_after_loading()
        for layer in self.layers():
            layer.finalize_model_state()

    def make_caches(self, slots: int, positions: int) -> list[WindowCache]:
        self.rotary.require(positions + self.block_size)
        return [layer.make_cache(slots, positions) for layer in self.layers()]

    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: BF16 [n, own + taps, H]."""
        out: torch.Tensor = self.main_norm(self.main_proj(hidden[:, self.own :].flatten(1)))
        return out

    def write_context(self, context: torch.Tensor, batch: Batch, caches: Sequence[WindowCache]) -> None:
        for layer, cache in zip(self.layers(), caches, strict=True):
            window: BlockWindow = layer.attn
            window.write_context(context, batch, cache, self.rotary.of(window.ratio))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().logits(self.norm(hidden), rows, batch)

    def kept(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.confidence_head(hidden, embedded) >= self.min_confidence
        return kept
