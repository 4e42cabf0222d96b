"""Groups of earlier tokens pooled into single keys: the compressor of a layer, and the indexer that chooses groups."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from workloads.kernels.compressed_attention import index_scores, overlapping, pool, through_fp4
from workloads.kernels.fp8_blocks import BLOCK, through_fp8
from workloads.kernels.interleaved_rope import rotate
from workloads.kernels.linear import linear_partial
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.config import DeepseekV4Config, Dimensions
from workloads.models.fp8_linear import replicated
from workloads.models.layers import ReplicatedLinear, RMSNorm, Rows

KV_GROUP = 64  # channels of a key without position that share an FP8 scale


@dataclass
class GroupState:
    """Per request slot: the finished entries, and what is projected of the last tokens, of which a group is pooled.

    entries: BF16 [slots, E, d]. kv, scores: FP32 [slots, R, W], token p at p mod R, R the tokens that an entry pools.
    """

    entries: torch.Tensor
    kv: torch.Tensor
    scores: torch.Tensor


def rounded_key(key: torch.Tensor, rope: int) -> torch.Tensor:
    """BF16 [..., d] with its channels without position rounded to FP8, as the cache of keys holds them."""
    nope = key.shape[-1] - rope
    return torch.cat([through_fp8(key[..., :nope], KV_GROUP).to(torch.bfloat16), key[..., nope:]], dim=-1)


class Compressor(WeightModule):
    """Pools every `ratio` tokens into one entry; overlapping groups pool the tokens of the group before as well.

    `ape` FP32 [ratio, width]: added to the scores by place within the group. rotated: entries are keys of the indexer,
    rotated by a Hadamard matrix and rounded to FP4; otherwise keys of attention, rounded to FP8.
    """

    ape: torch.Tensor

    def __init__(
        self, config: DeepseekV4Config, ratio: int, dim: int, overlap: bool, rotated: bool, prefix: str
    ) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap, self.rotated = ratio, dim, overlap, rotated
        self.rope = config.qk_rope_head_dim
        self.width = 2 * dim if overlap else dim
        self.pooled = 2 * ratio if overlap else ratio
        pieces = [Rows(f"{prefix}{name}.weight", self.width) for name in ("wkv", "wgate")]
        self.fused_wkv_wgate = ReplicatedLinear(config.hidden_size, pieces)
        self.norm = RMSNorm(dim, config.rms_norm_eps, f"{prefix}norm.weight")
        region = whole((ratio, self.width))
        ape = Placement(f"{prefix}ape", region, region, region)
        self.add_weight("ape", Weight((ratio, self.width), torch.float32, (ape,)))

    def make_state(self, slots: int, positions: int) -> GroupState:
        return GroupState(
            torch.empty(slots, positions // self.ratio, self.dim, dtype=torch.bfloat16),
            torch.empty(slots, self.pooled, self.width, dtype=torch.float32),
            torch.empty(slots, self.pooled, self.width, dtype=torch.float32),
        )

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """BF16 [T, H] at int64 [T] -> kv and scores of the tokens, FP32 [T, width] rounded once."""
        kv, scores = linear_partial(x, self.fused_wkv_wgate.matrix()).chunk(2, dim=-1)
        scores = scores + self.ape.to(torch.float64)[positions % self.ratio]
        return kv.to(torch.float32), scores.to(torch.float32)

    def absorb(
        self,
        piece: Segment,
        projected: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        state: GroupState,
    ) -> None:
        """Pool the groups that the tokens of a piece complete, and keep what later groups need.

        projected: the piece's rows of `project`. table: FP32 [positions, 2, rope/2].
        """
        first, last = piece.start // self.ratio, piece.end // self.ratio
        if first < last:
            groups = torch.arange(first, last, device=table.device)
            pooled = pool(
                *(self._candidates(piece, *pair) for pair in self._with_history(piece, projected, state))
            )
            turned = rotate(self.norm(pooled), table[groups * self.ratio])
            entries = through_fp4(turned) if self.rotated else rounded_key(turned, self.rope)
            state.entries[piece.slot, first:last] = entries
        kept = min(piece.length, self.pooled)
        at = torch.arange(piece.end - kept, piece.end, device=table.device) % self.pooled
        for held, rows in zip((state.kv, state.scores), projected, strict=True):
            held[piece.slot, at] = rows[-kept:]

    def _with_history(
        self, piece: Segment, projected: tuple[torch.Tensor, torch.Tensor], state: GroupState
    ) -> tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]]:
        """kv and scores from the first token that the piece's groups pool to its last, with what stands for a missing
        token."""
        begin = self._begin(piece)
        at = torch.arange(begin, piece.start, device=state.kv.device) % self.pooled
        kv, scores = (
            torch.cat([held[piece.slot, at], rows])
            for held, rows in zip((state.kv, state.scores), projected, strict=True)
        )
        return (kv, 0.0), (scores, -torch.inf)

    def _begin(self, piece: Segment) -> int:
        return max(0, piece.start // self.ratio - self.overlap) * self.ratio

    def _candidates(self, piece: Segment, rows: torch.Tensor, missing: float) -> torch.Tensor:
        """What each of the piece's groups pools: FP32 [G, pooled, dim] of rows from `_begin` on."""
        first, last = piece.start // self.ratio, piece.end // self.ratio
        groups = rows[: last * self.ratio - self._begin(piece)].view(-1, self.ratio, self.width)
        if not self.overlap:
            return groups
        if first == 0:
            groups = torch.cat([torch.full_like(groups[:1], missing), groups])
        return overlapping(groups)


class IndexQueries(nn.Module):
    """Scores finished groups for every token. rounded: queries as they meet keys, through FP4."""

    def __init__(
        self,
        config: Dimensions,
        prefix: str,
        rounded: Callable[[torch.Tensor], torch.Tensor],
        block: int = BLOCK,
    ) -> None:
        super().__init__()
        self.heads, self.dim, self.rounded = config.index_num_heads, config.index_head_dim, rounded
        self.wq_b = replicated(config.q_lora_rank, (f"{prefix}wq_b", self.heads * self.dim), block=block)
        weights = Rows(f"{prefix}weights_proj.weight", self.heads)
        self.weights_proj = ReplicatedLinear(config.hidden_size, [weights])

    def queries(
        self, x: torch.Tensor, latent: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x BF16 [T, H], latent BF16 [T, q_lora_rank], cos_sin FP32 [T, 2, rope/2] -> queries BF16 [T, heads, dim] in
        FP4, weights of the heads BF16 [T, heads]."""
        q = self.wq_b(latent).view(len(latent), self.heads, self.dim)
        return self.rounded(rotate(q, cos_sin)), self.weights_proj(x)

    def scores(
        self, queries: tuple[torch.Tensor, torch.Tensor], rows: slice, keys: torch.Tensor
    ) -> torch.Tensor:
        """float64 [T, E] of the tokens in `rows` for keys BF16 [E, dim]."""
        q, weights = queries
        return index_scores(q[rows], keys, weights[rows])


class Indexer(IndexQueries):
    """With keys of every finished group, from a compressor of its own."""

    def __init__(self, config: DeepseekV4Config, ratio: int, prefix: str) -> None:
        super().__init__(config, prefix, through_fp4)
        self.compressor = Compressor(
            config, ratio, self.dim, overlap=True, rotated=True, prefix=f"{prefix}compressor."
        )


def visible_groups(piece: Segment, ratio: int, batch: Batch) -> torch.Tensor:
    """bool [T, E]: which groups, up to the last that the piece completes, each of its tokens may see: those that end
    with it or before it."""
    tokens = torch.arange(piece.start, piece.end, device=batch.token_ids.device)
    groups = torch.arange(piece.end // ratio, device=tokens.device)
    return groups < ((tokens + 1) // ratio).unsqueeze(1)
