"""Moves an experiment on Slurm forward, one look at a time: notes what ended, submits what is missing or runs again.

Anybody may do so at any time from any login node, and stop at any moment: every look starts from the files.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.cluster import quarantine, slurm
from orchestrator.cluster.attempts import AGAIN, DONE, FAILED, WAITS
from orchestrator.cluster.history import Experiment, History, read_history, still_waits
from orchestrator.cluster.history import stands as stands_of
from orchestrator.cluster.jobs import Book, Task
from orchestrator.cluster.scheduling import levels, needs
from orchestrator.cluster.settle import NOT_ASKED, Settler
from orchestrator.cluster.submit import Report, Submission, not_run
from orchestrator.config.text import seconds
from orchestrator.store import Store

Json = dict[str, Any]
HERE = "RUNNING HERE"  # by a process of a `run` on this store, not by a job
SUBMITTED = "SUBMITTED"
SELDOM_S = 60.0  # between questions to Slurm, where cluster.poll_s is not longer


@dataclass
class Look:
    """What one look found. words: of every cell, a state of Slurm's or a verdict. is_over: nothing waits or runs and
    nothing is left to submit. trouble: why Slurm could not be asked or told everything, else ""."""

    words: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    trouble: str = ""
    is_settling: bool = False  # some job has ended, and its attempt has no result yet


def watch(
    store: Store,
    experiment: Experiment,
    report: Report,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Looks until the experiment is over; reports every change of the counts of states.

    Raises SlurmError when nobody could say anything for longer than any job may run: nothing is given up for lost
    then, and a later look goes on.
    """
    clusters = [cell["cluster"] for cell in experiment.cells.values()]
    patience = max(seconds(c["time"]) + c["lost_after_s"] for c in clusters)
    poll_s = min(c["poll_s"] for c in clusters)
    words: dict[str, str] = {}
    said, answered, asked, pause = "", clock(), -math.inf, poll_s
    while True:
        ask = clock() - asked >= pause
        look = advance(store, experiment, report, ask)
        now = clock()
        if look.is_over:
            return
        if ask:
            asked, answered = now, answered if look.trouble else now
            # Results come as files: Slurm is asked ever more seldom while nothing speaks against them.
            pause = poll_s if look.trouble or look.is_settling else min(4 * pause, max(poll_s, SELDOM_S))
        if now - answered > patience:
            raise slurm.SlurmError(f"Slurm said nothing for {now - answered:.0f} s. {look.trouble}")
        words = {
            name: words.get(name, word) if word == NOT_ASKED else word for name, word in look.words.items()
        }
        line = ", ".join(f"{word} {n}" for word, n in sorted(Counter(words.values()).items()))
        line += f" ({look.trouble})" if look.trouble else ""
        if line != said:
            report(line)
        said = line
        sleep(poll_s)


def advance(store: Store, experiment: Experiment, report: Report, ask: bool = True) -> Look:
    """One look. ask: Slurm about jobs, not only the store about results; at most one call of squeue and one of sacct
    beside what submitting takes. Raises StoreError when another process holds the store's lock of submissions for too
    long."""
    with store.submitting() as held:
        book = Book(store)
        histories = {
            name: read_history(store, book, name, experiment.before[name]) for name in experiment.cells
        }
        look = _Look(store, experiment, report, book, histories, Settler(store, book, [held], report))
        try:
            look.settle(ask)
            look.avoid_bad_nodes()
            return look.submit([held])
        except slurm.SlurmError as error:
            words = {
                name: "UNKNOWN" if history.open else _word(store, history, name)
                for name, history in histories.items()
            }
            return Look(words, trouble=str(error))


@dataclass
class _Look:
    """One look while it is taken. Its methods raise SlurmError, and are called in their order."""

    store: Store
    experiment: Experiment
    report: Report
    book: Book
    histories: Mapping[str, History]
    settler: Settler

    def settle(self, ask: bool) -> None:
        """Gives every attempt that has ended its result."""
        histories = self.histories.values()
        # A driver that was told to stop cannot know by whom: the end of its job says it.
        told = [a for t in histories for a, r in zip(t.attempts, t.results, strict=True) if _is_stopped(r)]
        if ask:
            self.settler.ask(
                [task for history in histories for task in history.open], told, self.experiment.cells
            )
        for name, history in self.histories.items():
            cell = self.experiment.cells[name]
            for task in tuple(history.open):
                result = self.settler.settle(task, cell)
                if result is not None:
                    history.results.append(result)
                    history.attempts.append(task.attempt)
                    history.open.remove(task)
            explained = [
                self.settler.explain(a, r, cell)
                for a, r in zip(history.attempts, history.results, strict=True)
            ]
            history.results[:] = explained
            history.open += self._ending(history)

    def _ending(self, history: History) -> list[Task]:
        """The last attempt's job, where its driver was told to stop and Slurm has not said yet why."""
        if not history.results or not _is_stopped(history.results[-1]):
            return []
        task = self.book.task(history.attempts[-1])
        if task is not None and not self.settler.has_asked:
            return [task]
        state = self.settler.state(task) if task is not None else None
        return [task] if task is not None and state is not None and not state.is_finished else []

    def avoid_bad_nodes(self) -> None:
        """Puts nodes that failed into quarantine, each failure once."""
        known = {(line["cell"], line["attempt"]) for line in quarantine.entries(self.store)}
        for name, history in self.histories.items():
            cell = self.experiment.cells[name]
            for attempt, result in zip(history.attempts, history.results, strict=True):
                if (name, attempt.name) in known:
                    continue
                for node in quarantine.at_fault(result["error"]):
                    quarantine.add(self.store, node, result["error"], attempt, cell["policy"]["quarantine_s"])
                for node in quarantine.suspected(result["error"]):
                    if self._can_spare(node, name):
                        quarantine.add(self.store, node, result["error"], attempt, quarantine.SUSPECTED_S)

    def _can_spare(self, node: str, name: str) -> bool:
        """Whether a cell that runs again finds enough nodes without this one, which may be innocent."""
        history, cell = self.histories[name], self.experiment.cells[name]
        if stands_of(self.store, self.experiment, name, history) != AGAIN or cell["cluster"]["nodelist"]:
            return False
        there = set(slurm.usable_nodes(cell["cluster"]["partition"]))
        avoided = {node, *quarantine.nodes(self.store)}
        return len(there - avoided) >= int(cell["parallelism"]["nodes"])

    def submit(self, held: Sequence[int]) -> Look:
        """Submits what is missing and what runs again, and says where every cell stands."""
        cells, histories = self.experiment.cells, self.histories
        stands = {name: stands_of(self.store, self.experiment, name, histories[name]) for name in cells}
        unfinished = {name: cell for name, cell in cells.items() if stands[name] != DONE}
        busy = {name for name, history in histories.items() if history.open or history.is_run_here}
        idle = [name for name in unfinished if name not in busy and stands[name] != FAILED]
        of = needs(unfinished, self.store.holds) if idle else {}
        level = levels(of)
        ready = set()
        for name in sorted(idle, key=level.__getitem__):  # makers first
            lost = {key: m for key, m in of[name].items() if stands[m] == FAILED and m not in busy}
            if lost:
                self._give_up(name, *next(iter(lost.items())), known=stands[name] == WAITS)
                stands[name] = FAILED
            elif stands[name] == WAITS and still_waits(self.store, histories[name]):
                busy.add(name)
            else:
                ready.add(name)
        words = {name: self._say(name) for name in cells}
        if ready:
            live = {name: history.open[-1] for name, history in histories.items() if history.open}
            jobs = sorted({task.batch.job for task in live.values() if task.batch.job is not None})
            task = Submission(self.store, self.book, self.experiment.name, held, self.report, live, jobs)
            task.submit({name: cells[name] for name in cells if name in ready}, of)
            words |= dict.fromkeys(ready, SUBMITTED)
        settling = any(self.settler.is_gone(task) for history in histories.values() for task in history.open)
        return Look(words, is_over=not busy and not ready, is_settling=settling)

    def _give_up(self, name: str, reference: str, maker: str, known: bool) -> None:
        """A cell whose reference nobody will make any more. known: its last attempt has this result already."""
        if known:
            return
        attempt, history = self.store.new_attempt(name), self.histories[name]
        made_by = self.histories[maker].attempts[-1]
        history.results.append(not_run(self.store, self.experiment.cells[name], attempt, reference, made_by))
        history.attempts.append(attempt)

    def _say(self, name: str) -> str:
        history = self.histories[name]
        return self.settler.word(history.open[-1]) if history.open else _word(self.store, history, name)


def _is_stopped(result: Json) -> bool:
    return result["error"] is not None and result["error"]["type"] == "stopped"


def _word(store: Store, history: History, name: str) -> str:
    if history.is_run_here:
        return HERE
    result = history.results[-1] if history.results else store.finished(name)
    return "NOT SUBMITTED" if result is None else str(result["verdict"])
