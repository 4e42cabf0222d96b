"""The tensor tables and memory plans of Qwen3 against the published checkpoints."""

from math import prod

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import Root
from orchestrator.rules.cell_rules import problems
from workloads.loading.tensor_table import TensorSpec, counted, every_tensor
from workloads.models.qwen3.config import Qwen3Config
from workloads.models.qwen3.tensors import sections

GB200 = ["cluster=gb200", "backend.moe_kernel=reference", "load_path=layerwise"]
TP4 = [f"parallelism.{key}" for key in ("tp=4", "dp=1", "ep=1", "nodes=1", "gpus_per_node=4")]


def root_of(model: str, *overrides: str) -> Root:
    [cell] = compose([f"model={model}", *GB200, *(overrides or TP4)])
    assert cell.root is not None, cell.problems
    return cell.root


def config_of(model: str) -> Qwen3Config:
    return root_of(model).model.qwen3


def total(model: str, attribute: str) -> int:
    return sum(getattr(spec, attribute) * copies for spec, copies in counted(sections(config_of(model))))


def find(model: str, name: str) -> TensorSpec:
    return next(spec for spec in every_tensor(sections(config_of(model))) if spec.name == name)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwen3_0_6b_fp8", 596_049_920),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_30b_a3b_fp8", 30_532_122_624),
        ("qwen3_30b_a3b_nvfp4", 30_532_122_624),
    ],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    assert total(model, "parameters") == parameters


def test_bytes_and_tensors_of_the_published_bf16_checkpoint() -> None:
    assert total("qwen3_30b_a3b", "nbytes") == 61_064_245_248
    assert sum(copies for _, copies in counted(sections(config_of("qwen3_30b_a3b")))) == 18_867


@pytest.mark.parametrize(
    ("model", "matrices"),
    [
        ("qwen3_0_6b_fp8", 28 * 7),
        ("qwen3_30b_a3b_fp8", 48 * (4 + 384)),
        ("qwen3_30b_a3b_nvfp4", 48 * (4 + 384)),
    ],
)
def test_quantised_matrices_have_their_scales(model: str, matrices: int) -> None:
    """One tile scale for 128 x 128 values of FP8; one block scale for 16 of NVFP4, and two scalars."""
    specs = list(every_tensor(sections(config_of(model))))
    values = sum(prod(s.quantized.shape) for s in specs if s.quantized and s.quantized.piece == "weight")
    scales = [s for s in specs if s.quantized and s.quantized.piece == "scale"]
    block, dtype = (16, "F8_E4M3") if "nvfp4" in model else (128 * 128, "BF16")
    assert len(scales) == matrices
    assert sum(prod(s.shape) for s in scales) * block == values
    assert {s.dtype for s in scales} == {dtype}
    scalars = [s for s in specs if s.shape == ()]
    assert len(scalars) == (2 * matrices if "nvfp4" in model else 0)
    assert {s.dtype for s in scalars} <= {"F32"}


@pytest.mark.parametrize(
    ("model", "name", "dtype", "shape"),
    [
        ("qwen3_0_6b_fp8", "model.embed_tokens.weight", "BF16", (151936, 1024)),
        ("qwen3_0_6b_fp8", "model.layers.27.self_attn.q_proj.weight", "F8_E4M3", (2048, 1024)),
        ("qwen3_0_6b_fp8", "model.layers.27.self_attn.q_proj.weight_scale_inv", "BF16", (16, 8)),
        ("qwen3_0_6b_fp8", "model.layers.0.mlp.down_proj.weight_scale_inv", "BF16", (8, 24)),
        ("qwen3_0_6b_fp8", "model.layers.0.self_attn.k_norm.weight", "BF16", (128,)),
        ("qwen3_30b_a3b", "model.layers.47.mlp.gate.weight", "BF16", (128, 2048)),
        ("qwen3_30b_a3b", "model.layers.47.mlp.experts.127.down_proj.weight", "BF16", (2048, 768)),
        ("qwen3_30b_a3b", "lm_head.weight", "BF16", (151936, 2048)),
        ("qwen3_30b_a3b_fp8", "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv", "BF16", (6, 16)),
        ("qwen3_30b_a3b_nvfp4", "model.layers.0.mlp.experts.0.gate_proj.weight", "U8", (768, 1024)),
        ("qwen3_30b_a3b_nvfp4", "model.layers.0.mlp.experts.0.gate_proj.weight_scale", "F8_E4M3", (768, 128)),
        ("qwen3_30b_a3b_nvfp4", "model.layers.0.self_attn.o_proj.input_scale", "F32", ()),
    ],
)
def test_published_headers(model: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (find(model, name).dtype, find(model, name).shape) == (dtype, shape)


def test_a_tied_head_is_not_in_the_table() -> None:
    names = {spec.name for spec in every_tensor(sections(config_of("qwen3_0_6b_fp8")))}
    assert not any(name.startswith("lm_head") for name in names)


def parts(model: str, *overrides: str) -> dict[str, tuple[float, str]]:
    return {
        p.name: (round(p.nbytes / 1e9, 2), p.basis) for p in memory.memory_parts(root_of(model, *overrides))
    }


def test_plan_of_qwen3_30b_at_tp4_without_expert_parallelism() -> None:
    found = parts("qwen3_30b_a3b")
    assert found["routed experts"] == (14.50, "128 of 128 experts a layer, split over TP4")
    assert found["expert padding"] == (4.83, "intermediate 192 -> 256")
    assert found["attention"] == (0.45, "split over TP4")
    assert found["embedding"] == found["output head"] == (0.16, "split over TP4")
    assert found["router"] == (0.03, "replicated")
    assert found["KV cache"] == (6.44, "262,144 tokens x 24,576 B")
    assert found["derived weights"] == (0.02, "rotation of 40,960 positions")


def test_plan_of_the_quantised_models_at_tp4() -> None:
    fp8, nvfp4 = parts("qwen3_30b_a3b_fp8"), parts("qwen3_30b_a3b_nvfp4")
    assert fp8["routed experts"][0] == 7.25
    assert fp8["expert padding"] == (2.42, "intermediate 192 -> 256")
    assert nvfp4["routed experts"][0] == 4.08
    assert nvfp4["expert padding"] == (0.0, "intermediate 192 -> 192")


def test_experts_dealt_out_whole_need_no_padding() -> None:
    overrides = [*TP4[:2], "parallelism.ep=4", *TP4[3:]]
    found = parts("qwen3_30b_a3b", *overrides)
    assert found["routed experts"] == (14.50, "32 of 128 experts a layer")
    assert found["expert padding"] == (0.0, "intermediate 768 -> 768")


def test_plan_of_the_dense_model() -> None:
    found = parts("qwen3_0_6b_fp8")
    assert found["MLP"] == (0.07, "split over TP4")
    assert "routed experts" not in found
    assert "expert padding" not in found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("quantization=int8", "model.qwen3.quantization is 'int8': use one of bf16, fp8, nvfp4."),
        ("num_experts=4", "model.qwen3.moe_intermediate_size is 0 and num_experts is 4"),
        ("intermediate_size=0", "model.qwen3.intermediate_size is 0 and num_experts is 0"),
        ("num_key_value_heads=3", "model.qwen3.num_heads is 4; num_key_value_heads 3 must divide it."),
        (
            "head_dim=96",
            "model.qwen3.head_dim is 96; in fp8 128 values share a scale, so it must be a multiple",
        ),
        ("hidden_size=200", "model.qwen3.hidden_size is 200; in fp8 128 values share a scale"),
        ("intermediate_size=128", "model.qwen3.intermediate_size is 128, 1 whole units of 128 for up to 2"),
    ],
)
def test_contradictions_are_named(override: str, message: str) -> None:
    [cell] = compose(["model=qwen3_tiny", f"model.qwen3.{override}"])
    assert cell.root is not None
    assert any(problem.startswith(message) for problem in problems(cell.root)), problems(cell.root)


@pytest.mark.parametrize(
    "model", ["qwen3_tiny", "qwen3_moe_tiny", "qwen3_moe_fp8_tiny", "qwen3_moe_nvfp4_tiny"]
)
def test_proxies_are_valid_and_keep_the_structure(model: str) -> None:
    [cell] = compose([f"model={model}", "backend=native_reference"])
    assert cell.root is not None
    assert problems(cell.root) == []
    config = cell.root.model.qwen3
    full = config_of(
        {"qwen3_tiny": "qwen3_0_6b_fp8"}.get(model, model.replace("moe", "30b_a3b").removesuffix("_tiny"))
    )
    for key in ("quantization", "tie_word_embeddings"):
        assert getattr(config, key) == getattr(full, key)
    assert bool(config.num_experts) == bool(full.num_experts)
    assert config.num_heads > config.num_key_value_heads


def test_the_default_dimensions_are_the_dense_proxy() -> None:
    [cell] = compose(["model=qwen3_tiny"])
    assert cell.root is not None
    assert cell.root.model.qwen3 == Qwen3Config()
