"""Words what a base and a candidate did: which versions they are, what each showed, and what changed between them."""

from orchestrator.report.rows import (
    Json,
    failed_checks,
    findings,
    first_sentence,
    informative,
    rows,
    with_names,
)

_SHOWN = 3  # pairs of versions in front of a table


def versions_text(verdict: Json) -> list[str]:
    """What base and candidate are, each pair once, with the cells that it is about where not all are; of more pairs
    than a reader remembers, none."""
    cells: dict[str, list[str]] = {}
    for row in rows(verdict):
        if text := own_versions(row.cell):
            cells.setdefault(text, []).append(row.name)
    return with_names(verdict, cells) if len(cells) <= _SHOWN else []


def own_versions(cell: Json) -> str:
    """`base: vllm 0.31.0; candidate: vllm 0.32.0`, "" with one arm, and of old results, which do not know."""
    return "; ".join(f"{name}: {version}" for name, version in (cell.get("versions") or {}).items())


def speeds_text(verdict: Json) -> list[str]:
    """Throughput of the cells with a base, which nothing else in a table says."""
    cells: dict[str, list[str]] = {}
    for row in rows(verdict):
        for check in informative(row.cell) if base_verdict(row.cell) != "NOT_RUN" else ():
            if check["rule"] == "throughput":
                cells.setdefault(f"{check['name']}: {check['observed']}", []).append(row.name)
    return with_names(verdict, cells)


def has_base(verdict: Json) -> bool:
    return any(check["arm"] == "base" for cell in verdict["cells"] for check in cell["checks"])


def base_verdict(cell: Json) -> str:
    """FAIL, ERROR, PASS, or NOT_RUN where the cell has no base arm."""
    checks = [check for check in cell["checks"] if check["arm"] == "base"]
    if not checks:
        return "NOT_RUN"
    verdicts = {check["verdict"] for check in checks}
    return next((v for v in ("ERROR", "FAIL") if v in verdicts), "PASS")


def arm_summary(cell: Json, arm: str) -> str:
    """What one arm did, in a table's cell: the primary finding, else the first failed check, else that all hold."""
    found = findings(cell, arm)
    failed = failed_checks(cell, arm)
    errors = [check for check in failed if check["verdict"] == "ERROR"]
    if errors:
        return f"{errors[0]['name'].removeprefix('base/')}: {errors[0]['observed']}"
    if found:
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0]['code']}: {first_sentence(found[0]['detail'])}{more}"
    if failed:
        return f"{failed[0]['name'].removeprefix('base/')}: {failed[0]['observed']}"
    passed = sum(c["verdict"] == "PASS" for c in cell["checks"] if c["arm"] == arm)
    return f"all {passed} checks hold" if passed else "not run"


def change(cell: Json) -> str:
    """What the candidate changes against the base: fixed, unchanged, broken, still failing."""
    before, after = base_verdict(cell) == "PASS", cell["verdict"] == "PASS"
    if before:
        return "unchanged" if after else "broken"
    return "fixed" if after else "still failing"
