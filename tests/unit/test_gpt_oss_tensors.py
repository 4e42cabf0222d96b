"""The tensor table and the plan of gpt-oss against the published checkpoint and its published sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import Root
from orchestrator.rules import cell_rules as rules
from workloads.loading.tensor_table import TensorSpec, bytes_by_component, counted, every_tensor
from workloads.models.gpt_oss import plan
from workloads.models.gpt_oss.config import CHECKPOINT_LAYOUTS, GptOssConfig
from workloads.models.gpt_oss.tensors import sections

PUBLISHED_TOTAL = 13_761_264_768  # metadata.total_size of the published index
PUBLISHED_TENSORS = 459
TINY = GptOssConfig()


def full(*overrides: str) -> Root:
    [cell] = compose(["model=gpt_oss_20b", "backend=native_hopper", "parallelism=tp2", *overrides])
    assert cell.root is not None, cell.problems
    return cell.root


FULL = full().model.gpt_oss


def find(name: str, config: GptOssConfig = FULL) -> TensorSpec:
    return next(spec for spec, _ in counted(sections(config)) if spec.name == name)


def test_the_table_is_the_published_checkpoint_to_the_byte() -> None:
    tensors = list(every_tensor(sections(FULL)))
    assert sum(spec.nbytes for spec in tensors) == PUBLISHED_TOTAL
    assert len({spec.name for spec in tensors}) == len(tensors) == PUBLISHED_TENSORS


def test_parameters_are_the_published_ones() -> None:
    assert round(sum(spec.parameters for spec in every_tensor(sections(FULL))) / 1e9, 1) == 20.9
    experts = [s for s in every_tensor(sections(FULL)) if s.quantized and ".layers.3." in s.name]
    assert sum(spec.parameters for spec in experts) == 32 * 24_883_200
    assert sum(spec.nbytes for spec in experts) == 32 * 13_219_200


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("mlp.experts.gate_up_proj_blocks", "U8", (32, 5760, 90, 16)),
        ("mlp.experts.gate_up_proj_scales", "U8", (32, 5760, 90)),
        ("mlp.experts.gate_up_proj_bias", "BF16", (32, 5760)),
        ("mlp.experts.down_proj_blocks", "U8", (32, 2880, 90, 16)),
        ("mlp.experts.down_proj_scales", "U8", (32, 2880, 90)),
        ("mlp.experts.down_proj_bias", "BF16", (32, 2880)),
        ("mlp.router.weight", "BF16", (32, 2880)),
        ("mlp.router.bias", "BF16", (32,)),
        ("self_attn.sinks", "BF16", (64,)),
        ("self_attn.q_proj.weight", "BF16", (4096, 2880)),
        ("self_attn.k_proj.bias", "BF16", (512,)),
        ("self_attn.o_proj.weight", "BF16", (2880, 4096)),
        ("self_attn.o_proj.bias", "BF16", (2880,)),
    ],
)
def test_published_headers(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    found = find(f"model.layers.7.{name}")
    assert (found.dtype, found.shape) == (dtype, shape)


@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_layouts_hold_the_same_bytes_under_their_own_names(layout: str) -> None:
    config = GptOssConfig(checkpoint_layout=layout)
    tensors = {spec.name: spec for spec in every_tensor(sections(config))}
    combined = {spec.name: spec for spec in every_tensor(sections(TINY))}
    assert sum(spec.nbytes for spec in tensors.values()) == sum(spec.nbytes for spec in combined.values())
    assert sum(s.parameters for s in tensors.values()) == sum(s.parameters for s in combined.values())
    expert = {"per_expert": "gate_up_proj.weight_packed", "quark": "gate_up_proj.weight"}.get(layout)
    if expert is not None:
        spec = tensors[f"model.layers.2.mlp.experts.15.{expert}"]
        assert (spec.dtype, spec.shape) == ("U8", (320, 48))
        assert tensors["model.layers.2.mlp.experts.15.down_proj.weight_scale"].shape == (96, 5)
    assert {name for name in tensors if ".experts." not in name} == {
        name for name in combined if ".experts." not in name
    }


@pytest.mark.parametrize(
    ("tp", "ep", "share"), [(1, 1, 1.0), (1, 4, 0.25), (4, 4, 0.25), (2, 1, 0.5)], ids=str
)
@pytest.mark.parametrize("layout", CHECKPOINT_LAYOUTS)
def test_experts_divide_over_ep_or_else_over_tp(tp: int, ep: int, share: float, layout: str) -> None:
    config = GptOssConfig(checkpoint_layout=layout)
    whole = bytes_by_component(sections(config))["routed_experts"]
    part = bytes_by_component(sections(config), tp, ep)["routed_experts"]
    undivided = 4 * 16 * 96 * 2 * (ep == 1)  # down_proj's bias, which every rank of a TP group holds whole
    assert part == pytest.approx(
        (whole - undivided) * share + undivided, rel=0.1
    )  # of five blocks one rank has three
    assert part >= (whole - undivided) * share + undivided


def test_ranks_share_whole_blocks() -> None:
    assert [FULL.intermediate_share(rank, 4) for rank in range(4)] == [
        (0, 736),
        (736, 736),
        (1472, 736),
        (2208, 672),
    ]
    assert [TINY.intermediate_share(rank, 2) for rank in range(2)] == [(0, 96), (96, 64)]
    with pytest.raises(ValueError, match=r"160 is 5 blocks of 32, which 4 .* share as 2 each"):
        TINY.intermediate_share(0, 4)


def shown(root: Root) -> list[tuple[str, str, float, str]]:
    """The lines of a plan's memory table, in GB."""
    return [(p.name, p.kind, round(p.nbytes / 1e9, 2), p.basis) for p in memory.memory_parts(root)]


def test_memory_of_the_full_model() -> None:
    """Experts: 24 layers x 32 x (13,219,200 B and 17,280 B of biases). Attention: 24 layers of 2880 x (2 x 4096 +
    2 x 512) in BF16. KV: 24 layers x 2 x 8 heads x 64 in BF16, for 32 requests of 8,192 tokens."""
    assert shown(full("parallelism=single")) == [
        ("routed experts", "weights", 10.17, "32 of 32 experts a layer"),
        ("attention", "weights", 1.27, "replicated"),
        ("embedding", "weights", 1.16, "replicated"),
        ("output head", "weights", 1.16, "replicated"),
        ("router", "weights", 0.0, "replicated"),
        ("norms", "weights", 0.0, "replicated"),
        ("expert padding", "padding", 1.4, "hidden 2880 -> 3072, intermediate 2880 -> 3072"),
        ("KV cache", "cache", 12.88, "262,144 tokens x 49,152 B"),
        ("reserve", "reserve", 6.0, "cuda runtime, activations"),
    ]


def test_memory_of_two_ranks_that_share_the_experts() -> None:
    parts = {name: (size, basis) for name, _, size, basis in shown(full("parallelism.ep=1"))}
    assert parts["routed experts"] == (5.09, "32 of 32 experts a layer, split over TP2")
    assert parts["attention"] == (0.64, "partly split over TP2")  # o_proj's bias is not
    assert parts["embedding"] == parts["output head"] == (0.58, "split over TP2")
    assert parts["KV cache"] == (6.44, "262,144 tokens x 24,576 B")


@pytest.mark.parametrize(
    ("layout", "basis", "inner"),
    [
        (["parallelism=single"], "hidden 2880 -> 3072, intermediate 2880 -> 3072", 3072),
        (["parallelism.ep=2"], "hidden 2880 -> 3072, intermediate 2880 -> 3072", 3072),
        (["parallelism.ep=1"], "hidden 2880 -> 3072, intermediate 1440 -> 1536", 1536),
    ],
    ids=["alone", "ep", "tp"],
)
def test_padding_is_what_the_kernel_layout_adds(layout: list[str], basis: str, inner: int) -> None:
    root = full(*layout)
    [padding] = [part for part in memory.memory_parts(root) if part.kind == "padding"]
    assert padding.basis == basis
    values, biases = 3 * 3072 * inner, 2 * inner + 3072
    experts = 32 // root.parallelism.ep
    held = 24 * experts * (values * 17 // 32 + 2 * biases)
    [loaded] = [part for part in memory.memory_parts(root) if part.name == "routed experts"]
    assert padding.nbytes == held - loaded.nbytes
    assert 0.12 < padding.nbytes / loaded.nbytes < 0.15


def problems(*overrides: str) -> str:
    [cell] = compose(["model=gpt_oss_tiny", "backend=native_reference", "parallelism=tp2", *overrides])
    assert cell.root is not None
    return "\n".join(rules.problems(cell.root))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.gpt_oss.num_heads=6", "num_heads is 6, which the num_key_value_heads 4 do not divide"),
        ("model.gpt_oss.head_dim=15", "head_dim is 15; rotation turns pairs"),
        ("model.gpt_oss.hidden_size=100", "hidden_size is 100; MXFP4 shares a scale between 32"),
        ("model.gpt_oss.intermediate_size=100", "intermediate_size is 100; MXFP4 shares"),
        (
            "model.gpt_oss.expert_alignment=64",
            "expert_alignment is 64; the kernel stores scales in blocks of 128",
        ),
        ("model.gpt_oss.expert_quantization=fp8", "expert_quantization is 'fp8'"),
        (
            "model.gpt_oss.checkpoint_layout=gguf",
            "checkpoint_layout is 'gguf'; choose one of combined, per_expert",
        ),
        (
            "model.gpt_oss.num_experts_per_token=17",
            "num_experts_per_token is 17, more than the num_experts 16",
        ),
        ("parallelism.ep=3", "parallelism.ep is 3"),
        ("backend=native", "the experts of gpt_oss_tiny are mxfp4 with biases"),
    ],
)
def test_dimensions_that_cannot_be_are_named(override: str, problem: str) -> None:
    assert problem in problems(override)


def test_a_rank_without_a_block_is_refused_before_the_start() -> None:
    four = ["parallelism.tp=4", "parallelism.gpus_per_node=4"]
    assert "intermediate_size 160 is 5 blocks" in problems(*four, "parallelism.ep=1")
    assert problems(*four, "parallelism.ep=4") == problems() == ""


def test_the_proxy_is_the_default_configuration() -> None:
    [cell] = compose(["model=gpt_oss_tiny", "backend=native_reference"])
    assert cell.root is not None
    assert cell.root.model.gpt_oss == TINY


def test_the_plan_names_every_component() -> None:
    assert plan.COMPONENTS.keys() == {spec.component for spec, _ in counted(sections(TINY))}


def test_table_and_plan_import_no_torch() -> None:
    code = "import json, sys, workloads.models.gpt_oss.plan; print(json.dumps(sorted(sys.modules)))"
    root = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=root).stdout
    assert not {"torch", "numpy"} & set(json.loads(output))
