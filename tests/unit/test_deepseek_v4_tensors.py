"""The tensor table and the plan of DeepSeek-V4 against the published checkpoints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.config.compose import compose
from orchestrator.memory import memory_parts
from workloads.loading.tensor_table import TensorSpec, bytes_by_component, counted, every_tensor
from workloads.models.deepseek_v4 import plan
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v4.tensors import FP8, sections

TINY = DeepseekV4Config()
ROOT = Path(__file__).parents[2]


def dimensions(model: str) -> DeepseekV4Config:
    """As conf/ has them."""
    return DeepseekV4Config(**yaml.safe_load((ROOT / f"conf/model/{model}.yaml").read_text())["deepseek_v4"])


@pytest.fixture(scope="module")
def flash() -> DeepseekV4Config:
    return dimensions("deepseek_v4_flash")


def find(name: str, config: DeepseekV4Config) -> TensorSpec:
    return next(spec for spec, _ in counted(sections(config)) if spec.name == name)


def parameters(config: DeepseekV4Config, *components: str) -> int:
    return sum(s.parameters * copies for s, copies in counted(sections(config)) if s.component in components)


def test_flash_has_the_published_number_of_tensors(flash: DeepseekV4Config) -> None:
    """The published checkpoint has 33,792 expert matrices and 375 other FP8 matrices, each with a scale, and 853
    tensors in BF16, FP32 and int64."""
    tensors = list(counted(sections(flash)))
    experts = sum(n for s, n in tensors if ".experts." in s.name and s.name.endswith(".weight"))
    dense = [s for s, _ in tensors if s.quantized is not None and s.quantized.format == FP8]
    assert experts == 33_792
    assert sum(s.quantized.piece == "weight" for s in dense if s.quantized is not None) == 375
    assert sum(n for s, n in tensors if s.quantized is None) == 853
    assert sum(n for _, n in tensors) == 2 * 33_792 + 2 * 375 + 853


@pytest.mark.parametrize(
    ("model", "expert_millions", "expert_bytes", "routed_billions", "routed_gb"),
    [
        ("deepseek_v4_flash", 25.17, 13_369_344, 277.0, 147.2),
        ("deepseek_v4_pro", 66.06, 35_094_528, 1547.4, 822.1),
    ],
)
def test_routed_experts(
    model: str, expert_millions: float, expert_bytes: int, routed_billions: float, routed_gb: float
) -> None:
    config = dimensions(model)
    expert = [s for s, n in counted(sections(config)) if n > 1 and s.name.startswith("layers.5.")]
    assert round(sum(s.parameters for s in expert) / 1e6, 2) == expert_millions
    assert sum(s.nbytes for s in expert) == expert_bytes
    assert round(parameters(config, "routed_experts") / 1e9, 1) == routed_billions
    assert round(bytes_by_component(sections(config))["routed_experts"] / 1e9, 1) == routed_gb


def test_dense_parameters_of_flash(flash: DeepseekV4Config) -> None:
    assert parameters(flash, "attention") / 1e9 == pytest.approx(4.6, abs=0.05)
    assert parameters(flash, "shared_experts") / 1e9 == pytest.approx(1.08, abs=0.01)
    assert parameters(flash, "embedding", "head") / 1e9 == pytest.approx(1.06, abs=0.01)
    total = parameters(flash, *{s.component for s, _ in counted(sections(flash))} - {"mtp"})
    assert total / 1e9 == pytest.approx(284, abs=0.6)


@pytest.mark.parametrize(
    ("model", "ep", "gigabytes"),
    [("deepseek_v4_flash", 16, 9.2), ("deepseek_v4_flash", 4, 36.8), ("deepseek_v4_pro", 16, 51.4)],
)
def test_routed_experts_of_one_gpu(model: str, ep: int, gigabytes: float) -> None:
    local = bytes_by_component(sections(dimensions(model)), tp=4, ep=ep)["routed_experts"]
    assert round(local / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.hc_attn_fn", "F32", (24, 16384)),
        ("layers.0.hc_ffn_scale", "F32", (3,)),
        ("layers.0.ffn.gate.tid2eid", "I64", (129280, 6)),
        ("layers.3.ffn.gate.bias", "F32", (256,)),
        ("layers.1.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.1.attn.wo_a.scale", "F8_E8M0", (64, 32)),
        ("layers.1.attn.attn_sink", "F32", (64,)),
        ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096)),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024)),
        ("layers.2.attn.compressor.norm.weight", "BF16", (512,)),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024)),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096)),
        ("layers.2.attn.indexer.compressor.wgate.weight", "BF16", (256, 4096)),
        ("layers.3.attn.compressor.wkv.weight", "BF16", (512, 4096)),
        ("layers.3.attn.compressor.ape", "F32", (128, 512)),
        ("layers.5.ffn.experts.*.w2.weight", "I8", (4096, 1024)),
        ("layers.5.ffn.experts.*.w2.scale", "F8_E8M0", (4096, 64)),
        ("layers.5.ffn.shared_experts.w1.scale", "F8_E8M0", (16, 32)),
        ("mtp.0.e_proj.weight", "F8_E4M3", (4096, 4096)),
        ("mtp.0.hc_head_fn", "F32", (4, 16384)),
        ("hc_head_scale", "F32", (1,)),
    ],
)
def test_published_headers(flash: DeepseekV4Config, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (find(name, flash).dtype, find(name, flash).shape) == (dtype, shape)


def test_kinds_of_layers(flash: DeepseekV4Config) -> None:
    names = {s.name for s, _ in counted(sections(flash))}
    assert sum("indexer.wq_b.weight" in name for name in names) == 21
    assert sum(name.endswith("attn.compressor.ape") for name in names) == 41
    assert sum("tid2eid" in name for name in names) == 3
    assert sum(name.endswith("gate.bias") for name in names) == 41
    assert dimensions("deepseek_v4_pro").compress_ratios.count(128) == 31
    assert dimensions("deepseek_v4_flash_4layer").compress_ratios == [0, 0, 4, 128, 0]


def test_the_proxy_is_the_default() -> None:
    assert dimensions("deepseek_v4_tiny") == TINY


def test_groups_and_expanded_tensors_agree() -> None:
    tensors = list(every_tensor(sections(TINY)))
    assert len({spec.name for spec in tensors}) == len(tensors)
    assert len(tensors) == sum(copies for _, copies in counted(sections(TINY)))
    assert not any("*" in spec.name for spec in tensors)


def test_fp8_experts_have_blocks(flash: DeepseekV4Config) -> None:
    flash = DeepseekV4Config(**{**vars(flash), "expert_quantization": "fp8"})
    assert find("layers.5.ffn.experts.*.w1.weight", flash).dtype == "F8_E4M3"
    assert find("layers.5.ffn.experts.*.w1.scale", flash).shape == (16, 32)
    assert bytes_by_component(sections(flash))["routed_experts"] / 1e9 == pytest.approx(277.0, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"compress_ratios": [0, 4]},
            "compress_ratios has 2 entries; num_layers 6, num_mtp_layers 1 and num_dspark_layers 0 need 7",
        ),
        ({"compress_ratios": [0, 0, 4, 8, 4, 0, -1]}, "compress_ratios holds [-1]"),
        ({"expert_quantization": "int4"}, "expert_quantization is 'int4'"),
        ({"num_experts": 15}, "num_experts is 15; it must be even"),
        ({"num_mtp_layers": 2, "compress_ratios": [0] * 8}, "num_mtp_layers is 2"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size is 100; MXFP4 shares a scale between 32"),
        ({"o_groups": 3}, "o_groups is 3; it must divide num_heads 4"),
        ({"o_lora_rank": 96}, "o_lora_rank is 96; FP8 shares a scale between 128 rows"),
        ({"head_dim": 32}, "head_dim times the heads of a group is 64"),
        ({"index_head_dim": 48}, "index_head_dim is 48; the Hadamard rotation takes a power of two"),
        ({"qk_rope_head_dim": 33}, "qk_rope_head_dim is 33; it must be even"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], problem: str) -> None:
    assert list(plan.problems(TINY)) == []
    found = list(plan.problems(DeepseekV4Config(**changes)))
    assert any(problem in text for text in found), found


def test_what_flash_derives_and_keeps(flash: DeepseekV4Config) -> None:
    derived = {part.name: part.nbytes for part in plan.derived(flash, tp=4)}
    rows = 43 * (1024 + 512 + 16 * 1024) * 2  # wq_a, wkv, wq_b: 4096 or 1024 columns are 8 or 2 words
    assert derived["packed FP8 scales"] > rows
    assert derived["fused shared experts"] / 44 == 2 * 2048 * 4096 + 3 * 2048 * 4096 // 32
    assert derived["first mix of one copy"] == 24 * 4096 * 4
    window, groups = plan.caches(flash, plan.Load(requests=1, tokens=1024), tp=4)[::-1]
    assert window.nbytes > 44 * 128 * 512 * 2
    assert groups.nbytes == 21 * 256 * (512 + 128) * 2 + 20 * 8 * 512 * 2


GB200 = ["+exp=kimi_k3_refit", "cluster=gb200", "load_path=layerwise", "model=deepseek_v4_flash"]


def test_the_plan_of_flash_on_gb200() -> None:
    [cell] = compose(GB200)
    assert cell.root is not None, cell.problems
    parts = {part.name: part.nbytes for part in memory_parts(cell.root)}
    assert round(parts["routed experts"] / 1e9, 1) == 9.2
    assert round(parts["shared experts"] / 1e9, 2) == 1.08
    assert {
        "MTP block",
        "hyper-connections",
        "packed FP8 scales",
        "compressed KV",
        "MegaMoE buffer",
    } <= parts.keys()


def test_table_and_plan_import_no_torch() -> None:
    code = "import json, sys, workloads.models.deepseek_v4.plan; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT).stdout
    assert not {"torch", "numpy"} & set(json.loads(output))
