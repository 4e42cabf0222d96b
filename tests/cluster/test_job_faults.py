"""What happens to jobs that are submitted, on the real Slurm: every end has its type, and cells are measured once."""

import io
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.cluster import quarantine
from orchestrator.cluster.history import load
from orchestrator.experiment import attempts_that_count, conclude
from orchestrator.store import read_json
from tests.cluster.toy_experiment import Toys, control, shim, toys

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("clean")]


def test_ends_that_others_bring_about(tmp_path: Path) -> None:
    """Cancelled while it waits and while it runs, preempted, at its time limit, requeued, held, suspended; and a driver
    that is killed -9."""
    made = toys(tmp_path, "load_path=cold", "checkpoints.new.seed=1,2,3,4,5,6,7,8")
    waiting, held, preempted, limited, cancelled, requeued, suspended, killed = range(8)
    for cell in (waiting, held):
        made.cells[cell].cell["cluster"]["partition"] = "debug"
    made.cells[preempted].cell["cluster"] |= {"partition": "preemptible", "nodelist": "gb200-3"}
    made.cells[limited].cell["cluster"]["time"] = "00:05:00"
    orders = {cell: ["hold", "pass"] for cell in (waiting, preempted, limited, cancelled, requeued)}
    run = Toys(made, {**orders, suspended: ["pass:go"], killed: ["die", "pass"]})
    control("update", "partition=debug", "state=down")
    try:
        run.look()
        control("hold", run.job(held))
        subprocess.run(["scancel", run.job(waiting)], check=True, timeout=30)
    finally:
        control("update", "partition=debug", "state=up")
    for cell in (preempted, limited, cancelled, requeued, suspended):
        run.running(cell, 90)
    control("suspend", run.job(suspended))
    control("update", f"jobid={run.job(limited)}", "timelimit=1")
    subprocess.run(["scancel", run.job(cancelled)], check=True, timeout=30)
    control("update", f"jobid={run.job(requeued)}", "requeue=1")
    control("requeue", run.job(requeued))
    urgent = ["sbatch", "-p", "debug", "-w", "gb200-3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2"]
    subprocess.run(urgent, check=True, capture_output=True, timeout=30)
    time.sleep(5)  # longer than `lost_after_s`
    words = run.look().words
    assert words[run.names[suspended]] == "SUSPENDED"
    assert words[run.names[held]] == "PENDING"
    control("resume", run.job(suspended))
    run.go()
    control("release", run.job(held))
    run.over(150)
    assert run.ends(waiting) == run.ends(cancelled) == ["stopped"], "nobody runs what somebody cancelled"
    assert run.ends(held) == run.ends(suspended) == ["PASS"]
    assert run.ends(preempted) == ["preempted", "PASS"]
    assert run.ends(limited) == ["time_limit"]
    assert run.ends(requeued) == ["requeued", "PASS"]
    assert run.ends(killed) == ["lost", "PASS"]
    assert run.each_once()


def test_a_controller_that_is_killed_and_comes_back_without_accounting(
    slurm: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = toys(tmp_path, "load_path=cold", "checkpoints.new.seed=1,2,3")
    run = Toys(made, {0: ["pass:go"], 1: ["pass:go"], 2: ["die:go", "pass"]})
    run.look()
    for cell in range(3):
        run.running(cell, 60)
    kill_controller()
    path = shim(tmp_path / "quick", "squeue", 'exec timeout 3 $REAL "$@"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{path}:{os.environ['PATH']}")
        look = run.look()
    assert look.trouble
    assert set(look.words.values()) <= {"UNKNOWN", "PASS"}
    monkeypatch.setenv("ONE_MACHINE_ACCOUNTING", "0")
    slurm("one_machine_up.sh")
    try:
        assert subprocess.run(["sacct"], capture_output=True, check=False, timeout=30).returncode != 0
        run.go()
        run.over(90)
    finally:
        kill_controller()
        monkeypatch.undo()
        slurm("one_machine_up.sh")
    assert [run.ends(cell) for cell in range(3)] == [["PASS"], ["PASS"], ["lost", "PASS"]]
    assert run.each_once()


def kill_controller() -> None:
    """After it has saved its state, which it does every few seconds: it forgets a job that it has not saved, gives its
    number to the next one, and a node that has seen the number refuses that and is drained."""
    time.sleep(6)
    folder = Path(os.environ["SLURM_CONF"]).parents[1]
    os.kill(int((folder / "run" / "slurmctld.pid").read_text()), signal.SIGKILL)


def test_a_node_that_is_taken_down_is_avoided(slurm: Callable[..., str], tmp_path: Path) -> None:
    """By an administrator, while two nodes run a cell: the fresh job avoids the one, as will other experiments."""
    made = toys(tmp_path, "load_path=cold", "parallelism={tp: 2, dp: 1, ep: 2, nodes: 2, gpus_per_node: 1}")
    run = Toys(made, {0: ["hold", "pass"]})
    run.look()
    run.running(0, 60)
    [line] = run.ran()
    assert line.endswith("gb200-[0-1]")
    slurm("one_machine_node.sh", "hang", "gb200-1")  # else its daemon registers again, and it is up at once
    try:
        control("update", "nodename=gb200-1", "state=down", "reason=test")
        run.over(120)
    finally:
        slurm("one_machine_node.sh", "unhang", "gb200-1")
    assert run.ends(0) == ["node_failed", "PASS"]
    assert quarantine.nodes(run.store) == ["gb200-1"]
    assert run.ran()[1].partition(" ")[2] in ("gb200-[0,2]", "gb200-[0,3]", "gb200-[2-3]")


@pytest.mark.timeout(900)  # 27 drivers start: a minute on an idle machine
def test_24_cells_and_three_failures_of_the_cluster(slurm: Callable[..., str], tmp_path: Path) -> None:
    """A node loses power, a driver dies, a job is requeued: 24 verdicts, each of the right attempt, the node avoided,
    and a report that says what happened."""
    made = toys(tmp_path, "load_path=cold", "checkpoints.new.seed=range(1,25)", "cluster.exclusive=true")
    powerless, requeued, dead, failing, defect = 0, 1, 5, 17, 23
    made.cells[powerless].cell["cluster"]["nodelist"] = "gb200-3"
    orders = {powerless: ["hold", "pass"], dead: ["die", "pass"], requeued: ["hold", "pass"]}
    run = Toys(made, {**orders, failing: ["fail"], defect: ["raise"]})
    run.look()
    run.running(powerless, 200)
    made.cells[powerless].cell["cluster"]["nodelist"] = None  # the fresh job may run elsewhere
    run.store.write_cell(made.cells[powerless].cell)
    slurm("one_machine_node.sh", "fail", "gb200-3")
    try:
        run.running(requeued, 200)
        control("update", f"jobid={run.job(requeued)}", "requeue=1")
        control("requeue", run.job(requeued))
        run.until(lambda run, _: quarantine.nodes(run.store) == ["gb200-3"], 200)
    finally:
        slurm("one_machine_node.sh", "restore")
    run.over(600)
    store, experiment, out = run.store, load(run.store, run.folder), Console(file=io.StringIO())
    assert conclude(store, run.folder, attempts_that_count(store, experiment), out) == 1
    verdict = read_json(run.folder / "verdict.json")
    assert verdict["counts"] == {"PASS": 22, "FAIL": 1, "ERROR": 1}
    tries = {cell: run.ends(cell) for cell in range(24)}
    expected = {cell: ["PASS"] for cell in range(24)}
    expected |= {powerless: ["node_failed", "PASS"], dead: ["lost", "PASS"], requeued: ["requeued", "PASS"]}
    assert tries == {**expected, failing: ["FAIL"], defect: ["rank_failed"]}
    assert [entry["attempts"] for entry in verdict["cells"]] == [len(tries[cell]) for cell in range(24)]
    assert run.each_once()
    again = [line for line in run.ran() if line.startswith(f"{run.names[powerless]}/attempt-002")]
    assert len(again) == 1
    assert not again[0].endswith("gb200-3")
