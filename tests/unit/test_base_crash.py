"""A base arm that dies does not hide what the candidate shows; what is not here is not run, and says why."""

import json
import sys
from pathlib import Path

import pytest
from judge_fixtures import World

from orchestrator.cell import cell_id
from orchestrator.config.compose import compose
from orchestrator.config.freeze import cell_arms, freeze
from orchestrator.judge.attempt import CRASH
from orchestrator.report.table import print_table
from orchestrator.report.two_arms import arm_summary, base_verdict, change


def frozen(*overrides: str) -> dict[str, object]:
    [one] = compose(["cluster.memory_gb=2", *overrides])
    assert one.root is not None
    return freeze(one.root, one.labels)


def test_faults_alone_make_a_base_arm() -> None:
    [one] = compose(["code.base.faults=[stale_padding]"])
    assert one.root is not None
    assert cell_arms(one.root).keys() == {"candidate", "base"}
    cell = frozen("code.base.faults=[stale_padding]")
    assert cell["code"]["base"]["faults"] == ["stale_padding"]  # type: ignore[index]
    assert cell["code"]["candidate"]["faults"] == []  # type: ignore[index]


def test_a_cell_that_needs_what_is_not_here_is_another_one() -> None:
    plain, needy = frozen(), frozen("needs='A node of four GPUs.'")
    assert needy["needs"] == "A node of four GPUs."
    assert "needs" not in plain
    assert cell_id(plain) != cell_id(needy)


def test_the_candidate_is_judged_beside_a_base_that_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(attempt: Path) -> None:
        (attempt / "base").mkdir(exist_ok=True)
        (attempt / "base" / CRASH).write_text(json.dumps({"message": "RuntimeError: no W_UV", "rank": 1}))

    world = World()
    world.cell["code"]["base"] = {"path": None, "commit": None, "faults": ["x"]}
    result = world.judge(tmp_path, die)
    assert result["verdict"] == "PASS"
    assert result["findings"] == []
    assert base_verdict(result) == "ERROR"
    assert change(result) == "fixed"
    assert arm_summary(result, "base") == "crash: RuntimeError: no W_UV"
    verdict = {
        "experiment": "x",
        "verdict": "PASS",
        "counts": {"PASS": 1},
        "cells": [{**result, "id": "c" * 64}],
    }
    print_table(verdict, sys.stdout)
    out = capsys.readouterr().out
    assert "before (base)" in out
    assert "no W_UV" in out
