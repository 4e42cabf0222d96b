"""Turns a hang into a failure that names the ranks that keep the others waiting, and shows where they are."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.failure import AttemptError, stacks, tail
from orchestrator.gangs.signs import Stall, order
from workloads import heartbeat
from workloads.stacks import stacks_file

_WAITING = ("/torch/distributed/", "/vllm/distributed/device_communicators/shm_broadcast.py:")

SHOWN_RANKS, SHOWN_PROCESSES, SHOWN_FRAMES, SHOWN_WIDTH = 3, 5, 16, 200  # in a finding; the files hold all

# A frame of faulthandler's and one of py-spy's, where native ones have a library or a C file.
_FRAME = re.compile(
    r'^(?:  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)'
    r"|    (?P<spied>\S.*) \((?P<where>[^()]*)\))$",
    re.MULTILINE,
)
_SPIED = re.compile(r"^Process (\d+):.*?^Thread \1 [^\n]*\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_THREAD = re.compile(r"^(?:Current )?[Tt]hread .*$", re.MULTILINE)
_PROCESS = re.compile(r"^(?=process \d+: )", re.MULTILINE)
_STATE = re.compile(r"^it (.+\(state [DTt]\))$", re.MULTILINE)


class Frame(NamedTuple):
    """where: file and line, or a library."""

    function: str
    where: str

    @property
    def is_python(self) -> bool:
        file = self.where.rpartition(":")[0]
        return file.endswith(".py") or file.startswith("<")

    def __str__(self) -> str:
        return f"{self.function} ({self.where})"


def frames(stack: str) -> list[Frame]:
    """Of the main thread, innermost first. By py-spy it has the number of its process, of which the rank's own is the
    first; faulthandler shows the newest thread first, so it is the last."""
    spied = _SPIED.search(stack)
    return _parsed(spied[2] if spied is not None else _THREAD.split(stack)[-1])


def _parsed(block: str) -> list[Frame]:
    return [
        Frame(match["function"], f"{match['file']}:{match['line']}")
        if match["file"]
        else Frame(match["spied"], match["where"])
        for match in _FRAME.finditer(block)
    ]


def place(stack: str) -> str:
    """Where the main thread is: its innermost Python frame outside torch and the standard library's wrappers."""
    python = [frame for frame in frames(stack) if frame.is_python]
    own = [frame for frame in python if "/torch/" not in frame.where] or python
    return f"{own[0].function.rpartition('.')[2]} ({own[0].where})" if own else "no Python frame"


def _waits(stack: str) -> bool:
    """Whether the main thread is in a collective, or is a worker of vLLM without work: it waits for others."""
    python = [frame.where for frame in frames(stack) if frame.is_python]
    return any(mark in where for mark in _WAITING for where in python)


def _elsewhere(told: Mapping[int, str], at: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Ranks that are not in a collective where others are; where all are in one or none is, those at the place of the
    fewest."""
    idle = [rank for rank, stack in told.items() if stack and not _waits(stack)]
    if 0 < len(idle) < sum(map(len, at.values())):
        return idle
    return min(at.values(), key=len) if len(at) > 1 else []


def hang(stall: Stall, exits: Iterable[Mapping[str, Any]], nodes: Mapping[int, int]) -> AttemptError:
    """Called when the gang has been stopped. exits: its `rank_exited` events. nodes: of its ranks.

    To blame are the ranks that showed no sign of life, else those that are behind in their steps; where all are at the
    same step, those that do not wait in a collective as the others do. A node is lost whose ranks were all lifeless and
    that did not answer when stacks were asked for.
    """
    folder, ended = Path(stall.spec.output), {event["rank"]: event for event in exits}
    led = stall.spec.ranks_per_member
    whole = {rank: _stack(folder, rank, ended.get(rank)) for rank in list(stall.positions)[::led]}
    told = _by_worker(folder, {rank: whole[rank - rank % led] for rank in stall.positions})
    at: dict[str, list[int]] = defaultdict(list)
    for rank, stack in told.items():
        if stack:
            at[place(stack)].append(rank)
    blamed = stall.lifeless or stall.behind or _elsewhere(told, at)
    first = blamed[0] if blamed else min(ended, default=None)
    lost = _lost_nodes(stall, folder, nodes)
    leader = None if first is None else first - first % led
    return AttemptError(
        "node_lost" if lost else "hang",
        " ".join(_sentences(stall, blamed, at, told)),
        rank=first,
        node=lost[0] if lost else None if leader is None else nodes.get(leader),
        log_tail="" if leader is None else tail(folder / f"rank-{leader:05d}.log"),
        stack=_shown({rank: told[rank] for rank in blamed or ([] if first is None else [first])}),
    )


def _stack(folder: Path, rank: int, exit_: Mapping[str, Any] | None) -> str:
    """What was seen from outside, where that shows stacks; else what the rank wrote itself."""
    file = stacks_file(folder, rank)
    seen = file.read_text() if file.exists() else ""
    own = stacks(folder / f"rank-{rank:05d}.log", exit_["stacks_at"]) if exit_ is not None else ""
    return seen if frames(seen) or not own else _head(seen) + own


def _by_worker(folder: Path, told: Mapping[int, str]) -> dict[int, str]:
    """Of ranks that have a worker, what was seen of it and not of its leader; unless all workers wait for what their
    leaders tell them to do."""
    own = {
        rank: _process(stack, worker[1])
        for rank, stack in told.items()
        if (worker := heartbeat.find_worker(folder, rank)) is not None
    }
    idle = own and all(stack and _waits(stack) for stack in own.values())
    return dict(told) if idle else {**told, **{rank: stack for rank, stack in own.items() if stack}}


def _process(seen: str, pid: int) -> str:
    """What is written about one of the processes."""
    return next((block for block in _PROCESS.split(seen) if block.startswith(f"process {pid}: ")), "")


def _head(seen: str) -> str:
    """With the state, which the rank cannot tell."""
    state = _STATE.search(seen)
    return f"{state[0]}\n" if state else ""


def _lost_nodes(stall: Stall, folder: Path, nodes: Mapping[int, int]) -> list[int]:
    """A node parent that runs writes stacks, also of ranks that are lifeless."""
    led = stall.spec.ranks_per_member
    mute = {rank for rank in stall.lifeless if not stacks_file(folder, rank - rank % led).exists()}
    lost = {node for rank, node in nodes.items() if rank in mute}
    alive = {node for rank, node in nodes.items() if rank not in mute}
    return sorted(lost - alive) if alive else []


def _sentences(
    stall: Stall, blamed: Sequence[int], at: Mapping[str, Sequence[int]], told: Mapping[int, str]
) -> Iterator[str]:
    yield (
        f"Gang {stall.spec.name!r} hangs in {_step(stall)}, silent for {stall.silent_s:.0f} s. "
        f"Behind: {_ranks(blamed)}."
    )
    if stall.lifeless:
        yield f"No sign of life of {_ranks(stall.lifeless)}."
    for rank in blamed[:SHOWN_RANKS]:
        if state := _STATE.search(told[rank]):
            yield f"The process of rank {rank} {state[1]}."
    if at:
        places = sorted(at.items(), key=lambda item: len(item[1]))
        yield f"Where: {'; '.join(f'{_ranks(ranks)} in {where}' for where, ranks in places)}."


def _step(stall: Stall) -> str:
    index = max(stall.positions.values(), key=order)[0]
    if index < 0:
        return "its start"
    step = stall.spec.steps[index]
    return f"step {index + 1} of {len(stall.spec.steps)} ({step.do} {step.name or step.checkpoint})"


def _shown(told: Mapping[int, str]) -> str:
    """The innermost frames of some ranks, and of the processes that they have started."""
    blocks = []
    for rank, stack in list(told.items())[:SHOWN_RANKS]:
        started = list(_SPIED.finditer(stack))[1:SHOWN_PROCESSES]
        blocks.append((f"rank {rank}:", frames(stack)))
        blocks += [(f"process {match[1]} of rank {rank}:", _parsed(match[2])) for match in started]
    lines = [line for head, block in blocks for line in (head, *(f"  {one}" for one in block[:SHOWN_FRAMES]))]
    return "\n".join(line[:SHOWN_WIDTH] for line in lines)


def _ranks(ranks: Sequence[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks)) if ranks else "no rank"
