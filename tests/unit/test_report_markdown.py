"""Markdown: tables that render, before and after, and text that cannot break out of its place."""

import re
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World

from orchestrator.judge.policy import combine
from orchestrator.report.markdown import markdown


def stale(gang: fx.Gang) -> None:
    for audit, old in zip(gang.each("updated"), gang.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)


def result(tmp_path: Path, name: str, before: bool, after: bool) -> fx.Record:
    """before, after: whether base and candidate are right."""
    world = World(base=True)
    world.cell["labels"]["case"] = name
    assert world.base is not None
    if not before:
        stale(world.base)
    if not after:
        stale(world.candidate)
    return world.judge(tmp_path / name) | {"cell": name}


@pytest.fixture(name="verdict")
def verdict_fixture(tmp_path: Path) -> fx.Record:
    cases = {"kept": (True, True), "repaired": (False, True), "spoiled": (True, False), "bad": (False, False)}
    return combine([result(tmp_path, name, *sides) for name, sides in cases.items()], "pr_123")


def tables(text: str) -> list[list[list[str]]]:
    """Tables as GitHub parses them: cells by row."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(re.split(r"(?<!\\)\|", line)[1:-1])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_every_table_is_whole(verdict: fx.Record) -> None:
    found = tables(markdown(verdict))
    assert len(found) >= 6
    for table in found:
        assert len({len(row) for row in table}) == 1
        assert all(cell.strip() == "---" for cell in table[1])


@pytest.mark.parametrize(
    ("kind", "case", "before", "after"),
    [
        ("Fixed", "repaired", "stale: 1 tensor in", "all 13 checks hold"),
        ("Broken", "spoiled", "all 13 checks hold", "stale: 1 tensor in"),
        ("Unchanged", "kept", "all 13 checks hold", "all 13 checks hold"),
        ("Still failing", "bad", "stale: 1 tensor in", "stale: 1 tensor in"),
    ],
)
def test_before_and_after(verdict: fx.Record, kind: str, case: str, before: str, after: str) -> None:
    text = markdown(verdict)
    row = tables(text[text.index(f"**{kind}**") :])[0][2]
    assert row[0].strip() == case
    assert before in row[1]
    assert after in row[2]
    assert "E.g." not in row[1] + row[2]


def test_bad_news_comes_first(verdict: fx.Record) -> None:
    text = markdown(verdict)
    order = [text.index(f"**{kind}**") for kind in ("Broken", "Still failing", "Fixed", "Unchanged")]
    assert order == sorted(order)


def test_without_a_base_there_is_no_before(tmp_path: Path) -> None:
    text = markdown(combine([World().judge(tmp_path)], "solo"))
    assert "before" not in text.split("<details>")[0]
    assert "✅ PASS" in text


def test_findings_and_checks_are_told(verdict: fx.Record) -> None:
    text = markdown(verdict)
    assert "1. **stale** 1 tensor in `target:model.layers.*.input_layernorm`" in text
    assert "1. base: **stale**" in text
    assert (
        "| updated_equals_fresh | every tensor of `updated` is that of `fresh.new`, bit for bit | 2/4 | yes |"
        in text
    )
    assert "| accuracy |" in text
    assert text.count("Not evidence: accuracy") == 1


def test_text_cannot_break_out(verdict: fx.Record) -> None:
    verdict["cells"][0]["labels"]["case"] = "<img src=x> | a\n| b *bold* [link](http://x)"
    verdict["cells"][2]["findings"][0]["detail"] = "an unpaired ` backtick <script>alert(1)</script> | x"
    text = markdown(verdict)
    assert "<img" not in text
    assert "<script" not in text
    assert "\\[link\\](http://x)" in text
    for table in tables(text):
        assert len({len(row) for row in table}) == 1
