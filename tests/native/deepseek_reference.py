"""What the attentions of DeepSeek's models have in common, plainly from a checkpoint's own tensors."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workloads.kernels.fp8_blocks import through_fp8
from workloads.kernels.linear import round_to_bf16
from workloads.kernels.quantization import decode_e8m0, dequantize_fp8_tiles
from workloads.loading.checkpoint import open_checkpoint
from workloads.models.deepseek_v4.config import Dimensions


class PlainLayer:
    """block: rows and columns that share an FP8 scale."""

    def __init__(self, checkpoint: Path, layer: int, config: Dimensions, block: int) -> None:
        self.reader = open_checkpoint(checkpoint)
        self.layer, self.config, self.block = layer, config, block
        self.ratio: int = config.compress_ratios[layer]

    def tensor(self, name: str) -> Tensor:
        return self.reader.get(f"layers.{self.layer}.attn.{name}").double()

    def matrix(self, stem: str) -> Tensor:
        """An FP8 matrix, decoded."""
        name = f"layers.{self.layer}.attn.{stem}"
        scales = decode_e8m0(self.reader.get(f"{name}.scale").view(torch.uint8))
        return dequantize_fp8_tiles(self.reader.get(f"{name}.weight"), scales, self.block)

    def fp8(self, stem: str, x: Tensor) -> Tensor:
        """A product with an FP8 matrix, not rounded."""
        return through_fp8(x, self.block) @ self.matrix(stem).t()

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x.double()
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return round_to_bf16(x / scale * self.tensor(name))

    def turn(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        """The last channels as complex numbers, turned; in a layer that compresses, with its own theta and YaRN."""
        c = self.config
        dim, out = c.qk_rope_head_dim, x.double().clone()
        theta = c.compress_rope_theta if self.ratio else c.rope_theta
        for i in range(dim // 2):
            f = theta ** (-2 * i / dim)
            if self.ratio:
                low, high = (
                    dim * math.log(c.rope_original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (c.rope_beta_fast, c.rope_beta_slow)
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
                ramp = min(max((i - low) / (high - low), 0), 1)
                f = f / c.rope_factor * ramp + f * (1 - ramp)
            cos, sin = (
                float(torch.tensor(g(position * f), dtype=torch.float32)) for g in (math.cos, math.sin)
            )
            at = x.shape[-1] - dim + 2 * i
            a, b = x[..., at].double(), x[..., at + 1].double()
            out[..., at], out[..., at + 1] = a * cos - sign * b * sin, b * cos + sign * a * sin
        return out

    def scores(
        self, x: Tensor, latent: Tensor, keys: Sequence[Tensor], rounded: Callable[[Tensor], Tensor]
    ) -> list[list[float]]:
        """Of each token, how much it wants each of the keys that are finished by then."""
        heads = self.config.index_num_heads
        q = round_to_bf16(self.fp8("indexer.wq_b", latent)).view(len(x), heads, -1)
        weights = round_to_bf16(x.double() @ self.tensor("indexer.weights_proj.weight").t()).double()
        found = []
        for i in range(len(x)):
            turned = rounded(round_to_bf16(self.turn(q[i], i))).double()
            found.append(
                [
                    sum(float(weights[i, h]) * max(0.0, float(turned[h] @ keys[j])) for h in range(heads))
                    for j in range((i + 1) // self.ratio)
                ]
            )
        return found

    def attended(self, q: Tensor, keys: Tensor, position: int) -> Tensor:
        """One token's heads BF16 [n, d], not turned yet, over the keys that it sees, with sinks; turned back, BF16."""
        turned = round_to_bf16(self.turn(q, position)).double()
        powers = torch.exp(turned @ keys.t() / math.sqrt(self.config.head_dim))
        sinks = torch.exp(self.tensor("attn_sink"))
        out = powers @ keys / (powers.sum(-1) + sinks)[:, None]
        return round_to_bf16(self.turn(out, position, sign=-1))

    def projected(self, heads: Tensor) -> Tensor:
        """BF16 [T, n, d] through the projections of the groups and the last one: float64 [T, H]."""
        groups = self.config.o_groups
        out = heads.reshape(len(heads), groups, -1)
        wo_a = self.matrix("wo_a").view(groups, self.config.o_lora_rank, -1)
        grouped = [round_to_bf16(through_fp8(out[:, g], self.block) @ wo_a[g].t()) for g in range(groups)]
        return self.fp8("wo_b", torch.cat(grouped, dim=-1))
