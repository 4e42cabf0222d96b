"""What faults say of themselves, the verb that lists them, and what counts as caught."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.config.compose import compose
from orchestrator.config.planning import plan
from orchestrator.config.schema import RULES  # noqa: F401  # registers the schema
from orchestrator.judge.findings import ORDER
from orchestrator.show import console
from orchestrator.store import RESULT, Store, write_json
from orchestrator.verbs import faults as verb
from orchestrator.verbs import faults_matrix as matrix
from orchestrator.verbs.faults import show_matrix
from orchestrator.verbs.faults_matrix import CLEAN, MatrixCell, Place
from workloads import faults
from workloads.faults._about import CRASH, FEATURES, KINDS, features
from workloads.models.architectures import ARCHITECTURES

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", faults.names())
def test_every_fault_says_what_it_is(name: str) -> None:
    about = faults.about(name)
    assert about.kind in KINDS
    assert about.finding in (*ORDER, CRASH)
    assert about.reports
    assert about.via
    assert faults.sentence(name).endswith(".")
    assert set(about.without.values()) <= {*ORDER, CRASH}
    known = set.union(*map(set, FEATURES.values())) | {
        "tp",
        "ep",
        "stages",
        "redundant_experts",
        "rebalanced",
        "adapters",
        "kernel_layout",
        "kernel_state",
        "safetensors",
    }
    assert {*about.needs, *about.without} <= known


def test_every_kind_of_failure_has_a_fault() -> None:
    assert {faults.about(name).kind for name in faults.names()} == set(KINDS)


def test_every_family_has_a_small_model_in_the_matrix() -> None:
    composed = [one for model in FEATURES for one in compose([f"model={model}"])]
    assert {one.root.model.architecture for one in composed if one.root is not None} == ARCHITECTURES.keys()


def test_every_small_model_and_every_fault_of_a_reload_has_its_cells() -> None:
    """A setting of the experiment that does not fit a model would take the model out of the matrix, and its faults."""
    places = matrix.places([], ["layerwise"], [])
    assert {place.model for place in places} == FEATURES.keys()
    reloads = {name for name in faults.names() if "layerwise" in faults.about(name).via}
    assert {cell.fault for cell in matrix.cells(places, faults.names())} >= {CLEAN, *reloads}


def test_a_fault_applies_where_its_load_and_its_features_are() -> None:
    about = faults.about("stale_padding")
    assert about.why_not({"safetensors", "layerwise"}, {"padding"}) == ""
    assert about.why_not({"direct", "layerwise"}, {"padding"}) == ""
    assert about.why_not({"direct"}, {"padding"}) == "there is no kernel_state"
    assert about.why_not({"safetensors"}, {"padding"}) == "no load goes via layerwise or direct or per_expert"
    assert about.why_not({"direct"}, {"experts"}) == "there is no padding"
    reader = faults.about("reader_of_the_old_path")
    assert reader.why_not({"sharded_state", "layerwise"}, set()) == "no load goes via safetensors"


def test_features_follow_the_layout() -> None:
    alone = features("kimi_k3_tiny", tp=1, ep=1, moe_kernel="reference")
    assert not {"tp", "ep", "kernel_layout"} & alone
    assert {"tp", "ep", "kernel_layout"} <= features("kimi_k3_tiny", tp=2, ep=2, moe_kernel="mega_moe")


PLACE = Place(
    "kimi_k3_tiny",
    "layerwise",
    ("parallelism=single",),
    frozenset({"safetensors", "layerwise"}),
    frozenset({"padding"}),
)


def test_a_matrix_has_clean_cells_and_those_in_which_a_fault_can_do_something() -> None:
    elsewhere = Place(
        "kimi_k3_tiny", "cold", ("parallelism=single",), frozenset({"safetensors"}), frozenset({"padding"})
    )
    every = matrix.cells([PLACE, elsewhere], ["stale_padding", "lazy_finalize", "rebind_derived"])
    assert [(cell.fault, cell.place.load_path) for cell in every] == [
        (CLEAN, "layerwise"),
        (CLEAN, "cold"),
        ("stale_padding", "layerwise"),
        ("lazy_finalize", "layerwise"),
        ("lazy_finalize", "cold"),
    ]
    sampled = matrix.sample(every)
    assert [cell.fault for cell in sampled] == [CLEAN, "stale_padding", "lazy_finalize"]
    assert matrix.sample(every) == sampled


def result(verdict: str, *codes: str, error: str = "") -> dict[str, Any]:
    return {
        "cell": "c0ffee",
        "attempt": "attempt-001",
        "verdict": verdict,
        "findings": [{"code": code, "arm": "candidate", "detail": f"{code}."} for code in codes],
        "error": {"type": error, "message": "it died"} if error else None,
    }


def grid(models: str, load_paths: str, *faults: str) -> list[MatrixCell]:
    """Cells of one fault on all combinations."""
    places = [replace(PLACE, model=model, load_path=path) for model in models for path in load_paths]
    return [MatrixCell(fault, place, "stale") for fault in faults for place in places]


def test_pairs_are_every_fault_on_every_model_and_on_every_load_path() -> None:
    every = grid("abc", "vwxyz", "one", "other")
    paired = matrix.pairs(every)
    assert len(paired) == 2 * 5
    for fault in ("one", "other"):
        own = [cell.place for cell in paired if cell.fault == fault]
        assert {place.model for place in own} == set("abc")
        assert {place.load_path for place in own} == set("vwxyz")
    assert matrix.pairs(every) == paired
    on_layouts = [*grid("a", "v", CLEAN), MatrixCell(CLEAN, replace(PLACE, model="a", layout=("x",)), "")]
    assert len(matrix.pairs(on_layouts)) == 2


def test_what_is_found_may_depend_on_the_model() -> None:
    about = faults.about("skip_post_process_on_dummy")
    assert about.expected((), {"processed"}) == CRASH
    assert about.expected((), {"sinks"}) == "skipped_hook"
    assert faults.about("stale_padding").expected((), {}) == "stale_padding"


def test_what_is_found_may_depend_on_what_was_there_before() -> None:
    about = faults.about("draft_not_updated")
    assert about.expected({"safetensors", "layerwise", "sleep1"}, {"draft"}) == "stale"
    assert about.expected({"safetensors", "layerwise", "sleep2"}, {"draft"}) == "uninitialised"


def test_a_load_path_that_names_the_drafter_needs_one() -> None:
    found = matrix.places(["gpt_oss_tiny", "medusa_tiny"], ["draft_apart"], [])
    assert {place.model for place in found} == {"medusa_tiny"}


def test_cells_are_those_of_the_same_command_lines() -> None:
    *_, place = matrix.places(["openpangu_tiny"], ["sleep_level_2"], ["collect.sampling.max_new_tokens=3"])
    cells = matrix.cells([place], ["stale_padding", "rebind_derived", "lazy_finalize"])
    plays = matrix.planned(cells, ["collect.sampling.max_new_tokens=3"])
    assert [one.cell.fault for one in plays.values()] == [CLEAN, "rebind_derived", "lazy_finalize"]
    clean, reload_only, any_load = plays.values()
    for one in (clean, any_load):
        [same] = plan(one.planned.arguments).cells
        assert (same.id, same.cell["load_path"]) == (one.planned.id, one.planned.cell["load_path"])
    assert reload_only.reference is clean.planned  # its starts are those of the clean cell
    assert any_load.reference is any_load.planned


def test_what_was_shown_is_kept_and_what_was_not_caught_is_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path)
    [place] = matrix.places(["minicpm_tiny"], ["cold"], [])[:1]
    plays = matrix.planned(
        [
            MatrixCell(CLEAN, place, ""),
            *(MatrixCell(f, place, "stale") for f in ("lazy_finalize", "tie_broken")),
        ],
        [],
    )
    results = [result("PASS"), result("FAIL", "moved"), result("ERROR", error="disk_full")]
    for one, shown in zip(plays.values(), results, strict=True):
        store.write_cell(one.planned.cell)
        write_json(store.new_attempt(one.planned.id) / RESULT, {**shown, "cell": one.planned.id})
    monkeypatch.setattr(verb, "judged", lambda *_: result("FAIL", "stale"))
    kept = dict(verb.kept(store, plays))
    clean, other, _ = plays
    assert {name: outcome.state for name, outcome in kept.items()} == {clean: "clean", other: "caught"}


@pytest.mark.parametrize(
    ("fault", "expected", "shown", "state"),
    [
        ("stale_padding", "stale_padding", result("FAIL", "stale_padding", "stale"), "caught"),
        ("stale_padding", "stale_padding", result("FAIL", "stale", "stale_padding"), "misnamed"),
        ("stale_padding", "stale_padding", result("PASS"), "missed"),
        ("stale_padding", "stale_padding", result("ERROR", error="hang"), "error"),
        ("stale_padding", "stale_padding", result("ERROR", error="rank_failed"), "misnamed"),
        ("layout_not_restored", CRASH, result("ERROR", error="rank_failed"), "caught"),
        ("layout_not_restored", CRASH, result("PASS"), "missed"),
        (CLEAN, "", result("PASS"), "clean"),
        (CLEAN, "", result("FAIL", "moved"), "false_alarm"),
        (CLEAN, "", result("PASS", "moved"), "false_alarm"),
        (CLEAN, "", result("INCONCLUSIVE"), "false_alarm"),
        (CLEAN, "", result("ERROR", error="disk_full"), "error"),
    ],
)
def test_what_a_result_shows_of_a_fault(
    fault: str, expected: str, shown: dict[str, Any], state: str, capsys: Capture
) -> None:
    outcome = matrix.outcome(MatrixCell(fault, PLACE, expected), shown)
    assert outcome.state == state
    show_matrix([outcome], console())
    out = capsys.readouterr().out
    assert ("1/1" in out) == (state in matrix.GOOD)
    assert ("0/1 " in out) == (state not in matrix.GOOD)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_the_list_says_where_each_was_last_caught(tmp_path: Path, capsys: Capture) -> None:
    one = {"fault": "stale_padding", "model": "m", "load_path": "direct", "state": "caught"}
    other = {**one, "fault": "rebind_derived", "state": "missed"}
    (tmp_path / "experiments" / "fault_matrix-1").mkdir(parents=True)
    (tmp_path / "experiments" / "fault_matrix-1" / "faults.json").write_text(
        json.dumps({"cells": [one, other]})
    )
    finding = {"code": "stale", "arm": "candidate"}
    cell = {"labels": {"faults": "bare_copy", "model": "k3", "load_path": "layerwise"}, "findings": [finding]}
    (tmp_path / "experiments" / "mine-2").mkdir()
    (tmp_path / "experiments" / "mine-2" / "verdict.json").write_text(json.dumps({"cells": [cell]}))
    assert run("faults", f"store='{tmp_path}'") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "last caught: m, direct, in fault_matrix-1" in out
    assert "last caught: k3, layerwise, in mine-2" in out
    assert out.count("never here") == len(faults.names()) - 2
    assert run("faults", "bare_copy", f"store='{tmp_path}'") == 0
    assert "stale_padding" not in capsys.readouterr().out


def test_the_verb_teaches_and_refuses(capsys: Capture) -> None:
    assert run("faults", "--help") == 0
    assert "--sample" in capsys.readouterr().out
    assert run("faults", "gremlins") == 2
    assert "'gremlins' is not a fault; the faults are: bare_copy, " in capsys.readouterr().err
    assert run("faults", "--fast") == 2
    assert "--fast is not an option of faults" in capsys.readouterr().err
    assert run("faults", "--run", "model=nonsense") == 2
    assert "nonsense" in capsys.readouterr().err
