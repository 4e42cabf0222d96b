"""The records of what was handed to Slurm. Whoever asks about jobs, from whichever login node, reads them here.

    <store>/jobs/<batch>/        one array job; <batch> is YYYYmmdd-HHMMSS-<8 hex digits>
        batch.json               {batch, comment, experiment, created, host, user, exclude, waits_for: [batch, ...],
                                 tasks: [{cell, attempt}, ...]}; the place of a task in the list is its array index
        tasks                    the attempts' folders, one a line, for the script
        script.sh                exactly what sbatch was given
        code                     link to the copy in the store of the code that its drivers run
        submitted.json           {job, submitted, adopted, removed_variables}; job: "123". Written after sbatch; while
                                 it is missing, the job is found by its comment `refit:<batch>`, or was never submitted
        123_4_0_log.out          what the driver of task 4 wrote
    <store>/cells/<cell>/attempt-NNN/
        job.json                 {batch, task, needs: [{reference, cell, attempt}, ...]}; the attempt's job is
                                 `<job>_<task>`, such as "123_4"; needs: attempts that make references of this one
        claim.json               {job, host, process, time} of the driver that runs the attempt; the first to create
                                 it is the only one that ever does

All but submitted.json and claim.json are written before sbatch is called. Times are seconds of the Unix clock.
"""

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.store import Store, read_json, write_json

JOB, CLAIM = "job.json", "claim.json"
BATCH, SUBMITTED, SCRIPT, TASKS, CODE = "batch.json", "submitted.json", "script.sh", "tasks", "code"
COMMENT = "refit:"  # before the batch in a job's comment


@dataclass(frozen=True)
class Batch:
    """One array job. job: its id; None while nobody knows that it was submitted."""

    folder: Path
    experiment: str
    tasks: Sequence[Path]  # the attempts' folders
    job: str | None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def comment(self) -> str:
        return COMMENT + self.folder.name

    @property
    def script(self) -> Path:
        return self.folder / SCRIPT


@dataclass(frozen=True)
class Task:
    """The job of one attempt."""

    batch: Batch
    index: int

    @property
    def attempt(self) -> Path:
        return self.batch.tasks[self.index]

    @property
    def id(self) -> str | None:
        """As Slurm calls it, "123_4"; None while nobody knows that it was submitted."""
        return None if self.batch.job is None else f"{self.batch.job}_{self.index}"

    @property
    def output(self) -> Path | None:
        """What the driver and the lines before it wrote; the file need not be there yet."""
        return None if self.id is None else self.batch.folder / f"{self.id}_0_log.out"


class Book:
    """Batches of a store, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._batches: dict[str, Batch] = {}

    def batch(self, name: str) -> Batch | None:
        """None where it is not, or not wholly, written."""
        if name not in self._batches:
            folder = batches_dir(self._store) / name
            written, submitted = read_json(folder / BATCH), read_json(folder / SUBMITTED)
            if written is None:
                return None
            tasks = [self._store.cell_dir(task["cell"]) / task["attempt"] for task in written["tasks"]]
            job = None if submitted is None else str(submitted["job"])
            self._batches[name] = Batch(folder, written["experiment"], tasks, job)
        return self._batches[name]

    def task(self, attempt: Path) -> Task | None:
        """None for an attempt that was not handed to Slurm, or whose batch its submitter did not get to write."""
        record = read_json(attempt / JOB)
        is_whole = isinstance(record, dict) and "batch" in record
        batch = self.batch(record["batch"]) if is_whole else None
        return None if batch is None else Task(batch, int(record["task"]))

    def submitted(self, batch: Batch, job: str, removed: Sequence[str], adopted: bool) -> Batch:
        """Notes a batch's job id."""
        record = {
            "job": job,
            "submitted": time.time(),
            "adopted": adopted,
            "removed_variables": list(removed),
        }
        write_json(batch.folder / SUBMITTED, record)
        self._batches[batch.name] = Batch(batch.folder, batch.experiment, batch.tasks, job)
        return self._batches[batch.name]


def batches_dir(store: Store) -> Path:
    return store.root / "jobs"


def new_batch_dir(store: Store) -> Path:
    """An empty folder with a name that no other batch of any store has."""
    batches_dir(store).mkdir(mode=0o700, exist_ok=True)
    folder = batches_dir(store) / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    return folder


def write_batch(
    folder: Path,
    experiment: str,
    attempts: Sequence[Path],
    script: str,
    code: Path,
    exclude: Sequence[str],
    waits_for: Sequence[str],
    needs: Mapping[Path, Sequence[Mapping[str, str]]],
) -> None:
    """Everything that the job reads and that names it, before sbatch is called. batch.json comes last: without it
    the other files are of no batch. needs: by attempt."""
    (folder / TASKS).write_text("".join(f"{attempt}\n" for attempt in attempts))
    (folder / SCRIPT).write_text(script)
    (folder / CODE).symlink_to(code)
    for index, attempt in enumerate(attempts):
        record = {"batch": folder.name, "task": index, "needs": list(needs.get(attempt, ()))}
        write_json(attempt / JOB, record, durable=False)
    about: dict[str, Any] = {
        "batch": folder.name,
        "comment": COMMENT + folder.name,
        "experiment": experiment,
        "created": time.time(),
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "exclude": list(exclude),
        "waits_for": list(waits_for),
        "tasks": [{"cell": attempt.parent.name, "attempt": attempt.name} for attempt in attempts],
    }
    write_json(folder / BATCH, about)


def claim(attempt: Path, environment: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Makes this process the one that runs the attempt: None. Else the claim that stands, which may be that of an
    earlier start of the same job."""
    own = {
        "job": job_id(environment),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.time(),
    }
    try:
        with (attempt / CLAIM).open("x") as file:
            json.dump(own, file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return dict(read_json(attempt / CLAIM) or {"job": None})
    return None


def job_id(environment: Mapping[str, str]) -> str | None:
    """Of the job that a process with these variables runs in, "123_4" for a task of an array."""
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")
