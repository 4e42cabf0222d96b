"""CPU reference of a fused MXFP4 MoE kernel for gpt-oss: BF16 activations, experts in `shuffled_moe_layout`, biases.

Products are summed in float64, the gated activation is rounded to BF16 as the kernel hands it to its second matrix,
and the result is not rounded: ranks that share an expert, or the experts, add theirs first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from workloads.kernels.activations import sigmoid
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.quantization import dequantize_mxfp4
from workloads.kernels.shuffled_moe_layout import unshuffle_rows, unshuffle_scale


@dataclass
class ExpertQuantization:
    """What the kernel reads beside the packed weights: the parameters themselves, by reference.

    w1_scale uint8 [E, 2I, H/32], w2_scale uint8 [E, H, I/32]: E8M0. w1_bias BF16 [E, 2I], w2_bias BF16 [E, H].
    """

    w1_scale: Tensor
    w2_scale: Tensor
    w1_bias: Tensor
    w2_bias: Tensor


class ShuffledMoE:
    """The kernel of one layer's experts on one rank.

    It owns the constants of its first matrix's epilogue, one value for each expert, FP32 [E]: `gemm1_alpha`,
    `gemm1_beta`, `gemm1_clamp_limit`. They follow from no weight and must outlive every reload where they are, since
    a captured graph holds their addresses.
    """

    def __init__(self, quantization: ExpertQuantization, alpha: float, limit: float) -> None:
        self.quantization = quantization
        experts = torch.ones(len(quantization.w1_bias), device=quantization.w1_bias.device)
        self.gemm1_alpha = experts * alpha
        self.gemm1_beta = experts.clone()
        self.gemm1_clamp_limit = experts * limit

    def forward(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, with_bias: bool
    ) -> Tensor:
        """x BF16 [T, h], topk_idx int64 [T, K] of this rank's experts (others' are outside 0..E-1), topk_weights FP32
        [T, K], w13 uint8 [E, 2I, H/2], w2 uint8 [E, H, I/2] -> float64 [T, h], the part of these experts.

        h is padded with zeros to H. with_bias: add the second matrix's bias; of ranks that share an expert one does.
        """
        padded = pad(x.to(torch.float64), (0, w2.shape[1] - x.shape[1]))
        total = padded.new_zeros(len(x), w2.shape[1])
        for expert in range(len(w13)):
            rows, slots = torch.nonzero(topk_idx == expert, as_tuple=True)
            if len(rows):
                hidden = self._first(expert, padded[rows], w13)
                out = self._second(expert, hidden, w2, with_bias)
                total[rows] += out * topk_weights[rows, slots].to(torch.float64).unsqueeze(1)
        return total[:, : x.shape[1]]

    def _first(self, expert: int, x: Tensor, w13: Tensor) -> Tensor:
        """float64 [R, H] -> activated, BF16 [R, I]."""
        one = slice(expert, expert + 1)
        scale = unshuffle_scale(self.quantization.w1_scale[one], pairs=True)
        matrix = dequantize_mxfp4(unshuffle_rows(w13[one], pairs=True), scale)[0]
        bias = unshuffle_rows(self.quantization.w1_bias[one], pairs=True)[0]
        both = x @ matrix.t() + bias
        constants = (self.gemm1_alpha, self.gemm1_beta, self.gemm1_clamp_limit)
        alpha, beta, limit = (float(values[expert]) for values in constants)
        return round_to_bf16(clamped_swiglu(both[:, 0::2], both[:, 1::2], alpha, beta, limit))

    def _second(self, expert: int, hidden: Tensor, w2: Tensor, with_bias: bool) -> Tensor:
        """BF16 [R, I] -> float64 [R, H]."""
        one = slice(expert, expert + 1)
        scale = unshuffle_scale(self.quantization.w2_scale[one], pairs=False)
        matrix = dequantize_mxfp4(unshuffle_rows(w2[one], pairs=False), scale)[0]
        out = hidden.to(torch.float64) @ matrix.t()
        return out + unshuffle_rows(self.quantization.w2_bias[one], pairs=False)[0] if with_bias else out


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """min(g, limit) * sigmoid(alpha * min(g, limit)) * (clamp(u, -limit, limit) + beta), in float64; gpt-oss's."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * sigmoid(alpha * gate) * (up + beta)
