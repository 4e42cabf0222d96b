"""Kimi delta attention of one layer: this rank's heads, prefill in chunks, decode by the recurrence."""

from dataclasses import dataclass

import torch

from workloads.kernels.conv import conv_decode, conv_prefill, tap_major_weight
from workloads.kernels.kda import kda_chunked, kda_decode, kda_gate, kda_output
from workloads.loading.weights import Placement, Weight, WeightModule
from workloads.models.batch import Batch, Segment
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, Rows, vector
from workloads.models.parallel import Group

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

    def post_process(self) -> None:
        self.set_derived("decode_conv1d_weight", tap_major_weight(self.weight.squeeze(1)))


class FusedGatedNorm(RMSNorm):
    """Norm of each head's output. Derived: `decode_norm_weight` FP32 [d], the copy that decode reads."""

    decode_norm_weight: torch.Tensor

    def __init__(self, size: int, eps: float, source: str) -> None:
        super().__init__(size, eps, source, torch.float32)
        self.register_buffer("decode_norm_weight", None, persistent=False)

    def post_process(self) -> None:
        self.set_derived("decode_norm_weight", self.weight.to(torch.float32, copy=True))


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
        q, k, v, gate, f_a, b, _ = self.in_proj_qkvgfab.split(x)
        inputs = torch.cat([q, k, v], dim=-1)
        decay = kda_gate(self._heads(self.f_b_proj(f_a)), self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(b.to(torch.float64))
        gate = self._heads(gate)
        out = torch.empty_like(gate)
        for segment in batch.prefills:
            rows = segment.rows
            mixed = self._prefill(segment, inputs[rows], decay[rows], beta[rows], cache)
            out[rows] = kda_output(mixed, self.o_norm.weight, gate[rows], self.o_norm.eps)
        if batch.decodes:
            picked, slots = batch.decode_rows, batch.decode_slots
            mixed = self._decode(slots, inputs[picked], decay[picked], beta[picked], cache)
            out[picked] = kda_output(mixed, self.o_norm.decode_norm_weight, gate[picked], self.o_norm.eps)
        partial: torch.Tensor = self.o_proj(out.flatten(1))
        return partial

    def _prefill(
        self,
        segment: Segment,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        cache: KdaCache,
    ) -> torch.Tensor:
        """One segment: inputs BF16 [T,3*heads*d], decay [T,heads,d], beta [T,heads] -> float64 [T,heads,d]."""
        conv, state = cache.at(segment)
        mixed, cache.conv[segment.slot] = conv_prefill(inputs, self.conv1d.weight.squeeze(1), conv)
        q, k, v = (self._heads(part).transpose(0, 1) for part in mixed.chunk(3, dim=-1))
        out, cache.state[segment.slot] = kda_chunked(q, k, v, decay.transpose(0, 1), beta.t(), state)
        return out.transpose(0, 1)

    def _decode(
        self,
        slots: torch.Tensor,
        inputs: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        cache: KdaCache,
    ) -> torch.Tensor:
        """One token of each of B requests; shapes as in `_prefill` with T = B."""
        mixed, cache.conv[slots] = conv_decode(inputs, self.conv1d.decode_conv1d_weight, cache.conv[slots])
        q, k, v = (self._heads(part) for part in mixed.chunk(3, dim=-1))
        out, cache.state[slots] = kda_decode(q, k, v, decay, beta, cache.state[slots])
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads*d] -> [T, heads, d]."""
        return x.reshape(x.shape[0], self.heads, self.dim)
