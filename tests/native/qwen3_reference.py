"""Qwen3 written out from its definition in float64: one prompt, no cache, no fused weights, no sharding.

BF16 where the model stores BF16. Shares nothing with the stack but the reader of the files.
"""

import math

import torch

from workloads.loading.checkpoint import CheckpointReader
from workloads.models.qwen3.config import Qwen3Config

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return bf16(x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double())


def fp4(packed: torch.Tensor) -> torch.Tensor:
    """Values of two codes a byte, the low nibble first."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0).double()


def nearest_fp4(x: torch.Tensor) -> torch.Tensor:
    """Ties towards zero."""
    distance = (x.abs().unsqueeze(-1) - E2M1).abs()
    return E2M1[distance.argmin(-1)] * x.sign()


class Reference:
    """The model of one checkpoint."""

    def __init__(self, reader: CheckpointReader, config: Qwen3Config) -> None:
        self.read, self.c = reader.get, config

    def log_probabilities(self, token_ids: list[int]) -> torch.Tensor:
        """Of what follows the prompt, float64 [vocab]."""
        c, embedding = self.c, self.read("model.embed_tokens.weight").double()
        x = embedding[token_ids]
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}."
            x = bf16(x + self.attention(self.normed(x, f"{prefix}input_layernorm"), f"{prefix}self_attn."))
            normed = self.normed(x, f"{prefix}post_attention_layernorm")
            x = bf16(x + (self.moe if c.num_experts else self.mlp)(normed, f"{prefix}mlp."))
        last = self.normed(x, "model.norm")[-1]
        head = embedding if c.tie_word_embeddings else self.read("lm_head.weight").double()
        return bf16(head @ last).log_softmax(-1)

    def normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.read(f"{name}.weight"), self.c.rms_norm_eps)

    def matrix(self, stem: str) -> torch.Tensor:
        weight = self.read(f"{stem}.weight")
        if self.c.quantization == "bf16":
            return weight.double()
        if self.c.quantization == "fp8":
            scales = self.read(f"{stem}.weight_scale_inv").double()
            return weight.double() * torch.kron(scales, torch.ones(128, 128, dtype=torch.float64))
        scales = self.read(f"{stem}.weight_scale").double()
        values = fp4(weight) * scales.repeat_interleave(16, 1)
        return values * self.read(f"{stem}.weight_scale_2").double()

    def seen(self, x: torch.Tensor, *stems: str) -> torch.Tensor:
        """What matrices that share an input see of it."""
        if self.c.quantization == "bf16":
            return x
        if self.c.quantization == "fp8":
            groups = x.unflatten(-1, (-1, 128))
            scale = (groups.abs().amax(-1, keepdim=True).clamp(min=1e-10).float() / 448).double()
            return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)
        common = max(self.read(f"{stem}.input_scale").double() for stem in stems)
        groups = x.unflatten(-1, (-1, 16))
        scale = (groups.abs().amax(-1, keepdim=True) / (6 * common)).clamp(2.0**-9, 448)
        scale = scale.float().to(torch.float8_e4m3fn).double() * common
        return (nearest_fp4(groups / scale) * scale).flatten(-2)

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        c, tokens = self.c, len(x)
        names = [f"{prefix}{n}_proj" for n in "qkv"]
        seen = self.seen(x, *names)
        q, k, v = (bf16(seen @ self.matrix(n).T).unflatten(1, (-1, c.head_dim)) for n in names)
        q, k = self.turned(self.normed(q, f"{prefix}q_norm")), self.turned(self.normed(k, f"{prefix}k_norm"))
        k, v = (t.repeat_interleave(c.num_heads // c.num_key_value_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
        scores += torch.full((tokens, tokens), -math.inf, dtype=torch.float64).triu(1)
        out = bf16(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)).flatten(1)
        return bf16(self.seen(out, f"{prefix}o_proj") @ self.matrix(f"{prefix}o_proj").T)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.c.head_dim // 2
        angles = torch.outer(
            torch.arange(len(x)).double(), self.c.rope_theta ** -(torch.arange(half).double() / half)
        )
        turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        turned = torch.complex(x[..., :half], x[..., half:]) * turns
        return bf16(torch.cat([turned.real, turned.imag], dim=-1))

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        return bf16(self.inner(x, prefix))

    def inner(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        names = [f"{prefix}{n}_proj" for n in ("gate", "up")]
        gate, up = (bf16(self.seen(x, *names) @ self.matrix(name).T) for name in names)
        hidden = bf16(gate / (1 + (-gate).exp()) * up)
        return self.seen(hidden, f"{prefix}down_proj") @ self.matrix(f"{prefix}down_proj").T

    def moe(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        probabilities = (x @ self.read(f"{prefix}gate.weight").double().T).softmax(-1)
        chosen, experts = probabilities.topk(self.c.num_experts_per_token)
        weights = chosen / chosen.sum(-1, keepdim=True)
        rows = []
        for t, row in enumerate(experts.tolist()):
            parts = [self.inner(x[t : t + 1], f"{prefix}experts.{e}.") for e in row]
            rows.append(torch.einsum("k,kh->h", weights[t], torch.cat(parts)))
        return bf16(torch.stack(rows))
