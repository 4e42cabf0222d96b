"""Writes a verdict as Markdown that pastes into a pull request: before and after, findings, what was checked."""

import re
from collections.abc import Iterator, Sequence

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

_MARKS = {"PASS": "✅", "FAIL": "❌", "ERROR": "💥", "INCONCLUSIVE": "❔", "NOT_RUN": "➖"}
_CHANGES = ("broken", "still failing", "fixed", "unchanged")
_SPECIAL = re.compile(r"[*\[\]\\]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")  # inside a word `_` is no emphasis
_SHOWN = 10  # findings of one cell; the HTML report has all


def markdown(verdict: Json) -> str:
    """GitHub-flavoured Markdown; ends in a newline."""
    return "\n".join(_lines(verdict)).rstrip() + "\n"


def _lines(verdict: Json) -> Iterator[str]:
    found = rows(verdict)
    yield f"## {_escape(verdict['experiment'] or 'experiment')}: {_verdict(verdict['verdict'])}"
    yield ""
    common = ", ".join(f"{key} {value}" for key, value in common_labels(verdict).items())
    yield f"{counts_text(verdict['counts'])}." + (f" All cells: {_escape(common)}." if common else "")
    yield ""
    if has_base(verdict):
        for text in versions_text(verdict):
            yield f"{_escape(text)}."
            yield ""
        yield from _before_and_after(verdict, found)
        for text in speeds_text(verdict):
            yield f"{_escape(text)}."
            yield ""
    yield from _numbers(verdict, found)
    if total := starts_text(verdict):
        yield f"{total}."
        yield ""
    yield from _explanations(found)
    yield from _checked(verdict)
    for note in left_out(verdict):
        yield f"- Coverage: {_escape(note)}."
    for caveat in caveats(verdict):
        yield f"- Not evidence: {_escape(caveat)}."


def _before_and_after(verdict: Json, found: Sequence[Row]) -> Iterator[str]:
    """One table per kind of change, the bad news first."""
    for kind in _CHANGES:
        chosen = [row for row in found if change(row.cell) == kind and base_verdict(row.cell) != "NOT_RUN"]
        if chosen:
            yield f"**{kind.capitalize()}**"
            yield ""
            yield from _table(
                [label_keys(verdict), "before (base)", "after (candidate)"],
                (
                    [row.name, arm_summary(row.cell, "base"), arm_summary(row.cell, "candidate")]
                    for row in chosen
                ),
            )


def _numbers(verdict: Json, found: Sequence[Row]) -> Iterator[str]:
    yield from _table(
        [label_keys(verdict), "verdict", "checks", "coverage", "GSM8K", "starts", "seconds"],
        (
            [row.name, _verdict(row.verdict), row.checks, row.coverage, row.gsm8k, row.starts, row.seconds]
            for row in found
        ),
    )


def _explanations(found: Sequence[Row]) -> Iterator[str]:
    for row in found:
        if row.verdict == "PASS" and not row.cell["findings"]:
            continue
        yield f"<details><summary>{_html(row.verdict)}: {_html(row.name)}</summary>"
        yield ""
        yield from _explanation(row.cell)
        yield ""
        yield "</details>"
        yield ""


def _explanation(cell: Json) -> Iterator[str]:
    error = cell.get("error")
    if error:
        yield f"- **{_escape(error['type'])}**: {_escape(error['message'])}"
    blocked = undecided(cell)
    if blocked:
        yield f"- undecided: {_escape(', '.join(blocked))}"
    for check in failed_checks(cell):
        if check["name"] not in blocked:
            yield f"- {_escape(check['name'])}: {_escape(check['observed'])}"
    found = [*findings(cell), *findings(cell, "base")]
    yield ""
    for number, finding in enumerate(found[:_SHOWN], start=1):
        arm = "base: " if finding["arm"] == "base" else ""
        follows = consequences_text(finding)
        yield f"{number}. {arm}**{finding['code']}** {_escape(finding['detail'])}"
        if follows:
            yield f"   {_escape(follows)}"
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN} more findings are in the report."
    yield from _reproduction(cell)


def _reproduction(cell: Json) -> Iterator[str]:
    """In fences longer than any run of backticks inside, so that nothing ends them early."""
    again = reproduction(cell)
    for title, language, text in (
        ("Again", "bash", again["command"]),
        ("Without us", "python", again["script"]),
    ):
        if text:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            yield ""
            yield f"{title}:"
            yield ""
            yield f"{fence}{language}"
            yield from text.rstrip("\n").split("\n")
            yield fence
    if again["note"]:
        yield ""
        yield _escape(again["note"])


def _checked(verdict: Json) -> Iterator[str]:
    """What each check demands, and in how many cells it holds."""
    names: dict[str, tuple[Json, list[str]]] = {}
    for cell in verdict["cells"]:
        for check in cell["checks"]:
            if check["arm"] == "candidate":
                names.setdefault(check["name"], (check, []))[1].append(check["verdict"])
    yield "<details><summary>What was checked</summary>"
    yield ""
    yield from _table(
        ["check", "demands", "holds in", "decides"],
        (
            [name, check["expected"], f"{v.count('PASS')}/{len(v)}", "yes" if check["required"] else "no"]
            for name, (check, v) in names.items()
        ),
    )
    yield "</details>"
    yield ""


def _table(header: Sequence[str], lines: Iterator[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(map(_escape, header)) + " |"
    yield "|" + " --- |" * len(header)
    for line in lines:
        yield "| " + " | ".join(map(_escape, line)) + " |"
    yield ""


def _verdict(verdict: str) -> str:
    return f"{_MARKS[verdict]} {verdict}"


def _escape(text: str) -> str:
    """Keeps `code` spans, and nothing of the text can open HTML, a table cell, or emphasis outside of them."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an unpaired backtick opens no span
        pieces = ["\\`".join(_plain(piece) for piece in pieces)]
    else:
        pieces[::2] = [_plain(piece) for piece in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", _html(text))


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
