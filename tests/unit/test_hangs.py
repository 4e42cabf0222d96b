"""A hang is told with the ranks that the others wait for, and with little of what is known of them."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.failure import AttemptError
from orchestrator.gangs.hangs import SHOWN_FRAMES, SHOWN_WIDTH, frames, hang, place
from orchestrator.gangs.signs import Position, Stall
from workloads.heartbeat import worker_file
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step
from workloads.stacks import stacks_file

WAITING = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/src/workloads/models/parallel.py", line 40 in gather
  File "/src/workloads/node.py", line 10 in main
"""
BUSY = WAITING.replace("line 40 in gather", "line 77 in scatter")

SPIED = """\
process 71: python -m workloads.node SET
it runs or waits (state S)
in the kernel:
[<0>] do_syscall_64+0x71/0x280
Process 71: python -m workloads.node SET
Python v3.11.7 (/usr/bin/python3.11)

Thread 70 (idle): "autograd"
    wait (/usr/lib/python3.11/threading.py:324)
Thread 71 (idle): "MainThread"
    clock_nanosleep (/usr/lib/libc.so.6)
    PyCFuncPtr_call (_ctypes.c:4201)
    Engine._grip (/src/workloads/engine.py:116)
    play (/src/workloads/scenario.py:36)
    <module> (<frozen runpy>:88)
Thread 72 (idle): "heartbeat"
    wait (/usr/lib/python3.11/threading.py:324)

process 73: python worker
it is gone
in the kernel:

Process 73: python worker
Thread 73 (idle): "MainThread"
    work (/src/worker.py:1)
"""
STOPPED = "process 9: python\nit is stopped by a signal (state T)\nin the kernel:\n\nError: no stacks\n"


def stall(folder: Path, positions: dict[int, Position], *lifeless: int, silent_s: float = 30.0) -> Stall:
    steps = [Step("start", "old"), Step("update", "new"), Step("observe", name="seen"), Step("update", "old")]
    layout = Parallelism(tp=len(positions), gpus_per_node=len(positions))
    spec = GangSpec("candidate", str(folder), Model(), layout, Backend(), {}, {}, steps)
    return Stall(spec, positions, silent_s, lifeless)


def exited(rank: int, stacks_at: int) -> dict[str, Any]:
    return {"kind": "rank_exited", "rank": rank, "node": rank // 2, "stacks_at": stacks_at}


def hung(
    folder: Path, by_rank: dict[int, str], seen: Stall, nodes: dict[int, int] | None = None
) -> AttemptError:
    for rank, stack in by_rank.items():
        (folder / f"rank-{rank:05d}.log").write_text("earlier output\n" + stack)
    return hang(seen, [exited(rank, len("earlier output\n")) for rank in by_rank], nodes or {})


def test_place_is_the_main_threads_innermost_frame_outside_torch() -> None:
    assert place(WAITING) == "gather (/src/workloads/models/parallel.py:40)"
    assert place(SPIED) == "_grip (/src/workloads/engine.py:116)"
    assert place("") == "no Python frame"


def test_frames_are_those_of_the_main_thread_of_the_rank_itself() -> None:
    assert [frame.function for frame in frames(SPIED)] == [
        "clock_nanosleep",
        "PyCFuncPtr_call",
        "Engine._grip",
        "play",
        "<module>",
    ]
    assert len(frames(WAITING)) == 4
    assert not frames(STOPPED)


def test_hang_blames_the_ranks_that_are_steps_behind(tmp_path: Path) -> None:
    seen = stall(tmp_path, {0: (3, "start"), 1: (2, "end"), 2: (3, "start")})
    error = hung(tmp_path, {0: WAITING, 1: WAITING, 2: BUSY}, seen)
    assert (error.failure.type, error.failure.rank) == ("hang", 1)
    assert "hangs in step 4 of 4 (update old), silent for 30 s. Behind: ranks 1." in error.failure.message


def test_hang_in_one_step_blames_the_ranks_that_stand_elsewhere(tmp_path: Path) -> None:
    seen = stall(tmp_path, dict.fromkeys(range(4), (1, "start")))
    error = hung(tmp_path, {0: WAITING, 1: WAITING, 2: BUSY, 3: WAITING}, seen)
    assert error.failure.rank == 2
    assert "ranks 2 in scatter" in error.failure.message
    assert "ranks 0, 1, 3 in gather" in error.failure.message
    assert error.failure.stack.splitlines()[:2] == [
        "rank 2:",
        "  all_reduce (/venv/site-packages/torch/distributed/distributed_c10d.py:2810)",
    ]


def test_rank_that_waits_for_nobody_is_to_blame_however_few_wait(tmp_path: Path) -> None:
    seen = stall(tmp_path, dict.fromkeys(range(3), (1, "start")))
    for rank in (1, 2):
        stacks_file(tmp_path, rank).write_text(SPIED)
    error = hung(tmp_path, {0: WAITING}, seen)
    assert (error.failure.rank, "Behind: ranks 1, 2." in error.failure.message) == (1, True)
    assert error.failure.stack.splitlines()[5:8] == [
        "  <module> (<frozen runpy>:88)",
        "process 73 of rank 1:",
        "  work (/src/worker.py:1)",
    ]


def test_rank_without_a_sign_of_life_is_to_blame_wherever_it_is(tmp_path: Path) -> None:
    stacks_file(tmp_path, 1).write_text(STOPPED)
    error = hung(
        tmp_path, {0: WAITING, 1: "", 2: BUSY}, stall(tmp_path, dict.fromkeys(range(3), (1, "start")), 1)
    )
    assert error.failure.rank == 1
    assert "No sign of life of ranks 1." in error.failure.message
    assert "The process of rank 1 is stopped by a signal (state T)." in error.failure.message


@pytest.mark.parametrize(
    ("lifeless", "answered", "type_"),
    [
        ((2, 3), (), "node_lost"),
        ((1, 2, 3), (0, 1), "node_lost"),
        ((3,), (), "hang"),
        ((2, 3), (2, 3), "hang"),
        ((0, 1, 2, 3), (), "hang"),
    ],
)
def test_node_is_lost_that_is_lifeless_as_a_whole_and_does_not_answer(
    tmp_path: Path, lifeless: tuple[int, ...], answered: tuple[int, ...], type_: str
) -> None:
    """Ranks 2 and 3 share a node, and 0 and 1 do. Where all is lifeless, the file system of the heartbeats may be."""
    for rank in answered:
        stacks_file(tmp_path, rank).write_text(STOPPED)
    seen = stall(tmp_path, dict.fromkeys(range(4), (1, "start")), *lifeless)
    error = hung(tmp_path, {0: WAITING, 1: WAITING}, seen, {0: 0, 1: 0, 2: 1, 3: 1})
    assert error.failure.type == type_
    if type_ == "node_lost":
        assert error.failure.node == 1


def worker(pid: int, *where: str) -> str:
    """What is written of one process: its main thread's frames, innermost first."""
    lines = "".join(f"    {one}\n" for one in where)
    head = f"process {pid}: VLLM::Worker\nit runs or waits (state S)\n"
    return f'{head}Process {pid}: x\nThread {pid} (idle): "MainThread"\n{lines}\n'


IDLE = (
    "acquire_read (/v/vllm/distributed/device_communicators/shm_broadcast.py:7)",
    "busy_loop (/v/exec.py:9)",
)
LOADS = "reload_weights (/v/worker.py:5)", "busy_loop (/v/exec.py:9)"


@pytest.mark.parametrize(
    ("frames_of", "rank", "inner"),
    [
        ({0: IDLE, 1: LOADS}, 1, "reload_weights (/v/worker.py:5)"),
        ({0: LOADS, 1: IDLE}, 0, "reload_weights (/v/worker.py:5)"),
        ({0: IDLE, 1: IDLE}, 0, "update (/src/adapter.py:3)"),
    ],
)
def test_hang_in_a_worker_of_a_led_rank_is_told_by_what_the_worker_does(
    tmp_path: Path, frames_of: dict[int, tuple[str, ...]], rank: int, inner: str
) -> None:
    """vLLM's leader waits for both of its workers; where these wait for orders, it is the leader that hangs."""
    seen = stall(tmp_path, dict.fromkeys(range(2), (1, "start")))
    seen.spec.backend.engine = "vllm"
    texts = [worker(70, "update (/src/adapter.py:3)")]
    for number, where in frames_of.items():
        worker_file(tmp_path, number, 71 + number).touch()
        texts.append(worker(71 + number, *where))
    stacks_file(tmp_path, 0).write_text("\n".join(texts))
    (tmp_path / "rank-00000.log").write_text("the leader's words\n")
    error = hang(seen, [exited(0, 0)], {0: 4})
    assert (error.failure.rank, error.failure.node) == (rank, 4)
    assert error.failure.stack.splitlines()[:2] == [f"rank {rank}:", f"  {inner}"]
    assert error.failure.log_tail == "the leader's words"


def test_hang_before_the_first_step_has_no_step(tmp_path: Path) -> None:
    error = hung(tmp_path, {}, stall(tmp_path, dict.fromkeys(range(2), (-1, "end"))))
    assert "in its start" in error.failure.message
    assert "Behind: no rank" in error.failure.message


def test_finding_shows_few_ranks_few_frames_and_no_endless_names(tmp_path: Path) -> None:
    deep = (
        'Process 1: python\nThread 1 (idle): "MainThread"\n' + 99 * f"    {'pybind11::' * 99} (/src/a.py:1)\n"
    )
    for rank in range(8):
        stacks_file(tmp_path, rank).write_text(deep)
    positions: dict[int, Position] = {rank: (0 if rank else 1, "start") for rank in range(8)}
    error = hung(tmp_path, {}, stall(tmp_path, positions))
    lines = error.failure.stack.splitlines()
    assert len(lines) == 3 * (1 + SHOWN_FRAMES)
    assert max(map(len, lines)) <= SHOWN_WIDTH
