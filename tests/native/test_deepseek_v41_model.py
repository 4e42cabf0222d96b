"""DeepSeek-V4.1: what its layers hand on, what Engram finds, what is padded and permuted, and how that goes wrong."""

from collections.abc import Iterator

import pytest
import torch
from deepseek_v41_toy import TOY
from families import NEW, OLD, checkpoint, fresh, start_toy, toy_spec
from k3_engine import different, held_bytes
from torch import Tensor

from workloads.engines.native import NativeEngine
from workloads.kernels.activations import SwigluParameters
from workloads.kernels.engram import compressed_ids, hash_multipliers
from workloads.kernels.fp8_blocks import through_fp8
from workloads.kernels.quantization import decode_e8m0, dequantize_fp8_tiles, quantize_fp8_rows
from workloads.kernels.shared_expert import SharedWeights, shared_rows
from workloads.loading.checkpoint import open_checkpoint
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.mhc import HyperConnection
from workloads.models.deepseek_v41.attention import Shared
from workloads.models.deepseek_v41.fused import InKernelOrder
from workloads.models.deepseek_v41.hashing import head_sizes
from workloads.models.deepseek_v41.model import DeepseekV41Model
from workloads.models.parallel import ALONE

NAME = "deepseek_v41"
IMAGE = TOY.image_token_start
COPIES = TOY.hc_mult
TAPS = frozenset({4, 5})  # layers that a drafter would read, one of them with Engram


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    with torch.no_grad():
        yield start_toy(NAME)


@pytest.fixture(scope="module")
def model(engine: NativeEngine) -> DeepseekV41Model:
    found = engine.roots()["target"].model
    assert isinstance(found, DeepseekV41Model)
    return found


def batch_of(ids: list[int], start: int = 0) -> Batch:
    return Batch(ids, [Segment(0, start, len(ids), 0)], ALONE, torch.device("cpu"))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def plain_mix(x: Tensor, connection: HyperConnection) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post, comb of every token, from the copies [T, c, H]."""
    fn, scale, base = (p.double() for p in connection.parameters_of_mix())
    flat = x.double().flatten(1)
    m = flat @ fn.t() / (flat.square().mean(-1, keepdim=True) + TOY.rms_norm_eps).sqrt()
    pre, post, comb = m.split([COPIES, COPIES, COPIES**2], dim=1)
    b = base.split([COPIES, COPIES, COPIES**2])
    pre = 1 / (1 + torch.exp(-(pre * scale[0] + b[0]))) + TOY.hc_eps
    post = 2 / (1 + torch.exp(-(post * scale[1] + b[1])))
    comb = torch.softmax((comb * scale[2] + b[2]).view(-1, COPIES, COPIES), -1) + TOY.hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + TOY.hc_eps)
    for _ in range(TOY.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + TOY.hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + TOY.hc_eps)
    return pre, post, comb


def collapsed(x: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, :, None] * x.double()).sum(1).to(torch.bfloat16)


def plain_stack(model: DeepseekV41Model, batch: Batch, delayed: bool) -> Tensor:
    """The copies between sublayers written out; attention, experts and Engram are the model's own. Not `delayed`: every
    sublayer reads the copies with its own coefficients, as in DeepSeek-V4."""
    caches = [layer.make_cache(1, 64) for layer in model.decoder_layers()]
    rows = iter(model.engram_hash(batch, model.engram_hash.make_cache(1)))
    images, shared, taps = model.engram_hash.of_images(batch.token_ids), Shared(), []
    x = model.embed_tokens(batch.token_ids)[:, None].repeat(1, COPIES, 1)
    before = torch.eye(COPIES, dtype=torch.float64)[0].repeat(len(x), 1)
    for number, (layer, cache) in enumerate(zip(model.decoder_layers(), caches, strict=True)):
        if layer.engram is not None:
            x = layer.engram(x, next(rows), images, batch)
        if number in model.taps:
            taps.append(x.double().mean(1).to(torch.bfloat16))
        for connection in (layer.hc_attn, layer.hc_ffn):
            pre, post, comb = plain_mix(x, connection)
            read = collapsed(x, before if delayed else pre)
            if connection is layer.hc_attn:
                table = model.rotary.of(layer.attn.ratio)
                out = layer.attn(layer.attn_norm(read), batch, cache, table, shared).to(torch.bfloat16)
            else:
                out = layer.ffn(layer.ffn_norm(read), images)
            kept = torch.einsum("tjk,tjh->tkh", comb, x.double())
            x = (kept + post[:, :, None] * out.double()[:, None]).to(torch.bfloat16)
            before = pre
    return torch.stack([collapsed(x, before), *taps], dim=1)


def test_coefficients_act_one_sublayer_later_and_taps_are_means_at_entries(
    engine: NativeEngine, model: DeepseekV41Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of([(37 * i) % 250 for i in range(30)])
    target = engine.roots()["target"]
    monkeypatch.setattr(model, "taps", TAPS)  # as with a drafter
    found = target(batch, target.make_caches(1, 64)).double()
    assert found.shape == (30, 1 + len(TAPS), TOY.hidden_size)
    for delayed, bound in ((True, (0.0, 0.01)), (False, (0.05, 2.0))):
        expected = plain_stack(model, batch, delayed).double()
        error = (found - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
        assert ((error >= bound[0]) & (error <= bound[1])).all(), (delayed, error)


def plain_engram(layer: int, ids: list[int], texts: list[str], x: Tensor) -> Tensor:
    """Engram of a layer on the copies x [T, c, H] of a text."""
    reader, name = open_checkpoint(checkpoint(NAME)), f"layers.{layer}.engram."
    compressed, orders = compressed_ids(texts), range(2, TOY.engram_max_ngram_size + 1)
    multipliers = hash_multipliers(layer, TOY.engram_max_ngram_size, max(compressed) + 1)
    padded = [compressed[TOY.engram_pad_token]] * 9 + [compressed[token] for token in ids]
    scales = decode_e8m0(reader.get(f"{name}embed.scale").view(torch.uint8)).repeat_interleave(32, 1)
    table, found = reader.get(f"{name}embed.weight").double() * scales, []
    for t in range(len(ids)):
        rows, offset = [], 0
        for head, size in enumerate(head_sizes(TOY, layer)):
            rolled = 0
            for k in range(orders[head // TOY.engram_num_heads]):
                rolled ^= padded[9 + t - k] * multipliers[k]
            rows.append(table[rolled % size + offset])
            offset += size
        found.append(torch.cat(rows))
    wkv_scales = decode_e8m0(reader.get(f"{name}wkv.scale").view(torch.uint8))
    wkv = dequantize_fp8_tiles(reader.get(f"{name}wkv.weight"), wkv_scales, 32)
    kv = (through_fp8(torch.stack(found).to(torch.bfloat16), 32) @ wkv.t()).to(torch.bfloat16).double()
    keys, value = kv[:, : COPIES * TOY.hidden_size].view(x.shape), kv[:, COPIES * TOY.hidden_size :]
    norm = [tensor / tensor.square().mean(-1, keepdim=True).sqrt() for tensor in (x.double(), keys)]
    weights = reader.get(f"{name}q_weight").double() * reader.get(f"{name}k_weight").double()
    dot = (norm[0] * norm[1] * weights).sum(-1) / TOY.hidden_size**0.5
    gates = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    return (x.double() + gates[:, :, None] * value[:, None]).to(torch.bfloat16)


@pytest.mark.parametrize("pieces", [[20], [1, 1, 7, 1, 10]], ids=["at once", "in pieces"])
def test_engram_equals_the_plain_computation(
    engine: NativeEngine, model: DeepseekV41Model, pieces: list[int]
) -> None:
    ids, texts = [(29 * i) % 120 for i in range(20)], engine.tokenizer.texts(TOY.vocab_size)
    history, x, start = model.engram_hash.make_cache(1), noise(20, COPIES, TOY.hidden_size), 0
    history.recent.fill_(-7)  # a new request must not read what a slot held before
    found: dict[int, list[Tensor]] = {layer: [] for layer in TOY.engram_layers}
    for length in pieces:
        batch = batch_of(ids[start : start + length], start)
        rows = model.engram_hash(batch, history)
        for layer, of_layer in zip(TOY.engram_layers, rows, strict=True):
            engram, none = model.decoder_layers()[layer].engram, torch.zeros(length, dtype=torch.bool)
            found[layer].append(engram(x[start : start + length], of_layer, none, batch))
        start += length
    for layer, outputs in found.items():
        assert torch.equal(torch.cat(outputs), plain_engram(layer, ids, texts, x))


def test_images_break_ngrams_take_nothing_and_are_routed_by_their_own_bias(model: DeepseekV41Model) -> None:
    ids = [65, 66, IMAGE, IMAGE + 1, 67, 68]
    batch, engram_hash = batch_of(ids), model.engram_hash
    images = engram_hash.of_images(batch.token_ids)
    assert images.tolist() == [False, False, True, True, False, False]
    rows, alone = (engram_hash(b, engram_hash.make_cache(1))[0] for b in (batch, batch_of([67, 68])))
    assert torch.equal(rows[4:], alone)
    x = noise(6, COPIES, TOY.hidden_size)
    layer = model.decoder_layers()[TOY.engram_layers[0]]
    changed = (layer.engram(x, rows, images, batch) != x).flatten(1).any(dim=1)
    assert changed.tolist() == [True, True, False, False, True, True]
    gate = layer.ffn.gate
    held = gate.e_score_correction_bias_vl.clone()
    gate.e_score_correction_bias_vl.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    chosen, _ = gate(noise(6, TOY.hidden_size), images)
    gate.e_score_correction_bias_vl.copy_(held)
    assert (chosen.sort(dim=1).values == torch.tensor([0, 1])).all(dim=1).tolist()[2:4] == [True, True]
    assert not (chosen[~images] < 2).all()


def test_padding_of_shared_experts_changes_nothing_unless_it_goes_stale(model: DeepseekV41Model) -> None:
    loaded = model.decoder_layers()[0].ffn.shared_experts.loaded()
    inner, padded = TOY.shared_intermediate_size, TOY.kernel_intermediate_multiple
    assert loaded.l1_weight.shape == (2 * padded, TOY.hidden_size)
    assert loaded.l2_weight.shape == (TOY.hidden_size, padded)
    kept = [*range(inner), *range(padded, padded + inner)]
    bare = SharedWeights(
        loaded.l1_weight.view(torch.uint8)[kept].view(torch.float8_e4m3fn),
        loaded.l1_scale[kept],
        loaded.l2_weight.view(torch.uint8)[:, :inner].contiguous().view(torch.float8_e4m3fn),
        loaded.l2_scale[:, : inner // 32],
    )
    q, scales = quantize_fp8_rows(noise(5, TOY.hidden_size))
    activation = SwigluParameters(TOY.swiglu_limit)
    right = shared_rows(q, scales, bare, activation)
    assert torch.equal(shared_rows(q, scales, loaded, activation), right)
    stale = loaded._replace(l1_scale=loaded.l1_scale.clone())
    stale.l1_scale[inner:padded] = 0xFF  # what fresh memory holds, NaN in E8M0
    assert not torch.equal(shared_rows(q, scales, stale, activation), right)


def test_projections_are_permuted_in_place_once_for_each_load() -> None:
    engine, reader = start_toy(NAME), open_checkpoint(checkpoint(NAME))
    for number, layer in enumerate(engine.roots()["target"].model.decoder_layers()):
        for stem, module in (("wq_b", layer.attn.wq_b), ("wo_a", layer.attn.wo_a)):
            assert isinstance(module, InKernelOrder)
            raw = reader.get(f"layers.{number}.attn.{stem}.weight").view(torch.uint8)
            served = module.weight.detach().view(torch.uint8).clone()
            assert not torch.equal(served, raw)
            assert not torch.equal(module.served_weight(served), raw)  # so that twice is not as good as never
            assert torch.equal(module.as_loaded("weight", module.weight).view(torch.uint8), raw)
            module.post_process()  # nothing has been loaded since
            assert torch.equal(module.weight.detach().view(torch.uint8), served)


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("permuted_twice", (".wq_b.weight", ".wo_a.weight")),
        ("permuted_at_first_load", (".wq_b.weight", ".wo_a.weight")),
        ("stale_sink_padding", (".attn_sink.weight",)),
        ("stale_shared_padding", (".shared_experts.",)),
    ],
)
def test_faults_of_this_family_leave_what_they_are_about_wrong(fault: str, part: tuple[str, ...]) -> None:
    spec = toy_spec(NAME)
    spec.faults = [fault]
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "safetensors")
    engine.update(NEW, "layerwise")
    wrong = different(held_bytes(engine), fresh(NAME, NEW).held)
    assert wrong
    assert all(any(name in path for name in part) for path in wrong)
    assert all(any(name in path for path in wrong) for name in part)
