"""Asks Slurm: what waits and runs, what ended how, what a partition allows. Knows the output of its tools."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

TIMEOUT_S = 30  # of one call; a controller that fails over answers later or not at all
PLAN_TIMEOUT_S = 5  # of the one call that a plan makes

# Failure types of result.json by state. States that are in neither set are not done yet, whatever they mean.
ENDED = {
    "COMPLETED": "lost",  # it ended, and left no result
    "FAILED": "lost",
    "REVOKED": "lost",
    "CANCELLED": "stopped",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_failed",
    "BOOT_FAIL": "node_failed",
    "OUT_OF_MEMORY": "out_of_memory",
    "PREEMPTED": "preempted",
}
# Set by an enclosing job or a profile, they steer sbatch and srun past what the script says. SLURM_CONF only
# says where the cluster is.
_INHERITED = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|SPANK)_")
_KEPT = {"SLURM_CONF"}


class SlurmError(Exception):
    """A Slurm command failed; the message says which and why."""


@dataclass(frozen=True)
class Job:
    """One line of the queue. script: path that sbatch was given."""

    id: str
    state: str
    comment: str
    script: str


@dataclass(frozen=True)
class JobState:
    """state: as Slurm calls it; "" when nothing is known of the job. ended: it will not run any more."""

    state: str
    ended: bool
    nodes: str = ""

    @property
    def failure_type(self) -> str:
        return ENDED.get(self.state, "lost")


def available() -> bool:
    return shutil.which("sbatch") is not None


def inherited_names(environment: Mapping[str, str]) -> list[str]:
    return sorted(name for name in environment if _INHERITED.match(name) and name not in _KEPT)


@contextmanager
def without_inherited(environment: MutableMapping[str, str] = os.environ) -> Iterator[list[str]]:
    """Takes Slurm's inherited variables out for the time of a submission; yields their names."""
    removed = {name: environment.pop(name) for name in inherited_names(environment)}
    try:
        yield list(removed)
    finally:
        environment.update(removed)


def queue(*arguments: str) -> list[Job]:
    """The caller's jobs that squeue lists. Raises SlurmError when it does not answer."""
    lines = _ask("squeue", "--me", "--noheader", "--format=%i|%T|%k|%o", *arguments).splitlines()
    return [Job(*line.split("|", 3)) for line in lines if line.count("|") >= 3]


def job_state(job: str) -> JobState:
    """From squeue, or else sacct. Raises SlurmError when the controller does not answer.

    Without accounting, a job that squeue has forgotten is ended in an unknown way.
    """
    for entry in queue():
        if entry.id == job:
            return JobState(entry.state, entry.state in ENDED)
    try:
        lines = _ask("sacct", "-X", "-n", "-P", "-j", job, "--format=State,NodeList").splitlines()
    except SlurmError:
        lines = []  # accounting is off, or its daemon is down
    if not lines:
        return JobState("", True)
    state, _, nodes = lines[-1].partition("|")
    state = state.split(" ")[0]  # "CANCELLED by 0"
    return JobState(state, state in ENDED, nodes)


def job_end(job: str) -> float | None:
    """Unix time at which Slurm will end a running job; None when it has no limit, or is being ended already, which
    Slurm shows as an end right now. Raises SlurmError."""
    shown = _ask("env", "SLURM_TIME_FORMAT=%s", "squeue", "--noheader", f"--jobs={job}", "--format=%T|%e")
    state, _, end = shown.strip().partition("|")
    return float(end) if state == "RUNNING" and end.isdigit() else None


@cache
def partition_limit(partition: str | None) -> int | None:
    """Seconds that a partition (None: the default one) allows; None when it has no limit or nobody can be asked."""
    if shutil.which("sinfo") is None:
        return None
    which = ("-p", partition) if partition is not None else ()
    try:
        lines = _ask("sinfo", "--noheader", *which, "--format=%P|%l", timeout_s=PLAN_TIMEOUT_S).splitlines()
    except SlurmError:
        return None
    rows = [line.split("|") for line in lines if "|" in line]
    limits = [limit for name, limit in rows if partition is not None or name.endswith("*")]
    return _limit_seconds(limits[0]) if limits else None


def _limit_seconds(text: str) -> int | None:
    """Of the forms 1-00:00:00, 4:00:00, 30:00 (minutes); None for `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _ask(*command: str, timeout_s: int = TIMEOUT_S) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on the PATH: this machine is no Slurm client.") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {timeout_s} s.") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
