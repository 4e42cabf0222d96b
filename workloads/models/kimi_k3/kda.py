"""Kimi delta attention of one layer: this rank's heads, prefill in chunks, decode by the recurrence."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workloads.kernels.conv import conv_decode, conv_prefill, tap_major_weight
from workloads.kernels.kda import kda_chunked, kda_decode, kda_gate, kda_output
from workloads.loading.weights import Placement, Weight, WeightModule
from workloads.models.batch import Batch, Segment
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, Rows, vector
from workloads.models.parallel import Group

PREFILL_TOKENS = 1024  # of one request that are computed together, so that their states stay in the cache
ROW_MULTIPLE = 16  # rows of the fused input projection are padded to it on every rank


@dataclass
class KdaCache:
    """Per request slot: the last inputs of the convolution, and the recurrent state.

    conv: BF16 [slots, 3*heads*d, W-1]. state: float64 [slots, heads, d, d]; see `kernels.kda` for why not float32.
    """

    conv: torch.Tensor
    state: torch.Tensor

    def at(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """What a prefill segment starts from; zeros at the beginning of a request, whatever the slot held."""
        conv, state = self.conv[segment.slot], self.state[segment.slot]
        return (conv, state) if segment.start else (torch.zeros_like(conv), torch.zeros_like(state))


class FusedShortConvolution(WeightModule):
    """Depthwise convolutions of q, k and v. `weight` FP32 [3*heads*d, 1, W].

    Derived: `decode_conv1d_weight` FP32 [3, W, heads*d], the layout that decode reads.
    """

    weight: torch.Tensor
    decode_conv1d_weight: torch.Tensor

    def __init__(self, group: Group, channels: int, size: int, prefix: str) -> None:
        super().__init__()
        first, length = group.share(channels, f"Channels of {prefix}q_conv1d")
        tail = ((0, 1), (0, size))
        placements = tuple(
            Placement(
                f"{prefix}{name}_conv1d.weight",
                source_region=((first, length), *tail),
                target=((i * length, length), *tail),
                slot=((i * length, length), *tail),
            )
            for i, name in enumerate("qkv")
        )
        self.add_weight("weight", Weight((3 * length, 1, size), torch.float32, placements))
        self.register_buffer("decode_conv1d_weight", None, persistent=False)

    def derivations(self) -> Mapping[str, torch.Tensor]:
        return {"decode_conv1d_weight": tap_major_weight(self.weight.squeeze(1))}


class FusedGatedNorm(RMSNorm):
    """Norm of each head's output. Derived: `decode_norm_weight` FP32 [d], the copy that decode reads."""

    decode_norm_weight: torch.Tensor

    def __init__(self, size: int, eps: float, source: str) -> None:
        super().__init__(size, eps, source, torch.float32)
        self.register_buffer("decode_norm_weight", None, persistent=False)

    def derivations(self) -> Mapping[str, torch.Tensor]:
        return {"decode_norm_weight": self.weight.to(torch.float32, copy=True)}


class KimiDeltaAttention(WeightModule):
    """`A_log` FP32 [heads] and `dt_bias` FP32 [heads*d] beside the projections. A_log is stored longer than there
    are heads; its tail is never read."""

    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, config: KimiK3Config, group: Group, prefix: str) -> None:
        super().__init__()
        hidden, self.dim = config.hidden_size, config.kda_head_dim
        width = config.kda_num_heads * self.dim
        self.lower_bound = config.kda_gate_lower_bound
        first, self.heads = group.share(config.kda_num_heads, "kda_num_heads")
        rank_width = self.heads * self.dim
        fused = [
            *(Rows(f"{prefix}{name}_proj.weight", width) for name in "qkvg"),
            Rows(f"{prefix}f_a_proj.weight", config.kda_gate_rank, sharded=False),
            Rows(f"{prefix}b_proj.weight", config.kda_num_heads),
        ]
        self.in_proj_qkvgfab = ColumnParallelLinear(group, hidden, fused, ROW_MULTIPLE)
        self.conv1d = FusedShortConvolution(group, width, config.kda_conv_size, prefix)
        self.f_b_proj = ColumnParallelLinear(
            group, config.kda_gate_rank, [Rows(f"{prefix}f_b_proj.weight", width)]
        )
        self.o_norm = FusedGatedNorm(self.dim, config.rms_norm_eps, f"{prefix}o_norm.weight")
        self.o_proj = RowParallelLinear(group, width, hidden, f"{prefix}o_proj.weight")
        self.add_weight("A_log", vector(f"{prefix}A_log", self.heads, torch.float32, first))
        self.add_weight(
            "dt_bias", vector(f"{prefix}dt_bias", rank_width, torch.float32, group.rank * rank_width)
        )

    def make_cache(self, slots: int, _positions: int) -> KdaCache:
        channels, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[2]
        return KdaCache(
            torch.empty(slots, channels, taps - 1, dtype=torch.bfloat16),
            torch.empty(slots, self.heads, self.dim, self.dim, dtype=torch.float64),
        )

    def forward(self, x: torch.Tensor, batch: Batch, cache: KdaCache) -> torch.Tensor:
        """x: BF16 [T, hidden], all tokens of the batch -> this rank's part of the sum, float64 [T, hidden]."""
        fused = self.in_proj_qkvgfab(x)
        out = fused.new_empty(x.shape[0], self.heads, self.dim)
        for segment in batch.prefills:
            for piece in segment.pieces(PREFILL_TOKENS):
                out[piece.rows] = self._prefill(piece, fused[piece.rows], cache)
        if batch.decodes:
            rows = batch.decode_rows
            out[rows] = self._decode(batch.decode_slots, fused[rows], cache)
        partial: torch.Tensor = self.o_proj(out.flatten(1))
        return partial

    def _prefill(self, piece: Segment, fused: torch.Tensor, cache: KdaCache) -> torch.Tensor:
        """Consecutive tokens of one request: their rows of the input projection -> BF16 [T, heads, d]."""
        inputs, gate, decay, beta = self._operands(fused)
        conv, state = cache.at(piece)
        mixed, cache.conv[piece.slot] = conv_prefill(inputs, self.conv1d.weight.squeeze(1), conv)
        q, k, v = (self._heads(part).transpose(0, 1) for part in mixed.chunk(3, dim=-1))
        o, cache.state[piece.slot] = kda_chunked(q, k, v, decay.transpose(0, 1), beta.t(), state)
        return kda_output(o.transpose(0, 1), self.o_norm.weight, gate, self.o_norm.eps)

    def _decode(self, slots: torch.Tensor, fused: torch.Tensor, cache: KdaCache) -> torch.Tensor:
        """One token of each of B requests: their rows of the input projection -> BF16 [B, heads, d]."""
        inputs, gate, decay, beta = self._operands(fused)
        mixed, cache.conv[slots] = conv_decode(inputs, self.conv1d.decode_conv1d_weight, cache.conv[slots])
        q, k, v = (self._heads(part) for part in mixed.chunk(3, dim=-1))
        o, cache.state[slots] = kda_decode(q, k, v, decay, beta, cache.state[slots])
        return kda_output(o, self.o_norm.decode_norm_weight, gate, self.o_norm.eps)

    def _operands(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Input of the convolution BF16 [T, 3*heads*d], output gate BF16 [T, heads, d], log decay float64
        [T, heads, d], beta float64 [T, heads]."""
        *_, gate, f_a, b, _ = torch.split(fused, self.in_proj_qkvgfab.sizes, dim=-1)
        decay = kda_gate(self._heads(self.f_b_proj(f_a)), self.A_log, self.dt_bias, self.lower_bound)
        inputs = fused[:, : 3 * self.heads * self.dim]
        return inputs, self._heads(gate), decay, torch.sigmoid(b.to(torch.float64))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads*d] -> [T, heads, d]."""
        return x.reshape(x.shape[0], self.heads, self.dim)
