"""Judges the checks that read tensors, one rank at a time, so that memory holds one rank's audits only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.judge.attempt import BASE, Arm, Attempt, Moment
from orchestrator.judge.compare import compare, moved, unchanged
from orchestrator.judge.coverage import Coverage
from orchestrator.judge.diagnose import Cause, View, explain, explain_parts, underived
from orchestrator.judge.findings import Ledger
from orchestrator.judge.groups import UNREACHABLE
from orchestrator.judge.parts import wrong_parts
from orchestrator.judge.places import Places
from orchestrator.judge.records import Audit, Reader, collector_paused
from orchestrator.judge.replicas import Prints, fingerprints, outvoted, replica_groups
from orchestrator.judge.stages import Holdings

Check = Mapping[str, Any]
RULES = ("equal", "all_changed", "stable_storage", "replicas", "checkpoint", "derived", "coverage")


@dataclass
class Tally:
    """What one check saw so far. differing: tensors that violate it, by rank. errors: why it cannot decide."""

    check: Check
    counts: Counter[str] = field(default_factory=Counter)
    differing: Counter[int] = field(default_factory=Counter)
    errors: dict[str, None] = field(default_factory=dict)

    @property
    def violations(self) -> int:
        return self.differing.total()


class TensorJudge:
    """All tensor checks of one arm. After `run`: `tallies` by check name, `coverage` by observation, and `engine`,
    name and release of a foreign engine, "" of our own."""

    def __init__(self, attempt: Attempt, arm: Arm, reader: Reader, ledger: Ledger) -> None:
        self.attempt, self.arm, self.reader, self.ledger = attempt, arm, reader, ledger
        self.tallies = {c["name"]: Tally(c) for c in attempt.checks(arm) if c["rule"] in RULES}
        self.observations = attempt.with_collector("tensors")
        layout = attempt.cell["parallelism"]
        group = max(layout["tp"], layout["ep"])
        self.coverage = {
            name: Coverage(group, attempt.moments[name].via != "dummy") for name in self.observations
        }
        self._holdings = {name: Holdings.of(attempt.cell) for name in self.observations}
        self._compared = attempt.compared_references | attempt.compared_with_base
        self._places: dict[str, Places] = {}
        self._replicas: dict[str, list[Prints]] = {name: [] for name in self.observations}
        self._audits: dict[str, Audit | None] = {}
        self._rank = 0
        self.engine = ""

    def run(self) -> None:
        with collector_paused():
            for rank in range(self.attempt.ranks):
                self._rank = rank
                self._audits = {}
                for name in self.observations:
                    self._cover(name, self._audit(name) or Audit(rank))
                for tally in self.tallies.values():
                    self._judge(tally)
            self._audits = {}
            for name, coverage in self.coverage.items():
                coverage.finish()
                self._cover_stages(name)
            self._explain_shortfall()
            for tally in self.tallies.values():
                if tally.check["rule"] == "replicas":
                    self._compare_replicas(tally)

    def are_equal(self, left: str, right: str) -> bool:
        """Whether a check found the tensors of two observations equal, on every rank."""
        of = (t for t in self.tallies.values() if t.check["rule"] == "equal")
        pairs = (t for t in of if (t.check["left"], t.check["right"]) == (left, right))
        return any(t.counts["equal"] and not t.violations and not t.errors for t in pairs)

    def _judge(self, tally: Tally) -> None:
        match tally.check["rule"]:
            case "equal":
                self._equal(tally)
            case "all_changed":
                self._all_changed(tally)
            case "stable_storage":
                self._stable_storage(tally)
            case "checkpoint":
                self._checkpoint(tally)
            case "derived":
                self._derived(tally)
            case "replicas":
                for name, audit in self._named(tally):
                    self._replicas[name].append(fingerprints(audit))
            case "coverage":
                pass  # gathered for every observation

    def _cover(self, name: str, audit: Audit) -> None:
        """Adds to the totals of an observation, and names what has no class."""
        self.coverage[name].add(audit)
        if engine := audit.header.get("engine"):
            self.engine = f"{engine['name']} {engine['version']}"
        if not audit.tensors:  # a rank whose records are not whole may hold what seems to be lacking
            self._holdings[name] = None
        if (holdings := self._holdings[name]) is not None:
            holdings.add(audit)
        for path in audit.unclassified:
            note = audit.tensors[path].get("reason", "")
            self._find(name, Cause("unclassified", audit.rank, path, note=note))
        for storage in audit.unreachable:
            path = f"{UNREACHABLE}:storage.{storage.get('dtype')} {storage.get('shape')}"
            self._find(name, Cause("unclassified", audit.rank, path, note=f"read by {storage.get('op')}"))

    def _cover_stages(self, name: str) -> None:
        """Adds what no stage holds to what an observation owes."""
        holdings = self._holdings[name]
        for path, missing, size in holdings.lacking() if holdings is not None else ():
            self.coverage[name].add_unheld(path, missing, size)

    def _explain_shortfall(self) -> None:
        for name, coverage in self.coverage.items():
            if coverage.unheld or coverage.fraction < self.attempt.cell["policy"]["coverage"]:
                for path, rank in coverage.missing.items():
                    why = coverage.reasons.get(path, "no audited tensor holds it")
                    code = "unheld" if path in coverage.unheld else "vacuous"
                    self._find(name, Cause(code, rank, path, note=why))

    def _find(self, observation: str, cause: Cause) -> None:
        self.ledger.add(self.arm.name, observation, "coverage", [cause])

    # One rank ------------------------------------------------------------------------------------------

    def _audit(self, name: str) -> Audit | None:
        """This rank's audit of an observation or reference; None where there is no whole one."""
        if name not in self._audits:
            folder = self.arm.observation(name)
            known = name in self.observations or name in self._compared
            audit = self.reader.audit(folder, self._rank) if folder and known else None
            self._audits[name] = audit if audit and audit.whole else None
        return self._audits[name]

    def _demand(self, tally: Tally, name: str) -> Audit | None:
        """As `_audit`, and the check cannot decide without it."""
        audit = self._audit(name)
        if audit is None and name.startswith("fresh.") and self.arm.observation(name) is None:
            tally.errors[f"there is no reference `{name}` for arm {self.arm.name}"] = None
        elif audit is None and name.startswith(BASE) and self.arm.observation(name) is None:
            tally.errors[f"there is no base arm, so nothing is `{name}`"] = None
        elif (
            audit is None
            and not name.startswith("fresh.")
            and name.removeprefix(BASE) not in self.observations
        ):
            tally.errors[f"there is no observation `{name}` that collects tensors"] = None
        elif audit is None:
            tally.errors[f"the records of `{name}` are not whole"] = None
        return audit

    def _named(self, tally: Tally) -> list[tuple[str, Audit]]:
        """The observation that a check names, or all of them."""
        left = tally.check["left"]
        audits = [(name, self._demand(tally, name)) for name in ([left] if left else self.observations)]
        return [(name, audit) for name, audit in audits if audit is not None]

    def _pair(self, tally: Tally) -> tuple[str, str, Audit, Audit] | None:
        """(observed, expected) names and audits; a reference is always the expected side."""
        left, right = tally.check["left"], tally.check["right"]
        if left.startswith("fresh.") and not right.startswith("fresh."):
            left, right = right, left
        observed, expected = self._demand(tally, left), self._demand(tally, right)
        if observed is None or expected is None:
            return None
        return left, right, observed, expected

    def _equal(self, tally: Tally) -> None:
        pair = self._pair(tally)
        if pair is None:
            return
        left, right, observed, expected = pair
        counts, differences = compare(observed, expected)
        tally.counts += counts
        if not differences:
            return
        tally.differing[self._rank] += len(differences)
        view = self._view(left, right, observed, expected)
        for difference in differences:
            self._add(tally, left, explain(view, difference))

    def _all_changed(self, tally: Tally) -> None:
        left, right = tally.check["left"], tally.check["right"]
        before, after = self._demand(tally, left), self._demand(tally, right)
        if before is None or after is None:
            return
        counts, same = unchanged(before, after)
        tally.counts += counts
        for path, part, record in same:
            # With the checkpoint's word that the slice should be another one, the old value is stale.
            known = bool(part) and record["expected"] is not None and record["expected"] != record["fp"]
            fps = {"now": record["fp"], "before": record["fp"]}
            cause = Cause("stale" if known else "not_changed", self._rank, path, part, **fps)
            self._add(tally, right, [cause])
        if same:
            tally.differing[self._rank] += len({path for path, _, _ in same})

    def _stable_storage(self, tally: Tally) -> None:
        if len(self.observations) < 2:
            tally.errors["addresses need two observations with tensors to be compared"] = None
            return
        first = self._demand(tally, self.observations[0])
        gone: set[str] = set()
        for name in self.observations[1:]:
            later = self._demand(tally, name)
            if first is None or later is None:
                continue
            if first.header.get("pid") != later.header.get("pid"):
                tally.errors[f"rank {self._rank} is another process in `{name}` than before"] = None
                continue
            looked_at, differences = moved(first, later)
            tally.counts.update(stable=looked_at - len(differences), moved=len(differences))
            gone |= {difference.path for difference in differences}
            for difference in differences:
                verb = "moved since" if difference.status == "moved" else "was there in"
                note = f"it {verb} `{self.observations[0]}`"
                self._add(tally, name, [Cause(difference.status, self._rank, difference.path, note=note)])
        if gone:
            tally.differing[self._rank] += len(gone)

    def _checkpoint(self, tally: Tally) -> None:
        for name, audit in self._named(tally):
            for path, wrong, parts, unknown in wrong_parts(audit):
                tally.counts.update(
                    right=parts - len(wrong) - unknown, wrong=len(wrong), unverifiable=unknown
                )
                if wrong:
                    tally.differing[self._rank] += 1
                    view = self._view(name, name, audit, audit)
                    self._add(tally, name, explain_parts(view, path, wrong))

    def _derived(self, tally: Tally) -> None:
        """Needs no reference: it also sees what every start makes wrong in the same way."""
        for name, audit in self._named(tally):
            told = [tensor for tensor in audit.tensors.values() if "follows" in tensor]
            wrong = [tensor for tensor in told if tensor["fp"] != tensor["follows"]]
            tally.counts.update(right=len(told) - len(wrong), wrong=len(wrong))
            if wrong:
                tally.differing[self._rank] += len(wrong)
                before = self._view(name, name, audit, audit).before
                self._add(tally, name, [underived(self._rank, tensor, before) for tensor in wrong])

    def _view(self, left: str, right: str, observed: Audit, expected: Audit) -> View:
        moment = self.attempt.moments[left]
        before = moment.before if moment.before in self.observations else f"fresh.{moment.previous}"
        truth = f"fresh.{moment.checkpoint}"
        return View(
            observed,
            expected,
            before=self._audit(before) if moment.previous else None,
            truth=self._audit(truth),
            places=self._places_of(left, truth).of,
            identical_runs=self._identical_runs(moment, right),
            is_other_version=right.startswith(BASE),
        )

    def _identical_runs(self, moment: Moment, right: str) -> bool:
        """Whether both sides are the same kind of load of the same checkpoint."""
        other = self.attempt.moments.get(right)
        if other is not None:
            return other is not moment and (other.checkpoint, other.via) == (moment.checkpoint, moment.via)
        return moment.load == 0 and right == f"fresh.{moment.checkpoint}" and moment.via != "dummy"

    def _places_of(self, observation: str, truth: str) -> Places:
        if observation not in self._places:
            reference = self.arm.observation(truth)
            self._places[observation] = Places(self.arm.folder / observation, reference, self.attempt.ranks)
        return self._places[observation]

    def _add(self, tally: Tally, observation: str, causes: Sequence[Cause]) -> None:
        self.ledger.add(self.arm.name, observation, tally.check["name"], causes)

    # Across ranks --------------------------------------------------------------------------------------

    def _compare_replicas(self, tally: Tally) -> None:
        groups = list(replica_groups(self.attempt.cell["parallelism"], self.attempt.ranks))
        tally.counts["groups"] = len(groups)
        for name, by_rank in self._replicas.items():
            if len(by_rank) < self.attempt.ranks:
                continue  # the check has an error already, or names another observation
            for group in groups:
                compared, causes = outvoted(group, by_rank)
                tally.counts["compared"] += compared
                tally.differing.update(cause.rank for cause in causes)
                self._add(tally, name, causes)
