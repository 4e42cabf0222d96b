"""The verb `cancel`: ends what waits or runs of a run, and keeps from starting what has not started."""

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from orchestrator.cluster import cancelled, slurm
from orchestrator.cluster.attempts import DONE, FAILED, failure_type
from orchestrator.cluster.history import Experiment, History, load, read_history, read_index, stands
from orchestrator.cluster.jobs import CLAIM, JOB, Book, Task, claim
from orchestrator.show import SHORT, console, table
from orchestrator.store import Store, StoreError, read_json
from orchestrator.verbs.arguments import Parser, UsageError
from orchestrator.verbs.selection import select, varied_labels

Json = dict[str, Any]
HELP = """\
Ends what waits or runs of a run, or of its one cell that CELL begins the id or a label
of, and says of each cell what it did. Jobs are ended by the ids in the store's records,
where Slurm still knows them by the comment that they were submitted with; drivers on
this machine get a SIGTERM. What has not begun never will. Each of these attempts ends as
ERROR (cancelled), which nobody tries again but `resume NAME`."""
LEFT = 3  # exit code: something goes on that could not be ended from here


def main(arguments: Sequence[str]) -> int:
    _, store, names = Parser("cancel", "NAME [CELL]", HELP).read(arguments)
    if not names:
        raise UsageError("cancel needs the name of a run; `runs` lists them.")
    folder = store.find_experiment(names[0])
    return cancel(Store.open(store.root), folder, names[1:], console())


def cancel(store: Store, folder: Path, words: Sequence[str], out: Console) -> int:
    """0, or 3 where something goes on. Raises SlurmError, before anything is changed, when squeue does not answer."""
    with store.submitting():  # nobody submits meanwhile
        cells = read_index(folder)["cells"]
        chosen = select(folder, cells, words)
        parts = [load(store, folder, on_slurm) for on_slurm in (False, True)]
        ending = _Ending(store, Book(store), slurm.Survey({}))
        if any(_may_be_queued(store, cell) for cell in chosen):
            ending.survey = slurm.Survey(slurm.queue())
        varied = varied_labels(cells)
        rows = table("cell", *varied, "done")
        for cell in reversed(chosen):  # the last first: a run on this machine goes on with the next one
            ending.said[cell["id"]] = ending.cell(
                next(part for part in parts if cell["id"] in part.cells), cell["id"]
            )
        for cell in chosen:
            labels = (escape(str(cell["labels"].get(key, ""))) for key in varied)
            rows.add_row(cell["id"][:SHORT], *labels, escape(ending.said[cell["id"]]))
        trouble = ending.end_jobs()
    out.print(rows)
    if trouble:
        out.print(f"Jobs may go on: {trouble} Cancel again.", soft_wrap=True, markup=False)
    return LEFT if trouble or ending.is_left else 0


def _may_be_queued(store: Store, cell: Json) -> bool:
    """Whether Slurm must be asked about a cell."""
    attempts = store.attempts(cell["id"], cell.get("before", 0))
    jobs = [path for path in attempts if (path / JOB).exists()]
    return any(store.result(path) is None or cancelled.is_marked(path) for path in jobs)


@dataclass
class _Ending:
    """Ends cells one by one, and their jobs together at last."""

    store: Store
    book: Book
    survey: slurm.Survey
    said: dict[str, str] = field(default_factory=dict)  # by cell: what was done
    jobs: list[str] = field(default_factory=list)
    is_left: bool = False

    def cell(self, experiment: Experiment, name: str) -> str:
        history = read_history(self.store, self.book, name, experiment.before[name])
        found = stands(self.store, experiment, name, history)
        if found == DONE:
            return "measured before"
        said = [self._job(task, experiment) for task in self._tasks(history)]
        if said:
            return "; ".join(said)
        if found == FAILED:
            return f"had ended: {failure_type(history.results[-1]) or 'ERROR'}"
        return self._here(experiment, name, history)

    def _tasks(self, history: History) -> list[Task]:
        """Those without a result, and those that were cancelled before and may be in the queue still."""
        marked = [attempt for attempt in history.attempts if cancelled.is_marked(attempt)]
        again = [task for attempt in marked if (task := self.book.task(attempt)) is not None]
        return [*history.open, *(task for task in again if self._live(task))]

    def _id(self, task: Task) -> str | None:
        """None: it was never submitted. Of a batch whose submitter did not get to note its job, by its comment."""
        found = task.batch.job or next(iter(self.survey.commented(task.batch.comment)), None)
        return None if found is None else f"{found}_{task.index}"

    def _live(self, task: Task) -> slurm.JobState | None:
        """The task's job where it waits or runs, and is ours: Slurm gives the ids of old jobs to new ones."""
        job = self._id(task)
        state = self.survey.state(job) if job is not None else None
        is_ours = state is not None and state.comment == task.batch.comment and not state.is_finished
        return state if is_ours else None

    def _job(self, task: Task, experiment: Experiment) -> str:
        job, state = self._id(task), self._live(task)
        begun = not self._keep_from_starting(task.attempt, experiment)
        if state is not None:
            self.jobs.append(state.id)
            where = f" on {state.nodes}" if begun and state.nodes else ""
            return f"cancelled job {state.id}, which was {state.state}{where}"
        if job is None:
            return "was never submitted, and will not be"
        other = self.survey.state(job)
        if other is not None and other.comment != task.batch.comment:
            return f"job {job} is gone; another job has its id now, and was left alone"
        return f"job {job} is gone{f' ({other.state})' if other is not None else ''}"

    def _keep_from_starting(self, attempt: Path, experiment: Experiment) -> bool:
        """Marks an attempt. Where no driver has claimed it, none can any more: True, and it has its result."""
        cancelled.mark(attempt)
        if claim(attempt, {}) is not None:
            return False
        cancelled.never_started(experiment.cells[attempt.parent.name], attempt)
        return True

    def _here(self, experiment: Experiment, name: str, history: History) -> str:
        if not history.is_run_here:
            try:
                with self.store.locked(name):
                    self._keep_from_starting(self.store.new_attempt(name), experiment)
                return "had not begun, and will not"
            except StoreError:  # a run has just come to it
                pass
        attempts = [path for path in self.store.attempts(name) if self.store.result(path) is None]
        if not attempts:
            self.is_left = True
            return f"is held by {self.store.holder(name)}: cancel again"
        return self._driver(attempts[-1], experiment)

    def _driver(self, attempt: Path, experiment: Experiment) -> str:
        """Of an attempt that a process of a `run` holds, on this machine or another."""
        claimed = read_json(attempt / CLAIM)
        if claimed is not None and claimed["host"] != socket.gethostname():
            self.is_left = True
            return f"is run by process {claimed['process']} on {claimed['host']}: cancel it there"
        if self._keep_from_starting(attempt, experiment):
            return "its driver had not begun, and will not"
        process = int(read_json(attempt / CLAIM)["process"])
        if not _is_driver(process, attempt):
            return "its driver has just ended"
        os.kill(process, signal.SIGTERM)
        return f"told its driver to end, process {process}"

    def end_jobs(self) -> str:
        """Why Slurm did not take it, else ""."""
        try:
            slurm.cancel(self.jobs)
        except slurm.SlurmError as error:
            return str(error)
        return ""


def _is_driver(process: int, attempt: Path) -> bool:
    """Whether a process on this machine is the driver of an attempt: ids of processes are used again, too."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(attempt) in words
