"""Brings attempts onto a Slurm cluster, at most one live job per cell, and waits for their results."""

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator import provenance, slurm
from orchestrator.failure import Failure, tail
from orchestrator.plan import Cell
from orchestrator.result import unjudged
from orchestrator.sbatch import LOG_FOLDER, driver_command, parameters
from orchestrator.store import RESULT, Store, read_json, write_json
from orchestrator.text import seconds

JOB = "job.json"
# Failures that say nothing about the code under test, and may not come back on other nodes.
INFRASTRUCTURE = {"node_lost", "node_failed", "connection_lost", "launch_failed", "preempted", "lost"}
SINGLE_NODE = re.compile(r"[A-Za-z][\w.-]*")
Report = Callable[[str], None]


class SubmitError(Exception):
    """sbatch refused. The message is a full sentence."""


def submit(store: Store, cell: Cell, name: str, rerun: bool = False) -> Path | None:
    """The attempt that measures the cell: the one whose job still waits or runs, else a new one. None when the
    cell is finished and `rerun` is off.

    Everything that the job reads is on disk before sbatch is called. A job whose submitter died right after is
    found again by its comment and script. Raises SubmitError, SlurmError, StoreError.
    """
    if not slurm.available():
        raise SubmitError(
            "sbatch is not on the PATH: submit from a login node of the cluster, or set cluster=local."
        )
    with store.locked(name):
        if store.finished(name) is not None and not rerun:
            return None
        running = live_attempt(store, name)
        if running is not None:
            return running
        store.write_cell(cell)
        attempt = store.new_attempt(name)
        write_json(attempt / "provenance.json", provenance.collect())
        _sbatch(cell, name, attempt)
        return attempt


def _sbatch(cell: Cell, name: str, attempt: Path) -> None:
    from submitit.core.utils import FailedJobError, FailedSubmissionError
    from submitit.slurm.slurm import SlurmExecutor

    folder = attempt / LOG_FOLDER
    folder.mkdir(mode=0o700)
    executor = SlurmExecutor(folder)
    executor.update_parameters(**parameters(cell, name))
    with slurm.without_inherited() as removed:
        try:
            # The job is a command, not a pickled function: what it reads is cell.json, and it cannot be stranded
            # between sbatch and the renaming of a pickle.
            job = executor._submit_command(driver_command(cell, attempt))
        except (FailedJobError, FailedSubmissionError) as error:
            raise SubmitError(f"sbatch refused cell {name[:12]}: {error}") from error
    write_json(attempt / JOB, {"job": job.job_id, "submitted": time.time(), "removed_variables": removed})


def live_attempt(store: Store, name: str) -> Path | None:
    """The attempt at a cell that has no result yet and whose job is still in the queue."""
    waiting = [attempt for attempt in store.attempts(name) if store.result(attempt) is None]
    if not waiting:
        return None
    jobs = [job for job in slurm.queue() if job.comment == name and job.state not in slurm.ENDED]
    for attempt in reversed(waiting):
        record = read_json(attempt / JOB)
        for job in jobs:
            if job.script.startswith(f"{attempt}/") or (record is not None and record["job"] == job.id):
                if record is None:
                    write_json(attempt / JOB, {"job": job.id, "submitted": time.time(), "adopted": True})
                return attempt
    return None


class Watch:
    """Looks at one submitted attempt until it has a result, its own or one that says how it was lost."""

    def __init__(
        self, store: Store, cell: Cell, attempt: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self.cell, self.attempt, self._clock = store, cell, attempt, clock
        self.job = str(read_json(attempt / JOB)["job"])
        self._last_seen = clock()
        self.state = "SUBMITTED"

    def look(self) -> dict[str, Any] | None:
        """The result once there is one. Writes a typed ERROR when the job has been gone for longer than
        `cluster.lost_after_s`, or when nobody could say anything about it for longer than it may run."""
        result = self._store.result(self.attempt)
        if result is not None:
            return result
        cluster = self.cell["cluster"]
        grace = cluster["lost_after_s"]  # the result may still be on its way through the file system
        try:
            job = slurm.job_state(self.job)
        except slurm.SlurmError as error:
            return self._unless_seen(None, str(error), grace + seconds(cluster["time"]))
        self.state = job.state or "gone"
        if not job.ended:
            self._last_seen = self._clock()
            return None
        return self._unless_seen(job, f"Slurm says {job.state or 'nothing'}", grace)

    def _unless_seen(self, job: slurm.JobState | None, reason: str, grace: float) -> dict[str, Any] | None:
        unseen = self._clock() - self._last_seen
        return self._lost(job, reason, unseen) if unseen >= grace else None

    def _lost(self, job: slurm.JobState | None, reason: str, unseen: float) -> dict[str, Any]:
        kind = job.failure_type if job is not None else "lost"
        message = (
            f"LOST: job {self.job} is not in the queue any more and left no {RESULT} within {unseen:.0f} s ({reason}). "
            f"Its output is in {self.attempt / LOG_FOLDER}."
        )
        node = job.nodes or None if job is not None else None
        failure = Failure(kind, message, node=node, log_tail=_output_tail(self.attempt))
        result = unjudged(self.cell, self.attempt.parent.name, self.attempt.name, "ERROR", failure)
        write_json(self.attempt / RESULT, result)
        return result


def submit_all(store: Store, cells: Mapping[str, Cell], report: Report, rerun: bool = False) -> list[Watch]:
    """One job for each cell (by id) that is not finished, submitted now or found again. Raises as `submit`."""
    watches = []
    for name, cell in cells.items():
        attempt = submit(store, cell, name, rerun)
        if attempt is not None:
            watches.append(Watch(store, cell, attempt))
            report(f"{name[:12]} {attempt.name}: job {watches[-1].job}")
    return watches


def run_jobs(store: Store, cells: Mapping[str, Cell], report: Report, rerun: bool = False) -> dict[str, Path]:
    """Submits, waits, and tries cells again whose infrastructure failed; the attempts that count, by cell."""
    counted: dict[str, Path] = {}
    tries: Counter[str] = Counter()
    watches = submit_all(store, cells, report, rerun)
    while watches:
        wait(watches, report)
        counted |= {watch.attempt.parent.name: watch.attempt for watch in watches}
        again = {}
        for watch in watches:
            name, result = watch.attempt.parent.name, store.result(watch.attempt)
            retry = _retry(watch.cell, result["error"] if result is not None else None)
            if retry is not None and tries[name] < watch.cell["policy"]["retries"]:
                again[name] = retry
        tries.update(again.keys())
        watches = submit_all(store, again, report, rerun=True)
    return counted


def _retry(cell: Cell, error: Mapping[str, Any] | None) -> Cell | None:
    """The cell for a fresh job that avoids the node that failed; None when the failure was not the cluster's."""
    if error is None or error["type"] not in INFRASTRUCTURE:
        return None
    bad = error["node"] if isinstance(error["node"], str) and SINGLE_NODE.fullmatch(error["node"]) else None
    exclude = ",".join(filter(None, (cell["cluster"]["exclude"], bad))) or None
    return {**cell, "cluster": {**cell["cluster"], "exclude": exclude}}


def wait(watches: Sequence[Watch], report: Report) -> None:
    """Returns when every attempt has a result; reports each change of a job's state."""
    waiting, states = list(watches), dict[Path, str]()
    while waiting:
        waiting = [watch for watch in waiting if watch.look() is None]
        for watch in waiting:
            if states.get(watch.attempt) != watch.state:
                states[watch.attempt] = watch.state
                report(f"{watch.attempt.parent.name[:12]} {watch.attempt.name}: {watch.state}")
        if waiting:
            time.sleep(min(watch.cell["cluster"]["poll_s"] for watch in waiting))


def _output_tail(attempt: Path) -> str:
    logs = sorted((attempt / LOG_FOLDER).glob("*_log.out"))
    return tail(logs[-1]) if logs else ""
