"""Runs one attempt inside its allocation, from cell.json to result.json: `python -m orchestrator.driver ATTEMPT`.

Exit codes: 0 PASS, 1 FAIL, 2 not an attempt that can be run, 3 ERROR, 4 INCONCLUSIVE or NOT_RUN.
"""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from collectors.records import RecordWriter
from orchestrator import provenance
from orchestrator.cell import Cell, cell_id, second_run
from orchestrator.cluster import cancelled, jobs, slurm, upstream
from orchestrator.failure import DISK_FULL, AttemptError, Failure
from orchestrator.gangs import gang
from orchestrator.gangs.launch import Allocation, GangSet, find_allocation
from orchestrator.gangs.signs import STANDING, limits_of
from orchestrator.judge.attempt import CRASH
from orchestrator.judge.policy import combine, judge_attempt
from orchestrator.nodes import node_step, preflight
from orchestrator.progress import Display, display
from orchestrator.publish import publish
from orchestrator.result import unjudged
from orchestrator.staging import arm_gangs, second_gang, stage
from orchestrator.store import RESULT, UPSTREAM, Store, read_json, write_json

USAGE, ERROR = 2, 3
RESERVE = 256 << 10  # bytes kept back, so that a full disk still takes the result that says so
NEAR_LIMIT_S = 300  # SIGTERM so shortly before the end of the job is the warning about its time limit
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EVENTS = "events.jsonl"
CRASHES = ("rank_failed", "rank_killed", "unusable")  # deaths of a rank that its own code may have caused

log = logging.getLogger(__name__)


@dataclass
class Recorder:
    """Gets every event and progress record of the gangs; keeps events, shows progress, counts engine starts."""

    events: RecordWriter
    shown: Display
    starts: int = 0

    def phase(self, text: str) -> None:
        log.info(text)
        self.shown.note(text)
        self._keep("phase", {"text": text, "time": time.time()})

    def take(self, record: Mapping[str, Any]) -> None:
        self.shown.take(record)
        if record["kind"] == "standing":
            write_json(self.events.path.with_name(STANDING), record, durable=False)
        elif record["kind"] != "step":  # the ranks have recorded their steps themselves
            self._keep(record["kind"], record)
        elif (record["do"], record["state"], record["rank"]) == ("start", "start", 0):
            self.starts += record.get("via") != "attach"

    def _keep(self, kind: str, record: Mapping[str, Any]) -> None:
        self.events.write(kind, record)
        self.events.sync()


def measure(cell: Cell, store: Store, attempt: Path, recorder: Recorder) -> dict[str, Any]:
    """Everything between a frozen cell and its judged result. Raises AttemptError."""
    if "needs" in cell:
        raise AttemptError("unsupported", cell["needs"])
    upstream.check(store, attempt, float(cell["cluster"]["lost_after_s"]))
    recorder.phase("preflight")
    on_slurm = cell["cluster"]["kind"] == "slurm"
    allocation = find_allocation(os.environ) if on_slurm else None
    preflight.check(preflight.Place(cell, store, attempt, allocation))
    if not (attempt / "provenance.json").exists():
        write_json(attempt / "provenance.json", provenance.collect())
    with contextlib.ExitStack() as stack:
        nodes = node_step.check_nodes(cell, store, attempt, allocation, recorder)
        if nodes is not None:
            stack.callback(nodes.close)
        recorder.phase("checkpoints and prompts")
        staged = stage(cell, store, attempt, allocation)
        for arm in ("base", "candidate"):
            if cell["code"][arm] is None:
                continue
            gangs = arm_gangs(staged, arm)
            try:
                _run_gangs(cell, arm, gangs.gang_set, allocation, recorder, nodes)
            except AttemptError as error:
                if arm != "base" or error.failure.type not in CRASHES:
                    raise
                write_json(attempt / "base" / CRASH, error.record())  # what the candidate may have mended
                recorder.phase(f"base: {error.failure.message}")
            nodes = None
            publish(store, gangs)
    if second_run(cell):
        for arm in ("candidate", "base"):
            _run_gangs(cell, arm, second_gang(staged, arm), allocation, recorder)
    recorder.phase("judging")
    return judge_attempt(cell, attempt, store.reference_dirs(cell))


def _run_gangs(
    cell: Cell,
    arm: str,
    gangs: GangSet,
    allocation: Allocation | None,
    recorder: Recorder,
    nodes: gang.Waiting | None = None,
) -> None:
    """nodes: parents that are there already."""
    recorder.shown.board.expect(gangs.gangs)
    recorder.phase(f"{arm}: {', '.join(spec.name for spec in gangs.gangs)}")
    gang.run(gangs, allocation, limits_of(cell["policy"]), recorder.take, nodes)


def drive(cell: Cell, store: Store, attempt: Path) -> dict[str, Any]:
    """The content of result.json, whatever happens on the way."""
    began, reserve = time.monotonic(), attempt / ".reserve"
    recorder: Recorder | None = None
    try:
        with (
            _endings_as_errors(),
            RecordWriter(attempt / EVENTS) as events,
            display(Console()) as shown,
        ):
            reserve.write_bytes(bytes(RESERVE))
            recorder = Recorder(events, shown)
            result = measure(cell, store, attempt, recorder)
    except AttemptError as error:
        result = _failed(cell, attempt, cancelled.explained(attempt, error.failure))
    except Exception as error:
        log.exception("attempt %s", attempt)
        result = _failed(cell, attempt, _unexpected(error))
    reserve.unlink(missing_ok=True)
    starts = recorder.starts if recorder is not None else 0
    return {**result, "seconds": time.monotonic() - began, "starts": starts}


def _failed(cell: Cell, attempt: Path, failure: Failure) -> dict[str, Any]:
    log.error("%s: %s", failure.type, failure.message)
    verdict = "NOT_RUN" if failure.type in ("unsupported", UPSTREAM) else "ERROR"
    return unjudged(cell, attempt.parent.name, attempt.name, verdict, failure)


def _unexpected(error: Exception) -> Failure:
    """A failure of the driver itself."""
    stack = "".join(traceback.format_exception(error))
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Failure(
            "disk_full", f"No space was left while writing {error.filename}: {error}.", stack=stack
        )
    return Failure("driver", f"{type(error).__name__}: {error}", stack=stack)


@contextmanager
def _endings_as_errors() -> Iterator[None]:
    """The first signal that asks for the end becomes an AttemptError; the way out is not interrupted again."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        ignore()
        name = signal.Signals(number).name
        if number == signal.SIGTERM and _near_time_limit():
            raise AttemptError("time_limit", "The job reaches its time limit: raise cluster.time.")
        raise AttemptError("stopped", f"The driver was told to stop by {name}.")

    def ignore() -> None:
        for ending in ENDINGS:
            signal.signal(ending, signal.SIG_IGN)

    for ending in ENDINGS:
        signal.signal(ending, stop)
    try:
        yield
    finally:
        ignore()


def _near_time_limit() -> bool:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    try:
        end = slurm.job_end(job)
    except slurm.SlurmError as error:
        log.warning("cannot tell how much time the job has left: %s", error)
        return False
    return end is not None and end - time.time() < NEAR_LIMIT_S


def _refusal(attempt: Path, cell: Any) -> str | None:
    """Why this folder cannot be run, as a sentence."""
    if not isinstance(cell, dict) or "load_path" not in cell:
        return f"{attempt.parent / 'cell.json'} is missing or not a cell: give the folder of an attempt below a cell."
    if cell_id(cell) != attempt.parent.name:
        return (
            f"{attempt.parent / 'cell.json'} was changed: its content has the id {cell_id(cell)[:12]}, the folder is "
            f"{attempt.parent.name[:12]}."
        )
    if not attempt.is_dir():
        return f"{attempt} is not there: make the folder first."
    begun = any((attempt / name).exists() for name in (EVENTS, RESULT))
    if begun and not (attempt / jobs.CLAIM).exists():  # else it depends on whose claim it is
        return f"{attempt} was run before, and records only grow: make a new attempt beside it."
    return None


def _second_start(cell: Cell, attempt: Path, claimed: Mapping[str, Any]) -> int:
    """An attempt runs once. Where it is its own job that was started over, the attempt has ended with that."""
    job = jobs.job_id(os.environ)
    by = f"job {claimed['job']}" if claimed["job"] is not None else "another process"
    print(
        f"error: {attempt} was run before by {by}, and records only grow: make a new attempt beside it.",
        file=sys.stderr,
    )
    result = read_json(attempt / RESULT)
    if job is None or claimed["job"] != job or (result is not None and not _was_told_to_stop(result)):
        return USAGE
    failure = Failure("requeued", f"Job {job} was requeued while it ran, and an attempt is run only once.")
    write_json(attempt / RESULT, _failed(cell, attempt, failure))
    return ERROR


def _was_told_to_stop(result: Mapping[str, Any]) -> bool:
    return result["error"] is not None and result["error"]["type"] == "stopped"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m orchestrator.driver ATTEMPT_FOLDER", file=sys.stderr)
        return USAGE
    attempt = Path(arguments[0]).resolve()
    cell = read_json(attempt.parent / "cell.json")
    refusal = _refusal(attempt, cell)
    if refusal is not None:
        print(f"error: {refusal}", file=sys.stderr)
        return USAGE
    logging.basicConfig(
        filename=attempt / "driver.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    claimed = jobs.claim(attempt, os.environ)
    if claimed is not None:
        return _second_start(cell, attempt, claimed)
    result = drive(cell, Store(attempt.parents[2]), attempt)
    write_json(attempt / RESULT, result)
    if result["error"] is not None:
        print(f"{result['verdict']} {result['error']['type']}: {result['error']['message']}", file=sys.stderr)
    return int(combine([result])["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
