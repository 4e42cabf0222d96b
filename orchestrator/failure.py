"""Turns what node parents and ranks reported into one typed failure that names the rank that began it."""

import errno
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.causes import likely_cause

TAIL_LINES = 40
SEARCHED_LINES = (
    2000  # of a log, for the cause: an engine's workers may say much after it, such as a crash's frames
)
SAID_CHARACTERS = 1500  # of a rank's own words in a message; its stack has all
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_TYPED = {
    "CheckpointError": "checkpoint",
    "CodeError": "code",
    "ReloadError": "unusable",
}  # of what a rank raises

# What a rank says when another one went away or did not come: never the cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (was )?closed|timed out|timeout|"
    r"remote process exited|failed to (recv|send)|ncclRemoteError|ncclSystemError|connectFullMesh failed",
    re.IGNORECASE,
)


# Signals that a process gets for what it does itself. Not SIGBUS, which memory that is bad or full brings, too.
OWN_SIGNALS = {"SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"}


@dataclass
class Failure:
    """`error` of result.json. type: rank_killed (by somebody else), rank_failed, out_of_memory, disk_full, hang,
    connection_lost, node_lost, node_failed, boot_failed, bad_node (found unfit before anything ran), gpu_failed,
    launch_failed, stopped, cancelled (by an operator), preempted, requeued, time_limit, lost, refused (by sbatch),
    never_starts, upstream (another cell did not make what this one needs), preflight, checkpoint (refused before
    anything was touched), unusable (a load broke off, or weights were discarded: the engine must not serve), code,
    judge."""

    type: str
    message: str
    rank: int | None = None
    node: int | str | None = None
    log_tail: str = ""
    stack: str = ""


class AttemptError(Exception):
    """An attempt ended without a verdict, for a reason with a type."""

    def __init__(self, type: str, message: str, **evidence: Any) -> None:
        super().__init__(f"{type}: {message}")
        self.failure = Failure(type, message, **evidence)

    def record(self) -> dict[str, Any]:
        return asdict(self.failure)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Last lines of a log; empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400 * lines))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def stacks(log: Path, start: int | None) -> str:
    """The stacks that a rank wrote when it was asked for them, from byte `start` of its log on."""
    if start is None or not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def first_failure(events: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]) -> AttemptError | None:
    """The failure that began it all, or None when no rank and no node reported one.

    events: of the node parents and the launcher. folders: gang name to gang folder. A death by a signal that nobody
    sent from here, a rank's own error and what the launcher says come first, in order of time; errors about other
    ranks only count without them.
    """
    for event in events:
        if event["kind"] == "node_failed":
            return _reported("node_failed", event["error"], node=event["node"])
    exits = [event for event in events if event["kind"] == "rank_exited" and event["code"] != 0]
    failed = sorted((event for event in exits if not event["stopped"]), key=_time)
    lost = next((event for event in events if event["kind"] == "launch_failed"), None)
    if not failed and lost is None:
        return None
    # The rank that they complain of may have been on its way out when all were told to stop.
    leaving = sorted((event for event in exits if event["stopped"] and _left_by_itself(event)), key=_time)
    own = [event for event in (*failed, *leaving) if not _is_consequence(event)]
    if lost is not None and not (own and _time(own[0]) < lost["time"]):
        return AttemptError(lost["type"], lost["message"], node=lost["node"])
    return _rank_failure(own[0], folders) if own else _connection_lost(failed, events, folders)


def unkillable(events: Sequence[Mapping[str, Any]]) -> AttemptError | None:
    """A process that the kernel does not let go: whatever else failed, its node is of no use before it is gone."""
    for event in events:
        if event["kind"] == "rank_unkillable":
            message = (
                f"Rank {event['rank']} of gang {event['gang']!r}, pid {event['pid']}, is still there after SIGKILL. "
                f"It {event['state']}. Its node is of no use before the process is gone, which may take a restart."
            )
            return AttemptError("node_failed", message, rank=event["rank"], node=event["node"])
    return None


def _time(event: Mapping[str, Any]) -> float:
    error = event["error"]
    return float(error["time"] if error else event["time"])


def _left_by_itself(event: Mapping[str, Any]) -> bool:
    """Whether a rank that was told to stop had failed before: it gave an error, an exit code or a signal of its own."""
    return bool(event["error"]) or event["signal"] not in ("SIGTERM", "SIGKILL")


def _is_consequence(event: Mapping[str, Any]) -> bool:
    error = event["error"]
    if (
        not error
        or error["path"]
        or error["type"]
        not in (
            "RuntimeError",
            "DistError",
            "DistBackendError",
            "DistNetworkError",
            "DistStoreError",
        )
    ):
        return False
    return bool(_CONSEQUENCE.search(error["message"]))


def _reported(kind: str, error: Mapping[str, Any], **evidence: Any) -> AttemptError:
    """A failure that came with a report of `workloads.rank.failure_report`."""
    message = f"{error['type']}: {_shortened(error['message'])}"
    if error["errno"] in DISK_FULL:
        kind, message = "disk_full", f"No space was left while writing {error['path']}: {error['message']}."
    elif error["type"] in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in error["message"]:
        kind = "out_of_memory"
    elif error["type"] in _TYPED:
        kind = _TYPED[error["type"]]
    elif error["type"] == "UnsupportedError":
        kind, message = "unsupported", error["message"]
    return AttemptError(kind, message, stack=error["traceback"], **evidence)


def _shortened(said: str) -> str:
    """Some engines list all that they support, behind which nobody finds the likely cause."""
    left = len(said) - SAID_CHARACTERS
    return said if left <= 0 else f"{said[:SAID_CHARACTERS]}… ({left} more characters in its stack)"


def _rank_failure(event: Mapping[str, Any], folders: Mapping[str, Path]) -> AttemptError:
    """The death of a rank, with the cause that its log tells."""
    log = folders[event["gang"]] / f"rank-{event['rank']:05d}.log"
    error = _death(event, log)
    cause = likely_cause("\n".join([error.failure.message, error.failure.stack, tail(log, SEARCHED_LINES)]))
    if cause is None or error.failure.type not in ("rank_failed", "rank_killed"):
        return error  # it has a cause already
    evidence = {key: value for key, value in error.record().items() if key not in ("type", "message")}
    message = f"{error.failure.message.rstrip()} Likely cause: {cause.sentence}."
    return AttemptError(cause.type or error.failure.type, message, **evidence)


def _death(event: Mapping[str, Any], log: Path) -> AttemptError:
    rank = event["rank"]
    evidence = {"rank": rank, "node": event["node"], "log_tail": tail(log)}
    if event["error"]:
        return _reported("rank_failed", event["error"], **evidence)
    where = f"Rank {rank} of gang {event['gang']!r}"
    if event["signal"] is None:
        return AttemptError(
            "rank_failed", f"{where} exited with code {event['code']} and said nothing.", **evidence
        )
    hint = (
        " Nobody here sent it: look for the kernel's OOM killer in dmesg."
        if event["signal"] == "SIGKILL"
        else ""
    )
    message = f"{where} was ended by {event['signal']}.{hint}"
    kind = "rank_failed" if event["signal"] in OWN_SIGNALS else "rank_killed"
    return AttemptError(kind, message, stack=stacks(log, 0) if hint == "" else "", **evidence)


def _connection_lost(
    failed: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]
) -> AttemptError:
    """Ranks complain about others, and none of those others has reported anything."""
    gang = failed[0]["gang"]
    started = {e["rank"]: e["node"] for e in events if e["kind"] == "rank_started" and e["gang"] == gang}
    ended = {e["rank"] for e in events if e["kind"] == "rank_exited" and e["gang"] == gang}
    silent = _on_lost_nodes(started, set(started) - ended)
    first = failed[0]
    complaint = f"rank {first['rank']} says {first['error']['message'].splitlines()[0]!r}"
    evidence = {
        "log_tail": tail(folders[gang] / f"rank-{first['rank']:05d}.log"),
        "stack": first["error"]["traceback"],
    }
    if silent:
        nodes = sorted({started[rank] for rank in silent})
        message = f"Ranks {silent} on nodes {nodes} vanished without a report: {complaint}."
        return AttemptError("node_lost", message, rank=silent[0], node=nodes[0], **evidence)
    message = f"No rank of gang {gang!r} died by itself, yet {complaint}."
    return AttemptError("connection_lost", message, rank=first["rank"], node=first["node"], **evidence)


def _on_lost_nodes(node_of: Mapping[int, int], silent: set[int]) -> list[int]:
    """The silent ranks of nodes that are silent as a whole: a node that is lost takes all its ranks with it, while
    the launcher ends ranks of other nodes, some before they can report. All silent ranks where there is no such node.
    """
    spoke = {node for rank, node in node_of.items() if rank not in silent}
    return sorted(rank for rank in silent if node_of[rank] not in spoke) or sorted(silent)
