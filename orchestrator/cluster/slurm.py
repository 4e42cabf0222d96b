"""Asks and tells Slurm: the only module that knows its commands, their output and the words for its states."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

TIMEOUT_S = 30  # of one call; a controller that fails over answers later or not at all
PLAN_TIMEOUT_S = 5  # of one call that a plan makes
DEFAULT_ARRAY_LIMIT = 1001  # Slurm's own MaxArraySize, where nobody can be asked

# Words for states, in three sets. What is in neither of these two is unknown: not done yet, whatever it means.
UNFINISHED = {
    "PENDING",
    "RUNNING",
    "SUSPENDED",
    "CONFIGURING",
    "COMPLETING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "RESIZING",
    "RESV_DEL_HOLD",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
}
# The failure type of an attempt whose job ended so and left no result.
FINISHED = {
    "COMPLETED": "lost",
    "FAILED": "lost",
    "REVOKED": "lost",
    "CANCELLED": "stopped",
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "NODE_FAIL": "node_failed",
    "BOOT_FAIL": "boot_failed",
    "OUT_OF_MEMORY": "out_of_memory",
    "PREEMPTED": "preempted",
}
# Reasons for which a job pends for ever. Not those that a repaired node or a free licence ends: ReqNodeNotAvail,
# and PartitionNodeLimit, which Slurm also says of a partition whose nodes are down.
_NEVER_STARTS = re.compile(
    r"BadConstraints|DependencyNeverSatisfied|AccountNotAllowed|InvalidAccount|InvalidQOS|QOSNotAllowed|"
    r"PartitionTimeLimit|.* not permitted to use this partition.*"
)
# What sbatch says when the controller did not answer, or not now: the same script may be accepted later.
_NOT_NOW = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted|connection refused|"
    r"transport endpoint|temporarily|try again|did not answer|unexpected message|controller (is )?not responding|"
    r"incompatible|backup",
    re.IGNORECASE,
)
# Set by an enclosing job or a profile, they steer sbatch and srun past what the script says. SLURM_CONF only
# says where the cluster is.
_INHERITED = re.compile(r"(SLURM|SBATCH|SRUN|PMI|PMIX|SPANK)_")
_KEPT = {"SLURM_CONF"}
_STEERING = re.compile(r"(SQUEUE|SACCT|SINFO)_")  # set in a profile, they change what these print
_JOB_LINE = re.compile(
    r"(?P<id>\d[\d_+]*)\|(?P<state>[A-Z][A-Z0-9_.]*)(?: [^|]*)?\|(?P<reason>[^|]*)\|(?P<nodes>[^|]*)\|(?P<left>[^|]*)\|"
    r"(?P<comment>.*)"
)


class SlurmError(Exception):
    """A Slurm command failed; the message says which and why."""


class RefusedError(SlurmError):
    """sbatch will not take this script."""


@dataclass(frozen=True)
class JobState:
    """One job, or task of an array. id: "123" or "123_4". state: Slurm's word. reason: why it waits. nodes: its node
    list, "" before it has one. left: of its time limit, as squeue writes times; sacct does not tell."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    left: str = ""
    comment: str = ""

    @property
    def is_finished(self) -> bool:
        """It will not run any more."""
        return self.state in FINISHED

    @property
    def is_known(self) -> bool:
        return self.state in FINISHED or self.state in UNFINISHED

    @property
    def never_starts(self) -> bool:
        return self.state == "PENDING" and _NEVER_STARTS.fullmatch(self.reason) is not None

    @property
    def failure_type(self) -> str:
        return FINISHED.get(self.state, "lost")


@dataclass(frozen=True)
class Survey:
    """What Slurm said at one moment. queued: by id, of squeue. accounted: of sacct, for jobs that squeue has
    forgotten."""

    queued: Mapping[str, JobState]
    accounted: Mapping[str, JobState] = field(default_factory=dict)

    def state(self, job: str) -> JobState | None:
        """None: Slurm knows nothing of it, or not any more."""
        return self.queued.get(job) or self.accounted.get(job)

    def commented(self, comment: str) -> list[str]:
        """Ids of the arrays with this comment, oldest first."""
        found = {state.id.partition("_")[0] for state in self.queued.values() if state.comment == comment}
        return sorted(found, key=int)

    def is_live(self, array: str) -> bool:
        """Whether a task of an array may still run."""
        return any(
            state.id.partition("_")[0] == array and not state.is_finished for state in self.queued.values()
        )


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


def survey(jobs: Collection[str]) -> Survey:
    """The caller's jobs in one call of squeue, and those of `jobs` (ids of arrays) that it does not list in one of
    sacct. Where accounting is off or down, a job that squeue has forgotten is unknown.

    Raises SlurmError when squeue does not answer, or says what cannot be read: then nothing is known.
    """
    queued = queue()
    listed = {job.partition("_")[0] for job in queued}
    forgotten = sorted(set(jobs) - listed)
    return Survey(queued, _accounted(forgotten) if forgotten else {})


def queue() -> dict[str, JobState]:
    """The caller's jobs that the controller still has in memory, ended ones too, by id. Raises SlurmError."""
    return _read("squeue", "--me", "--array", "--noheader", "--states=all", "--format=%i|%T|%r|%N|%L|%k")


def _accounted(jobs: Iterable[str]) -> dict[str, JobState]:
    fields = "--format=JobID,State,Reason,NodeList,Timelimit,Comment"
    try:
        found = _read(
            "sacct", "-X", "--array", "--noheader", "--parsable2", f"--jobs={','.join(jobs)}", fields
        )
    except SlurmError:
        return {}  # accounting is off, its daemon is down, or slow
    return {job: replace(state, left="") for job, state in found.items()}  # it told the whole limit


def _read(*command: str) -> dict[str, JobState]:
    found = {}
    for line in _ask(*command).splitlines():
        match = _JOB_LINE.fullmatch(line)
        if match is None:
            raise SlurmError(f"{command[0]} said {line[:200]!r}, which is no line about a job.")
        found[match["id"]] = JobState(**match.groupdict())
    return found


def sbatch(script: Path, held: Sequence[int] = ()) -> str:
    """Submits a script; the id of its job. held: descriptors of locks, which last as long as sbatch may still submit,
    even where this process is killed meanwhile.

    Raises RefusedError when Slurm will not take it, and SlurmError when it is open whether Slurm took it.
    """
    try:
        said = _ask("sbatch", "--parsable", str(script), held=held)
    except SlurmError as error:
        raise (error if _NOT_NOW.search(str(error)) else RefusedError(str(error))) from error
    job = said.strip().partition(";")[0]
    if not job.isdigit():
        raise SlurmError(f"sbatch said {said.strip()[:200]!r}, which is no job id.")
    return job


def cancel(jobs: Sequence[str]) -> None:
    """Ends jobs by id. Ids that Slurm has forgotten are ended. Raises SlurmError."""
    if jobs:
        _ask("scancel", "--quiet", *jobs)


def down_nodes(nodes: str) -> list[str]:
    """Of a node list, those that Slurm holds for down or failing. Raises SlurmError."""
    return sorted(name for name, state in _node_states(f"--nodes={nodes}").items() if _is_down(state))


def usable_nodes(partition: str | None) -> list[str]:
    """Nodes of a partition (None: of any) that run jobs, or will. Raises SlurmError."""
    states = _node_states(*([f"--partition={partition}"] if partition is not None else []))
    return sorted(name for name, state in states.items() if not _is_down(state) and "drain" not in state)


def _node_states(*which: str) -> dict[str, str]:
    lines = _ask("sinfo", "--noheader", "--Node", *which, "--format=%N|%T").splitlines()
    return dict(line.split("|", 1) for line in lines if "|" in line)  # a node stands once for each partition


def _is_down(state: str) -> bool:
    return state.startswith(("down", "fail")) or state.endswith("*")


@cache
def array_limit() -> int:
    """How many tasks an array may have: the index must stay below MaxArraySize."""
    if shutil.which("scontrol") is None:
        return DEFAULT_ARRAY_LIMIT
    try:
        said = _ask("scontrol", "show", "config", timeout_s=PLAN_TIMEOUT_S)
    except SlurmError:
        return DEFAULT_ARRAY_LIMIT  # a larger array would be refused, not lost
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", said, re.MULTILINE)
    return int(match[1]) if match is not None else DEFAULT_ARRAY_LIMIT


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


def _ask(*command: str, timeout_s: int = TIMEOUT_S, held: Sequence[int] = ()) -> str:
    kept = {name: value for name, value in os.environ.items() if not _STEERING.match(name)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=kept,
            pass_fds=held,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{command[0]} is not on the PATH: this machine is no Slurm client.") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} did not answer within {timeout_s} s.") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
