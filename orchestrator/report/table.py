"""Prints a verdict on a terminal: one row per cell, and under the table why each failed cell failed."""

from collections.abc import Iterator
from typing import TextIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.report.rows import (
    Json,
    Row,
    caveats,
    common_labels,
    consequences_text,
    counts_text,
    failed_checks,
    findings,
    label_keys,
    left_out,
    reproduction,
    rows,
    starts_text,
    undecided,
)
from orchestrator.report.two_arms import (
    arm_summary,
    base_verdict,
    change,
    has_base,
    speeds_text,
    versions_text,
)

MAX_WIDTH = 100
_STYLES = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "ERROR": "bold magenta",
    "INCONCLUSIVE": "bold yellow",
    "NOT_RUN": "bold yellow",
}
_SHOWN = 6  # findings of one cell; the report has all


def print_table(verdict: Json, file: TextIO, width: int | None = None) -> None:
    """Writes to `file`, at most 100 columns wide; in colour only when it is a terminal."""
    console = Console(file=file, width=width, highlight=False, soft_wrap=False)
    console.width = min(MAX_WIDTH, console.width)
    found = rows(verdict)
    common = common_labels(verdict)
    title = Text.assemble(
        (verdict["experiment"] or "experiment", "bold"), "  ", _verdict(verdict["verdict"]),
        f"  {counts_text(verdict['counts'])}",
    )  # fmt: skip
    console.print(title)
    if common:
        console.print(Text("all cells: " + ", ".join(f"{k} {v}" for k, v in common.items()), style="dim"))
    console.print(_table(found, label_keys(verdict)))
    if has_base(verdict):
        for text in versions_text(verdict):
            console.print(Text(f"{text}."))
        console.print(_before_and_after(found))
        for text in speeds_text(verdict):
            console.print(Text(f"{text}."))
    if len(found) > 1 and (total := starts_text(verdict)):
        console.print(Text(f"{total}.", style="dim"))
    for row in found:
        if row.verdict != "PASS" or row.cell["findings"]:
            _explain(console, row)
    for note in left_out(verdict):
        console.print(Text(f"coverage - {note}.", style="dim"))
    for caveat in caveats(verdict):
        console.print(Text(f"not evidence - {caveat}.", style="dim"))


def _verdict(verdict: str) -> tuple[str, str]:
    return verdict, _STYLES[verdict]


def _table(found: list[Row], labels: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(labels, overflow="fold")
    for name in ("checks", "coverage", "GSM8K", "starts", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in found:
        cells = (row.name, row.checks, row.coverage, row.gsm8k, row.starts, row.seconds)
        table.add_row(*(Text(cell) for cell in cells), Text(*_verdict(row.verdict)))
    return table


def _before_and_after(found: list[Row]) -> Table:
    """What each arm did, for the cells that have two."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("cell", "before (base)", "after (candidate)"):
        table.add_column(name, overflow="fold", ratio=1)
    for row in found:
        if base_verdict(row.cell) != "NOT_RUN":
            arms = (arm_summary(row.cell, arm) for arm in ("base", "candidate"))
            table.add_row(Text(f"{row.name}: {change(row.cell)}"), *map(Text, arms))
    return table


def _explain(console: Console, row: Row) -> None:
    console.print(Text.assemble(_verdict(row.verdict), f"  {row.name}"))
    for text, indent in _lines(row):
        console.print(Padding(text, (0, 0, 0, indent)))
    console.print()


def _lines(row: Row) -> Iterator[tuple[Text, int]]:
    """Text and indent of everything that explains a cell."""
    cell = row.cell
    error = cell.get("error")
    if error:
        yield Text.assemble((error["type"], "bold"), f": {error['message']}"), 2
    blocked = undecided(cell)
    if blocked:
        yield Text(f"undecided: {', '.join(blocked)}"), 2
    for check in failed_checks(cell):
        if check["name"] not in blocked:
            yield Text.assemble((check["name"], "bold"), f"  {check['observed']}"), 2
    found = [*findings(cell), *findings(cell, "base")]
    for number, finding in enumerate(found[:_SHOWN], start=1):
        arm = "base: " if finding["arm"] == "base" else ""
        yield Text.assemble(f"{number}. {arm}", (finding["code"], "bold"), f"  {finding['detail']}"), 2
        follows = consequences_text(finding)
        if follows:
            yield Text(follows, style="dim"), 5
    if len(found) > _SHOWN:
        yield Text(f"{len(found) - _SHOWN} more findings are in the report."), 2
    if command := reproduction(cell)["command"]:
        yield Text(f"again: {command}", style="dim"), 2
