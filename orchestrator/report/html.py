"""Writes a verdict as one self-contained HTML file: no network, no script, everything escaped."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from orchestrator.judge.sentences import rank_list
from orchestrator.report import rows as shared
from orchestrator.report import two_arms
from orchestrator.report.plots import LABEL_END, coverage_bar, heat_strip, load_bars
from orchestrator.report.rows import Json, Row

_TEMPLATE = "report.html"
_JOINT = re.compile(r"[_.](?=\w)")
_LOGS = 16  # rank logs linked by default; beyond, those of ranks that a finding or the error names


def html(verdict: Json, store: str = "../..") -> str:
    """The whole page. store: relative path from the page to the run store, for links to logs and records."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    environment.filters["soft"] = _soft
    found = shared.rows(verdict)
    return environment.get_template(_TEMPLATE).render(
        label_end=LABEL_END,
        experiment=verdict["experiment"] or "experiment",
        verdict=verdict["verdict"],
        counts=shared.counts_text(verdict["counts"]),
        common=shared.common_labels(verdict),
        labels=shared.label_keys(verdict),
        caveats=shared.caveats(verdict),
        left_out=shared.left_out(verdict),
        starts=shared.starts_text(verdict),
        versions=two_arms.versions_text(verdict),
        speeds=two_arms.speeds_text(verdict),
        has_base=two_arms.has_base(verdict),
        cells=[_cell(row, store) for row in found],
    )


def _code(text: str) -> Markup:
    """Escapes, and turns `…` into code; an unpaired backtick stays as it is."""
    pieces = [escape(piece) for piece in str(text).split("`")]
    if len(pieces) % 2 == 0:
        return Markup("`").join(pieces)
    return Markup("").join(
        piece if place % 2 == 0 else Markup("<code>{}</code>").format(piece)
        for place, piece in enumerate(pieces)
    )


def _soft(name: str) -> Markup:
    """Escapes, and lets a long identifier break after its underscores and dots."""
    return Markup(_JOINT.sub(r"\g<0><wbr>", str(escape(name))))


def _cell(row: Row, store: str) -> dict[str, Any]:
    cell = row.cell
    evidence = cell.get("evidence") or {"loads": [], "memory": [], "differing": []}
    attempt = f"{store}/cells/{quote(row.id)}/{quote(str(cell['attempt']))}"
    return {
        "row": row,
        "labels": cell["labels"],
        "attempts": cell["attempts"],
        "error": cell.get("error"),
        "findings": [_finding(f) for f in (*shared.findings(cell), *shared.findings(cell, "base"))],
        "checks": [check for check in cell["checks"] if check["arm"] == "candidate"],
        "base_checks": [check for check in cell["checks"] if check["arm"] == "base"],
        "versions": two_arms.own_versions(cell),
        "base": two_arms.arm_summary(cell, "base"),
        "candidate": two_arms.arm_summary(cell, "candidate"),
        "base_verdict": two_arms.base_verdict(cell),
        "change": two_arms.change(cell),
        "reproduction": shared.reproduction(cell),
        "coverage_notes": shared.coverage_notes(cell),
        "coverage": coverage_bar(cell.get("coverage"), _threshold(cell)),
        "loads": load_bars(evidence["loads"]),
        "heat": heat_strip(evidence["differing"], cell.get("layout")),
        "audits": shared.audits_text(cell),
        "memory": [_memory(entry) for entry in evidence["memory"]],
        "links": list(_links(cell, attempt)),
    }


def _finding(finding: Json) -> dict[str, Any]:
    ranks = rank_list(finding["ranks"])
    return {**finding, "ranks": ranks, "follows": shared.consequences_text(finding)}


def _threshold(cell: Json) -> float | None:
    """The least coverage that the cell demands, as its check states it."""
    for check in cell["checks"]:
        if check["arm"] == "candidate" and "threshold" in check["counts"]:
            return float(check["counts"]["threshold"])
    return None


def _memory(entry: Json) -> str:
    return f"{entry['arm']}, {entry['observation']}: {entry['peak_rss'] / 1e9:.2f} GB at most on a rank"


def _links(cell: Json, attempt: str) -> Iterator[tuple[str, str]]:
    """(text, relative address) of the files that a person opens next."""
    for name in ("driver.log", "events.jsonl", "provenance.json", "result.json"):
        yield name, f"{attempt}/{name}"
    layout = cell.get("layout") or {"tp": 0, "dp": 0}
    ranks = range(layout["tp"] * layout["dp"] * layout.get("pp", 1))
    arms = dict.fromkeys(check["arm"] for check in cell["checks"])
    for arm in arms:
        for rank in ranks if len(ranks) <= _LOGS else _named_ranks(cell, arm):
            yield f"{arm}/rank-{rank:05d}.log", f"{attempt}/{arm}/rank-{rank:05d}.log"


def _named_ranks(cell: Json, arm: str) -> Sequence[int]:
    ranks = {finding["rank"] for finding in shared.findings(cell, arm)}
    error = cell.get("error")
    if error and error["rank"] is not None and arm == "candidate":
        ranks.add(error["rank"])
    return sorted(ranks or {0})
