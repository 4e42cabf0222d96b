"""DSpark drafters against plain float64 computations from the checkpoint's tensors, written for this test."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from dspark_engine import NEW, OLD, TOYS, start, stored
from torch import Tensor

from workloads.kernels.quantization import dequantize_mxfp4
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.dspark.drafter import BlockDrafter
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.parallel import ALONE
from workloads.models.vision import VisionWrapper

Deepseek = DeepseekV4Config | DeepseekV41Config
IDS = [(7 * i) % 251 for i in range(40)]  # longer than the window of DeepSeek-V4
Stored = Callable[[str], Tensor]


def wide(get: Stored) -> Stored:
    return lambda name: get(name).to(torch.float64)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def turned(x: Tensor, angles: Tensor, sign: int = 1) -> Tensor:
    """The last channels of x [T, ..., W] as complex numbers (even, odd) times e^(i * angle), angles [T, D/2]."""
    width = 2 * angles.shape[-1]
    pairs = torch.view_as_complex(torch.unflatten(x[..., -width:].contiguous(), -1, (-1, 2)))
    spin = torch.polar(torch.ones_like(angles), sign * angles)
    spun = pairs * spin.view(len(x), *(1,) * (x.dim() - 2), -1)
    return torch.cat([x[..., :-width], torch.view_as_real(spun).flatten(-2)], dim=-1)


class Seen:
    """What the target's layers gave out for IDS, seen from outside; the drafter, and what it makes of a block."""

    def __init__(self, name: str, weights: str) -> None:
        self.engine = start(name, weights)
        self.config = TOYS[name]
        draft, target = self.engine.roots()["draft"], self.engine.roots()["target"]
        assert isinstance(draft, BlockDrafter)
        text = target.language_model if isinstance(target, VisionWrapper) else target
        after: dict[int, Tensor] = {}

        def note(number: int) -> Callable[..., None]:
            def hook(module: torch.nn.Module, given: tuple[object, ...], out: object) -> None:
                stream = given[0]
                if isinstance(stream, Tensor) and isinstance(out, tuple):
                    after[number] = stream  # DeepSeek-V4.1 reads what goes in, after Engram
                else:
                    after[number] = out if isinstance(out, Tensor) else stream.prefix.clone()  # type: ignore[attr-defined]

            return hook

        hooks = [
            layer.register_forward_hook(note(int(number)))
            for number, layer in text.get_submodule("model.layers").named_children()
        ]
        self.anchor, cpu = 77, torch.device("cpu")
        with torch.no_grad():
            batch = Batch(IDS, [Segment(0, 0, len(IDS), 0)], ALONE, cpu)
            hidden = target(batch, self._caches("target"))
            shifted = Batch([*IDS[1:], self.anchor], batch.segments, ALONE, cpu)
            drafted = draft(shifted, hidden, self._caches("draft"))
            rows = torch.tensor([len(IDS) - 1])
            [self.proposed] = draft.proposals(drafted, rows, shifted, self._caches("draft"))
            block, _ = self._block(draft, shifted, rows)
            embedded = draft.embed_tokens(block.token_ids)
            self.states = draft.draft(embedded, block, self._caches("draft")).to(torch.float64)
        for hook in hooks:
            hook.remove()
        taps = [after[layer].to(torch.float64) for layer in self.config.dspark_target_layer_ids]
        self.taps = torch.cat([tap.mean(1) if tap.dim() == 3 else tap for tap in taps], dim=-1)
        self.block = [self.anchor, *[self.config.dspark_mask_token_id] * (self.config.dspark_block_size - 1)]
        self.positions = torch.arange(len(IDS) + len(self.block), dtype=torch.float64)

    def _caches(self, root: str) -> list[object]:
        return self.engine._caches[root]

    def _block(self, draft: BlockDrafter, batch: Batch, rows: Tensor) -> tuple[Batch, Tensor]:
        anchors = batch.token_ids[rows]
        return draft._block(anchors.tolist(), rows.tolist(), batch), anchors


def proposals(logits: Tensor, w1: Tensor, w2: Tensor, anchor: int) -> list[int]:
    """Of logits [K, vocab], the likeliest token after the one before it."""
    chosen = []
    for row in logits:
        anchor = int((row + w2 @ w1[anchor]).argmax())
        chosen.append(anchor)
    return chosen


def close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).norm() < 0.02 * want.norm())


def yarn(dim: int, theta: float, factor: float, original: int, fast: float, slow: float) -> Tensor:
    angles = torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    turns = [dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta)) for beta in (fast, slow)]
    low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), dim - 1)
    for i in range(dim // 2):
        stretched = min(max((i - low) / max(high - low, 0.001), 0), 1)
        angles[i] *= stretched / factor + 1 - stretched
    return angles


@pytest.mark.parametrize("weights", [OLD, NEW])
def test_the_mla_drafter_of_kimi_k3(weights: str) -> None:
    seen, get = Seen("kimi_k3", weights), wide(stored("kimi_k3", weights))
    c: KimiK3Config = seen.config
    eps, n, latent = c.rms_norm_eps, c.dspark_num_heads, c.kv_lora_rank
    frequencies = yarn(
        c.qk_rope_head_dim,
        c.dspark_rope_theta,
        c.dspark_rope_factor,
        c.dspark_rope_original_positions,
        c.dspark_rope_beta_fast,
        c.dspark_rope_beta_slow,
    )
    angles = seen.positions[:, None] * frequencies
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * (
        0.1 * math.log(c.dspark_rope_factor) + 1
    ) ** 2
    context = rms(seen.taps @ get("context_proj.weight").T, get("context_norm.weight"), eps)
    x = get("language_model.model.embed_tokens.weight")[seen.block]
    for layer in range(c.num_dspark_layers):
        at = f"layers.{layer}."
        w = {key: get(f"{at}self_attn.{key}.weight") for key in ("q_a_proj", "q_a_layernorm", "q_b_proj")}
        w |= {key: get(f"{at}self_attn.{key}.weight") for key in ("kv_a_proj_with_mqa", "kv_a_layernorm")}
        h = rms(x, get(f"{at}input_layernorm.weight"), eps)
        q = (rms(h @ w["q_a_proj"].T, w["q_a_layernorm"], eps) @ w["q_b_proj"].T).view(len(x), n, -1)
        q = turned(q, angles[len(IDS) :])
        kv = torch.cat([context, h]) @ w["kv_a_proj_with_mqa"].T
        shared = turned(kv[:, latent:], angles)
        expanded = rms(kv[:, :latent], w["kv_a_layernorm"], eps) @ get(f"{at}self_attn.kv_b_proj.weight").T
        keys, values = expanded.view(len(kv), n, -1).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        keys = torch.cat([keys, shared[:, None].expand(-1, n, -1)], dim=-1)
        weights_of = (torch.einsum("qnd,knd->nqk", q, keys) * scale).softmax(-1)
        x = (
            x
            + torch.einsum("nqk,knv->qnv", weights_of, values).flatten(1)
            @ get(f"{at}self_attn.o_proj.weight").T
        )
        h = rms(x, get(f"{at}post_attention_layernorm.weight"), eps)
        gate, up = (h @ get(f"{at}mlp.{name}_proj.weight").T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ get(f"{at}mlp.down_proj.weight").T
    x = rms(x, get("final_norm.weight"), eps)
    assert close(seen.states, x)
    logits = seen.states @ get("language_model.lm_head.weight").T
    w1, w2 = (get(f"markov_head.{name}.weight") for name in ("markov_w1", "markov_w2"))
    assert seen.proposed == proposals(logits, w1, w2, seen.anchor)


def matrix(get: Stored, stem: str, block: int) -> Tensor:
    """An FP8 matrix with a scale for every block of rows and columns."""
    weight, scale = get(f"{stem}.weight"), get(f"{stem}.scale")
    rows, columns = weight.shape
    scales = (
        scale.to(torch.float32).repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    )
    return weight.to(torch.float64) * scales.to(torch.float64)


def mixed(x: Tensor, w: Mapping[str, Tensor], c: Deepseek) -> tuple[Tensor, Tensor, Tensor]:
    """What a sublayer reads of the copies [T, c, H] and how its output goes back: pre, post [T, c], comb [T, c, c]."""
    n, flat = c.hc_mult, x.flatten(1)
    m = (flat @ w["fn"].T) / torch.sqrt((flat**2).mean(-1, keepdim=True) + c.rms_norm_eps)
    pre = torch.sigmoid(m[:, :n] * w["scale"][0] + w["base"][:n]) + c.hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * w["scale"][1] + w["base"][n : 2 * n])
    comb = (m[:, 2 * n :] * w["scale"][2] + w["base"][2 * n :]).view(-1, n, n).softmax(-1) + c.hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
    for _ in range(c.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
    return pre, post, comb


def experts(x: Tensor, get: Stored, at: str, c: Deepseek, block: int) -> Tensor:
    """Routed and shared experts of every token [T, H]."""

    def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        gate, up = (x @ w1.T).clamp(max=c.swiglu_limit), (x @ w3.T).clamp(-c.swiglu_limit, c.swiglu_limit)
        return (silu(gate) * up * weight) @ w2.T

    def fp4(stem: str) -> Tensor:
        packed, scale = get(f"{stem}.weight").view(torch.uint8), get(f"{stem}.scale").view(torch.uint8)
        return dequantize_mxfp4(packed, scale).to(torch.float64)

    shared = [matrix(get, f"{at}shared_experts.w{i}", block) for i in (1, 2, 3)]
    out = swiglu(x, *shared)
    scores = torch.sqrt(torch.log1p(torch.exp(x @ get(f"{at}gate.weight").to(torch.float64).T)))
    best = (scores + get(f"{at}gate.bias").to(torch.float64)).topk(c.num_experts_per_token).indices
    chosen = scores.gather(1, best)
    chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
    for token, (numbers, factors) in enumerate(zip(best.tolist(), chosen, strict=True)):
        for number, factor in zip(numbers, factors, strict=True):
            w1, w2, w3 = (fp4(f"{at}experts.{number}.w{i}") for i in (1, 2, 3))
            out[token] += swiglu(x[token], w1, w2, w3, factor)
    return out


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41"])
def test_the_window_drafters_of_deepseek(name: str) -> None:
    """Hyper-connections act at once, and a head collapses the copies; or one sublayer later, and what the last sublayer
    found collapses them."""
    seen, raw = Seen(name, OLD), stored(name)
    get, c = wide(raw), seen.config
    assert isinstance(c, Deepseek)
    delayed = isinstance(c, DeepseekV41Config)
    of_experts, block = (c.of_drafter(), 32) if isinstance(c, DeepseekV41Config) else (c, 128)
    eps, d, rope, groups = c.rms_norm_eps, c.head_dim, c.qk_rope_head_dim, c.o_groups
    frequencies = torch.tensor(
        [c.rope_theta ** (-2 * i / rope) for i in range(rope // 2)], dtype=torch.float64
    )
    angles = seen.positions[:, None] * frequencies
    context = rms(seen.taps @ matrix(raw, "mtp.0.main_proj", block).T, get("mtp.0.main_norm.weight"), eps)
    own = angles[len(IDS) :]
    x = get("embed.weight")[seen.block][:, None].repeat(1, c.hc_mult, 1)
    before = torch.eye(c.hc_mult, dtype=torch.float64)[0].repeat(len(x), 1)
    for stage in range(c.num_dspark_layers):
        at = f"mtp.{stage}."
        pre, post, comb = mixed(x, {key: get(f"{at}hc_attn_{key}") for key in ("fn", "scale", "base")}, c)
        h = rms(((before if delayed else pre)[..., None] * x).sum(1), get(f"{at}attn_norm.weight"), eps)
        before = pre
        q = rms(h @ matrix(raw, f"{at}attn.wq_a", block).T, get(f"{at}attn.q_norm.weight"), eps)
        q = (q @ matrix(raw, f"{at}attn.wq_b", block).T).view(len(x), c.num_heads, d)
        q = turned(q if delayed else q / torch.sqrt((q**2).mean(-1, keepdim=True) + eps), own)
        kv = rms(
            torch.cat([context, h]) @ matrix(raw, f"{at}attn.wkv", block).T,
            get(f"{at}attn.kv_norm.weight"),
            eps,
        )
        keys = turned(kv, angles)[len(IDS) - c.sliding_window :]
        scores = torch.einsum("qnd,kd->nqk", q, keys) * d**-0.5
        sink = get(f"{at}attn.attn_sink").view(-1, 1, 1).expand(-1, len(x), 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        o = turned(torch.einsum("nqk,kd->qnd", weights, keys), own, sign=-1).reshape(len(x), groups, -1)
        lora = matrix(raw, f"{at}attn.wo_a", block).view(groups, c.o_lora_rank, -1)
        out = torch.einsum("tgi,goi->tgo", o, lora).flatten(1) @ matrix(raw, f"{at}attn.wo_b", block).T
        x = post[..., None] * out[:, None] + torch.einsum("tjk,tjh->tkh", comb, x)
        pre, post, comb = mixed(x, {key: get(f"{at}hc_ffn_{key}") for key in ("fn", "scale", "base")}, c)
        h = rms(((before if delayed else pre)[..., None] * x).sum(1), get(f"{at}ffn_norm.weight"), eps)
        before = pre
        out = experts(h, raw, f"{at}ffn.", of_experts, block)
        x = post[..., None] * out[:, None] + torch.einsum("tjk,tjh->tkh", comb, x)
    last, head = f"mtp.{c.num_dspark_layers - 1}.", before
    if not delayed:
        flat = x.flatten(1)
        m = flat @ get(f"{last}hc_head_fn").T / torch.sqrt((flat**2).mean(-1, keepdim=True) + eps)
        head = torch.sigmoid(m * get(f"{last}hc_head_scale") + get(f"{last}hc_head_base")) + c.hc_eps
    assert (
        seen.states - (head[..., None] * x).sum(1)
    ).norm() < 0.06 * seen.states.norm()  # FP8 and FP4 activations
    logits = rms(seen.states, get(f"{last}norm.weight"), eps) @ get("head.weight").T
    markov = ("embed", "head") if delayed else ("markov_w1", "markov_w2")
    w1, w2 = (get(f"{last}markov_head.{one}.weight") for one in markov)
    likeliest = proposals(logits, w1, w2, seen.anchor)
    of_previous = torch.stack([w1[token] for token in (seen.anchor, *likeliest[:-1])])
    confidence = torch.sigmoid(
        torch.cat([seen.states, of_previous], dim=-1) @ get(f"{last}confidence_head.proj.weight")[0]
    )
    sure = (confidence >= c.dspark_min_confidence).tolist()
    assert seen.proposed == likeliest[: sure.index(False) if False in sure else len(sure)]
