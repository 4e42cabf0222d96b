"""Gangs of real processes over gloo: they start light, fail with a name and leave nothing behind."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.failure import AttemptError, Failure
from orchestrator.gangs.gang import run
from orchestrator.gangs.launch import GangSet, free_port
from orchestrator.gangs.watch import Watch
from orchestrator.nodes.node_check import problems
from orchestrator.nodes.node_records import Expected, read_events
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step

ROOT = Path(__file__).parents[2]
TOY = {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
EVENT_KINDS = {"node_started", "gang_started", "rank_started", "rank_exited", "gang_ended"}


def toy_spec(folder: Path, via: str, ranks: int, name: str = "candidate") -> GangSpec:
    return GangSpec(
        name=name,
        output=str(folder / name),
        model=Model(),
        parallelism=Parallelism(tp=ranks, gpus_per_node=ranks),
        backend=Backend(engine="toy_engine:ToyEngine"),
        checkpoints={},
        checkpoint_dirs={},
        steps=[Step("start", "old", "sum"), Step("update", "new", via)],
        master_port=free_port(),
    )


def toy_set(folder: Path, *specs: GangSpec) -> GangSet:
    return GangSet(folder / "set", specs, ROOT, environment=TOY)


def failure_of(folder: Path, via: str, ranks: int = 4, timeout_s: float = 60.0) -> Failure:
    """Runs a gang that must fail; nothing of it may be left."""
    events: list[dict] = []
    with pytest.raises(AttemptError) as caught:
        run(toy_set(folder, toy_spec(folder, via, ranks)), None, timeout_s, lambda e: events.append(dict(e)))
    assert not left_of(folder)
    started = {e["rank"] for e in events if e["kind"] == "rank_started"}
    assert started == {e["rank"] for e in events if e["kind"] == "rank_exited"} == set(range(ranks))
    return caught.value.failure


def left_of(folder: Path) -> list[psutil.Process]:
    """Processes that have to do with a run below `folder`: forked ranks share the command line of their parent."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if any(str(folder) in word for word in command) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def shared_bytes(process: psutil.Process) -> int:
    """Memory of a process, of pages that n processes share one n-th; 0 when it has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def wait_until_gone(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left_of(folder):
        assert time.monotonic() < deadline, f"still running: {left_of(folder)}"
        time.sleep(0.05)


def test_two_gangs_of_one_set_run_in_order_and_record_their_steps(tmp_path: Path) -> None:
    events: list[dict] = []
    specs = [toy_spec(tmp_path, "sum", 2, name) for name in ("reference", "candidate")]
    run(toy_set(tmp_path, *specs), None, 60, lambda e: events.append(dict(e)))
    order = [(e["kind"], e["gang"]) for e in events if e["kind"] in ("gang_started", "gang_ended")]
    assert order == [
        ("gang_started", "reference"),
        ("gang_ended", "reference"),
        ("gang_started", "candidate"),
        ("gang_ended", "candidate"),
    ]
    lines = (tmp_path / "candidate" / "progress-00001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["kind"], r.get("index"), r.get("state")) for r in records] == [
        ("step", 0, "start"),
        ("step", 0, "end"),
        ("step", 1, "start"),
        ("step", 1, "end"),
        ("end", None, None),
    ]
    assert records[3]["stats"]["nbytes"] == 8
    assert (records[3]["do"], records[3]["name"]) == ("update", "new")
    assert not left_of(tmp_path)


@pytest.mark.parametrize(("via", "kind"), [("sum", "stopped"), ("raise:1", "rank_failed")])
def test_an_order_to_end_while_gangs_end_does_not_hide_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, via: str, kind: str
) -> None:
    """As Slurm gives it after it has lost a node: the driver's signal handler raises in the middle of the stop."""
    stop, orders = Watch.stop, []

    def interrupted(watch: Watch, process: subprocess.Popen[bytes]) -> None:
        if not orders:
            orders.append(AttemptError("stopped", "The driver was told to stop by SIGTERM."))
            raise orders[0]
        stop(watch, process)

    monkeypatch.setattr(Watch, "stop", interrupted)
    with pytest.raises(AttemptError) as caught:
        run(toy_set(tmp_path, toy_spec(tmp_path, via, 2)), None, 60, lambda _: None)
    assert (caught.value.failure.type, len(orders)) == (kind, 1)
    assert not left_of(tmp_path)


def test_sixteen_ranks_take_seconds_to_start_and_share_their_memory(tmp_path: Path) -> None:
    peak = 0

    def observe(record: object) -> None:
        nonlocal peak
        if isinstance(record, dict) and record.get("state") == "start" and record["index"] == 1:
            peak = max(peak, sum(map(shared_bytes, left_of(tmp_path))))

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(toy_set(tmp_path, toy_spec(tmp_path, "late:3", 16)), None, 60, observe)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # Of processor time, whatever else runs: 3 s here, and over 25 s with an import of torch in every rank.
    assert seconds < 12
    assert 0 < peak < 2 << 30


def test_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "kill:2")
    assert (failure.type, failure.rank) == ("rank_killed", 2)
    assert "SIGKILL" in failure.message


def test_segfault_shows_where_it_happened(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "segfault:1")
    assert (failure.type, failure.rank) == ("rank_failed", 1)
    assert "SIGSEGV" in failure.message
    assert "toy_engine.py" in failure.stack


def test_raised_error_is_named_and_not_the_broken_connections_of_the_others(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "raise:3")
    assert (failure.type, failure.rank) == ("rank_failed", 3)
    assert failure.message == "ValueError: the toy was told to raise"
    assert "in _raise" in failure.stack
    assert "told to raise" in failure.log_tail


def test_silent_exit_is_a_failure(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "exit:1")
    assert (failure.type, failure.rank) == ("rank_failed", 1)
    assert "code 7" in failure.message


@pytest.mark.parametrize(
    ("action", "message"), [("leave", "code 7"), ("linger", "ValueError: the toy was told to raise")]
)
def test_rank_that_ends_after_the_others_have_complained_of_it_is_named(
    tmp_path: Path, action: str, message: str
) -> None:
    failure = failure_of(tmp_path, f"{action}:3")
    assert (failure.type, failure.rank) == ("rank_failed", 3)
    assert message in failure.message


def test_disk_that_is_full_while_recording_is_named_by_the_file(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "full:1", ranks=2)
    assert (failure.type, failure.rank) == ("disk_full", 1)
    assert str(tmp_path / "candidate" / "progress-00001.jsonl") in failure.message


def test_rank_that_ignores_sigterm_and_its_runaway_child_are_ended(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, "deaf:0+late:1+raise:1", ranks=2)
    assert (failure.type, failure.rank) == ("rank_failed", 1)


def test_killed_node_parent_takes_its_ranks_along_and_is_reported(tmp_path: Path) -> None:
    def kill_parent(record: dict) -> None:
        if record.get("kind") == "step" and record["index"] == 1:
            os.kill(node, signal.SIGKILL)
        elif record["kind"] == "node_started":
            remember(record["pid"])

    node = 0

    def remember(pid: int) -> None:
        nonlocal node
        node = pid

    with pytest.raises(AttemptError) as caught:
        run(toy_set(tmp_path, toy_spec(tmp_path, "hang:1", 2)), None, 60, kill_parent)
    assert caught.value.failure.type == "node_lost"
    wait_until_gone(tmp_path, 5)


def test_error_in_the_follower_ends_the_gang(tmp_path: Path) -> None:
    def observe(record: dict) -> None:
        if record.get("kind") == "step":
            raise KeyError("no such column")

    with pytest.raises(KeyError):
        run(toy_set(tmp_path, toy_spec(tmp_path, "hang:1", 2)), None, 60, observe)
    assert not left_of(tmp_path)


def test_unknown_engine_names_the_valid_ones(tmp_path: Path) -> None:
    spec = toy_spec(tmp_path, "sum", 1)
    spec.backend.engine = "nativ"
    with pytest.raises(AttemptError, match=r"backend\.engine='nativ'.*native, vllm"):
        run(toy_set(tmp_path, spec), None, 60, lambda e: None)


def test_interpreter_without_torch_is_a_failed_launch_with_its_output(tmp_path: Path) -> None:
    spec = toy_spec(tmp_path, "sum", 1)
    gangs = GangSet(tmp_path / "set", [spec], ROOT, python="/bin/false", environment=TOY)
    with pytest.raises(AttemptError) as caught:
        run(gangs, None, 60, lambda e: None)
    assert caught.value.failure.type == "launch_failed"
    assert "code 1" in caught.value.failure.message


def test_spawned_ranks_report_as_forked_ones_do(tmp_path: Path) -> None:
    """Ranks on a GPU are spawned; on a machine without one, the first thing they do fails."""
    spec = toy_spec(tmp_path, "sum", 2)
    spec.backend.device = "cuda"
    with pytest.raises(AttemptError) as caught:
        run(toy_set(tmp_path, spec), None, 60, lambda e: None)
    assert caught.value.failure.type in ("rank_failed", "node_failed")
    assert not left_of(tmp_path)


FOLLOWER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from test_gang import toy_set, toy_spec
from orchestrator.gangs.gang import run
folder = Path({folder!r})
def show(record):
    print(record.get("kind"), record.get("index"), flush=True)
run(toy_set(folder, toy_spec(folder, "deaf:1", 4)), None, 60, show)
"""


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that follows a hanging gang, up to the point where the gang hangs."""
    code = FOLLOWER.format(tests=str(Path(__file__).parent), root=str(ROOT), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "step 1\n":
                break
        yield process
        process.kill()


def test_nothing_survives_kill_9_of_the_driver(follower: subprocess.Popen[str], tmp_path: Path) -> None:
    assert len(left_of(tmp_path)) >= 6  # follower, node parent, 4 ranks
    follower.kill()
    follower.wait()
    wait_until_gone(tmp_path, 8)


def checking_set(folder: Path, **variables: str) -> GangSet:
    spec = toy_spec(folder, "sum", 2, "preflight")
    program = ("workloads.preflight", "--nodes=1", "--device=cuda", "--stay")
    return GangSet(
        folder / "preflight", [spec], ROOT, environment=TOY | variables, program=program, stays=True
    )


def test_the_nodes_that_were_checked_run_the_gangs(tmp_path: Path) -> None:
    """In the same process, which has torch by then; other variables take another one."""
    folder = tmp_path / "with a space"
    events: list[dict] = []

    def observe(event: Mapping[str, Any]) -> None:
        events.append(dict(event))

    waiting = run(checking_set(folder), None, 60, observe)
    assert waiting is not None
    assert {event["stage"] for event in events if event["kind"] == "node_check"} == {
        "machine",
        "gpus",
        "done",
    }
    assert run(toy_set(folder, toy_spec(folder, "sum", 2)), None, 60, observe, waiting) is None
    checked, ran = (event["pid"] for event in events if event["kind"] == "node_started")
    assert checked == ran
    assert [event["code"] for event in events if event["kind"] == "rank_exited"] == [0, 0]
    waiting.close()
    assert not left_of(folder)

    waiting = run(checking_set(folder, OTHER="1"), None, 60, observe)
    with pytest.raises(AttemptError, match="Rank 1 of gang 'second'"):
        run(toy_set(folder, toy_spec(folder, "kill:1", 2, "second")), None, 60, observe, waiting)
    checked, ran = [event["pid"] for event in events if event["kind"] == "node_started"][2:]
    assert checked != ran
    assert not left_of(folder)


def test_a_check_that_dies_does_not_take_its_node_along(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nkill -9 $PPID\n")
    smi.chmod(0o755)
    events: list[dict] = []
    checks = checking_set(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    waiting = run(checks, None, 60, lambda event: events.append(dict(event)))
    assert waiting is not None
    [node] = read_events(Expected(["n1"], 2), events)
    assert [problem.nodes for problem in problems(Expected(["n1"], 2), [node])] == [("n1",)]
    waiting.close()
    assert not left_of(tmp_path)
