"""Judges one arm of an attempt: validity gates, then every check that the cell asks for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from collectors.records import rank_file
from orchestrator.failure import tail
from orchestrator.judge import answers, kernels, lifecycle, timings
from orchestrator.judge.answers import Outcome
from orchestrator.judge.attempt import Arm, Attempt, check_files, is_load
from orchestrator.judge.coverage import Coverage
from orchestrator.judge.diagnose import Cause
from orchestrator.judge.findings import Ledger
from orchestrator.judge.records import Problem, Reader
from orchestrator.judge.sentences import rank_list, ranks_text
from orchestrator.judge.tensor_rules import RULES, TensorJudge
from orchestrator.judge.wording import tally_outcome

Json = dict[str, Any]


class ArmJudge:
    """Everything that the records say about one arm. The base arm's checks inform and never decide."""

    def __init__(self, attempt: Attempt, arm: Arm, ledger: Ledger) -> None:
        self._attempt, self._arm, self._ledger = attempt, arm, ledger
        self.name = arm.name
        self._reader = Reader(attempt.folder)
        check_files(attempt, arm, self._reader)
        self._tensors = TensorJudge(attempt, arm, self._reader, ledger)
        self._tensors.run()
        self.engine = self._tensors.engine
        steps = timings.progress(attempt, arm.folder, self._reader)
        self.loads = timings.loads(attempt, arm, steps)
        self.audits = timings.audits(attempt, arm, steps, self._reader)
        self.wall = timings.wall(steps)
        self.memory = timings.memory(attempt, arm, self._reader)

    def checks(self) -> list[Json]:
        """Gates and checks as result.json holds them."""
        asked = self._attempt.checks(self._arm)
        found = [self._entry(check, self._outcome(check)) for check in asked]
        if self._tensors.observations and not any(check["rule"] == "coverage" for check in asked):
            found.insert(0, self._gate("coverage", self._coverage_outcome()))
        served = kernels.outcomes(self._attempt, self._arm, self._reader, self._ledger)
        found += [
            self._entry({"name": name, "rule": "gate", "required": True}, outcome) for name, outcome in served
        ]
        if any(self._attempt.with_collector(c) for c in ("generations", "gsm8k")):
            found.insert(0, self._gate("tokens", self._tokens()))
        found.insert(0, self._gate("records", self._records()))  # last, when every file has been read
        return found

    def _entry(self, check: Mapping[str, Any], outcome: Outcome) -> Json:
        is_candidate = self._arm.name == "candidate"
        return {
            "name": check["name"] if is_candidate else f"{self._arm.name}/{check['name']}",
            "arm": self._arm.name,
            "rule": check["rule"],
            "verdict": outcome.verdict,
            "required": bool(is_candidate and check["required"] and outcome.required),
            "expected": outcome.expected,
            "observed": outcome.observed,
            "caveat": outcome.caveat,
            "counts": dict(outcome.counts),
        }

    def _gate(self, name: str, outcome: Outcome) -> Json:
        return self._entry({"name": f"gate:{name}", "rule": "gate", "required": True}, outcome)

    def _outcome(self, check: Mapping[str, Any]) -> Outcome:
        rule, left = check["rule"], check["left"]
        if rule == "coverage":
            return self._coverage_outcome()
        if rule in RULES:
            return tally_outcome(self._tensors.tallies[check["name"]], self._attempt)
        if rule == "lifecycle":
            return self._lifecycle(check)
        if left not in self._attempt.moments:
            return Outcome("ERROR", check["name"], f"there is no observation `{left}`")
        judges: dict[str, Callable[..., Outcome]] = {
            "same_generations": partial(
                answers.same_generations, same_tensors=self._tensors.are_equal(left, check["right"])
            ),
            "gsm8k": answers.gsm8k,
            "throughput": timings.throughput,
        }
        outcome = judges[rule](self._attempt, self._arm, check, self._reader)
        if outcome.cause:
            cause = Cause(outcome.code, 0, f"generations of {left}", note=outcome.cause)
            self._ledger.add(self._arm.name, left, check["name"], [cause])
        return outcome

    # Gates ---------------------------------------------------------------------------------------------

    def _records(self) -> Outcome:
        expected = f"whole records of {ranks_text(self._attempt.ranks)} and of every step"
        problems = self._reader.problems
        if problems:
            more = f" ({len(problems)} problems in all)" if len(problems) > 1 else ""
            return Outcome("ERROR", expected, problems[0].message + more, {"problems": len(problems)})
        return Outcome("PASS", expected, "whole", {"problems": 0})

    def _tokens(self) -> Outcome:
        expected = "every request got tokens"
        asked = silent = tokens = 0
        nothing = []
        for stem in ("generations", "gsm8k"):
            for name in self._attempt.with_collector(stem):
                records = self._reader.generations(self._arm.folder / name, stem).values()
                asked += len(records)
                tokens += sum(len(record["token_ids"]) for record in records)
                silent += sum(not record["token_ids"] for record in records)
                nothing += [] if records else [f"{name}/{stem}"]
        counts = {"requests": asked, "silent": silent, "tokens": tokens}
        text = f"{tokens} tokens, {silent} of {asked} requests got none"
        if nothing:
            text += f"; no request is recorded in {', '.join(nothing)}"
        return Outcome("ERROR" if silent or nothing else "PASS", expected, text, counts)

    def coverage(self) -> Json:
        """Totals of the observation that covers least, as result.json holds them."""
        name, worst = self._least_covered()
        return {
            **worst.totals(),
            "missing": worst.shown_missing(),
            "reasons": worst.shown_reasons(),
            "observation": name,
        }

    def _least_covered(self) -> tuple[str, Coverage]:
        entries = [entry for entry in self._tensors.coverage.items() if entry[1].owes]
        if not entries:
            return "", Coverage()
        return min(entries, key=lambda e: (e[1].fraction, -e[1].unclassified - e[1].unreachable))

    def _coverage_outcome(self) -> Outcome:
        threshold = self._attempt.cell["policy"]["coverage"]
        name, worst = self._least_covered()
        expected = f"at least {threshold:.2%} of the checkpoint's bytes audited, every tensor with a class"
        counts: Json = worst.totals() | {"silent_ranks": worst.silent_ranks, "threshold": threshold}
        if not worst.expected or worst.silent_ranks:
            text = f"{worst.silent_ranks} ranks do not say how many bytes they owe, so coverage is unknown"
            return Outcome("ERROR", expected, text, counts)
        text = f"{worst.fraction:.4%} of {worst.expected:,} bytes in `{name}`{worst.left_out()}"
        if worst.unheld or worst.fraction < threshold:
            none = "" if worst.missing else "; not covered: no names recorded"
            return Outcome("FAIL", expected, text + none, counts)
        if worst.unclassified or worst.unreachable:
            text += f"; {worst.unclassified} tensors have no class"
            text += f", {worst.unreachable} storages used in a forward are reached by no walk"
            return Outcome("FAIL", expected, text, counts)
        return Outcome("PASS", expected, text, counts)

    # Lifecycle -----------------------------------------------------------------------------------------

    def _lifecycle(self, check: Mapping[str, Any]) -> Outcome:
        attempt = self._attempt
        expected = (
            "once per load and model: padding filled, then post-processing, then the hook; none while serving"
        )
        loads = [step for step in attempt.cell["load_path"]["steps"] if is_load(step)]
        owed = len(loads)
        broken: list[lifecycle.Violation] = []
        events = 0
        for rank in range(attempt.ranks):
            path = rank_file(self._arm.folder, "lifecycle", rank)
            records = [r for r in self._reader.records(path, rank, ends=False) if r["kind"] == "event"]
            events += len(records)
            recorded = lifecycle.loads_recorded(records)
            if recorded != self._loads_of(records, loads):
                text = f"rank {rank} recorded {recorded} loads, the scenario has {owed}"
                return Outcome("ERROR", expected, text, {"events": events})
            broken += lifecycle.violations(rank, records, owed, loads)
        for violation in broken:
            self._ledger.add_violation(
                self._arm.name, self._seen_in(violation.load), check["name"], violation
            )
        counts = {"events": events, "violations": len(broken)}
        if not broken:
            return Outcome("PASS", expected, f"{events} events of {owed} loads", counts)
        text = f"{broken[0].text} (load {broken[0].load} of `{broken[0].root}`, {rank_list(v.rank for v in broken)})"
        return Outcome("FAIL", expected, f"{text}; {len(broken)} violations", counts)

    def _loads_of(self, records: Sequence[Json], loads: Sequence[Mapping[str, Any]]) -> int:
        """Loads up to the last one that leaves events on a rank: the drafter's leave none in a stage without it."""
        if self._attempt.cell["parallelism"].get("pp", 1) == 1:
            return len(loads)
        own = {record["root"] for record in records}
        mine = [
            number for number, step in enumerate(loads) if not step.get("roots") or own & {*step["roots"]}
        ]
        return max(mine, default=-1) + 1

    def _seen_in(self, load: int) -> str:
        """The first observation after a load."""
        names = [m.name for m in self._attempt.moments.values() if m.load >= load]
        return names[0] if names else ""

    # For the result ------------------------------------------------------------------------------------

    def error(self) -> Json | None:
        """The first problem of the records as `error` of result.json."""
        problems = self._reader.problems
        return self._error(problems[0]) if problems else None

    def _error(self, problem: Problem) -> Json:
        log = self._arm.folder / f"rank-{problem.rank or 0:05d}.log"
        return {
            "type": f"records_{problem.type}",
            "message": problem.message,
            "rank": problem.rank,
            "node": None,
            "log_tail": tail(log),
            "stack": "",
        }

    def differing(self) -> Iterator[Json]:
        """Per tensor check, how many tensors violate it on each rank."""
        for tally in self._tensors.tallies.values():
            if tally.check["rule"] != "coverage":
                ranks = [tally.differing[rank] for rank in range(self._attempt.ranks)]
                yield {"arm": self._arm.name, "check": tally.check["name"], "ranks": ranks}
