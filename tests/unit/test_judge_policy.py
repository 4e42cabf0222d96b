"""Verdicts: gates come first, only required checks decide, nothing that proves nothing passes."""

import json
from collections.abc import Callable
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check

from orchestrator.judge.policy import cell_verdict, combine


def rule_check(verdict: str, required: bool = True, rule: str = "equal") -> fx.Record:
    return {"name": rule, "rule": rule, "verdict": verdict, "required": required}


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([rule_check("PASS")], "PASS"),
        ([rule_check("PASS"), rule_check("FAIL", required=False)], "PASS"),
        ([rule_check("PASS"), rule_check("FAIL")], "FAIL"),
        ([rule_check("FAIL"), rule_check("ERROR")], "FAIL"),
        ([rule_check("FAIL"), rule_check("ERROR", rule="gate")], "ERROR"),
        ([rule_check("PASS"), rule_check("ERROR")], "ERROR"),
        ([rule_check("PASS"), rule_check("INCONCLUSIVE"), rule_check("NOT_RUN")], "INCONCLUSIVE"),
        ([rule_check("PASS"), rule_check("NOT_RUN")], "NOT_RUN"),
        ([rule_check("PASS", rule="gate")], "INCONCLUSIVE"),
        ([rule_check("PASS", rule="gate"), rule_check("PASS", required=False)], "INCONCLUSIVE"),
        ([], "INCONCLUSIVE"),
    ],
)
def test_cell_verdict(checks: list[fx.Record], verdict: str) -> None:
    assert cell_verdict(checks) == verdict


def result(cell: str, verdict: str, attempt: str = "attempt-001") -> fx.Record:
    return {"cell": cell, "attempt": attempt, "verdict": verdict, "checks": [], "findings": [], "labels": {}}


@pytest.mark.parametrize(
    ("verdicts", "verdict", "code"),
    [
        (["PASS", "PASS"], "PASS", 0),
        (["PASS", "FAIL", "ERROR"], "FAIL", 1),
        (["PASS", "ERROR", "NOT_RUN"], "ERROR", 3),
        (["PASS", "INCONCLUSIVE"], "INCONCLUSIVE", 4),
        (["PASS", "NOT_RUN"], "NOT_RUN", 4),
        ([], "NOT_RUN", 4),
    ],
)
def test_experiment_verdict_and_exit_code(verdicts: list[str], verdict: str, code: int) -> None:
    combined = combine([result(f"c{i}", v) for i, v in enumerate(verdicts)], "exp")
    assert (combined["verdict"], combined["exit_code"]) == (verdict, code)
    assert sum(combined["counts"].values()) == len(verdicts)
    assert combined["experiment"] == "exp"


def test_the_last_attempt_counts() -> None:
    results = [result("a", "PASS", "attempt-002"), result("b", "PASS"), result("a", "ERROR")]
    combined = combine(results)
    assert combined["verdict"] == "PASS"
    assert [(c["id"], c["attempts"], c["attempt"]) for c in combined["cells"]] == [
        ("a", 2, "attempt-002"), ("b", 1, "attempt-001"),
    ]  # fmt: skip


def no_tokens(world: World) -> None:
    for record in world.candidate.generations["back"]:
        record["token_ids"] = []


def one_silent_request(world: World) -> None:
    world.candidate.gsm8k["updated"][3]["token_ids"] = []


def no_generations_at_all(world: World) -> None:
    for gang in (world.candidate, *world.fresh.values()):
        for observation in gang.generations:
            gang.generations[observation] = []


@pytest.mark.parametrize("change", [no_tokens, one_silent_request, no_generations_at_all])
def test_an_engine_that_says_nothing_is_an_error(tmp_path: Path, change: Callable[[World], None]) -> None:
    world = World()
    change(world)
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "ERROR"
    assert check(judged, "gate:tokens")["verdict"] == "ERROR"


def less_audited(audit: fx.Audit) -> None:
    audit.sources[0] |= {"bytes_audited": 8900, "missing": ["layers.0.lost.weight"]}


def no_totals(audit: fx.Audit) -> None:
    audit.sources.clear()
    audit.header["root_count"] = 0


def unclassified(audit: fx.Audit) -> None:
    audit.tensor("target:model.cache", "unclassified", fx.fp("cache"))


def unreachable(audit: fx.Audit) -> None:
    audit.unreachable.append({"kind": "unreachable", "storage": 5, "nbytes": 64, "op": "aten::mm"})


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        (less_audited, "FAIL", "layers.0.lost.weight"),
        (no_totals, "ERROR", "coverage is unknown"),
        (unclassified, "FAIL", "4 tensors have no class"),
        (unreachable, "FAIL", "4 storages used in a forward are reached by no walk"),
    ],
)
@pytest.mark.parametrize("asked", [True, False])
def test_coverage_is_a_gate(
    tmp_path: Path, change: Callable[[fx.Audit], None], verdict: str, says: str, asked: bool
) -> None:
    world = World()
    if not asked:
        world.cell["load_path"]["checks"] = [
            c for c in world.cell["load_path"]["checks"] if c["rule"] != "coverage"
        ]
    for gang in (world.candidate, *world.fresh.values()):
        for observation in gang.audits:
            for audit in gang.each(observation):
                change(audit)
    judged = world.judge(tmp_path)
    entry = check(judged, "coverage" if asked else "gate:coverage")
    assert judged["verdict"] == verdict
    assert entry["verdict"] == verdict
    assert says in entry["observed"]
    assert (verdict == "FAIL") == bool(judged["findings"])


def test_vacuous_tensors_are_counted(tmp_path: Path) -> None:
    world = World()
    for gang in (world.candidate, *world.fresh.values()):
        for observation in gang.audits:
            for audit in gang.each(observation):
                audit.tensor("target:model.emptied", "weight", None, nbytes=0)
    judged = world.judge(tmp_path)
    assert judged["coverage"]["vacuous"] == 4
    assert check(judged, "updated_equals_fresh")["counts"]["empty"] == 4


def only(world: World, rule: str) -> None:
    world.cell["load_path"]["checks"] = [c for c in world.cell["load_path"]["checks"] if c["rule"] == rule]


def test_a_check_that_compared_nothing_is_an_error(tmp_path: Path) -> None:
    world = World()
    only(world, "checkpoint")
    for observation in world.candidate.audits:
        for audit in world.candidate.each(observation):
            audit.parts.clear()
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "ERROR"
    assert "nothing to compare" in check(judged, "updated_is_checkpoint")["observed"]


def test_the_same_checkpoint_twice_shows_no_change(tmp_path: Path) -> None:
    world = World()
    only(world, "all_changed")
    for new, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        new.parts = old.parts
        new.tensors = old.tensors
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "ERROR"
    assert check(judged, "every_weight_changed")["counts"] == {"same_in_both": 88}


def test_padding_of_which_nothing_is_known_is_inconclusive(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.parts[fx.SCALES]["padding"]["padding_value"] = None
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "INCONCLUSIVE"
    assert check(judged, "updated_is_checkpoint")["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("drafts", "told"),
    [
        ([[], [], []], "4 of 4 identical; the drafter proposed nothing, so that it was not compared"),
        ([[2, 5], [5], []], "4 of 4 identical; of 8 draft tokens 8 accepted on both sides"),
        ([], "4 of 4 identical"),
    ],
)
def test_a_drafter_that_proposes_nothing_is_told(tmp_path: Path, drafts: list[list[int]], told: str) -> None:
    world = World()
    for gang in (world.candidate, *world.fresh.values()):
        for records in gang.generations.values():
            for record in records:
                record["drafts"] = drafts
    assert check(world.judge(tmp_path), "updated_answers_as_fresh")["observed"] == told


def test_a_missing_reference_is_an_error(tmp_path: Path) -> None:
    from orchestrator.judge.policy import judge_attempt

    world = World()
    attempt, references = world.write(tmp_path)
    del references["fresh.new"]
    judged = judge_attempt(world.cell, attempt, references)
    assert judged["verdict"] == "ERROR"
    assert "no reference `fresh.new`" in check(judged, "updated_equals_fresh")["observed"]
    assert "no reference `fresh.new`" in check(judged, "updated_answers_as_fresh")["observed"]


def test_an_observation_that_is_not_in_the_scenario_is_an_error(tmp_path: Path) -> None:
    world = World()
    for entry in world.cell["load_path"]["checks"]:
        entry["left"] = entry["left"].replace("back", "nowhere")
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "ERROR"
    assert "no observation `nowhere`" in check(judged, "back_equals_fresh")["observed"]


def test_sides_may_be_named_in_either_order(tmp_path: Path) -> None:
    world = World()
    entry = world.cell["load_path"]["checks"][0]
    entry["left"], entry["right"] = entry["right"], entry["left"]
    for audit in world.candidate.each("updated"):
        audit.remove(fx.W_UV)
    assert "missing" in fx.codes(world.judge(tmp_path))


def test_without_replicas_their_check_does_not_count(tmp_path: Path) -> None:
    judged = World(tp=1, dp=1, ep=1).judge(tmp_path)
    assert judged["verdict"] == "PASS"
    entry = check(judged, "replicas_agree")
    assert (entry["verdict"], entry["required"]) == ("NOT_RUN", False)


def test_addresses_of_another_process_are_not_compared(tmp_path: Path) -> None:
    world = World()
    world.candidate.audits["back"][1].header["pid"] = 1
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "ERROR"
    assert "rank 1 is another process" in check(judged, "nothing_moved")["observed"]


def test_the_base_arm_informs_and_does_not_decide(tmp_path: Path) -> None:
    world = World(base=True)
    assert world.base is not None
    for audit, old in zip(world.base.each("updated"), world.base.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)
    judged = world.judge(tmp_path)
    assert judged["verdict"] == "PASS"
    before = check(judged, "base/updated_equals_fresh")
    assert (before["verdict"], before["required"], before["arm"]) == ("FAIL", False, "base")
    assert [(f["arm"], f["code"]) for f in judged["findings"]] == [("base", "stale")]


def test_a_base_that_crashed_leaves_the_candidate_judged(tmp_path: Path) -> None:
    world = World(base=True)
    only(world, "equal")
    judged = world.judge(tmp_path, lambda attempt: (attempt / "base/back/tensors-00001.jsonl").unlink())
    assert judged["verdict"] == "PASS"
    assert check(judged, "base/gate:records")["verdict"] == "ERROR"


def test_the_result_has_its_contract_keys(tmp_path: Path) -> None:
    world = World()
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)
    judged = world.judge(tmp_path)
    assert {
        "cell", "attempt", "verdict", "checks", "findings", "coverage", "labels", "seconds", "starts",
        "references", "error",
    } <= judged.keys()  # fmt: skip
    assert {"code", "arm", "observation", "rank", "path", "detail"} <= judged["findings"][0].keys()
    assert {"name", "verdict", "required", "expected", "observed", "counts"} <= judged["checks"][0].keys()
    assert {"fraction", "bytes", "expected", "vacuous", "unclassified"} <= judged["coverage"].keys()
    assert judged["references"] == ["key-new", "key-old"]
    assert judged["starts"] == 1
    assert judged["seconds"] == pytest.approx(7.9)


def test_loads_show_the_slowest_rank_and_all_bytes(tmp_path: Path) -> None:
    loads = World().judge(tmp_path)["evidence"]["loads"]
    assert [(load["do"], load["name"]) for load in loads] == [
        ("start", "old"), ("update", "new"), ("update", "new"), ("update", "old"),
    ]  # fmt: skip
    assert loads[1]["nbytes"] == 4 * 10_000
    assert loads[1]["phases"]["install_s"] == 0.3


def test_audits_are_those_of_this_attempt(tmp_path: Path) -> None:
    """The slowest rank counts, a reference that another attempt built does not, and one of both arms counts once."""
    world = World(base=True)
    _, references = world.write(tmp_path)
    for name, attempt in (("new", "c0ffee/attempt-001"), ("old", "c0ffee/attempt-000")):
        folder = references[f"fresh.{name}"]
        (folder / "gang.json").write_text("{}")
        (folder / "reference.json").write_text(json.dumps({"observation": "fresh", "attempt": attempt}))

    def slow(attempt: Path) -> None:
        path = attempt / "candidate" / "progress-00002.jsonl"
        path.write_text(path.read_text().replace('"tensors":0.4', '"tensors":0.9', 1))

    found = [
        (a["arm"], a["observation"], a["seconds"]) for a in world.judge(tmp_path, slow)["evidence"]["audits"]
    ]
    names = ("started", "updated", "repeated", "back")
    candidate = [("candidate", name, 0.9 if name == "started" else 0.4) for name in names]
    base = [("base", name, 0.4) for name in names]
    assert found == [*candidate, ("candidate", "fresh.new", 0.4), *base]


def test_differing_tensors_are_counted_by_rank(tmp_path: Path) -> None:
    world = World()
    world.candidate.audits["updated"][2].tensors[fx.W_UV]["fp"] = fx.fp("bit flip")
    differing = {e["check"]: e["ranks"] for e in world.judge(tmp_path)["evidence"]["differing"]}
    assert differing["updated_equals_fresh"] == [0, 0, 1, 0]
    assert differing["back_equals_fresh"] == [0, 0, 0, 0]
