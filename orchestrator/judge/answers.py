"""Judges what the engine said: generations exactly, GSM8K per question."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from collectors.gsm8k.questions import HOW_TO_GET
from collectors.gsm8k.scoring import score
from orchestrator.judge.attempt import Arm, Attempt
from orchestrator.judge.records import Reader, Record
from orchestrator.judge.statistics import not_worse, paired
from workloads.engines.acceptance import accepted

#: Largest loss of right answers that still counts as equally accurate.
ACCURACY_MARGIN = 0.01


@dataclass
class Outcome:
    """What one check found. cause: the sentence of a finding, "" where there is none; code: of that finding.
    caveat: why what was observed is no evidence, the same for every cell."""

    verdict: str
    expected: str
    observed: str
    counts: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    code: str = "generation_differs"
    caveat: str = ""
    required: bool = True


def counterpart(attempt: Attempt, arm: Arm, check: Mapping[str, Any], stem: str) -> tuple[str, Path] | None:
    """(name, folder) of what a check's left observation is compared with: the named one, else the same
    observation of the base arm, else a fresh start on the same checkpoint if it recorded such a file."""
    left, right = check["left"], check["right"]
    if right:
        folder = arm.observation(right)
        return (right, folder) if folder else None
    bases = [other for other in attempt.arms if other.name == "base"]
    if arm.name == "candidate" and bases:
        return f"base/{left}", bases[0].folder / left
    fresh = f"fresh.{attempt.moments[left].checkpoint}"
    folder = arm.observation(fresh)
    return (fresh, folder) if folder and (folder / f"{stem}.jsonl").is_file() else None


def same_generations(
    attempt: Attempt, arm: Arm, check: Mapping[str, Any], reader: Reader, same_tensors: bool = False
) -> Outcome:
    """Token ids, draft tokens and log-probabilities of `left` against `right`, exactly. same_tensors: whether every
    tensor of the one was found to be that of the other."""
    left, right = check["left"], check["right"]
    expected = (
        f"generations of `{left}` are those of `{right}`, token by token and to the last bit of a logprob"
    )
    folders = arm.observation(left), arm.observation(right)
    if folders[0] is None or folders[1] is None:
        return Outcome("ERROR", expected, f"there is no reference `{right}` for arm {arm.name}")
    got, want = (reader.generations(folder, "generations") for folder in folders if folder)
    if not got or not want:
        return Outcome("ERROR", expected, "no generations were recorded on one side, so nothing was compared")
    differing = {name: text for name in want if (text := _divergence(got.get(name), want[name]))}
    differing |= dict.fromkeys(got.keys() - want.keys(), "it was not asked on the other side")
    counts = {"identical": len(want) - len(want.keys() & differing.keys()), "differs": len(differing)}
    if not differing:
        proposed, taken = _drafted(want.values())
        told = f"; of {proposed} draft tokens {taken} accepted on both sides" if proposed else ""
        if not proposed and any(one.get("drafts") for one in want.values()):
            told = "; the drafter proposed nothing, so that it was not compared"
        counts |= {"draft_tokens": proposed, "accepted": taken} if proposed else {}
        return Outcome("PASS", expected, f"{len(want)} of {len(want)} identical{told}", counts)
    name, text = next(iter(differing.items()))
    first = f"Request `{name}`: {text}."
    cause = f"{len(differing)} of {len(want)} generations of `{left}` are not those of `{right}`. {first}"
    observed = f"{len(differing)} of {len(want)} differ. {first}"
    before = attempt.moments[left].before
    if not _is_repeated(attempt, arm, before, got, reader):
        if not same_tensors or before is None:
            return Outcome("FAIL", expected, observed, counts, cause)
        if all(_same_answer(got.get(name), want.get(name)) for name in differing):
            cause += (
                f" Every tensor of `{left}` is that of `{right}`, and the target answers alike: what differs is what "
                "the drafter reads of the target, or keeps beside its weights."
            )
            return Outcome("FAIL", expected, observed, counts, cause)
        cause += (
            f" Every tensor of `{left}` is that of `{right}`: it is not the weights, but what serving keeps beside "
            "them, such as keys and values of a known prompt in a cache that the update did not empty; or chance in a "
            "kernel."
        )
        return Outcome("FAIL", expected, observed, counts, cause, code="stale_cache")
    cause += (
        f" They are, to the last bit, those of `{before}`, from before the update: a cache keeps what the old weights "
        "computed, and the update did not empty it."
    )
    return Outcome("FAIL", expected, observed, counts, cause, code="stale_cache")


def _drafted(generations: Iterable[Record]) -> tuple[int, int]:
    """Draft tokens of all generations, and those that speculative serving would have accepted."""
    each = [accepted(one["token_ids"], one.get("drafts", [])) for one in generations]
    return sum(proposed for proposed, _ in each), sum(taken for _, taken in each)


def _is_repeated(
    attempt: Attempt, arm: Arm, before: str | None, got: Mapping[str, Record], reader: Reader
) -> bool:
    """Whether an observation answers exactly as the one before its load did."""
    if before is None or before not in attempt.with_collector("generations"):
        return False
    old = reader.generations(arm.folder / before, "generations")
    return got.keys() == old.keys() and not any(_divergence(got[name], old[name]) for name in got)


def _same_answer(got: Record | None, want: Record | None) -> bool:
    """Whether the target's own part of two generations agrees, whatever its drafter proposed."""
    keys = ("token_ids", "top_logprobs")
    return got is not None and want is not None and all(got[key] == want[key] for key in keys)


def _divergence(got: Record | None, want: Record) -> str:
    """Where two generations part, "" when they do not."""
    if got is None:
        return "it has no answer"
    tokens, others = got["token_ids"], want["token_ids"]
    at = _first_difference(tokens, others)
    near = _first_difference(got["top_logprobs"], want["top_logprobs"])
    if at is not None:
        have, owed = (str(t[at]) if at < len(t) else "nothing" for t in (tokens, others))
        before = "" if near is None or near >= at else f"; log-probabilities part at token {near}"
        return f"token {at} is {have}, expected {owed}{before}"
    if near is not None:
        gap = _logprob_gap(got["top_logprobs"][near], want["top_logprobs"][near])
        return f"the tokens agree, and the log-probabilities part at token {near} ({gap})"
    drafts = (
        at
        for key in ("draft_token_ids", "drafts")
        if (at := _first_difference(got.get(key, []), want.get(key, []))) is not None
    )
    draft = next(drafts, None)
    return "" if draft is None else f"the tokens agree, and the draft's proposals part at token {draft}"


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _logprob_gap(left: Sequence[tuple[int, float | None]], right: Sequence[tuple[int, float | None]]) -> str:
    """How far log-probabilities are apart; None stands for NaN and infinities, which JSON does not have."""
    theirs = dict(right)
    gaps = []
    for token, value in left:
        other = theirs.get(token, value)
        if value is None or other is None:
            return "some are no numbers"
        gaps.append(abs(value - other))
    return f"by up to {max(gaps):.3g}" if any(gaps) else "other candidates"


def gsm8k(attempt: Attempt, arm: Arm, check: Mapping[str, Any], reader: Reader) -> Outcome:
    """Right answers of `left`, paired question by question with its counterpart where there is one.

    A proxy has random weights: its score is shown, never evidence.
    """
    expected = "as many right answers, within 1 point" if not attempt.is_proxy else "no score: random weights"
    if attempt.cell["collect"]["gsm8k"]["path"] is None:
        caveat = f"the questions are not at hand. {HOW_TO_GET}"
        return Outcome("NOT_RUN", expected, "no questions", caveat=caveat, required=not attempt.is_proxy)
    other = counterpart(attempt, arm, check, "gsm8k")
    got = reader.generations(arm.folder / check["left"], "gsm8k")
    want = reader.generations(other[1], "gsm8k") if other else {}
    name = other[0] if other else ""
    answers = _reference_answers(attempt)
    if not got or got.keys() != answers.keys():
        why = (
            "no answers were recorded"
            if not got
            else "the answers are not those to the questions that were asked"
        )
        return Outcome("ERROR", expected, why, required=not attempt.is_proxy)
    right = {key: score(r["text"], answers[key]).flexible for key, r in got.items()}
    counts: dict[str, Any] = {"questions": len(got), "right": sum(right.values())}
    shown = f"{counts['right']} of {len(got)} right"
    if attempt.is_proxy:
        return _proxy_outcome(expected, shown, counts, got, want, name)
    if got.keys() != want.keys():
        why = "nothing to pair them with" if not want else f"`{name}` answered other questions"
        return Outcome("INCONCLUSIVE" if not want else "ERROR", expected, f"{shown}; {why}", counts)
    theirs = [score(want[key]["text"], answers[key]).flexible for key in got]
    return _paired_outcome(expected, shown, counts, list(right.values()), theirs, name)


def _proxy_outcome(
    expected: str,
    shown: str,
    counts: dict[str, Any],
    got: dict[str, Record],
    want: dict[str, Record],
    name: str,
) -> Outcome:
    text = shown
    if want:
        same = sum(got[key]["token_ids"] == want[key]["token_ids"] for key in got.keys() & want.keys())
        counts["same_answers"] = same
        text += f"; {same} of {len(got)} answers are those of `{name}`"
    caveat = "a proxy with random weights cannot answer, so its score is no evidence of accuracy"
    return Outcome("INCONCLUSIVE", expected, text, counts, caveat=caveat, required=False)


def _paired_outcome(
    expected: str, shown: str, counts: dict[str, Any], ours: list[bool], theirs: list[bool], name: str
) -> Outcome:
    result = paired(ours, theirs)
    counts |= {
        "right_other": sum(theirs), "only_left": result.left_only, "only_right": result.right_only,
        "difference": result.difference, "interval": [result.low, result.high], "p": result.p,
    }  # fmt: skip
    text = (
        f"{shown}, {sum(theirs)} for `{name}`: {100 * result.difference:+.2f} points, 95% interval "
        f"{100 * result.low:+.2f} to {100 * result.high:+.2f}, {result.left_only} against {result.right_only} "
        f"discordant, exact McNemar p = {result.p:.3g}"
    )
    verdict = not_worse(result.low, result.high, ACCURACY_MARGIN)
    if verdict == "INCONCLUSIVE":
        text += "; the interval spans the margin, so this many questions cannot decide"
    return Outcome(verdict, expected, text, counts)


def _reference_answers(attempt: Attempt) -> dict[str, str]:
    """Worked solutions by request, as the driver left them beside the prompts."""
    path = attempt.folder / "prompts" / "gsm8k.jsonl"
    if not path.is_file():
        return {}
    return {row["id"]: row["answer"] for row in map(orjson.loads, path.read_bytes().splitlines())}
