"""The terminal table: fits, wraps, colours only terminals, and explains each failed cell under it."""

import io
import re
from pathlib import Path
from typing import Any

import judge_fixtures as fx
import pytest
from judge_fixtures import World

from orchestrator.judge.policy import combine
from orchestrator.report.rows import coverage_text
from orchestrator.report.table import print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stale(world: World) -> None:
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)


def result(
    tmp_path: Path, name: str, change: Any = lambda world: None, damage: Any = lambda a: None
) -> fx.Record:
    world = World()
    world.cell["labels"]["fault"] = name
    change(world)
    return world.judge(tmp_path / name, damage) | {"cell": name}


@pytest.fixture(name="verdict")
def verdict_fixture(tmp_path: Path) -> fx.Record:
    return combine(
        [
            result(tmp_path, "none"),
            result(tmp_path, "tensor_not_reloaded", stale),
            result(tmp_path, "killed", damage=lambda a: (a / "candidate/back/tensors-00001.jsonl").unlink()),
        ],
        "refit",
    )


def printed(verdict: fx.Record, width: int, file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    print_table(verdict, file, width)
    return file.getvalue()


@pytest.mark.parametrize(("width", "most"), [(80, 80), (100, 100), (300, 100)])
def test_it_fits(verdict: fx.Record, width: int, most: int) -> None:
    lines = printed(verdict, width).splitlines()
    assert max(map(len, lines)) <= most


@pytest.mark.parametrize("width", [80, 100])
def test_rows_have_labels_numbers_and_verdicts(verdict: fx.Record, width: int) -> None:
    text = printed(verdict, width)
    assert re.search(r"none +13/13 +100\.00% +\(0/8\) +1 +7\.9 +PASS", text)
    assert re.search(r"tensor_not_reloaded +9/13 +100\.00% +\(0/8\) +1 +7\.9 +FAIL", text)
    assert re.search(r"killed +\d+/13 .* ERROR", text)
    assert "1 PASS, 1 FAIL, 1 ERROR" in text
    assert "all cells: model kimi_k3_tiny, layout TP2 DP2 EP4" in text


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_failed_cells_are_explained_and_passed_ones_are_not(verdict: fx.Record) -> None:
    text = unwrapped(printed(verdict, 80))
    assert "updated_equals_fresh 4 of 52 tensors are not equal, ranks 0-3" in text
    assert "1. stale 1 tensor in `target:model.layers.*.input_layernorm` (ranks 0-3) still holds" in text
    assert "records_rank_count: candidate/back/tensors-00001.jsonl: rank 1 wrote none" in text
    assert "undecided: gate:records" in text
    assert text.count("none") >= 1
    assert "PASS none" not in text


def test_no_evidence_is_said_once(verdict: fx.Record) -> None:
    text = unwrapped(printed(verdict, 80))
    assert text.count("not evidence - accuracy: a proxy with random weights cannot answer") == 1


def test_colour_only_on_terminals(verdict: fx.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" not in printed(verdict, 80)
    assert "\x1b[" in printed(verdict, 80, Terminal())


def test_text_from_records_is_no_markup(verdict: fx.Record) -> None:
    verdict["cells"][1]["findings"][0]["detail"] = "path [bold]x[/bold] [/] [red"
    verdict["cells"][1]["labels"]["fault"] = "[blink]fault[/blink]"
    text = printed(verdict, 100)
    assert "path [bold]x[/bold] [/] [red" in text
    assert "[blink]fault[/blink]" in text


def test_coverage_is_never_rounded_up() -> None:
    assert coverage_text({"coverage": {"fraction": 0.999999, "expected": 1}}) == "99.99%"
    assert coverage_text({"coverage": {"fraction": 1.0, "expected": 1}}) == "100.00%"
    assert coverage_text({"coverage": {"fraction": 0.0, "expected": 0}}) == "-"


def test_an_experiment_without_cells_still_prints() -> None:
    assert "no cells" in printed(combine([], "empty"), 80)


def test_a_single_cell_keeps_its_labels(tmp_path: Path) -> None:
    assert "kimi_k3_tiny · TP2 DP2 EP4 · layerwise · alone" in printed(
        combine([result(tmp_path, "alone")]), 100
    )
