"""DSpark drafters as a plan sees them: published tensors, what does not fit, memory, acceptance."""

import re
from dataclasses import replace

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import Root
from orchestrator.rules.cell_rules import problems
from workloads.engines.acceptance import accepted
from workloads.loading.tensor_table import bytes_by_component, counted, every_tensor
from workloads.models.deepseek_v4 import tensors as v4
from workloads.models.kimi_k3 import tensors as k3
from workloads.models.planning import Part

GB200 = ("cluster=gb200", "parallelism=tp4_dp4_ep16", "backend=native_gb200")
PUBLISHED_BYTES = 7_124_633_450 - 8 - 7_520  # of the file of Inferact/Kimi-K3-DSpark, without its header
EMBEDDING, CONFIDENCE = 163_840 * 7_168 * 2, (7_168 + 256 + 1) * 2  # which are not loaded


def rooted(*words: str) -> Root:
    [one] = compose(list(words))
    assert one.root is not None, one.problems
    return one.root


def test_the_drafter_of_kimi_k3_has_the_published_tensors() -> None:
    c = rooted("model=kimi_k3_dspark", *GB200).model.kimi_k3
    table = {spec.name: spec for spec, _ in counted(k3.sections(c)) if spec.component == "dspark"}
    assert len(table) == 68 - 3
    assert sum(spec.nbytes for spec in table.values()) == PUBLISHED_BYTES - EMBEDDING - CONFIDENCE
    assert {spec.dtype for spec in table.values()} == {"BF16"}
    assert table["context_proj.weight"].shape == (7168, 5 * 7168)
    assert table["layers.4.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    assert table["layers.0.self_attn.q_b_proj.weight"].shape == (64 * 192, 1536)
    assert table["markov_head.markov_w1.weight"].shape == (163_840, 256)
    for name in ("embed_tokens.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"):
        assert name.startswith(k3.NOT_LOADED), "published beside them, and not loaded"
        assert name not in table


def test_the_drafter_of_deepseek_v4_has_the_published_tensors() -> None:
    """As loaders of the published checkpoint require them: 29 of each stage beside its experts; the first and the last
    stage have more."""
    c = rooted("model=deepseek_v4_flash_dspark", *GB200).model.deepseek_v4
    names = [spec.name for spec in every_tensor(v4.sections(c)) if spec.name.startswith("mtp.")]
    beside = [name.split(".", 2) for name in names if ".experts." not in name]
    of_stage = [{rest for _, number, rest in beside if number == str(stage)} for stage in range(3)]
    common = set.intersection(*of_stage)
    assert len(common) == 29
    assert of_stage[0] - common == {"main_proj.weight", "main_proj.scale", "main_norm.weight"}
    assert of_stage[1] == common
    assert of_stage[2] - common == {
        *("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"),
        *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"),
    }
    assert len(names) - len(beside) == 3 * 256 * 6
    assert len(c.compress_ratios) == 46


def parts_of(*words: str) -> dict[str, Part]:
    return {part.name: part for part in memory.memory_parts(rooted(*words))}


def test_a_plan_counts_the_drafter() -> None:
    """Weights, what is joined and absorbed of them, and its latents, at published dimensions: on one of 16 GPUs 5.7 GB
    more than without."""
    bare, drafted = parts_of("model=kimi_k3", *GB200), parts_of("model=kimi_k3_dspark", *GB200)
    assert drafted.keys() - bare.keys() == {"DSpark drafter", "DSpark derived", "DSpark KV"}
    assert all(drafted[name] == part for name, part in bare.items())
    assert round(drafted["DSpark drafter"].nbytes / 1e9, 2) == 4.13
    joined = 5 * (576 * 7168 + 512) * 2
    assert drafted["DSpark derived"].nbytes == joined + 5 * 16 * 512 * 256 * 2
    assert drafted["DSpark KV"].nbytes == (32 * 8192 + 32 * 7) * 5 * 576 * 2


def test_a_plan_counts_what_a_drafter_loads_again() -> None:
    own = {
        "kimi_k3_tiny": ["embedding"],
        "deepseek_v4_tiny": ["embedding", "head"],
        "openpangu_tiny": ["embedding"],
    }
    for model, names in own.items():
        parts = parts_of(f"model={model}", "parallelism=single", "backend=native_reference")
        found = {name: part for name, part in parts.items() if name.startswith("drafter's ")}
        assert list(found) == [f"drafter's {name}" for name in names], model
        for part in found.values():
            assert (part.kind, part.nbytes) == ("weights", parts["embedding"].nbytes), model


def test_experts_of_the_stages_count_like_those_of_layers() -> None:
    drafted, mtp = rooted("model=deepseek_v4_flash_dspark", *GB200), rooted("model=deepseek_v4_flash", *GB200)
    one = bytes_by_component(v4.sections(mtp.model.deepseek_v4), tp=4, ep=16)["mtp"]
    three = bytes_by_component(v4.sections(drafted.model.deepseek_v4), tp=4, ep=16)["dspark"]
    assert 2.9 * one < three < 3.6 * one
    assert memory.update_bytes(drafted) == memory.update_bytes(mtp) > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.kimi_k3.num_mtp_layers=1"], "an engine has one drafter; set one of the two to 0"),
        (["model.kimi_k3.dspark_target_layer_ids=[2,1]"], r"is \[2, 1\]; .* in ascending order"),
        (["model.kimi_k3.dspark_target_layer_ids=[]"], r"is \[\]; .* must name different layers"),
        (
            ["model.kimi_k3.dspark_target_layer_ids=[1,4]"],
            r"names \[4\]: the drafter does not fit this target, whose num_layers 4 are 0 to 3",
        ),
        (
            ["model.kimi_k3.dspark_mask_token_id=1024"],
            "does not fit this target, whose vocabulary has 1024 tokens",
        ),
        (["model.kimi_k3.dspark_num_heads=7", "parallelism=tp2"], "dspark_num_heads 7"),
        (["model.kimi_k3.qk_rope_head_dim=15"], "turns its channels in pairs, so it must be even"),
    ],
)
def test_a_drafter_that_does_not_fit_its_target_is_refused(words: list[str], sentence: str) -> None:
    found = problems(rooted("model=kimi_k3_dspark_tiny", *words))
    assert len(found) == 1, found
    assert re.search(sentence, found[0]), found


def test_stages_need_a_ratio_each_and_no_groups() -> None:
    [found] = problems(
        rooted("model=deepseek_v4_dspark_tiny", "model.deepseek_v4.compress_ratios=[0,0,4,8,4,0,0]")
    )
    assert "and num_dspark_layers 2 need 8, the drafter's last" in found
    [found] = problems(
        rooted("model=deepseek_v4_dspark_tiny", "model.deepseek_v4.compress_ratios=[0,0,4,8,4,0,0,4]")
    )
    assert "ends with [0, 4]; the stages of the DSpark drafter attend to a window only" in found


@pytest.mark.parametrize("model", ["qwen3_tiny", "gpt_oss_tiny", "minicpm_tiny"])
def test_an_update_of_a_drafter_needs_one(model: str) -> None:
    found = problems(rooted(f"model={model}", "load_path=draft_apart", "backend=native_reference"))
    assert len(found) == 1
    assert f"load_path.steps[3].roots names 'draft', and {model} has no drafter" in found[0]


@pytest.mark.parametrize(
    "model", ["kimi_k3_tiny", "kimi_k3_dspark_tiny", "deepseek_v4_dspark_tiny", "medusa_tiny"]
)
def test_an_update_of_a_drafter_is_taken_where_there_is_one(model: str) -> None:
    assert problems(rooted(f"model={model}", "load_path=draft_apart", "backend=native_reference")) == []


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        ([], (0, 0)),
        ([[]] * 6, (0, 0)),
        ([[2, 3, 4, 5]] + [[9]] * 5, (4, 4)),  # all taken, and the token after them is the last
        ([[2, 9, 4]] + [[9]] * 5, (6, 1)),
        ([[9], [9], [9], [9], [9], [9]], (5, 0)),
    ],
)
def test_acceptance_is_what_speculative_serving_would_have_taken(
    drafts: list[list[int]], expected: tuple[int, int]
) -> None:
    assert accepted([1, 2, 3, 4, 5, 6], drafts) == expected


def test_no_drafter_no_bytes() -> None:
    c = rooted("model=kimi_k3_dspark_tiny", "parallelism=single").model.kimi_k3
    assert "dspark" in bytes_by_component(k3.sections(c))
    assert "dspark" not in bytes_by_component(k3.sections(replace(c, num_dspark_layers=0)))
