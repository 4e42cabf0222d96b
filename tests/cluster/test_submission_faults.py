"""What goes wrong while jobs are submitted, on the real Slurm: every cell is measured once all the same."""

import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.cluster.history import load
from orchestrator.config.planning import Plan
from orchestrator.experiment import attempts_that_count
from orchestrator.store import read_json
from tests.cluster.toy_experiment import Toys, shim, toys

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("clean")]

APART = ["load_path=cold", "checkpoints.new.seed=1,2"]


@pytest.fixture(name="two")
def two_fixture(tmp_path: Path) -> Plan:
    """Two cells that share nothing."""
    return toys(tmp_path, *APART)


def killed_while(made: Toys, path: Path, file: str) -> None:
    """Kills an operator as soon as a command in `path` has touched `file`."""
    with made.operator(path) as operator:
        deadline = time.monotonic() + 60
        while not (path / file).exists():
            assert time.monotonic() < deadline
            assert operator.poll() is None
            time.sleep(0.05)
        operator.kill()


def test_a_submitter_that_is_killed_before_sbatch(two: Plan, tmp_path: Path) -> None:
    """Its sbatch is killed with it: the batch is on disk, and the next operator submits that one."""
    made = Toys(two, {})
    path = shim(tmp_path / "before", "sbatch", 'touch "$(dirname "$0")/there"; sleep 2; exit 1')
    killed_while(made, path, "there")
    made.over(60)
    assert [made.ends(cell) for cell in range(2)] == [["PASS"], ["PASS"]]
    assert made.each_once()


def test_a_submitter_that_is_killed_while_its_sbatch_goes_on(two: Plan, tmp_path: Path) -> None:
    """The orphan submits later. It holds the lock, so that the next operator finds its job."""
    made = Toys(two, {0: ["pass:go"]})
    path = shim(tmp_path / "orphan", "sbatch", 'touch "$(dirname "$0")/there"; sleep 2; exec $REAL "$@"')
    killed_while(made, path, "there")
    made.look()
    assert any("found again by its comment" in line for line in made.said)
    made.go()
    made.over(60)
    assert [made.ends(cell) for cell in range(2)] == [["PASS"], ["PASS"]]
    assert len(list(made.store.root.glob("jobs/*"))) == 1


def test_a_submitter_that_is_killed_between_sbatch_and_recording(two: Plan, tmp_path: Path) -> None:
    made = Toys(two, {0: ["pass:go"]})
    path = shim(tmp_path / "after", "sbatch", '$REAL "$@"; touch "$(dirname "$0")/there"; sleep 2')
    killed_while(made, path, "there")
    assert not list(made.store.root.glob("jobs/*/submitted.json"))
    made.look()  # while the first cell waits: jobs that are all over by then need not be found again
    [record] = made.store.root.glob("jobs/*/submitted.json")
    assert read_json(record)["adopted"]
    made.go()
    made.over(60)
    assert [made.ends(cell) for cell in range(2)] == [["PASS"], ["PASS"]]
    assert made.each_once()


def test_sbatch_fails_after_submitting_squeue_is_slow_and_sacct_talks_rubbish(
    two: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shim(tmp_path / "bad", "sbatch", '$REAL "$@"; echo Socket timed out >&2; exit 1')
    shim(
        path, "squeue", 'sleep 1; [[ -e $0.broken ]] && { echo "<html>502</html>"; exit 0; }; exec $REAL "$@"'
    )
    shim(path, "sacct", "echo rubbish")
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    made = Toys(two, {0: ["pass:go"]})
    assert made.look().trouble == ""
    (path / "squeue.broken").touch()
    assert "<html>" in made.look().trouble
    (path / "squeue.broken").unlink()
    made.go()
    made.over(60)
    assert [made.ends(cell) for cell in range(2)] == [["PASS"], ["PASS"]]
    assert len(list(made.store.root.glob("jobs/*"))) == 1
    assert made.each_once()


def test_two_operators_at_once(two: Plan) -> None:
    made = Toys(two, {0: ["pass:go"]})
    operators = [made.operator() for _ in range(2)]
    for operator in operators:
        said, _ = operator.communicate(timeout=90)
        assert operator.returncode == 0, said
    made.go()
    made.over(60)
    assert [made.ends(cell) for cell in range(2)] == [["PASS"], ["PASS"]]
    assert len(list(made.store.root.glob("jobs/*"))) == 1
    assert made.each_once()


def test_what_slurm_will_never_run_is_an_error_of_its_cells_only(tmp_path: Path) -> None:
    """A partition, a node, a feature and a node list that are not there; an account without rights, which Slurm takes
    and never starts."""
    subprocess.run(
        ["scontrol", "create", "partition=closed", "nodes=ALL", "AllowAccounts=team"], check=True, timeout=30
    )
    try:
        bad = [
            {"partition": "nowhere"},
            {"nodelist": "gb200-9"},
            {"constraint": "h100"},
            {"nodelist": "gb200-0", "exclude": "gb200-0"},
            {"partition": "closed", "account": "nobody"},
        ]
        made = toys(tmp_path, "load_path=cold", "checkpoints.new.seed=1,2,3,4,5,6")
        for one, changes in zip(made.cells, bad, strict=False):
            one.cell["cluster"] |= changes
        run = Toys(made, {})
        run.over(60)
        assert [run.ends(cell) for cell in range(6)] == [*[["refused"]] * 4, ["never_starts"], ["PASS"]]
        for cell, says in enumerate(
            ("partition", "Invalid node name", "Invalid feature", "nvalid node", "not permitted")
        ):
            assert says in run.error(cell)["message"]
    finally:
        subprocess.run(["scontrol", "delete", "partition=closed"], check=True, timeout=30)


def test_the_attempts_that_count(two: Plan) -> None:
    made = Toys(two, {0: ["preempted@", "pass"]})
    made.over(60)
    counted = attempts_that_count(made.store, load(made.store, made.folder))
    assert [counted[name].name for name in made.names] == ["attempt-002", "attempt-001"]
