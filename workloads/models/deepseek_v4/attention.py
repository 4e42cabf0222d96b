"""Attention of one layer: this rank's heads over a window of keys and the groups that the layer compresses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workloads.kernels.compressed_attention import best_entries, sink_attention
from workloads.kernels.interleaved_rope import rotate
from workloads.kernels.norm import rms_scale
from workloads.loading.weights import Placement, Weight, WeightModule
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.compressor import (
    Compressor,
    GroupState,
    Indexer,
    rounded_key,
    visible_groups,
)
from workloads.models.deepseek_v4.config import DeepseekV4Config, Dimensions
from workloads.models.fp8_linear import Fp8GroupedLinear, Fp8Linear, Fp8RowParallelLinear, replicated
from workloads.models.layers import RMSNorm, Rows
from workloads.models.parallel import Group

PREFILL_TOKENS = 256  # of one request that attend together


@dataclass
class WindowCache:
    """Per request slot the keys of the last tokens, BF16 [slots, W, d]: token p at p mod W."""

    window: torch.Tensor


@dataclass
class CompressedCache(WindowCache):
    """With the groups of the layer, see `GroupState`."""

    entries: torch.Tensor
    group_kv: torch.Tensor
    group_scores: torch.Tensor

    @property
    def groups(self) -> GroupState:
        return GroupState(self.entries, self.group_kv, self.group_scores)


@dataclass
class IndexedCache(CompressedCache):
    """With the indexer's keys of the same groups."""

    index_entries: torch.Tensor
    index_kv: torch.Tensor
    index_scores: torch.Tensor

    @property
    def index(self) -> GroupState:
        return GroupState(self.index_entries, self.index_kv, self.index_scores)


@dataclass(frozen=True)
class Tokens:
    """What attention needs of the tokens of a batch. q: BF16 [T, n, d], rotated. keys: BF16 [T, d], as cached.
    groups, index: rows of `Compressor.project`. queries: of the indexer."""

    q: torch.Tensor
    keys: torch.Tensor
    groups: tuple[torch.Tensor, torch.Tensor] | None
    index: tuple[torch.Tensor, torch.Tensor] | None
    queries: tuple[torch.Tensor, torch.Tensor] | None


class AttentionSink(WeightModule):
    """`weight` FP32 [heads, padded for the kernel]: a score of each head without a value; padded heads have -inf."""

    weight: torch.Tensor

    def __init__(self, config: Dimensions, group: Group, source: str) -> None:
        super().__init__()
        first, heads = group.share(config.num_heads, "num_heads")
        padded = -(-heads // config.kernel_head_multiple) * config.kernel_head_multiple
        placement = Placement(source, ((first, heads),), ((0, heads),), ((0, padded),))
        self.add_weight("weight", Weight((padded,), torch.float32, (placement,), -torch.inf))


class CompressedAttention(nn.Module):
    """Keys are values too. Queries have no weight in their norm; the output is rotated back before its projections."""

    def __init__(self, config: DeepseekV4Config, layer: int, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, eps, self.dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.eps, self.rope, self.window = eps, config.qk_rope_head_dim, config.sliding_window
        self.ratio, self.topk = config.compress_ratios[layer], config.index_topk
        _, self.heads = group.share(config.num_heads, "num_heads")
        width, ranks = config.num_heads * self.dim, config.o_groups * config.o_lora_rank
        self.fused_wqa_wkv = replicated(
            hidden, (f"{prefix}wq_a", config.q_lora_rank), (f"{prefix}wkv", self.dim)
        )
        self.q_norm = RMSNorm(config.q_lora_rank, eps, f"{prefix}q_norm.weight")
        self.kv_norm = RMSNorm(self.dim, eps, f"{prefix}kv_norm.weight")
        self.wq_b = Fp8Linear(group, config.q_lora_rank, [Rows(f"{prefix}wq_b", width)])
        self.attn_sink = AttentionSink(config, group, f"{prefix}attn_sink")
        self.wo_a = Fp8GroupedLinear(
            group, config.o_groups, width // config.o_groups, config.o_lora_rank, f"{prefix}wo_a"
        )
        self.wo_b = Fp8RowParallelLinear(group, ranks, hidden, f"{prefix}wo_b")
        indexed = config.indexed(layer)
        self.compressor = self.indexer = None
        if self.ratio:
            self.compressor = Compressor(
                config, self.ratio, self.dim, overlap=indexed, rotated=False, prefix=f"{prefix}compressor."
            )
        if indexed:
            self.indexer = Indexer(config, self.ratio, f"{prefix}indexer.")

    def make_cache(self, slots: int, positions: int) -> WindowCache:
        window = torch.empty(slots, self.window, self.dim, dtype=torch.bfloat16)
        if self.compressor is None:
            return WindowCache(window)
        groups = self.compressor.make_state(slots, positions)
        if self.indexer is None:
            return CompressedCache(window, *_tensors(groups))
        return IndexedCache(
            window, *_tensors(groups), *_tensors(self.indexer.compressor.make_state(slots, positions))
        )

    def forward(self, x: torch.Tensor, batch: Batch, cache: Any, table: torch.Tensor) -> torch.Tensor:
        """x: BF16 [T, H], all tokens of the batch. table: FP32 [positions, 2, rope/2]. Returns this rank's part of the
        sum, float64 [T, H]."""
        cos_sin = table[batch.positions]
        tokens = self._project(x, batch.positions, cos_sin)
        out = tokens.q.new_empty(tokens.q.shape)
        for segment in batch.segments:
            for piece in segment.pieces(PREFILL_TOKENS):
                attended = self.attend(piece, batch, tokens, cache, table)
                out[piece.rows] = rotate(attended, cos_sin[piece.rows], inverse=True)
        grouped = out.view(len(out), self.wo_a.groups, -1)
        partial: torch.Tensor = self.wo_b(self.wo_a(grouped))
        return partial

    def _project(self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> Tokens:
        q_a, kv = self.fused_wqa_wkv.split(x)
        latent = self.q_norm(q_a)
        q = self.wq_b(latent).view(len(x), self.heads, self.dim)
        q = rotate(q.to(torch.float64) * rms_scale(q, self.eps), cos_sin)
        keys = self.keys(kv, cos_sin)
        groups = index = queries = None
        if self.compressor is not None:
            groups = self.compressor.project(x, positions)
        if self.indexer is not None:
            index = self.indexer.compressor.project(x, positions)
            queries = self.indexer.queries(x, latent, cos_sin)
        return Tokens(q, keys, groups, index, queries)

    def keys(self, kv: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """BF16 [T, d], not yet normalised -> as cached."""
        return rounded_key(rotate(self.kv_norm(kv), cos_sin), self.rope)

    def attend(
        self, piece: Segment, batch: Batch, tokens: Tokens, cache: Any, table: torch.Tensor
    ) -> torch.Tensor:
        """Consecutive tokens of one request: write their keys, and attend. float64 [T, n, d], not rounded."""
        keys, seen = windowed(piece, tokens.keys[piece.rows], cache.window)
        if self.compressor is not None and tokens.groups is not None:
            self.compressor.absorb(piece, _rows(tokens.groups, piece), table, cache.groups)
            chosen = visible_groups(piece, self.ratio, batch)
            if self.indexer is not None and tokens.index is not None and tokens.queries is not None:
                self.indexer.compressor.absorb(piece, _rows(tokens.index, piece), table, cache.index)
                index_keys = cache.index_entries[piece.slot, : chosen.shape[1]]
                scores = self.indexer.scores(tokens.queries, piece.rows, index_keys)
                chosen = best_entries(scores, chosen, self.topk)
            keys = torch.cat([keys, cache.entries[piece.slot, : chosen.shape[1]]])
            seen = torch.cat([seen, chosen], dim=1)
        return sink_attention(tokens.q[piece.rows], keys, seen, self.attn_sink.weight[: self.heads])


def windowed(piece: Segment, own: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys BF16 [S, d] of the window before the piece and of the piece, and bool [T, S], which of them each token
    sees. The piece's keys `own` are left in the window [slots, W, d]."""
    width = window.shape[1]
    before = torch.arange(max(0, piece.start - width + 1), piece.start, device=own.device)
    keys = torch.cat([window[piece.slot, before % width], own])
    at = torch.arange(piece.start, piece.end, device=own.device)
    distance = at.unsqueeze(1) - torch.cat([before, at])
    leave(piece, own, window)
    return keys, (distance >= 0) & (distance < width)


def leave(piece: Segment, own: torch.Tensor, window: torch.Tensor) -> None:
    """Keys BF16 [T, d] of consecutive tokens of a request into its window, of [slots, W, d]."""
    width = window.shape[1]
    kept = torch.arange(piece.start, piece.end, device=own.device)[-width:]
    window[piece.slot, kept % width] = own[-width:]


def _rows(pair: tuple[torch.Tensor, torch.Tensor], piece: Segment) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0][piece.rows], pair[1][piece.rows]


def _tensors(state: GroupState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.entries, state.kv, state.scores
