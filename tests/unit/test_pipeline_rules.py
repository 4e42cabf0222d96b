"""What a plan says of pipeline stages, and what the judge makes of ranks that hold different layers."""

import re
from dataclasses import asdict
from typing import Any

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import RULES, Root  # noqa: F401  # registers the schema
from orchestrator.judge.coverage import Coverage
from orchestrator.judge.records import Audit
from orchestrator.judge.replicas import outvoted, replica_groups
from orchestrator.judge.stages import Holdings
from orchestrator.rules.cell_rules import problems
from workloads.loading.tensor_table import every_tensor
from workloads.models.architectures import ARCHITECTURES, tensor_table
from workloads.models.stages import DIVIDED, staged

K3 = ("model=kimi_k3", "cluster=gb200", "backend=native_gb200", "load_path=layerwise")
K3_LAYOUT = "parallelism={tp: 4, dp: 4, ep: 16, pp: 1, nodes: 4, gpus_per_node: 4}"


def root(*words: str) -> Root:
    [one] = compose(list(words))
    assert one.root is not None, one.problems
    return one.root


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("model=gpt_oss_tiny",),
            r"^parallelism.pp is 2 and model.architecture is gpt_oss: .* of no other family; ",
        ),
        (
            ("parallelism.pp=9", "parallelism.gpus_per_node=9"),
            r"^parallelism.pp is 9 and .*num_layers 4: .* to 4 or ",
        ),
        (
            ("parallelism.gpus_per_node=4",),
            r"tp 1 x dp 1 x pp 2 is 2 ranks, but nodes 1 x gpus_per_node 4 is 4;",
        ),
        (("parallelism.ep=2",), r"^parallelism.ep is 2, which does not divide the 1 ranks of a stage"),
        (
            ("model=deepseek_v4_vision_tiny",),
            r"^model.deepseek_v4.vision is true: .* set parallelism.pp=1\.$",
        ),
        (
            ("model=deepseek_v41_vision_tiny",),
            r"^model.deepseek_v41.vision is true: .* set parallelism.pp=1\.$",
        ),
        (
            ("model=deepseek_v41_tiny", "parallelism.pp=4", "parallelism.gpus_per_node=4"),
            r"^parallelism.pp is 4 and stage 3 begins with layer 6: layer 6 needs what layer 4 makes, and compressed",
        ),
        (
            ("model=tiny_llama", "backend=vllm_cpu", "load_path=vllm_reload"),
            r"^parallelism.pp is 2 and backend.engine",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(words: tuple[str, ...], sentence: str) -> None:
    found = problems(root("parallelism=pp2", "backend=native_reference", *words))
    assert any(re.search(sentence, problem) for problem in found), found


def test_a_plan_shows_the_fullest_stage() -> None:
    one = root(*K3)
    one.parallelism.tp, one.parallelism.dp, one.parallelism.ep = 4, 4, 16
    whole = {part.name: part.nbytes for part in memory.memory_parts(one)}
    one.parallelism.pp = 2
    assert memory.fullest_stage(one) == 0, "47 of 93 layers"
    stage = {part.name: part.nbytes for part in memory.memory_parts(one)}
    assert "output head" not in stage
    assert "MTP block" not in stage
    assert stage["embedding"] == whole["embedding"]
    assert stage["KV cache"] == whole["KV cache"] * 11 // 24, "layers with MLA of the first 47"
    assert stage["routed experts"] == whole["routed experts"] * 46 // 92
    assert stage["MegaMoE buffer"] == whole["MegaMoE buffer"]
    assert memory.weight_bytes(one) == memory.weight_bytes(root(*K3))


def test_what_the_first_stage_alone_derives_counts_there_only() -> None:
    one = root("model=deepseek_v4_tiny", "parallelism=pp2", "backend=native_reference")
    assert memory.fullest_stage(one) == 1, "with the drafter"
    assert "first mix of one copy" not in {part.name for part in memory.memory_parts(one)}
    one.model.deepseek_v4.num_mtp_layers, one.model.deepseek_v4.compress_ratios = 0, [4, 4, 4, 0, 0, 0]
    assert memory.fullest_stage(one) == 0
    assert "first mix of one copy" in {part.name for part in memory.memory_parts(one)}


def test_replicas_are_within_a_stage_and_ends_agree() -> None:
    groups = list(replica_groups({"tp": 1, "dp": 2, "ep": 2, "pp": 2}, 4))
    assert [(g.ranks, g.experts, g.stages) for g in groups] == [
        ([0, 1], False, False),
        ([2, 3], False, False),
        ([0, 2], False, True),
        ([1, 3], False, True),
    ]
    prints = [{"embed": "a", "layers.0": "x"}] * 2 + [
        {"embed": "a", "layers.1": "y"},
        {"embed": "b", "layers.1": "y"},
    ]
    found = {tuple(group.ranks): outvoted(group, prints) for group in groups}
    assert [(cause.rank, cause.path) for cause in found[2, 3][1]] == [(3, "embed")]
    assert found[0, 2] == (1, []), "layers that one of them lacks are not compared"
    assert [(cause.rank, cause.path) for cause in found[1, 3][1]] == [(3, "embed")]


def test_within_a_stage_a_missing_tensor_is_a_difference() -> None:
    group, _ = replica_groups({"tp": 1, "dp": 2, "ep": 1}, 2)
    compared, causes = outvoted(group, [{"a": "1", "b": "2"}, {"a": "1"}])
    assert (compared, [cause.path for cause in causes]) == (2, ["b"])


@pytest.mark.parametrize("family", DIVIDED)
def test_what_no_stage_holds_is_named_with_its_bytes(family: str) -> None:
    config = ARCHITECTURES[family]()
    cell: dict[str, Any] = {
        "parallelism": {"pp": 2},
        "model": {"architecture": family, family: asdict(config)},
    }
    specs = list(every_tensor(tensor_table(family).sections(config)))
    lost = next(
        spec for spec in specs if spec.name.startswith(f"{staged(family).layer}1.") and len(spec.shape) == 2
    )
    whole, holed = Holdings.of(cell), Holdings.of(cell)
    assert whole is not None
    assert holed is not None
    for stage in range(2):
        held = [s for s in specs if staged(family).holds(config, s.name, 2, stage)]
        whole.add(
            audit(
                stage,
                {
                    s.name: [[0, s.read or n] if not i else [0, n] for i, n in enumerate(s.shape)]
                    for s in held
                },
            )
        )
        holed.add(audit(stage, {s.name: [[0, n] for n in s.shape] for s in held if s is not lost}))
    holed.add(audit(0, {lost.name: [[0, lost.shape[0] // 2], [0, lost.shape[1]]]}))
    assert list(whole.lacking()) == []
    half = lost.nbytes - lost.nbytes * (lost.shape[0] // 2) // lost.shape[0]
    assert list(holed.lacking()) == [(lost.name, half, lost.nbytes)]
    coverage = Coverage(expected=1000, audited=1000)
    coverage.add_unheld(lost.name, half, lost.nbytes)
    assert coverage.fraction < 1
    assert coverage.unheld == {lost.name}
    assert coverage.reasons == {lost.name: f"no pipeline stage holds {half:,} of its {lost.nbytes:,} bytes"}


def audit(rank: int, regions: dict[str, list[list[int]]]) -> Audit:
    """Of a rank that holds these regions of the checkpoint, each in a tensor of its own."""
    part = {"fp": "f", "nbytes": 1, "expected": "f"}
    parts = {name: {name: {**part, "source": name, "region": region}} for name, region in regions.items()}
    return Audit(rank, parts=parts)


def test_without_stages_nothing_is_asked() -> None:
    assert Holdings.of({"parallelism": {"pp": 1}, "model": {"architecture": "qwen3"}}) is None
    assert Holdings.of({"parallelism": {}, "model": {"architecture": "transformers"}}) is None
