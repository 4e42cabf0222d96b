"""Words the outcome of a tensor check: expected, observed, verdict."""

from orchestrator.judge.answers import Outcome
from orchestrator.judge.attempt import Attempt
from orchestrator.judge.sentences import rank_list
from orchestrator.judge.tensor_rules import Tally

#: Counts that say how many things a rule looked at; none of them, and it proved nothing.
_LOOKED_AT = {
    "equal": ("equal", "differs"),
    "all_changed": ("changed", "unchanged"),
    "stable_storage": ("stable", "moved"),
    "replicas": ("compared",),
    "checkpoint": ("right", "wrong"),
}
_NOUN = {"checkpoint": "parts", "all_changed": "weights or checkpoint slices"}


def tally_outcome(tally: Tally, attempt: Attempt) -> Outcome:
    """PASS only when something was compared and nothing violates the rule."""
    rule = tally.check["rule"]
    expected = _expected(tally)
    looked_at = sum(tally.counts[key] for key in _LOOKED_AT[rule])
    counts = {key: value for key, value in tally.counts.items() if value}
    if rule == "replicas" and not tally.counts["groups"] and not tally.errors:
        return Outcome("NOT_RUN", expected, "the layout has no replicas", counts, required=False)
    if tally.errors:
        return Outcome("ERROR", expected, "; ".join(tally.errors), counts)
    if tally.violations:
        return Outcome("FAIL", expected, _violated(tally, looked_at), counts)
    if not looked_at:
        return Outcome("ERROR", expected, "there was nothing to compare, so nothing is shown", counts)
    if tally.counts["unverifiable"]:
        text = f"{tally.counts['unverifiable']} parts record neither what they should be nor a constant"
        return Outcome("INCONCLUSIVE", expected, text, counts)
    noun = _NOUN.get(rule, "tensors")
    return Outcome(
        "PASS", expected, f"{looked_at:,} {noun} on {attempt.ranks} ranks, none violates it", counts
    )


def _expected(tally: Tally) -> str:
    left, right = tally.check["left"], tally.check["right"]
    return {
        "equal": f"every tensor of `{left}` is that of `{right}`, bit for bit",
        "all_changed": f"every weight of `{right}` differs from `{left}`",
        "stable_storage": "no weight, derived or constant tensor moved while the engine ran",
        "replicas": "ranks that hold the same shard hold the same bytes",
        "checkpoint": f"parts of `{left or 'every observation'}` are the checkpoint's slices, padding its value",
    }[tally.check["rule"]]


def _violated(tally: Tally, looked_at: int) -> str:
    kinds = {k: v for k, v in tally.counts.items() if v and k not in ("equal", "right", "stable", "changed")}
    kinds = {k: v for k, v in kinds.items() if k not in ("empty", "groups", "compared", "same_in_both")}
    detail = ", ".join(f"{count:,} {name}" for name, count in sorted(kinds.items()))
    what = f"{tally.violations:,} tensors violate it on {rank_list(tally.differing)}"
    return f"{what} ({detail}; {looked_at:,} looked at)" if detail else f"{what} ({looked_at:,} looked at)"
