"""Engram of a layer: rows of hashed n-grams, projected to a value and to the keys that gate it into each copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from workloads.kernels.engram import (
    add_gated,
    compressed_ids,
    engram_gates,
    hash_multipliers,
    last_tokens,
    ngram_rows,
)
from workloads.kernels.quantization import dequantize_fp8_rows
from workloads.loading.tensor_table import MXFP4_GROUP
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.batch import Batch
from workloads.models.deepseek_v41.config import FP8_BLOCK, DeepseekV41Config
from workloads.models.deepseek_v41.hashing import head_sizes
from workloads.models.fp8_linear import Fp8RowParallelLinear
from workloads.models.layers import share_of_sum
from workloads.models.parallel import Group


def of_images(token_ids: torch.Tensor, images: range) -> torch.Tensor:
    """bool [T] of int64 [T]: which tokens stand for a part of an image."""
    return (token_ids >= images.start) & (token_ids < images.stop)


@dataclass
class TokenHistory:
    """Per request slot the compressed ids of its last tokens, int64 [slots, N-1], token p at p mod (N-1); -1 for one
    that breaks n-grams."""

    recent: torch.Tensor


class NgramHash(nn.Module):
    """Rows of every Engram layer's table for the tokens of a batch. Its buffers follow from the dimensions and the
    vocabulary: no checkpoint has them.

    texts: of each token id; empty: all are different.
    """

    token_map: torch.Tensor
    multipliers: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, config: DeepseekV41Config, texts: Sequence[str]) -> None:
        super().__init__()
        layers, self.tokens = config.engram_layers, config.engram_max_ngram_size
        self.images = config.image_ids
        ids = compressed_ids(texts) if texts else list(range(config.vocab_size))
        sizes = [head_sizes(config, layer) for layer in layers]
        self.pad = ids[config.engram_pad_token]
        tables = {
            "token_map": ids,
            "multipliers": [hash_multipliers(layer, self.tokens, max(ids) + 1) for layer in layers],
            "sizes": sizes,
            "offsets": [list(accumulate(of_layer, initial=0))[:-1] for of_layer in sizes],
        }
        for name, values in tables.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def make_cache(self, slots: int) -> TokenHistory:
        return TokenHistory(torch.empty(slots, self.tokens - 1, dtype=torch.int64))

    def of_images(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `of_images`."""
        return of_images(token_ids, self.images)

    def forward(self, batch: Batch, history: TokenHistory) -> list[torch.Tensor]:
        """int64 [T, heads] for each Engram layer, of all tokens of the batch, which are left in the history."""
        token_ids = batch.token_ids[: batch.tokens]
        ids = self.token_map[token_ids].masked_fill(self.of_images(token_ids), -1)
        last = token_ids.new_empty(batch.tokens, self.tokens)
        kept = self.tokens - 1
        for segment in batch.segments:
            before = torch.arange(max(0, segment.start - kept), segment.start, device=ids.device)
            known = torch.cat([history.recent[segment.slot, before % kept], ids[segment.rows]])
            last[segment.rows] = last_tokens(known, segment.length, self.tokens, self.pad)
            after = torch.arange(max(segment.start, segment.end - kept), segment.end, device=ids.device)
            history.recent[segment.slot, after % kept] = known[len(known) - len(after) :]
        constants = zip(self.multipliers, self.sizes, self.offsets, strict=True)
        return [ngram_rows(last, *of_layer) for of_layer in constants]


class EngramTable(WeightModule):
    """The parts of a layer's table that belong to this rank's heads: `weight` float8_e4m3fn [rows, dim],
    `weight_scale_inv` U8 [rows, dim/32]."""

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor

    def __init__(self, config: DeepseekV41Config, layer: int, group: Group, stem: str) -> None:
        super().__init__()
        sizes, dim = head_sizes(config, layer), config.engram_head_dim
        first, count = group.share(len(sizes), "Heads of Engram's tables")
        self.heads = slice(first, first + count)
        self.first_row, rows = sum(sizes[:first]), sum(sizes[self.heads])
        for name, leaf, width, dtype in (
            ("weight", "weight", dim, torch.float8_e4m3fn),
            ("weight_scale_inv", "scale", dim // MXFP4_GROUP, torch.uint8),
        ):
            region = whole((rows, width))
            placement = Placement(f"{stem}.{leaf}", ((self.first_row, rows), (0, width)), region, region)
            self.add_weight(name, Weight((rows, width), dtype, (placement,)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """int64 [T, all heads] -> what this rank's heads find, BF16 [T, heads * dim], exact."""
        local = rows[:, self.heads] - self.first_row
        found = dequantize_fp8_rows(self.weight[local], self.weight_scale_inv[local])
        return found.flatten(1).to(torch.bfloat16)


class EngramNorms(WeightModule):
    """`q_weight`, `k_weight` BF16 [copies, H]: of the norms of copies and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor

    def __init__(self, shape: tuple[int, int], prefix: str) -> None:
        super().__init__()
        for name in ("q_weight", "k_weight"):
            placement = Placement(f"{prefix}{name}", whole(shape), whole(shape), whole(shape))
            self.add_weight(name, Weight(shape, torch.bfloat16, (placement,)))


class Engram(nn.Module):
    """Every rank looks up its heads' rows of all tokens; the sum over ranks of what they project is shared out."""

    def __init__(self, config: DeepseekV41Config, layer: int, group: Group, prefix: str) -> None:
        super().__init__()
        self.group, self.copies, self.hidden = group, config.hc_mult, config.hidden_size
        self.eps = config.rms_norm_eps
        self.embed_tokens = EngramTable(config, layer, group, f"{prefix}embed")
        width, out = config.engram_heads * config.engram_head_dim, (self.copies + 1) * self.hidden
        self.wkv = Fp8RowParallelLinear(group, width, out, f"{prefix}wkv", FP8_BLOCK)
        self.norms = EngramNorms((self.copies, self.hidden), prefix)

    def forward(
        self, x: torch.Tensor, rows: torch.Tensor, images: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """x: BF16 [n, copies, H], this rank's tokens. rows: int64 [T, heads] of all. images: bool [n], tokens that take
        nothing. Returns BF16 [n, copies, H]. Collective."""
        if not batch.tokens:
            return x
        kv = share_of_sum(self.group, batch, self.wkv(self.embed_tokens(rows)))
        keys, value = kv[:, : -self.hidden], kv[:, -self.hidden :]
        weights = self.norms.q_weight, self.norms.k_weight
        gates = engram_gates(x, keys.view(x.shape), weights, self.eps)
        return add_gated(x, gates.masked_fill(images.unsqueeze(1), 0.0), value)
