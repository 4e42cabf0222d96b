"""Attention of one layer: this rank's heads over a window of keys and over compressed keys that layers share."""

from dataclasses import dataclass, field

import torch
from torch import nn

from workloads.kernels.compressed_attention import (
    best_entries,
    candidate_entries,
    sink_attention,
    through_nvfp4,
)
from workloads.kernels.fp8_blocks import through_fp8
from workloads.kernels.fused_attention_layout import deinterleave, interleave
from workloads.kernels.interleaved_rope import rotate
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import PREFILL_TOKENS, AttentionSink, WindowCache, windowed
from workloads.models.deepseek_v4.compressor import visible_groups
from workloads.models.deepseek_v41.compressor import Compressor, Indexer
from workloads.models.deepseek_v41.config import FP8_BLOCK, OUTPUT_CHUNK, QUERY_CHUNK, DeepseekV41Config
from workloads.models.deepseek_v41.fused import OutputProjection, QueryProjection
from workloads.models.fp8_linear import Fp8RowParallelLinear, replicated
from workloads.models.layers import RMSNorm
from workloads.models.parallel import Group


@dataclass
class SourceCache(WindowCache):
    """Of a layer that makes compressed keys. Per request slot: entries BF16 [slots, E, d], the keys; index_entries BF16
    [slots, E, dim], those of the indexers; open_tokens: see `Compressor.latents`."""

    entries: torch.Tensor
    index_entries: torch.Tensor
    open_tokens: torch.Tensor


@dataclass
class Shared:
    """What layers hand on to later ones within a pass. source: cache of the latest that made keys. chosen, candidates:
    bool [T, E] for each piece of the batch in turn, what the latest indexer and the filter before it chose."""

    source: SourceCache | None = None
    chosen: list[torch.Tensor] = field(default_factory=list)
    candidates: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Tokens:
    """What attention needs of the tokens of a batch. q: BF16 [T, n, d], rotated. keys: BF16 [T, d], as cached.
    projected: rows of `Compressor.project`. queries: of the indexer."""

    q: torch.Tensor
    keys: torch.Tensor
    projected: torch.Tensor | None
    queries: tuple[torch.Tensor, torch.Tensor] | None


class SharedKeyAttention(nn.Module):
    """Keys are values too; the output is rotated back before its projections. A layer that makes compressed keys has a
    compressor, one that chooses among them an indexer; others use what the latest such layer left in `Shared`."""

    def __init__(self, config: DeepseekV41Config, layer: int, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps, self.dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.window, self.ratio, self.topk = (
            config.sliding_window,
            config.compress_ratios[layer],
            config.index_topk,
        )
        self.blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size
        self.finds_candidates = layer == config.candidate_source_layer
        self.filtered = layer > config.candidate_source_layer
        _, self.heads = group.share(config.num_heads, "num_heads")
        ranks = config.o_groups * config.o_lora_rank
        self.heads_of_group = config.num_heads // config.o_groups
        self.fused_wqa_wkv = replicated(
            hidden,
            (f"{prefix}wq_a", config.q_lora_rank),
            (f"{prefix}wkv", self.dim),
            block=FP8_BLOCK,
        )
        self.q_norm = RMSNorm(config.q_lora_rank, eps, f"{prefix}q_norm.weight")
        self.kv_norm = RMSNorm(self.dim, eps, f"{prefix}kv_norm.weight")
        self.wq_b = QueryProjection(group, config.q_lora_rank, config.num_heads, self.dim, f"{prefix}wq_b")
        self.attn_sink = AttentionSink(config, group, f"{prefix}attn_sink")
        self.wo_a = OutputProjection(
            group,
            config.o_groups,
            self.heads_of_group * self.dim,
            config.o_lora_rank,
            self.heads_of_group,
            f"{prefix}wo_a",
        )
        self.wo_b = Fp8RowParallelLinear(group, ranks, hidden, f"{prefix}wo_b", FP8_BLOCK)
        makes_keys = layer in config.kv_source_layers
        self.compressor = Compressor(config, self.ratio, f"{prefix}compressor.") if makes_keys else None
        self.indexer = None
        if layer in config.index_source_layers:
            self.indexer = Indexer(config, makes_keys, f"{prefix}indexer.")

    def make_cache(self, slots: int, positions: int) -> WindowCache:
        window = torch.empty(slots, self.window, self.dim, dtype=torch.bfloat16)
        if self.compressor is None or self.indexer is None:
            return WindowCache(window)
        entries = positions // self.ratio
        return SourceCache(
            window,
            torch.empty(slots, entries, self.dim, dtype=torch.bfloat16),
            torch.empty(slots, entries, self.indexer.dim, dtype=torch.bfloat16),
            torch.empty(slots, self.ratio, self.compressor.width, dtype=torch.float32),
        )

    def forward(
        self, x: torch.Tensor, batch: Batch, cache: WindowCache, table: torch.Tensor, shared: Shared
    ) -> torch.Tensor:
        """x: BF16 [T, H], all tokens of the batch. table: FP32 [positions, 2, rope/2]. Returns this rank's part of the
        sum, float64 [T, H]."""
        cos_sin = table[batch.positions]
        tokens = self._project(x, cos_sin)
        if isinstance(cache, SourceCache):
            shared.source = cache
        if self.indexer is not None:
            shared.chosen = []
        if self.finds_candidates:
            shared.candidates = []
        out = tokens.q.new_empty(tokens.q.shape)
        pieces = [piece for segment in batch.segments for piece in segment.pieces(PREFILL_TOKENS)]
        for number, piece in enumerate(pieces):
            attended = self.attend(piece, number, batch, tokens, cache, table, shared)
            out[piece.rows] = rotate(attended, cos_sin[piece.rows], inverse=True)
        grouped = interleave(out.view(len(out), self.wo_a.groups, -1), 2, self.heads_of_group, OUTPUT_CHUNK)
        partial: torch.Tensor = self.wo_b(self.wo_a(grouped))
        return partial

    def attend(
        self,
        piece: Segment,
        number: int,
        batch: Batch,
        tokens: Tokens,
        cache: WindowCache,
        table: torch.Tensor,
        shared: Shared,
    ) -> torch.Tensor:
        """Consecutive tokens of one request, piece `number` of the batch: write their keys, and attend. float64
        [T, n, d], not rounded."""
        keys, seen = windowed(piece, tokens.keys[piece.rows], cache.window)
        if self.ratio:
            entries, chosen = self._compressed(piece, number, batch, tokens, table, shared)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, chosen], dim=1)
        return sink_attention(tokens.q[piece.rows], keys, seen, self.attn_sink.weight[: self.heads])

    def keys(self, kv: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """BF16 [T, d], not yet normalised -> as cached."""
        return through_fp8(rotate(self.kv_norm(kv), cos_sin), FP8_BLOCK).to(torch.bfloat16)

    def _project(self, x: torch.Tensor, cos_sin: torch.Tensor) -> Tokens:
        q_a, kv = self.fused_wqa_wkv.split(x)
        latent = self.q_norm(q_a)
        q = deinterleave(self.wq_b(latent), 1, self.heads, QUERY_CHUNK)
        return Tokens(
            rotate(q.view(len(x), self.heads, self.dim), cos_sin),
            self.keys(kv, cos_sin),
            None if self.compressor is None else self.compressor.project(x),
            None if self.indexer is None else self.indexer.queries(x, latent, cos_sin),
        )

    def _compressed(
        self,
        piece: Segment,
        number: int,
        batch: Batch,
        tokens: Tokens,
        table: torch.Tensor,
        shared: Shared,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The compressed keys BF16 [E, d] that there are after a piece, and bool [T, E], which of them each of its
        tokens attends to. number: of the piece in the batch."""
        source = shared.source
        assert source is not None, "a layer that compresses follows one that makes keys"
        if tokens.projected is not None:
            self._make_keys(piece, tokens.projected[piece.rows], table, source)
        entries = piece.end // self.ratio
        if self.indexer is not None and tokens.queries is not None:
            scores = self.indexer.scores(
                tokens.queries, piece.rows, source.index_entries[piece.slot, :entries]
            )
            chosen = visible_groups(piece, self.ratio, batch)
            if self.finds_candidates:
                shared.candidates.append(candidate_entries(scores, chosen, self.blocks, self.block_size))
            elif self.filtered:
                chosen = chosen & shared.candidates[number]
            shared.chosen.append(best_entries(scores, chosen, self.topk))
        return source.entries[piece.slot, :entries], shared.chosen[number]

    def _make_keys(
        self, piece: Segment, projected: torch.Tensor, table: torch.Tensor, cache: SourceCache
    ) -> None:
        """Of the groups that the piece completes, those of attention and of the indexers."""
        compressor, indexer = self.compressor, self.indexer
        assert compressor is not None, "a source makes keys"
        assert indexer is not None, "and chooses among them"
        latents = compressor.latents(piece, projected, cache.open_tokens)
        first, last = piece.start // self.ratio, piece.end // self.ratio
        cos_sin = table[torch.arange(first, last, device=table.device) * self.ratio]
        cache.entries[piece.slot, first:last] = through_nvfp4(rotate(latents, cos_sin))
        cache.index_entries[piece.slot, first:last] = indexer.keys(latents, cos_sin)
