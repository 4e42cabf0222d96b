"""OpenPangu against plain float64 formulas, and its sinks' keys on every way that weights arrive."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_families import VARIANTS, checkpoint, relative, whole_prompt, widened
from family_engine import make_spec, roots_of_rank, start_engine
from k3_engine import NEW, OLD, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.models.openpangu.attention import SinkAttention
from workloads.models.tower import tower_features
from workloads.models.vision import VisionWrapper
from workloads.spec import Checkpoint

Tensor = torch.Tensor
TEXT, VL = VARIANTS["openpangu"], VARIANTS["openpangu_vl"]
IDS = [256, 3, 77, 301, 12, 12, 250, 499]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openpangu")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + TEXT.rms_norm_eps).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """[T, N, D]: channel i and channel i + D/2 as a complex number, turned by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * TEXT.rope_theta ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def sinks_as_defined(sink: Tensor, norm: Tensor) -> Tensor:
    return rms(sink, norm)


def attention(x: Tensor, w: dict[str, Tensor], at: str, sinks: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Head by head and query by query."""
    c, norm = TEXT, w[f"{at}k_layernorm.weight"]
    q, k, v = ((x @ w[f"{at}{name}_proj.weight"].t()).view(len(x), -1, c.head_dim) for name in "qkv")
    q, k = rotated(q), rotated(rms(k, norm))
    sink_key, sink_value = sinks(w[f"{at}param_sink_key"], norm), w[f"{at}param_sink_value"]
    out = torch.zeros_like(q)
    for head in range(c.num_heads):
        shared = head // (c.num_heads // c.num_kv_heads)
        for t in range(len(x)):
            keys = torch.cat([sink_key[:, shared], k[: t + 1, shared]])
            values = torch.cat([sink_value[:, shared], v[: t + 1, shared]])
            out[t, head] = torch.softmax(keys @ q[t, head] / c.head_dim**0.5, 0) @ values
    return out.flatten(1) @ w[f"{at}o_proj.weight"].t()


def layer(
    x: Tensor, w: dict[str, Tensor], at: str, sinks: Callable[[Tensor, Tensor], Tensor] = sinks_as_defined
) -> Tensor:
    x = x + attention(rms(x, w[f"{at}input_layernorm.weight"]), w, f"{at}self_attn.", sinks)
    y = rms(x, w[f"{at}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{at}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
    return x + (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].t()


def target(
    x: Tensor, w: dict[str, Tensor], prefix: str, sinks: Callable[[Tensor, Tensor], Tensor] = sinks_as_defined
) -> Tensor:
    for number in range(TEXT.num_layers):
        x = layer(x, w, f"{prefix}model.layers.{number}.", sinks)
    return rms(x, w[f"{prefix}model.norm.weight"])


def test_the_text_model_and_its_drafter_are_the_formulas(folder: Path) -> None:
    where = checkpoint(folder, "openpangu")
    engine, w = start_engine(where, TEXT), widened(where)
    batch = whole_prompt(IDS[:-1])
    with torch.no_grad():
        hidden = engine.roots()["target"](batch, engine._caches["target"])
        drafted = engine.roots()["draft"](whole_prompt(IDS[1:]), hidden, engine._caches["draft"])
        logits = engine.roots()["target"].logits(hidden, torch.arange(len(IDS) - 1), batch)
    expected = target(w["model.embed_tokens.weight"][IDS[:-1]], w, "")
    assert relative(hidden, expected) < 0.02
    assert relative(logits, expected @ w["lm_head.weight"].t()) < 0.02
    at = f"model.layers.{TEXT.num_layers}."
    embedded = w["model.embed_tokens.weight"][IDS[1:]].clone()
    embedded[0] = 0  # no embedding at the first position
    sides = [rms(embedded, w[f"{at}enorm.weight"]), rms(hidden.double(), w[f"{at}hnorm.weight"])]
    joined = torch.cat(sides, dim=1) @ w[f"{at}eh_proj.weight"].t()
    assert relative(drafted, rms(layer(joined, w, at), w[f"{at}shared_head.norm.weight"])) < 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        lambda sink, norm: sink,
        lambda sink, norm: rotated(rms(sink, norm)),
        lambda sink, norm: rms(sink, norm)[:0],
    ],
    ids=["not normed", "rotated", "none"],
)
def test_the_formulas_tell_other_sinks_apart(folder: Path, wrong: Callable[[Tensor, Tensor], Tensor]) -> None:
    w = widened(checkpoint(folder, "openpangu"))
    if not len(wrong(torch.ones(1, 1, 16), torch.ones(16))):
        w |= {name: t[:0] for name, t in w.items() if name.endswith("param_sink_value")}
    x = w["model.embed_tokens.weight"][IDS]
    right = target(x, widened(checkpoint(folder, "openpangu")), "")
    assert relative(target(x, w, "", wrong), right) > 0.04  # twice what rounding may do


def test_the_vision_wrapper_puts_projected_features_in_place_of_image_tokens(folder: Path) -> None:
    where = checkpoint(folder, "openpangu_vl")
    engine, w = start_engine(where, VL), widened(where)
    first = VL.image_token_start + VL.image_lengths[0]  # the second image's first patch
    ids = [65, first, first + 1, first + 2, 66]
    features = tower_features(1, VL.image_lengths[1], VL.vision_hidden_size, torch.device("cpu")).double()
    patches = rms(features, w["visual.merger.norm.weight"]) @ w["visual.merger.proj.weight"].t()
    x = w["language_model.model.embed_tokens.weight"][ids].clone()
    x[1:4] = patches[:3]
    with torch.no_grad():
        hidden = engine.roots()["target"](whole_prompt(ids), engine._caches["target"])
    assert relative(hidden, target(x, w, "language_model.")) < 0.02
    as_text = target(w["language_model.model.embed_tokens.weight"][ids], w, "language_model.")
    assert relative(hidden, as_text) > 0.2


def attentions(engine: NativeEngine) -> list[SinkAttention]:
    modules = [module for root in engine.roots().values() for module in root.modules()]
    return [module for module in modules if isinstance(module, SinkAttention)]


def wrong_sinks(engine: NativeEngine) -> int:
    """Layers of all roots whose sink key is not the norm of what they hold."""
    found = attentions(engine)
    assert len(found) == 3
    right = (rms(m.param_sink_key.double(), m.k_layernorm.weight.double()) for m in found)
    pairs = zip(found, right, strict=True)
    return sum(not bool((m.sink_key.double() - key).abs().le(key.abs() / 250).all()) for m, key in pairs)


@pytest.mark.parametrize("variant", ["openpangu", "openpangu_vl"])
@pytest.mark.parametrize("start", ["safetensors", "streamed", "dummy"])
@pytest.mark.parametrize("update", ["layerwise", "direct"])
def test_every_path_leaves_the_sink_keys_of_every_root_fresh(
    folder: Path, variant: str, start: str, update: str
) -> None:
    engine = start_engine(checkpoint(folder, variant), VARIANTS[variant], OLD, start)
    assert wrong_sinks(engine) == 0
    places = [module.sink_key.data_ptr() for module in attentions(engine)]
    engine.update(NEW, update)
    assert wrong_sinks(engine) == 0
    assert [module.sink_key.data_ptr() for module in attentions(engine)] == places


@pytest.mark.parametrize("source", ["k_layernorm.weight", "param_sink_key"])
@pytest.mark.parametrize("update", ["layerwise", "direct"])
def test_either_source_alone_refreshes_them(folder: Path, source: str, update: str) -> None:
    spec = make_spec(checkpoint(folder, "openpangu"), TEXT)
    name = f"model.layers.1.self_attn.{source}"
    spec.checkpoints[NEW] = Checkpoint(perturbation="one_tensor", perturbation_target=name)
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "safetensors")
    before = [module.sink_key.clone() for module in attentions(engine)]
    engine.update(NEW, update)
    same = [torch.equal(module.sink_key, old) for module, old in zip(attentions(engine), before, strict=True)]
    assert same == [True, False, True]
    assert wrong_sinks(engine) == 0


@pytest.mark.parametrize("variant", ["openpangu", "openpangu_vl"])
@pytest.mark.parametrize("update", ["layerwise", "direct"])
def test_without_the_hook_every_layer_of_every_root_is_wrong(
    folder: Path, variant: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update the old keys; after a dummy start what was there before."""
    where, config = checkpoint(folder, variant), VARIANTS[variant]
    engine = start_engine(where, config, OLD)
    for root in engine.roots().values():
        monkeypatch.setattr(root, "process_weights_after_loading", lambda: None)
    engine.update(NEW, update)
    assert wrong_sinks(engine) == 3
    said = generate(engine, prompts(9), 3)
    assert said != generate(start_engine(where, config, NEW), prompts(9), 3)
    monkeypatch.setattr("workloads.loading.loader.Loader.finalize", lambda self: None)
    assert wrong_sinks(start_engine(where, config, OLD, "dummy")) == 3


def test_the_wrapper_s_hook_is_the_language_model_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine(checkpoint(folder, "openpangu_vl"), VL)
    wrapper = engine.roots()["target"]
    assert isinstance(wrapper, VisionWrapper)
    calls: list[str] = []
    own = wrapper.language_model.process_weights_after_loading
    monkeypatch.setattr(
        wrapper.language_model, "process_weights_after_loading", lambda: (calls.append("hook"), own())
    )
    for update in ("layerwise", "direct"):
        engine.update(NEW, update)
    assert calls == ["hook"] * 2


def test_ranks_hold_the_sinks_of_their_heads(folder: Path) -> None:
    shapes = set()
    for rank in range(4):
        for root in roots_of_rank(TEXT, tp=4, rank=rank).values():
            for module in root.modules():
                if isinstance(module, SinkAttention):
                    (placement,) = module.weights["param_sink_key"].placements
                    assert placement.source_region == ((0, 6), (rank, 1), (0, 16))
                    shapes.add(tuple(module.sink_key.shape))
    assert shapes == {(6, 1, 16)}
