"""What gpt-oss says is what its published formulas give."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_oss_engine import TOY, start_engine
from k3_engine import evidence, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.kernels.quantization import dequantize_mxfp4
from workloads.loading.checkpoint import CheckpointReader, open_checkpoint
from workloads.loading.generate import generate_checkpoint
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.spec import Sampling

LENGTHS = (1, 5, 20)  # the last is longer than the window of 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("gpt_oss") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> NativeEngine:
    return start_engine(checkpoint, max_requests=32)


def test_a_token_outside_of_every_window_still_counts(engine: NativeEngine) -> None:
    """Odd layers see all keys: the first of 20 tokens changes the answer, two layers and a window of 6 later."""
    [prompt] = prompts(20)
    other = Prompt(prompt.id, (prompt.token_ids[0] + 1, *prompt.token_ids[1:]))
    assert generate(engine, [prompt]) != generate(engine, [other])


# A second forward pass, written from the published description, in float64 but for BF16 where the model stores it.


def plain(reader: CheckpointReader, name: str) -> torch.Tensor:
    return reader.get(name).double()


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return bf16(x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight)


def rotated(x: torch.Tensor, c: GptOssConfig) -> torch.Tensor:
    low, high = (
        c.head_dim / 2 * math.log(4096 / (turns * 2 * math.pi)) / math.log(c.rope_theta) for turns in (32, 1)
    )
    out = torch.empty_like(x)
    for i in range(c.head_dim // 2):
        frequency = c.rope_theta ** (-2 * i / c.head_dim)
        blend = min(max((i - low) / (high - low), 0.0), 1.0)
        frequency = frequency / 32 * blend + frequency * (1 - blend)
        for t in range(len(x)):
            turn = torch.exp(torch.tensor(1j * t * frequency, dtype=torch.complex128)) * (
                0.1 * math.log(32) + 1
            )
            pair = torch.complex(x[t, :, i], x[t, :, i + c.head_dim // 2]) * turn
            out[t, :, i], out[t, :, i + c.head_dim // 2] = pair.real, pair.imag
    return bf16(out)


def attention(reader: CheckpointReader, prefix: str, x: torch.Tensor, window: int | None) -> torch.Tensor:
    c = TOY

    def project(name: str, heads: int) -> torch.Tensor:
        weight, bias = plain(reader, f"{prefix}{name}.weight"), plain(reader, f"{prefix}{name}.bias")
        return bf16(x @ weight.T + bias).view(len(x), heads, c.head_dim)

    q, k = rotated(project("q_proj", c.num_heads), c), rotated(project("k_proj", c.num_key_value_heads), c)
    v, sinks = project("v_proj", c.num_key_value_heads), plain(reader, f"{prefix}sinks")
    out = torch.empty_like(q)
    for t in range(len(x)):
        for head in range(c.num_heads):
            of = head * c.num_key_value_heads // c.num_heads
            first = 0 if window is None else max(0, t - window + 1)
            scores = k[first : t + 1, of] @ q[t, head] / math.sqrt(c.head_dim)
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            out[t, head] = weights @ v[first : t + 1, of]
    merged = bf16(out).flatten(1)
    return bf16(merged @ plain(reader, f"{prefix}o_proj.weight").T + plain(reader, f"{prefix}o_proj.bias"))


def experts(reader: CheckpointReader, prefix: str, x: torch.Tensor) -> torch.Tensor:
    c = TOY
    logits = x @ plain(reader, f"{prefix}router.weight").T + plain(reader, f"{prefix}router.bias")
    best = logits.topk(c.num_experts_per_token, dim=-1)
    weights = best.values.softmax(-1).float().double()
    pieces = {
        name: reader.get(f"{prefix}experts.{name}")
        for matrix in ("gate_up_proj", "down_proj")
        for name in (f"{matrix}_blocks", f"{matrix}_scales", f"{matrix}_bias")
    }
    alpha = float(torch.tensor(1.702))
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(best.indices[t].tolist(), weights[t], strict=True):
            gate_up, down = (
                dequantize_mxfp4(pieces[f"{m}_blocks"][e].flatten(-2), pieces[f"{m}_scales"][e])
                for m in ("gate_up_proj", "down_proj")
            )
            both = gate_up @ x[t] + pieces["gate_up_proj_bias"][e]
            gate, up = both[0::2].clamp(max=7), both[1::2].clamp(-7, 7)
            hidden = bf16(gate / (1 + torch.exp(-alpha * gate)) * (up + 1))
            out[t] += weight * (down @ hidden + pieces["down_proj_bias"][e])
    return bf16(out)


def next_token(reader: CheckpointReader, ids: tuple[int, ...]) -> tuple[int, float]:
    """The most probable token after `ids` and its log-probability."""
    x = plain(reader, "model.embed_tokens.weight")[list(ids)]
    for layer in range(TOY.num_layers):
        prefix = f"model.layers.{layer}."
        normed = rms(x, plain(reader, f"{prefix}input_layernorm.weight"))
        x = bf16(
            x
            + attention(reader, f"{prefix}self_attn.", normed, TOY.sliding_window if layer % 2 == 0 else None)
        )
        normed = rms(x, plain(reader, f"{prefix}post_attention_layernorm.weight"))
        x = bf16(x + experts(reader, f"{prefix}mlp.", normed))
    hidden = rms(x, plain(reader, "model.norm.weight"))[-1]
    logprobs = bf16(plain(reader, "lm_head.weight") @ hidden).log_softmax(-1)
    return int(logprobs.argmax()), float(logprobs.max())


@pytest.mark.parametrize("length", LENGTHS)
def test_generations_are_those_of_the_published_formulas(
    engine: NativeEngine, checkpoint: Path, length: int
) -> None:
    """Bit for bit as far as a last digit before a rounding does not matter: hidden states are BF16 everywhere."""
    [prompt] = prompts(length)
    said: list[tuple[Any, ...]] = evidence(engine.generate([prompt], Sampling(max_new_tokens=2)))
    tokens, logprobs = said[0][2], said[0][3]
    reader, ids = open_checkpoint(checkpoint), prompt.token_ids
    for token, best in zip(tokens, logprobs, strict=True):
        expected, logprob = next_token(reader, ids)
        assert token == expected
        assert best[0][1] == pytest.approx(logprob, abs=1e-5)
        ids = (*ids, token)
