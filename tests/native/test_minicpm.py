"""MiniCPM's resampler and audio projector against torch's own layers in float64, and where its positions lie."""

import math
from pathlib import Path

import pytest
import torch
from dense_families import VARIANTS, checkpoint, relative, whole_prompt, widened
from family_engine import roots_of_rank, start_engine
from k3_engine import NEW, OLD
from torch.nn import functional

from workloads.kernels.linear import round_to_bf16
from workloads.kernels.norm import layer_norm
from workloads.kernels.resampler import cross_attention
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.minicpm.model import MiniCpm
from workloads.models.minicpm.resampler import Resampler, sincos_positions
from workloads.models.tower import tower_features

Tensor = torch.Tensor
C = VARIANTS["minicpm_o"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("minicpm")


def model(where: Path, config: MiniCpmConfig = C) -> MiniCpm:
    target = start_engine(where, config).roots()["target"]
    assert isinstance(target, MiniCpm)
    return target


def test_positions_are_sines_and_cosines_of_column_and_row() -> None:
    table = sincos_positions(16, 7)
    assert table.shape == (7, 7, 16)
    assert table.dtype == torch.float32
    for row in range(7):
        for column in range(7):
            expected = [
                function(place * 10000 ** (-i / 4))
                for place in (column, row)
                for function in (math.sin, math.cos)
                for i in range(4)
            ]
            assert torch.equal(table[row, column], torch.tensor(expected, dtype=torch.float64).float())


def test_kernels_equal_torch_s_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 24, generator=generator).bfloat16() for n in (5, 9, 9))
    heads = (x.double().view(len(x), 3, 8).transpose(0, 1) for x in (q, k, v))
    attended = functional.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
    assert torch.equal(cross_attention(q, k, v, 3), round_to_bf16(attended))
    x, weight, bias = (torch.randn(*s, generator=generator).bfloat16() for s in ((4, 24), (24,), (24,)))
    normed = functional.layer_norm(x.double(), (24,), weight.double(), bias.double(), 1e-6)
    assert torch.equal(layer_norm(x, weight, bias, 1e-6), round_to_bf16(normed))


def resampled(w: dict[str, Tensor], features: Tensor, height: int, columns: int) -> Tensor:
    """By torch's multi-head attention."""
    w = {name.removeprefix("resampler."): t for name, t in w.items() if name.startswith("resampler.")}
    wide = C.hidden_size
    q, kv = (
        functional.layer_norm(x, (wide,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)
        for name, x in (("ln_q", w["query"]), ("ln_kv", features.double() @ w["kv_proj.weight"].t()))
    )
    positions = sincos_positions(wide, 70)[:height, :columns].reshape(height * columns, wide).double()
    out, _ = functional.multi_head_attention_forward(
        q, kv + positions, kv, wide, C.resampler_heads, w["attn.in_proj_weight"], w["attn.in_proj_bias"],
        None, None, False, 0.0, w["attn.out_proj.weight"], w["attn.out_proj.bias"],
    )  # fmt: skip
    return functional.layer_norm(out, (wide,), w["ln_post.weight"], w["ln_post.bias"], 1e-6) @ w["proj"]


def test_the_resampler_is_torch_s_attention_between_norms(folder: Path) -> None:
    where = checkpoint(folder, "minicpm_o")
    loaded, w = model(where), widened(where)
    for image, (height, columns) in enumerate(zip(C.image_heights, C.image_widths, strict=True)):
        features = tower_features(image, height * columns, C.vision_hidden_size, CPU)
        with torch.no_grad():
            embeddings = loaded.image(image)
        assert embeddings.shape == (C.num_queries, C.hidden_size)
        assert relative(embeddings, resampled(w, features, height, columns)) < 0.02
        if height > 1:
            assert relative(embeddings, resampled(w, features, 1, height * columns)) > 0.03


def test_the_audio_projector_averages_what_two_matrices_give(folder: Path) -> None:
    where = checkpoint(folder, "minicpm_o")
    loaded, w = model(where), widened(where)
    for sound, frames in enumerate(C.audio_frames):
        x = tower_features(len(C.image_heights) + sound, frames, C.audio_hidden_size, CPU).double()
        for name, activation in (("linear1", functional.relu), ("linear2", lambda y: y)):
            at = f"audio_projection_layer.{name}."
            x = activation(x @ w[f"{at}weight"].t() + w[f"{at}bias"])
        expected = functional.avg_pool1d(x.t().unsqueeze(0), C.audio_pool).squeeze(0).t()
        with torch.no_grad():
            embeddings = loaded.sound(sound)
        assert embeddings.shape == expected.shape == (frames // 2, C.hidden_size)
        assert relative(embeddings, expected) < 0.02


def test_media_stand_where_their_ids_are(folder: Path) -> None:
    loaded = model(checkpoint(folder, "minicpm_o"))
    image, sound = C.image_slots[2], C.audio_slots[1]
    ids = [65, image[3], image[15], image[0], 66, sound[3], 322 + 64 + 10]
    seen: list[Tensor] = []
    loaded.llm.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    with torch.no_grad():
        loaded(whole_prompt(ids), loaded.make_caches(1, 16))
        text = loaded.llm.embed(whole_prompt(ids))
        pictures, sounds = loaded.image(2), loaded.sound(1)
    expected = text.clone()
    expected[1:4] = pictures[[3, 15, 0]]
    expected[5] = sounds[3]
    assert torch.equal(seen[0], expected)
    assert not any(torch.equal(expected[row], text[row]) for row in (1, 2, 3, 5))


def test_towers_stand_ins_differ_and_are_exact() -> None:
    first, second = (tower_features(medium, 12, 48, CPU) for medium in (0, 1))
    assert (first != second).float().mean() > 0.9
    assert first.abs().max() <= 1
    assert torch.equal(first.double() * 128, (first.double() * 128).round())
    assert len(first.unique()) > 100


def test_the_hook_brings_the_positions_to_the_weights() -> None:
    """Weights on another device than the host: here `meta`, which no computer lacks."""
    with torch.device("meta"):
        root = roots_of_rank(C)["target"]
        resampler = root.get_submodule("resampler")
    assert isinstance(resampler, Resampler)
    assert resampler.query.device.type == "meta"
    assert resampler.pos_embed.device.type == "cpu"
    root.process_weights_after_loading()
    assert resampler.pos_embed.device.type == "meta"
    assert "pos_embed" not in root.state_dict()


@pytest.mark.parametrize("start", ["safetensors", "streamed", "dummy"])
def test_every_path_leaves_the_positions_as_they_are(folder: Path, start: str) -> None:
    engine = start_engine(checkpoint(folder, "minicpm_o"), C, OLD, start)
    resampler = engine.roots()["target"].get_submodule("resampler")
    assert isinstance(resampler, Resampler)
    place = resampler.pos_embed.data_ptr()
    for update in ("layerwise", "direct"):
        engine.update(NEW, update)
        assert resampler.pos_embed.data_ptr() == place
        assert torch.equal(resampler.pos_embed, sincos_positions(C.hidden_size, C.resampler_max_size))
