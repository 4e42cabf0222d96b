"""Words the outcome of a tensor check: expected, observed, verdict."""

from collections import Counter

from orchestrator.judge.answers import Outcome
from orchestrator.judge.attempt import Attempt
from orchestrator.judge.sentences import rank_list, ranks_text
from orchestrator.judge.tensor_rules import Tally

_FORM = ("differs", "dtype", "layout", "missing", "extra", "vacuous", "unclassified", "alias_broken")
#: Per rule: counts of what violates it, counts of what obeys it, what they count, what violation is called.
_COUNTED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str]] = {
    "equal": (_FORM, ("equal",), "tensors", "are not equal"),
    "all_changed": (("unchanged",), ("changed",), "weights and checkpoint slices", "did not change"),
    "stable_storage": (("moved",), ("stable",), "addresses", "changed"),
    "replicas": ((), ("compared",), "tensors", "disagree with their replicas"),
    "checkpoint": (("wrong",), ("right",), "checkpoint slices and paddings", "are wrong"),
    "derived": (("wrong",), ("right",), "derived tensors", "do not follow from their weights"),
}


def tally_outcome(tally: Tally, attempt: Attempt) -> Outcome:
    """PASS only when something was compared and nothing violates the rule."""
    rule = tally.check["rule"]
    expected = _expected(tally)
    counts = {key: value for key, value in tally.counts.items() if value}
    if rule == "replicas" and not tally.counts["groups"] and not tally.errors:
        return Outcome("NOT_RUN", expected, "the layout has no replicas", counts, required=False)
    if rule == "derived" and not counts and not tally.errors:
        return Outcome(
            "NOT_RUN", expected, "no module says what is derived from its weights", counts, required=False
        )
    if tally.errors:
        return Outcome("ERROR", expected, "; ".join(tally.errors), counts)
    bad, good, noun, violated = _COUNTED[rule]
    wrong = sum(tally.counts[key] for key in bad) or tally.violations
    looked_at = sum(tally.counts[key] for key in good) + sum(tally.counts[key] for key in bad)
    if tally.violations:
        text = f"{wrong:,} of {looked_at:,} {noun} {violated}, {rank_list(tally.differing)}"
        return Outcome("FAIL", expected, text + _forms(tally.counts), counts)
    if not looked_at:
        return Outcome("ERROR", expected, "there was nothing to compare, so nothing is shown", counts)
    if tally.counts["unverifiable"]:
        text = f"{tally.counts['unverifiable']} parts record neither what they should be nor a constant"
        return Outcome("INCONCLUSIVE", expected, text, counts)
    return Outcome("PASS", expected, f"all of {looked_at:,} {noun}, {ranks_text(attempt.ranks)}", counts)


def _forms(counts: Counter[str]) -> str:
    """`: 3 differs, 2 missing` where not all merely differ."""
    forms = [f"{counts[form]:,} {form}" for form in _FORM if counts[form]]
    return f": {', '.join(forms)}" if forms and not (len(forms) == 1 and counts["differs"]) else ""


def _expected(tally: Tally) -> str:
    left, right = tally.check["left"], tally.check["right"]
    return {
        "equal": f"every tensor of `{left}` is that of `{right}`, bit for bit",
        "all_changed": f"every weight of `{right}` differs from `{left}`",
        "stable_storage": "no weight, derived or constant tensor moved while the engine ran",
        "replicas": "ranks that hold the same shard hold the same bytes",
        "checkpoint": f"parts of `{left or 'every observation'}` are the checkpoint's slices, padding its value",
        "derived": "what is derived from weights follows from those that serve beside it",
    }[tally.check["rule"]]
