"""The tensor table and the plan of DeepSeek-V4.1 against the published checkpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.compose import compose
from orchestrator.memory import memory_parts
from orchestrator.rules.cell_rules import problems
from workloads.loading.tensor_table import TensorSpec, bytes_by_component, counted, every_tensor
from workloads.models.deepseek_v41 import plan
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.deepseek_v41.hashing import head_sizes
from workloads.models.deepseek_v41.tensors import sections

TINY = DeepseekV41Config()
ROOT = Path(__file__).parents[2]
VISION, DRAFTER = 266, 801 + 798 + 802  # tensors that are published and not loaded


def dimensions(model: str) -> DeepseekV41Config:
    """As conf/ has them."""
    return DeepseekV41Config(
        **yaml.safe_load((ROOT / f"conf/model/{model}.yaml").read_text())["deepseek_v41"]
    )


@pytest.fixture(scope="module")
def flash() -> DeepseekV41Config:
    return dimensions("deepseek_v41_flash")


@pytest.fixture(scope="module")
def drafted() -> DeepseekV41Config:
    [cell] = compose(["model=deepseek_v41_flash_dspark"])
    assert cell.root is not None, cell.problems
    return cell.root.model.deepseek_v41


def of_layer(config: DeepseekV41Config, layer: int) -> list[tuple[TensorSpec, int]]:
    return [(s, n) for s, n in counted(sections(config)) if s.name.startswith(f"layers.{layer}.")]


def test_flash_has_the_published_number_of_tensors(flash: DeepseekV41Config) -> None:
    """96,085 in all: also 384 experts of three matrices in each of 40 layers, eight FP8 matrices a layer, eight
    indexers and two Engram projections."""
    tensors = list(counted(sections(flash)))
    assert sum(n for _, n in tensors) == 96_085 - VISION - DRAFTER
    weights = [(s, n) for s, n in tensors if s.quantized is not None and s.quantized.piece == "weight"]
    by_format: dict[str, int] = {}
    for spec, copies in weights:
        assert spec.quantized is not None
        by_format[spec.quantized.format] = by_format.get(spec.quantized.format, 0) + copies
    assert by_format == {
        "mxfp4_i8": 40 * 384 * 3,
        "fp8_e8m0_block32": 40 * 8 + 8 + 2,
        "fp8_e8m0_rows32": 2,
    }


def test_the_drafter_has_the_published_tensors(drafted: DeepseekV41Config) -> None:
    """All but the tower's: the first stage has the context projection, the last the heads."""
    tensors = list(counted(sections(drafted)))
    assert sum(n for _, n in tensors) == 96_085 - VISION
    names = {spec.name: (n, spec) for spec, n in tensors if spec.name.startswith("mtp.")}
    counts = [sum(n for name, (n, _) in names.items() if name.startswith(f"mtp.{i}.")) for i in range(3)]
    assert counts == [801, 798, 802]
    own = {"main_proj.weight": (5120, 3 * 5120), "main_proj.scale": (160, 480), "main_norm.weight": (5120,)}
    assert all(names[f"mtp.0.{name}"][1].shape == shape for name, shape in own.items())
    last = {
        "norm.weight": (5120,),
        "markov_head.embed.weight": (129_280, 256),
        "markov_head.head.weight": (129_280, 256),
        "confidence_head.proj.weight": (1, 5120 + 256),
    }
    assert all(names[f"mtp.2.{name}"][1].shape == shape for name, shape in last.items())
    assert names["mtp.1.ffn.gate.bias_vl"][1].shape == (128,)
    experts = sum(spec.nbytes * n for n, spec in names.values() if ".experts." in spec.name)
    assert round(experts / 1e9, 1) == 7.2


@pytest.mark.parametrize(
    ("layer", "count"),
    [(0, 2334), (3, 2334), (24, 2337), (2, 2342), (20, 2341), (1, 2340), (14, 2348)],
    ids=["window", "reuses", "chooses", "pools two", "pools one", "engram", "engram and source"],
)
def test_tensors_of_each_kind_of_layer(flash: DeepseekV41Config, layer: int, count: int) -> None:
    assert sum(n for _, n in of_layer(flash, layer)) == count


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.3.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.3.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.3.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.3.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.3.attn.wo_b.scale", "F8_E8M0", (160, 256)),
        ("layers.3.hc_attn_fn", "F32", (24, 20480)),
        ("layers.3.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.3.ffn.experts.*.w1.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.experts.*.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.3.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.2.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.2.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.1.engram.embed.weight", "F8_E4M3", (384006168, 256)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.14.engram.q_weight", "BF16", (4, 5120)),
    ],
)
def test_published_headers(flash: DeepseekV41Config, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    [spec] = [s for s, _ in counted(sections(flash)) if s.name == name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


def test_sizes_by_part(flash: DeepseekV41Config) -> None:
    sizes = bytes_by_component(sections(flash))
    assert sum(s.nbytes for s, n in of_layer(flash, 5) if n > 1) == 18_800_640
    assert round(sizes["routed_experts"] / 1e9, 1) == 288.8
    engram_tables = sum(s.nbytes for s, _ in counted(sections(flash)) if ".engram.embed." in s.name)
    assert round(engram_tables / 1e9, 1) == 202.8
    for ep, gigabytes in ((16, 18.0), (4, 72.2)):
        local = bytes_by_component(sections(flash), tp=4, ep=ep)
        assert round(local["routed_experts"] / 1e9, 1) == gigabytes


def test_the_parts_of_tables_are_different_primes(flash: DeepseekV41Config) -> None:
    sizes = [size for layer in flash.engram_layers for size in head_sizes(flash, layer)]
    assert len(set(sizes)) == 2 * 3 * 8
    assert sizes == sorted(sizes)
    assert sizes[0] >= 16_000_000
    small = [size for layer in TINY.engram_layers for size in head_sizes(TINY, layer)]
    assert small == [199, 211, 223, 227, 229, 233, 239, 241]


def test_sources(flash: DeepseekV41Config) -> None:
    assert [flash.kv_source(layer) for layer in (0, 2, 7, 19, 20, 39)] == [None, 2, 2, 14, 20, 20]
    assert [flash.index_source(layer) for layer in (1, 9, 23, 26, 39)] == [None, 8, 20, 24, 36]


def test_the_proxy_is_the_default() -> None:
    assert dimensions("deepseek_v41_tiny") == TINY


def test_groups_and_expanded_tensors_agree() -> None:
    tensors = list(every_tensor(sections(TINY)))
    assert len({spec.name for spec in tensors}) == len(tensors)
    assert len(tensors) == sum(copies for _, copies in counted(sections(TINY)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"compress_ratios": [0, 1]},
            "compress_ratios has 2 entries; num_layers 8 and num_dspark_layers 0 need 8",
        ),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, -1]}, "compress_ratios holds -1"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1]}, "layer 1 compresses 2 tokens and finds no keys"),
        ({"compress_ratios": [0, 0, 2, 1, 1, 1, 1, 1]}, "layer 3 compresses 1 tokens and finds no keys"),
        ({"index_source_layers": [4, 6]}, "index_source_layers lacks layer 2, which makes keys"),
        ({"candidate_source_layer": 5}, "candidate_source_layer is 5; it must be one of index_source_layers"),
        ({"candidate_source_layer": 2}, "the indexers after it must choose among the same keys"),
        ({"engram_layers": [3, 1]}, "engram_layers is [3, 1]; give layers between 0 and 7"),
        ({"engram_layers": [0, 1]}, "before layer 0 all copies must be equal"),
        ({"engram_layers": []}, "engram_layers is empty"),
        (
            {"kv_source_layers": [1, 2, 4]},
            "kv_source_layers is [1, 2, 4]; a layer with a compress ratio of 0",
        ),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size is 1"),
        ({"engram_pad_token": 5000}, "engram_pad_token is 5000"),
        ({"expert_quantization": "fp8"}, "expert_quantization is 'fp8'"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100; FP8 shares a scale between 32"),
        ({"head_dim": 48}, "head_dim is 48; the attention kernel takes chunks of 32"),
        ({"o_groups": 3}, "o_groups is 3; it must divide num_heads 4"),
        ({"num_experts": 15}, "num_experts is 15"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33"),
        (
            {"image_lengths": [1000]},
            "image_token_start and image_lengths take the token ids from 258 to 1257",
        ),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 1], "num_dspark_layers": 1},
            "compress_ratios ends with [1]; the stages of the DSpark drafter attend to a window only",
        ),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0], "num_dspark_layers": 1, "dspark_num_experts": 3},
            "dspark_num_experts is 3; it must be even",
        ),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], problem: str) -> None:
    assert list(plan.problems(TINY)) == []
    found = list(plan.problems(DeepseekV41Config(**changes)))
    assert any(problem in text for text in found), found


def test_what_flash_derives_and_keeps(flash: DeepseekV41Config) -> None:
    derived = {part.name: part.nbytes for part in plan.derived(flash, tp=4)}
    assert derived["shared expert padding"] == 40 * 3 * (2560 - 2304) * 5120
    assert derived["fused shared experts"] == 40 * (2 * 2560 * 5120 + 3 * 2560 * 5120 // 32)
    assert derived["packed FP8 scales"] > 40 * 8 * 8192 * 4
    keys, window = plan.caches(flash, plan.Load(requests=1, tokens=1024), tp=4)
    assert keys.nbytes == (3 * 512 + 1024) * (512 + 128) * 2
    assert window.nbytes > 40 * 128 * 512 * 2


def test_the_plan_of_flash_on_gb200() -> None:
    [cell] = compose(
        ["+exp=kimi_k3_refit", "cluster=gb200", "load_path=layerwise", "model=deepseek_v41_flash"]
    )
    assert cell.root is not None, cell.problems
    parts = {part.name: part.nbytes for part in memory_parts(cell.root)}
    assert round(parts["routed experts"] / 1e9, 1) == 18.0
    assert round(parts["engram tables and projections"] / 1e9, 1) == 50.8
    assert {
        "expert padding",
        "shared expert padding",
        "compressed KV of the sources",
        "MegaMoE buffer",
    } <= parts.keys()


def test_a_plan_counts_the_drafter_and_its_experts() -> None:
    """Of one of 16 GPUs, MXFP4 experts padded to 2560 for the kernel like the target's."""

    def parts(model: str) -> dict[str, int]:
        words = ["+exp=kimi_k3_refit", "cluster=gb200", "load_path=layerwise", f"model={model}"]
        [cell] = compose(words)
        assert cell.root is not None, cell.problems
        return {part.name: part.nbytes for part in memory_parts(cell.root)}

    bare, with_drafter = parts("deepseek_v41_flash"), parts("deepseek_v41_flash_dspark")
    assert with_drafter.keys() - bare.keys() == {"DSpark drafter", "drafter's expert padding"}
    expert = 3 * 2560 * 5120 * 17 // 32
    assert with_drafter["drafter's expert padding"] == 3 * 8 * expert * 256 // 2560
    assert with_drafter["expert padding"] == bare["expert padding"] == 40 * 24 * expert * 256 // 2560
    assert with_drafter["routed experts"] == bare["routed experts"]
    assert with_drafter["fused shared experts"] * 40 == bare["fused shared experts"] * 43
    assert with_drafter["rotation tables"] == 2 * bare["rotation tables"]


def test_experts_of_the_drafter_are_dealt_out_too() -> None:
    [cell] = compose(["model=deepseek_v41_dspark_tiny", "parallelism=tp4_dp4_ep16", "backend=native"])
    assert cell.root is not None, cell.problems
    assert any("model.deepseek_v41.dspark_num_experts 8" in problem for problem in problems(cell.root))


def test_table_and_plan_import_no_torch() -> None:
    code = "import json, sys, workloads.models.deepseek_v41.plan; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT).stdout
    assert not {"torch", "numpy"} & set(json.loads(output))
