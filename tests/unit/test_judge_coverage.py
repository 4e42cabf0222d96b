"""Coverage of engines whose ranks say what they hold: boxes counted exactly, by groups that hold one model."""

import itertools
import random
import time
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check

from orchestrator.judge.boxes import union_volume
from orchestrator.judge.coverage import Coverage
from orchestrator.judge.records import Audit

Boxes = list[list[list[int]]]


def brute_force(boxes: Boxes, shape: list[int]) -> int:
    points = itertools.product(*(range(size) for size in shape))
    return sum(
        any(
            len(box) == len(shape) and all(s <= p < s + n for p, (s, n) in zip(point, box, strict=True))
            for box in boxes
        )
        for point in points
    )


@pytest.mark.parametrize("seed", range(60))
def test_union_is_exact(seed: int) -> None:
    chance = random.Random(seed)
    shape = [chance.randint(1, 6) for _ in range(chance.randint(0, 4))]
    boxes = [
        [[chance.randint(-1, size), chance.randint(0, size + 1)] for size in shape]
        for _ in range(chance.randint(0, 6))
    ]
    boxes += [[[0, 1]]] * chance.randint(0, 1)  # of another rank, perhaps
    assert union_volume(boxes, shape) == brute_force(boxes, shape)


def shared(rank: int, tensors: dict[str, list[object]], regions: dict[str, Boxes], **more: object) -> Audit:
    source = {"kind": "source", "root": "target", "shared": True, "tensors": tensors, "regions": regions}
    return Audit(rank, sources=[{**source, "bytes_expected": 1, "bytes_audited": 1, "missing": [], **more}])


def total(audits: list[Audit], group: int) -> Coverage:
    coverage = Coverage(group)
    for audit in audits:
        coverage.add(audit)
    coverage.finish()
    return coverage


TENSORS: dict[str, list[object]] = {"a": [[4, 6], 2], "b": [[3], 4], "c": [[], 2]}


def test_ranks_of_a_group_cover_together_and_overlaps_count_once() -> None:
    left, right = (
        {"a": [[[0, 3], [0, 6]]], "b": [[[0, 3]]]},
        {"a": [[[1, 3], [0, 6]]], "b": [[[0, 3]]], "c": [[]]},
    )
    coverage = total([shared(0, TENSORS, left), shared(1, TENSORS, right)], group=2)
    assert (coverage.expected, coverage.audited, coverage.missing) == (62, 62, {})


def test_a_draft_covers_what_its_target_left_to_it() -> None:
    """In one checkpoint. What a draft holds of its target's tensors again counts once."""
    target, draft = {"a": [[[0, 4], [0, 6]]]}, {"a": [[[0, 4], [0, 6]]], "b": [[[0, 3]]]}
    [own], [drafted] = (shared(0, TENSORS, regions).sources for regions in (target, draft))
    audit = Audit(0, sources=[own, {**drafted, "root": "draft", "of": "target"}])
    coverage = total([audit], group=1)
    assert (coverage.expected, coverage.audited) == (62, 60)
    assert coverage.missing == {"target:c": 0}


def test_groups_do_not_cover_for_each_other() -> None:
    """Data-parallel replicas hold a whole model each."""
    whole = {"a": [[[0, 4], [0, 6]]], "b": [[[0, 3]]], "c": [[]]}
    coverage = total([shared(0, TENSORS, whole), shared(1, TENSORS, {"b": [[[1, 1]]]})], group=1)
    assert (coverage.expected, coverage.audited) == (124, 66)
    assert coverage.missing == {"target:a": 1, "target:b": 1, "target:c": 1}
    assert coverage.reasons["target:b"] == "4 of its 12 bytes are held"


def test_reasons_follow_and_excused_is_not_owed() -> None:
    audits = [
        shared(
            0,
            TENSORS,
            {"b": [[[0, 3]]]},
            excused={"a": "tied", "c": "for the draft"},
            reasons={"c": "sliced twice"},
        ),
        shared(1, TENSORS, {}, excused={"a": "tied"}),
    ]
    coverage = total(audits, group=2)
    assert (coverage.expected, coverage.audited) == (14, 12), "what one rank of the group owes is owed"
    assert coverage.excused == {"target:a": 48}
    assert coverage.reasons == {"target:c": "no audited tensor holds it; sliced twice"}
    assert coverage.totals()["excused_bytes"] == 48
    assert coverage.shown_reasons() == {
        "target:c": "no audited tensor holds it; sliced twice",
        "target:a": "tied",
    }


def test_each_reason_of_what_is_not_owed_is_shown_once() -> None:
    tensors: dict[str, list[object]] = {f"t{i}": [[2], 2] for i in range(100)}
    excused = {name: "vision" if i % 2 else "mtp" for i, name in enumerate(tensors)}
    coverage = total([shared(0, tensors, {}, excused=excused)], group=1)
    assert coverage.shown_reasons() == {"target:t0": "mtp", "target:t1": "vision"}
    assert "100 tensors of 400 bytes not owed" in coverage.left_out()


def test_what_is_not_owed_is_listed_where_its_size_is_not_recorded() -> None:
    coverage = total([shared(0, {"b": [[3], 4]}, {"b": [[[0, 3]]]}, excused={"a": "tied"})], group=1)
    assert (coverage.fraction, coverage.excused) == (1.0, {"target:a": 0})


def test_what_the_checkpoint_does_not_hold_counts_nothing() -> None:
    coverage = total([shared(0, {"b": [[3], 4]}, {"x": [[[0, 3]]], "b": [[[0, 9], [0, 9]]]})], group=1)
    assert (coverage.expected, coverage.audited) == (12, 0)


def test_many_tensors_are_fast() -> None:
    tensors: dict[str, list[object]] = {f"model.layers.{i}.weight": [[64, 64], 2] for i in range(100_000)}
    audits = [shared(r, tensors, {name: [[[16 * r, 16], [0, 64]]] for name in tensors}) for r in range(4)]
    began = time.process_time()
    coverage = total(audits, group=4)
    assert time.process_time() - began < 10
    assert coverage.fraction == 1.0


def vllm_world(**lacking: Boxes) -> World:
    """A world as a foreign engine leaves it: no lifecycle, shared sources; `lacking` replaces regions."""
    world = World()
    world.cell["backend"]["engine"] = "vllm"
    checks = world.cell["load_path"]["checks"]
    world.cell["load_path"]["checks"] = [c for c in checks if c["rule"] != "lifecycle"]
    for gang in (world.candidate, *world.fresh.values()):
        for audit in gang.each(*gang.audits):
            audit.sources = [source(root, lacking) for root in ("target", "draft")]
    return world


def source(root: str, lacking: dict[str, Boxes]) -> fx.Record:
    tensors = {"w": [[8, 8], 2], "v": [[8], 4], "skipped": [[100], 1]}
    regions = {"w": [[[0, 8], [0, 8]]], "v": [[[0, 8]]], **lacking}
    return {
        "kind": "source", "root": root, "shared": True, "tensors": tensors, "regions": regions,
        "excused": {"skipped": "the engine computes rotary tables itself"}, "reasons": {"v": "no tensor has its bytes"},
        "bytes_expected": 160, "bytes_audited": 160, "missing": [],
    }  # fmt: skip


def without_lifecycle(attempt: Path) -> None:
    for path in attempt.glob("*/lifecycle-*.jsonl"):
        path.unlink()


def test_a_foreign_engine_passes_without_lifecycle_files(tmp_path: Path) -> None:
    judged = vllm_world().judge(tmp_path, without_lifecycle)
    assert judged["verdict"] == "PASS"
    assert judged["findings"] == []
    coverage = judged["coverage"]
    assert (coverage["fraction"], coverage["excused"], coverage["excused_bytes"]) == (1.0, 2, 200)
    assert coverage["reasons"]["target:skipped"] == "the engine computes rotary tables itself"
    assert "2 tensors of 200 bytes not owed" in check(judged, "coverage")["observed"]


def test_the_native_engine_owes_its_lifecycle_files(tmp_path: Path) -> None:
    assert World().judge(tmp_path, without_lifecycle)["verdict"] == "ERROR"


def test_what_is_not_covered_is_named_with_its_reason(tmp_path: Path) -> None:
    judged = vllm_world(v=[[[0, 2]]]).judge(tmp_path, without_lifecycle)
    observed = check(judged, "coverage")["observed"]
    assert check(judged, "coverage")["verdict"] == "FAIL"
    assert "`target:v` (8 of its 32 bytes are held; no tensor has its bytes)" in observed
    found = [finding for finding in judged["findings"] if finding["code"] == "vacuous"]
    assert {path for finding in found for path in finding["paths"]} == {"target:v", "draft:v"}
    assert "no tensor has its bytes" in found[0]["detail"]


@pytest.mark.parametrize("key", ["tensors", "regions"])
def test_a_shared_source_without_its_keys_is_a_broken_record(tmp_path: Path, key: str) -> None:
    world = vllm_world()
    del next(world.candidate.each("updated")).sources[0][key]
    assert world.judge(tmp_path, without_lifecycle)["error"]["type"] == "records_bad_record"


def test_packed_bytes_are_compared_and_said_to_be_read_back(tmp_path: Path) -> None:
    world = vllm_world()
    path = "target:model.layers.0.mlp.cpu_linear.<closure handler>.<packed>"
    for gang in (world.candidate, *world.fresh.values()):
        for audit in gang.each(*gang.audits):
            record = audit.tensor(path, "derived", fx.fp("packed", audit.checkpoint))
            record |= {"origin": "packed", "storage": 0}
    for audit in world.candidate.each("updated"):
        audit.tensors[path]["fp"] = fx.fp("other")
    judged = world.judge(tmp_path, without_lifecycle)
    [finding] = [f for f in judged["findings"] if f["path"] == path]
    assert "read back through the kernel" in finding["detail"]
    assert check(judged, "nothing_moved")["verdict"] == "PASS"
