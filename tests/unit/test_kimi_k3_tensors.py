"""The tensor table against the published full-size checkpoint, to the byte."""

import json
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from workloads.loading.tensor_table import TensorSpec, bytes_by_component, counted, every_tensor, local_bytes
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import sections

FULL = KimiK3Config(
    num_layers=93,
    full_attention_layers=[*range(3, 92, 4), 92],
    hidden_size=7168,
    vocab_size=163840,
    num_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=96,
    kda_head_dim=128,
    kda_gate_rank=128,
    kda_a_log_size=128,
    attn_res_block_size=12,
    dense_intermediate_size=33792,
    moe_latent_size=3584,
    num_experts=896,
    num_experts_per_token=16,
    moe_intermediate_size=3072,
    shared_intermediate_size=6144,
    num_mtp_layers=0,
)
PUBLISHED_TOTAL = 1_560_860_324_864  # metadata.total_size of the published index
PUBLISHED_VISION = 894_717_952  # bytes of its 168 vision tensors
TINY = KimiK3Config()


def _sum(component: str, layer: int | None = None, matrices: bool = False) -> int:
    return sum(
        spec.parameters * copies
        for spec, copies in counted(sections(FULL))
        if spec.component == component
        and (layer is None or f".layers.{layer}." in spec.name)
        and not (matrices and (spec.shape[0] == 1 or len(spec.shape) != 2))
    )


def _find(name: str, config: KimiK3Config = FULL) -> TensorSpec:
    return next(spec for spec, _ in counted(sections(config)) if spec.name == "language_model." + name)


def test_text_weights_equal_the_published_total_to_the_byte() -> None:
    total = sum(spec.nbytes * copies for spec, copies in counted(sections(FULL)))
    assert total == PUBLISHED_TOTAL - PUBLISHED_VISION


def test_tensor_count_equals_the_published_index_without_vision() -> None:
    assert sum(copies for _, copies in counted(sections(FULL))) == 497_220 - 168


def test_routed_experts_of_the_full_model() -> None:
    assert _sum("routed_experts") == 2_722_740_830_208
    one_expert = [
        spec for spec, copies in counted(sections(FULL)) if copies > 1 and ".layers.1." in spec.name
    ]
    assert sum(spec.nbytes for spec in one_expert) == 17_547_264
    assert sum(spec.parameters for spec in one_expert) == 33_030_144


@pytest.mark.parametrize(
    ("component", "layer", "millions"),
    [
        ("kda", 0, 443.6),
        ("mla", 3, 232.2),
        ("mla", 92, 232.2),
        ("latent", 1, 51.4),
        ("shared_experts", 92, 132.1),
        ("router", 1, 6.4),
        ("dense", 0, 726.7),
    ],
)
def test_matrix_parameters_per_layer(component: str, layer: int, millions: float) -> None:
    assert round(_sum(component, layer, matrices=True) / 1e6, 1) == millions


def test_trunk_embedding_and_head_bytes() -> None:
    rest = (
        sum(bytes_by_component(sections(FULL)).values())
        - bytes_by_component(sections(FULL))["routed_experts"]
    )
    assert rest == pytest.approx(113.4e9, rel=2e-3)


def test_bytes_of_one_gpu_at_tp4_dp4_ep16() -> None:
    parts = {
        name: round(size / 1e9, 1) for name, size in bytes_by_component(sections(FULL), tp=4, ep=16).items()
    }
    assert parts == {
        "embedding": 0.6,
        "norms": 0.0,
        "kda": 15.4,
        "mla": 3.3,
        "dense": 1.5,
        "router": 1.2,
        "latent": 9.5,
        "shared_experts": 24.3,
        "routed_experts": 90.4,
        "head": 0.6,
    }
    assert sum(bytes_by_component(sections(FULL), tp=4, ep=16).values()) == pytest.approx(147e9, rel=3e-3)


def test_planning_the_full_model_takes_milliseconds() -> None:
    started = time.perf_counter()
    bytes_by_component(sections(FULL), tp=4, ep=16)
    assert time.perf_counter() - started < 0.25  # 7 ms here; expanding the experts takes 1000


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("model.layers.1.self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
        ("model.layers.1.self_attn.o_norm.weight", "F32", (128,)),
        ("model.layers.1.self_attn.A_log", "F32", (128,)),
        ("model.layers.1.self_attn.dt_bias", "F32", (12288,)),
        ("model.layers.1.self_attention_res_proj.weight", "BF16", (1, 7168)),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "F32", (896,)),
        ("model.layers.1.block_sparse_moe.experts.*.w2.weight_packed", "U8", (3584, 1536)),
        ("model.layers.1.block_sparse_moe.experts.*.w3.weight_scale", "U8", (3072, 112)),
    ],
)
def test_published_headers(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert (_find(name).dtype, _find(name).shape) == (dtype, shape)


def test_only_the_heads_of_a_log_are_held() -> None:
    a_log = _find("model.layers.1.self_attn.A_log")
    assert a_log.nbytes == 512
    assert local_bytes(a_log, 1, tp=4, ep=16) == 96 // 4 * 4


def test_uneven_splits_count_the_largest_share() -> None:
    embedding = _find("model.embed_tokens.weight", TINY)
    assert local_bytes(embedding, 1, tp=3, ep=1) == 342 * 256 * 2
    scale = _find("model.layers.1.block_sparse_moe.experts.*.w1.weight_scale", TINY)
    assert local_bytes(scale, 32, tp=4, ep=5) == 7 * scale.nbytes


def test_row_split_matrix_is_divided_over_tp() -> None:
    output = _find("model.layers.1.self_attn.o_proj.weight")
    assert local_bytes(output, 1, tp=4, ep=1) == output.nbytes // 4


def test_groups_and_expanded_tensors_agree() -> None:
    tensors = list(every_tensor(sections(TINY)))
    assert len({spec.name for spec in tensors}) == len(tensors)
    assert not any("*" in spec.name for spec in tensors)
    for group, copies in counted(sections(TINY)):
        matches = [spec for spec in tensors if fnmatchcase(spec.name, group.name)]
        assert len(matches) == copies
        assert {(s.dtype, s.shape, s.shard, s.component) for s in matches} == {
            (group.dtype, group.shape, group.shard, group.component)
        }


def test_mtp_block_is_a_decoder_layer_without_residual_mixers() -> None:
    names = {
        s.name.removeprefix("language_model.model.layers.4.")
        for s, _ in counted(sections(TINY))
        if s.component == "mtp"
    }
    assert {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
    } <= names
    assert {
        "self_attn.kv_b_proj.weight",
        "block_sparse_moe.experts.*.w1.weight_packed",
        "input_layernorm.weight",
    } <= names
    assert not any("_res_" in name or "A_log" in name for name in names)
    assert not any(s.component == "mtp" for s, _ in counted(sections(FULL)))


def test_expert_width_without_whole_scale_groups_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"w2 has 100 input columns.*multiple of the 32.*change moe_latent_size"
    ):
        list(counted(sections(KimiK3Config(moe_intermediate_size=100))))


def test_table_imports_no_torch() -> None:
    code = "import json, sys, workloads.models.kimi_k3.tensors; print(json.dumps(sorted(sys.modules)))"
    root = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=root).stdout
    loaded = json.loads(output)
    assert not {"torch", "numpy"} & set(loaded)
