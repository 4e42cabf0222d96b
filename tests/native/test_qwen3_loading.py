"""What is particular to loading Qwen3: padding by format and rank, gate and up, alphas, tied heads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from k3_engine import different, generate, held_bytes, prompts
from qwen3_engine import CONFIGS, NEW, OLD, SPARSE, WIDE, checkpoint, qwen3_spec, start_qwen3
from safetensors.torch import load_file, save_file

from workloads.engines.native import NativeEngine
from workloads.loading.experts import takes_single_experts
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader
from workloads.loading.perturb import open_view
from workloads.loading.weights import Part
from workloads.models.parallel import ALONE, Group, RankGroups
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.formats import FORMATS
from workloads.models.qwen3.matrices import FusedMatrices
from workloads.models.qwen3.model import Qwen3ForCausalLM
from workloads.spec import Checkpoint

every_kind = pytest.mark.parametrize("name", list(CONFIGS))


def roots_of_rank(config: Qwen3Config, tp: int, dp: int, ep: int, rank: int) -> Qwen3ForCausalLM:
    """The model as `rank` holds it; without a process group, so it can be loaded but not run."""
    groups = RankGroups(
        world=Group(rank, tp * dp),
        tp=Group(rank % tp, tp) if tp > 1 else ALONE,
        ep=Group(rank % ep, ep) if ep > 1 else ALONE,
        dp_rank=rank // tp,
        dp=dp,
    )
    return Qwen3ForCausalLM(config, groups)


def parts_of(root: Qwen3ForCausalLM) -> Iterator[Part]:
    for path, module in root.weight_modules():
        yield from module.parts(f"target:{path}")


def modules_of(engine: NativeEngine) -> list[FusedMatrices]:
    return [m for m in engine.roots()["target"].modules() if isinstance(m, FusedMatrices)]


@pytest.mark.parametrize(
    ("name", "tp", "rank", "padded"),
    [
        ("moe_bf16", 1, 0, {("w13.kernel_weight", 0.0), ("w2.weight", 0.0)}),
        ("moe_bf16", 2, 1, {("w13.kernel_weight", 0.0), ("w2.weight", 0.0)}),
        ("moe_fp8", 1, 0, set()),
        ("moe_fp8", 2, 0, set()),
        (
            "moe_fp8",
            2,
            1,
            {
                ("w13.kernel_weight", 0.0),
                ("w2.weight", 0.0),
                ("w13.weight_scale", 1.0),
                ("w2.weight_scale", 1.0),
            },
        ),
        (
            "dense_fp8",
            2,
            1,
            {
                ("gate_up_proj.weight", 0.0),
                ("gate_up_proj.weight_scale", 1.0),
                ("down_proj.weight", 0.0),
                ("down_proj.weight_scale", 1.0),
            },
        ),
        ("moe_nvfp4", 2, 1, set()),
        ("wide_bf16", 1, 0, set()),
        ("wide_bf16", 4, 3, {("w13.kernel_weight", 0.0), ("w2.weight", 0.0)}),
        ("wide_fp8", 4, 1, set()),
        (
            "wide_fp8",
            4,
            2,
            {
                ("w13.kernel_weight", 0.0),
                ("w2.weight", 0.0),
                ("w13.weight_scale", 1.0),
                ("w2.weight_scale", 1.0),
            },
        ),
        ("wide_nvfp4", 4, 3, set()),
    ],
)
def test_padding_is_where_a_share_is_not_what_the_kernel_needs(
    name: str, tp: int, rank: int, padded: set[tuple[str, float]]
) -> None:
    root = roots_of_rank((CONFIGS | WIDE)[name], tp, 1, 1, rank)
    Loader("target", root, Lifecycle()).cold(open_view(Checkpoint(), checkpoint(name)))
    found = {
        (".".join(part.tensor.split(".")[-2:]), part.padding_value)
        for part in parts_of(root)
        if part.source is None
    }
    assert found == padded


@every_kind
def test_post_processing_twice_changes_nothing(name: str) -> None:
    """Gate and up must not change places again, nor scales be packed twice."""
    engine = start_qwen3(name)
    before = held_bytes(engine)
    for module in modules_of(engine):
        module.post_process()
    assert different(held_bytes(engine), before) == []


def test_gate_and_up_serve_in_the_kernels_order_from_the_storage_they_were_loaded_into() -> None:
    engine = start_qwen3("moe_bf16")
    experts = engine.roots()["target"].get_submodule("model.layers.0.mlp.experts.w13")
    assert isinstance(experts, FusedMatrices)
    assert experts.live("weight") is None
    reader = open_view(Checkpoint(), checkpoint("moe_bf16"))
    stem = "model.layers.0.mlp.experts.5."
    assert torch.equal(experts.kernel_weight[5, :96], reader.get(f"{stem}up_proj.weight"))
    assert torch.equal(experts.kernel_weight[5, 128 : 128 + 96], reader.get(f"{stem}gate_proj.weight"))
    (loader,) = engine.loaders.values()
    loader.restore_consumed(experts)
    assert experts.get_parameter("weight").data_ptr() == experts.kernel_weight.data_ptr()


def test_a_tied_head_is_the_embedding_whatever_the_file_stores_beside_it(tmp_path: Path) -> None:
    """Published checkpoints store the head once more; it must not be read, and updates must reach both."""
    stored = {}
    for file in checkpoint("dense_bf16").glob("*.safetensors"):
        stored |= load_file(file)
    save_file({**stored, "lm_head.weight": torch.zeros(264, 128)}, tmp_path / "model.safetensors")
    spec = qwen3_spec("dense_bf16")
    spec.checkpoint_dirs[OLD] = str(tmp_path)
    engine, plain = NativeEngine(spec, 0), start_qwen3("dense_bf16")
    engine.start(OLD, "safetensors")
    assert generate(engine, prompts(5), 2) == generate(plain, prompts(5), 2)
    for via in ("layerwise", "direct"):
        engine.update(NEW, via)
        root = engine.roots()["target"]
        head, embedding = (
            root.get_parameter("lm_head.weight"),
            root.get_parameter("model.embed_tokens.weight"),
        )
        assert head.data_ptr() == embedding.data_ptr()
        assert torch.equal(
            head,
            open_view(Checkpoint(perturbation="every_tensor"), checkpoint("dense_bf16")).get(
                "model.embed_tokens.weight"
            ),
        )
    assert generate(engine, prompts(5), 2) == generate(start_qwen3("dense_bf16", NEW), prompts(5), 2)


def test_alphas_are_the_products_of_both_global_scales() -> None:
    engine = start_qwen3("moe_nvfp4", NEW)
    reader = open_view(Checkpoint(perturbation="every_tensor"), checkpoint("moe_nvfp4"))
    experts = engine.roots()["target"].get_submodule("model.layers.1.mlp.experts")
    for e in range(8):
        stem = f"model.layers.1.mlp.experts.{e}."
        inputs = [reader.get(f"{stem}{n}_proj.input_scale") for n in ("gate", "up", "down")]
        scales = [reader.get(f"{stem}{n}_proj.weight_scale_2") for n in ("gate", "up", "down")]
        common = torch.maximum(inputs[0], inputs[1])
        assert experts.w13.alphas[e].tolist() == [(common * scales[1]).item(), (common * scales[0]).item()]
        assert experts.w13.input_scale_max[e] == common
        assert experts.w2.alphas[e].tolist() == [(inputs[2] * scales[2]).item()]


@pytest.mark.parametrize(
    ("quantization", "width", "ranks", "shares"),
    [
        ("fp8", 768, 4, [(0, 256, 256), (256, 256, 256), (512, 128, 256), (640, 128, 256)]),
        ("bf16", 768, 4, [(192 * r, 192, 256) for r in range(4)]),
        ("nvfp4", 768, 4, [(192 * r, 192, 192) for r in range(4)]),
        ("fp8", 768, 1, [(0, 768, 768)]),
    ],
)
def test_shares_of_qwen3_30b(
    quantization: str, width: int, ranks: int, shares: list[tuple[int, int, int]]
) -> None:
    form = FORMATS[quantization]
    assert [form.share(width, rank, ranks) for rank in range(ranks)] == shares


def test_more_ranks_than_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="A width of 256 is not 4 or more whole units of 128"):
        FORMATS["fp8"].share(256, 0, 4)


def test_heads_that_cut_a_tile_are_refused() -> None:
    config = Qwen3Config(num_heads=4, num_key_value_heads=2, head_dim=64)
    with pytest.raises(ValueError, match=r"self_attn.k_proj', 64 from 0, is not made of whole blocks of 128"):
        roots_of_rank(config, 2, 1, 1, 0)


@pytest.mark.parametrize("name", SPARSE)
def test_a_perturbed_checkpoint_changes_every_tensor_and_stays_valid(name: str) -> None:
    before, after = (
        open_view(Checkpoint(perturbation=kind), checkpoint(name)) for kind in ("none", "every_tensor")
    )
    for tensor in before.names():
        old, new = (view.get(tensor) for view in (before, after))
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[old.element_size()]
        assert (old.reshape(-1).view(width) != new.reshape(-1).view(width)).all(), tensor
        if new.is_floating_point():
            assert new.float().isfinite().all(), tensor
        if "scale" in tensor.rpartition(".")[2]:
            assert (new.float() > 0).all(), tensor


@pytest.mark.parametrize("name", SPARSE)
def test_experts_arrive_one_at_a_time(name: str) -> None:
    modules = start_qwen3(name).roots()["target"].get_submodule("model.layers.0.mlp.experts")
    assert all(takes_single_experts(module) for module in (modules.w13, modules.w2))
