"""Ranks that hang are told from ranks that work for long; all is seen of them, and nothing of them is left."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_gang import left_of, toy_set, toy_spec

from orchestrator.failure import AttemptError, Failure
from orchestrator.gangs.gang import run
from orchestrator.gangs.signs import Limits
from workloads import member as members
from workloads import shared_memory, stacks
from workloads.member import Events, Member, end_members
from workloads.processes import family

LIMITS = Limits(120, {"update": 10})  # a start has the time to import torch, on a busy machine
needs_py_spy = pytest.mark.skipif(
    stacks.find_tool() is None, reason="py-spy is neither on PATH nor in this environment"
)


def hang_of(folder: Path, via: str, ranks: int = 3, port: int | None = None) -> Failure:
    spec = toy_spec(folder, via, ranks)
    spec.master_port = port or spec.master_port
    with pytest.raises(AttemptError) as caught:
        run(toy_set(folder, spec), None, LIMITS, lambda e: None)
    assert not left_of(folder)
    assert caught.value.failure.type == "hang"
    return caught.value.failure


def seen(folder: Path, rank: int) -> str:
    return stacks.stacks_file(folder / "candidate", rank).read_text()


def test_hang_names_the_rank_that_the_others_wait_for_and_where_all_are(tmp_path: Path) -> None:
    failure = hang_of(tmp_path, "hang:2", ranks=4)
    assert failure.rank == 2
    assert "hangs in step 2 of 2 (update new)" in failure.message
    assert "Behind: ranks 2." in failure.message
    assert "ranks 0, 1, 3 in update" in failure.message
    assert "sign of life" not in failure.message  # its thread beats: it is not the process that stands still
    assert "_hang (" in failure.stack
    assert len(failure.stack.splitlines()) < 20
    assert all("in the kernel:\n" in seen(tmp_path, rank) for rank in range(4))


def test_ranks_that_cannot_speak_are_lifeless_and_still_seen(tmp_path: Path) -> None:
    """One is stopped, one keeps the lock of the interpreter."""
    failure = hang_of(tmp_path, "halt:0+grip:1")
    assert failure.rank == 0
    assert "No sign of life of ranks 0, 1." in failure.message
    assert "The process of rank 0 is stopped by a signal (state T)." in failure.message
    assert "_grip (" in failure.stack
    if stacks.find_tool() is not None:
        assert "_halt (" in failure.stack
        assert "nanosleep (" in failure.stack  # native frames
        assert "c10d::Work::wait (" in seen(tmp_path, 2)


def test_rank_that_works_for_longer_than_its_limit_does_not_hang_and_nor_do_those_that_wait(
    tmp_path: Path,
) -> None:
    told: list[dict] = []
    run(toy_set(tmp_path, toy_spec(tmp_path, "work:1", 3)), None, LIMITS, lambda e: told.append(dict(e)))
    [update] = [e for e in told if e["kind"] == "step" and e["rank"] == 1 and e.get("seconds") and e["index"]]
    assert update["seconds"] > LIMITS.of_steps["update"]
    standings = [e for e in told if e["kind"] == "standing" and e["index"] == 1]
    assert standings
    assert all(standing["node"] == socket.gethostname() for standing in standings)


def test_node_is_usable_at_once_after_a_hang_with_a_crowd(tmp_path: Path) -> None:
    first, port = tmp_path / "first", 31_987
    shared = Path(f"/dev/shm/toy-{port}")
    failure = hang_of(first, "crowd:1+hang:1", ranks=2, port=port)
    assert failure.rank == 1
    assert not shared.exists()
    spec = toy_spec(tmp_path / "second", "sum", 2)
    spec.master_port = port
    run(toy_set(tmp_path / "second", spec), None, LIMITS, lambda e: None)
    assert not left_of(tmp_path)


def test_shared_memory_that_somebody_still_uses_stays(tmp_path: Path) -> None:
    used, unused = tmp_path / "used", tmp_path / "unused"
    unused.touch()
    with used.open("w"):
        assert shared_memory.used_by([os.getpid()], tmp_path) == {used}
        assert shared_memory.remove_left([used, unused, tmp_path / "gone"], tmp_path) == [unused]
    assert used.exists()


IN_THE_KERNEL = """
import ctypes
libc = ctypes.CDLL(None)
def waits_for_its_child():
    if libc.vfork() == 0:
        libc.sleep(60)
waits_for_its_child()
"""


@pytest.fixture
def in_the_kernel() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits in the kernel for its child, in state D."""
    with subprocess.Popen([sys.executable, "-c", IN_THE_KERNEL], process_group=0) as process:
        deadline = time.monotonic() + 30
        while "(state D)" not in stacks.describe_state(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_process_that_waits_in_the_kernel_is_told_with_the_place_there(
    in_the_kernel: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    stacks.dump({5: in_the_kernel.pid}, tmp_path, [5])
    text = stacks.stacks_file(tmp_path, 5).read_text()
    assert "it waits in the kernel, which does not let it go (state D)" in text
    assert "vfork" in text
    assert len(family(in_the_kernel.pid)) == text.count("process ") == 2


@needs_py_spy
def test_process_that_waits_in_the_kernel_shows_its_python_frames(
    in_the_kernel: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    stacks.dump({5: in_the_kernel.pid}, tmp_path, [])
    assert "waits_for_its_child (<string>:" in stacks.stacks_file(tmp_path, 5).read_text()


def test_without_py_spy_the_file_says_where_the_stacks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "find_tool", lambda: None)
    stacks.dump({0: os.getpid()}, tmp_path, [])
    assert "py-spy is neither on PATH" in stacks.stacks_file(tmp_path, 0).read_text()


def test_py_spy_is_also_found_where_the_driver_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "py-spy"
    tool.touch(mode=0o700)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv(stacks.TOOL, str(tool))
    assert stacks.find_tool() == str(tool)
    tool.unlink()  # a container without it
    assert stacks.find_tool() is None


def test_stacks_that_take_too_long_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o700)
    monkeypatch.setattr(stacks, "find_tool", lambda: str(slow))
    monkeypatch.setattr(stacks, "DUMP_S", 0.5)
    began = time.monotonic()
    stacks.dump(dict.fromkeys(range(2 * (os.cpu_count() or 1)), os.getppid()), tmp_path, [1])
    assert time.monotonic() - began < 10
    assert "timed out" in stacks.stacks_file(tmp_path, 1).read_text()
    assert "no time was left" in stacks.stacks_file(tmp_path, 2 * (os.cpu_count() or 1) - 1).read_text()


def test_process_that_sigkill_does_not_end_is_reported_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a driver of a broken device: here the signals are held back."""
    told: list[tuple[str, dict]] = []
    monkeypatch.setattr(Events, "__init__", lambda self, node: None)
    monkeypatch.setattr(Events, "emit", lambda self, kind, **values: told.append((kind, values)))
    monkeypatch.setattr(members, "kill_group", lambda leader, number: None)
    monkeypatch.setattr(members, "TERMINATE_S", 0.1)
    monkeypatch.setattr(members, "KILL_S", 0.1)
    log = tmp_path / "rank-00003.log"
    log.touch()
    with subprocess.Popen(["sleep", "60"]) as process:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        end_members("candidate", {3: Member(3, process.pid, log, reader)}, Events(0), ordered=True)
        process.kill()
    os.close(reader)
    os.close(writer)
    [(kind, values)] = told
    assert (kind, values["rank"], values["gang"]) == ("rank_unkillable", 3, "candidate")
    assert "(state S)" in values["state"]


def test_yama_lets_the_node_parent_read_a_rank() -> None:
    """Where the kernel has that module, the request succeeds; where it has not, it is not needed."""
    code = "import os; from workloads.processes import allow_debugger; allow_debugger(os.getppid())"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert ctypes.CDLL(None).prctl is not None
