"""What every report says about a cell, worded once: labels, numbers, failed checks, before and after."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "NOT_RUN", "ERROR")


@dataclass(frozen=True)
class Row:
    """One cell. name: its labels that differ between cells. checks: required ones that passed, of all."""

    id: str
    name: str
    verdict: str
    checks: str
    coverage: str
    gsm8k: str
    starts: str
    seconds: str
    cell: Json


def rows(verdict: Json) -> list[Row]:
    common = common_labels(verdict)
    return [_row(cell, common) for cell in verdict["cells"]]


def common_labels(verdict: Json) -> dict[str, str]:
    """Labels that all of several cells share; they are said once. A single cell keeps its own."""
    cells = verdict["cells"]
    if len(cells) < 2:
        return {}
    first = cells[0]["labels"]
    return {k: str(v) for k, v in first.items() if all(c["labels"].get(k) == v for c in cells)}


def _row(cell: Json, common: Json) -> Row:
    own = [str(value) for key, value in cell["labels"].items() if key not in common]
    return Row(
        id=cell["id"],
        name=" · ".join(own) or cell["id"][:12],
        verdict=cell["verdict"],
        checks=_passed(cell),
        coverage=coverage_text(cell),
        gsm8k=gsm8k_text(cell),
        starts=str(cell.get("starts") or "-"),
        seconds=seconds_text(cell.get("seconds")),
        cell=cell,
    )


def _passed(cell: Json) -> str:
    required = [check for check in cell["checks"] if check["required"]]
    if not required:
        return "-"
    return f"{sum(check['verdict'] == 'PASS' for check in required)}/{len(required)}"


def coverage_text(cell: Json) -> str:
    """Percent with two digits, never rounded up: 99.999 % is not 100 %."""
    coverage = cell.get("coverage")
    if not coverage or not coverage["expected"]:
        return "-"
    return f"{math.floor(coverage['fraction'] * 10_000) / 100:.2f}%"


def coverage_notes(cell: Json) -> list[str]:
    """What is not covered and what is not owed, with the reasons on record."""
    coverage = cell.get("coverage") or {}
    reasons, missing = coverage.get("reasons", {}), coverage.get("missing", [])
    named = [f"`{name}`" + (f" ({reasons[name]})" if name in reasons else "") for name in missing]
    notes = [f"not covered: {', '.join(named)}"] if named else []
    if coverage.get("excused"):
        excuses = [f"`{name}`: {reason}" for name, reason in reasons.items() if name not in missing]
        count = coverage["excused"]
        size = f"{count} tensor{'s' if count > 1 else ''} of {coverage['excused_bytes']:,} bytes"
        notes.append(f"not owed by the engine: {size}, {'; '.join(excuses)}")
    return notes


def left_out(verdict: Json) -> list[str]:
    """`coverage_notes` of all cells, each once, with the cells that it is about where not all are."""
    cells: dict[str, list[str]] = {}
    for row in rows(verdict):
        for note in coverage_notes(row.cell):
            cells.setdefault(note, []).append(row.name)
    return with_names(verdict, cells)


def with_names(verdict: Json, cells: Mapping[str, Sequence[str]]) -> list[str]:
    """Texts, with the names of their cells where they are not about all."""
    everywhere = len(verdict["cells"])
    return [
        text if len(names) == everywhere else f"{text} (in {', '.join(names)})"
        for text, names in cells.items()
    ]


def starts_text(verdict: Json) -> str:
    """Of the attempts that count, "" where no engine started."""
    total = sum(cell.get("starts") or 0 for cell in verdict["cells"])
    audits = [audit for cell in verdict["cells"] for audit in _audits(cell)]
    if not total or not audits:
        return f"Engine starts: {total} in all" if total else ""
    seconds = sum(audit["seconds"] for audit in audits)
    return f"Engine starts: {total} in all. Audits: {len(audits)}, which took {seconds:.1f} s"


def audits_text(cell: Json) -> str:
    """Seconds of each audit of a cell; "" of old results, which do not know."""
    return ", ".join(
        f"{audit['arm']} {audit['observation']} {audit['seconds']:.2f} s" for audit in _audits(cell)
    )


def _audits(cell: Json) -> Sequence[Json]:
    audits: Sequence[Json] = (cell.get("evidence") or {}).get("audits", ())
    return audits


def reproduction(cell: Json) -> Mapping[str, str]:
    """How to see a failure again: command, script, note, each perhaps ""."""
    return {"command": "", "script": "", "note": "", **(cell.get("reproduction") or {})}


def gsm8k_text(cell: Json) -> str:
    """Right answers of the candidate; in parentheses where they are no evidence."""
    for check in cell["checks"]:
        if check["rule"] == "gsm8k" and check["arm"] == "candidate" and "right" in check["counts"]:
            text = f"{check['counts']['right']}/{check['counts']['questions']}"
            return text if check["required"] else f"({text})"
    return "-"


def seconds_text(seconds: float | None) -> str:
    if not seconds:
        return "-"
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"


def failed_checks(cell: Json, arm: str = "candidate") -> list[Json]:
    """Checks of one arm that did not pass and count, or, of the base, did not pass and are no INCONCLUSIVE."""
    checks = [check for check in cell["checks"] if check["arm"] == arm and check["verdict"] != "PASS"]
    if arm == "candidate":
        return [check for check in checks if check["required"]]
    return [check for check in checks if check["verdict"] in ("FAIL", "ERROR")]


def undecided(cell: Json) -> list[str]:
    """Names of required checks that could not decide because the cell has an error of its own."""
    if not cell.get("error"):
        return []
    return [check["name"] for check in failed_checks(cell) if check["verdict"] == "ERROR"]


def findings(cell: Json, arm: str = "candidate") -> list[Json]:
    return [finding for finding in cell["findings"] if finding["arm"] == arm]


def consequences_text(finding: Json) -> str:
    """`Follows from it: 12 extra in `updated`; other generations in `updated`; again in `back`.` or ""."""
    consequences = finding["consequences"]
    parts = [_consequence(c) for c in consequences if c["code"] != finding["code"]]
    again = [f"`{c['observation']}`" for c in consequences if c["code"] == finding["code"]]
    parts += [f"the same again in {', '.join(dict.fromkeys(again))}"] if again else []
    return "Follows from it: " + "; ".join(parts) + "." if parts else ""


def _consequence(consequence: Json) -> str:
    where = f" in `{consequence['observation']}`" if consequence["observation"] else ""
    if consequence["code"] in ("generation_differs", "stale_cache"):
        return f"other generations{where}"
    return f"{consequence['count']:,} {consequence['code']}{where}"


def first_sentence(text: str) -> str:
    """Up to the example that follows the explanation."""
    return text.split(" E.g. ")[0]


def counts_text(counts: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts.get(verdict)) or "no cells"
    )


def informative(cell: Json) -> Sequence[Json]:
    """The candidate's checks that are shown and do not decide."""
    return [check for check in cell["checks"] if not check["required"] and check["arm"] == "candidate"]


def caveats(verdict: Json) -> list[str]:
    """Why some of what is shown is no evidence, each reason once, without its full stop."""
    shown = (check for cell in verdict["cells"] for check in informative(cell) if check.get("caveat"))
    return list(dict.fromkeys(f"{check['name']}: {check['caveat'].rstrip('.')}" for check in shown))


def label_keys(verdict: Json) -> str:
    """Names of the labels that tell the cells apart."""
    common = common_labels(verdict)
    keys = dict.fromkeys(key for cell in verdict["cells"] for key in cell["labels"] if key not in common)
    return " · ".join(keys) or "cell"
