"""Finds out how attempts without a result ended: our own result file first, then squeue, then sacct, then LOST."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cell import Cell
from orchestrator.cluster import cancelled, slurm
from orchestrator.cluster.jobs import Batch, Book, Task
from orchestrator.cluster.submit import Report, Submission
from orchestrator.failure import Failure, tail
from orchestrator.result import unjudged
from orchestrator.store import RESULT, Store, write_json

Json = dict[str, Any]
GONE = "gone"  # since when an attempt has no job that will run, by the clock of the store's files; names bad nodes
NEVER_STARTS = "never_starts"
NOT_ASKED = "NOT ASKED"


class Settler:
    """Asks Slurm once about all attempts of a look, and writes the results of those that left none."""

    def __init__(self, store: Store, book: Book, held: Sequence[int], report: Report) -> None:
        self._store, self._book, self._held, self._report = store, book, held, report
        self._survey = slurm.Survey({})
        self._now: float | None = None
        self.has_asked = False

    def ask(self, tasks: Sequence[Task], stopped: Sequence[Path], cells: Mapping[str, Cell]) -> None:
        """Slurm about the jobs of `tasks` and of the attempts `stopped`. A batch that nobody noted to be submitted is
        found by its comment, or submitted now. Raises SlurmError."""
        self.has_asked = True
        known = [task for attempt in stopped if (task := self._book.task(attempt)) is not None]
        if not tasks and not known:
            return
        batches = {task.batch.name: task.batch for task in (*tasks, *known)}
        self._survey = slurm.survey([batch.job for batch in batches.values() if batch.job is not None])
        for batch in batches.values():
            self._recover(batch, cells)

    def _recover(self, batch: Batch, cells: Mapping[str, Cell]) -> None:
        found = self._survey.commented(batch.comment)
        if batch.job is None and found:
            self._book.submitted(batch, found[0], (), adopted=True)
            self._report(f"job {found[0]} was found again by its comment, {batch.comment}")
        elif batch.job is None:
            task = Submission(self._store, self._book, batch.experiment, self._held, self._report, {}, [])
            if task.resubmit(batch, cells):
                self._survey = slurm.survey([])
        # A script that was accepted late, after it had been submitted again: its drivers would refuse to run, too.
        twice = [job for job in found if job != (batch.job or found[0])]
        slurm.cancel([job for job in twice if self._survey.is_live(job)])

    def state(self, task: Task) -> slurm.JobState | None:
        """None: Slurm knows nothing of the attempt's job."""
        task = self._again(task)
        return None if task.id is None else self._survey.state(task.id)

    def word(self, task: Task) -> str:
        if not self.has_asked:
            return NOT_ASKED
        state = self.state(task)
        if state is None:
            return "GONE"
        return state.state if state.is_known else f"UNKNOWN ({state.state})"

    def settle(self, task: Task, cell: Cell) -> Json | None:
        """The result of an attempt that had none a moment ago: its own by now, or one that says how it was lost, once
        its job has been gone for `cluster.lost_after_s`. None while it may still run, or its result may still come.
        """
        result = self._store.result(task.attempt)
        if result is not None or not self.has_asked:
            return result
        state, marker = self.state(task), task.attempt / GONE
        is_live = state is not None and not state.is_finished and not state.never_starts
        if is_live:
            marker.unlink(missing_ok=True)
            return None
        if not marker.exists():
            marker.write_text(_bad_nodes(state))  # now: the node may be back before the grace time is over
        if self._now is None:
            self._now = self._store.now()
        grace = float(cell["cluster"]["lost_after_s"])
        if self._now - marker.stat().st_mtime < grace:
            return None
        return (
            self._never(task, cell, state) if state and state.never_starts else self._lost(task, cell, state)
        )

    def is_gone(self, task: Task) -> bool:
        """Whether the attempt of a job that will not run any more still has its time of grace."""
        return (task.attempt / GONE).exists()

    def _never(self, task: Task, cell: Cell, state: slurm.JobState) -> Json:
        slurm.cancel([state.id])
        message = (
            f"Job {state.id} can never start: Slurm says {state.reason}. It was cancelled. Change cluster.partition, "
            f"account, qos, nodelist, exclude or constraint, or end the quarantine of nodes."
        )
        return self._write(task, cell, Failure(NEVER_STARTS, message))

    def _lost(self, task: Task, cell: Cell, state: slurm.JobState | None) -> Json:
        says = "nothing" if state is None else state.state
        nodes = (task.attempt / GONE).read_text()
        where = f" Down: {nodes}." if nodes else ""
        output = self._again(task).output
        message = (
            f"LOST: job {self._again(task).id} is not in the queue any more and left no {RESULT} within "
            f"{float(cell['cluster']['lost_after_s']):.0f} s (Slurm says {says}).{where} Its output is in {output}."
        )
        kind = "lost" if state is None else state.failure_type
        log_tail = tail(output) if output is not None else ""
        return self._write(task, cell, Failure(kind, message, node=nodes or None, log_tail=log_tail))

    def _write(self, task: Task, cell: Cell, failure: Failure) -> Json:
        name, attempt = task.attempt.parent.name, task.attempt
        failure = cancelled.explained(attempt, failure)
        result = unjudged(cell, name, attempt.name, "ERROR", failure)
        write_json(attempt / RESULT, result)
        self._report(f"{name[:12]} {attempt.name}: {failure.type}. {failure.message}")
        return result

    def explain(self, attempt: Path, result: Json, cell: Cell) -> Json:
        """The result of a driver that was told to stop, with the type that the end of its job has for Slurm."""
        if result["error"] is None or result["error"]["type"] != "stopped":
            return result
        task = self._book.task(attempt)
        state = self.state(task) if task is not None else None
        if state is None or state.failure_type in ("lost", "stopped"):
            return result
        nodes = _bad_nodes(state)
        error = {**result["error"], "type": state.failure_type, "node": nodes or result["error"]["node"]}
        error["message"] += f" Slurm says {state.state}."
        explained = {**result, "error": error}
        write_json(attempt / RESULT, explained)
        return explained

    def _again(self, task: Task) -> Task:
        """With what is known of its batch by now."""
        batch = self._book.batch(task.batch.name)
        return task if batch is None else Task(batch, task.index)


def _bad_nodes(state: slurm.JobState | None) -> str:
    """Those of a job that Slurm ended because of a node: as far as they are still down. Commas between names."""
    if state is None or state.failure_type not in ("node_failed", "boot_failed") or not state.nodes:
        return ""
    return ",".join(slurm.down_nodes(state.nodes))
