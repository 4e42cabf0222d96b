"""Submission to the fake Slurm: everything is on disk before, and nothing is submitted twice."""

import os
import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import BATCH, Run, apart_fixture, pair_fixture, run_fixture, sharing_fixture, store_fixture  # noqa: F401

from orchestrator.cluster.jobs import Book, claim
from orchestrator.cluster.sbatch import script
from orchestrator.config.planning import Plan, plan
from orchestrator.store import Store, StoreError, read_json


def test_everything_is_on_disk_before_one_sbatch(cluster: Cluster, run: Run) -> None:
    cluster.fault("sbatch", "sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    look = run.look()
    assert "Unable to contact" in look.trouble
    [batch] = (run.store.root / "jobs").iterdir()
    assert (batch / "tasks").read_text().splitlines() == [str(run.attempt(i)) for i in range(3)]
    for cell in range(3):
        attempt = run.attempt(cell)
        assert read_json(attempt.parent / "cell.json") == run.experiment.cells[run.names[cell]]
        assert (attempt / "provenance.json").is_file()
        assert read_json(attempt / "job.json") == {"batch": batch.name, "task": cell, "needs": []}
    assert not list(run.store.root.rglob("*.pkl")), "the job is a command: there is no pickle to strand"
    cluster.fault("sbatch", None)
    cluster.calls()
    assert set(run.look().words.values()) == {"PENDING"}, "the batch that was written, not another one"
    assert cluster.calls().count("sbatch") == 1
    assert run.count() == [1, 1, 1]
    assert cluster.jobs["100"]["text"] == (batch / "script.sh").read_text()


def test_the_script_is_that_of_the_plan(cluster: Cluster, run: Run) -> None:
    run.look()
    task = Book(run.store).task(run.attempt(1))
    assert task is not None
    assert task.id == "100_1"
    cell = run.experiment.cells[run.names[0]]
    assert cluster.jobs["100"]["text"] == script(cell, task.batch.folder, 3)


def test_a_job_runs_the_code_that_was_submitted(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    """Not that of the folder that it starts in."""
    run.look()
    task = Book(run.store).task(run.attempt())
    assert task is not None
    code = task.batch.folder / "code"
    assert f"export PYTHONPATH='{code}'" in task.batch.script.read_text() or " " not in str(code)
    other = tmp_path / "orchestrator"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the wrong one')")
    words = shlex.split(task.batch.script.read_text().splitlines()[-1])
    driver = [*words[1 : words.index("orchestrator.driver") + 1], str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(driver, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "is missing or not a cell" in done.stderr
    assert code.resolve().parent == run.store.root / "trees"
    assert all((code / script).is_file() for script in ("slurm/step.sh", "slurm/ray_step.sh"))
    source = run.experiment.cells[run.names[0]]["code"]["candidate"]["source"]
    assert (run.store.root / "trees" / source / "workloads" / "node.py").is_file()


def test_inherited_variables_do_not_reach_sbatch(
    cluster: Cluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaking = {"SBATCH_PARTITION": "x", "SLURM_NTASKS_PER_NODE": "9", "SRUN_DEBUG": "1", "PMI_RANK": "0"}
    for name, value in (leaking | {"SLURM_CONF": "/etc/slurm.conf"}).items():
        monkeypatch.setenv(name, value)
    run.look()
    seen = cluster.jobs["100"]["env"]
    assert leaking.keys().isdisjoint(seen)
    assert seen["SLURM_CONF"] == "/etc/slurm.conf"
    [record] = run.store.root.glob("jobs/*/submitted.json")
    assert read_json(record)["removed_variables"] == sorted(leaking)
    assert os.environ["SBATCH_PARTITION"] == "x", "only taken out for the submission"


def test_a_job_is_found_again_by_its_comment(cluster: Cluster, run: Run) -> None:
    """Its submitter died between sbatch and noting the id."""
    run.look()
    [record] = run.store.root.glob("jobs/*/submitted.json")
    record.unlink()
    run.look()
    assert read_json(record)["job"] == "100"
    assert read_json(record)["adopted"]
    assert list(cluster.jobs) == ["100"]
    assert run.count() == [1, 1, 1]


def test_sbatch_that_fails_after_submitting(cluster: Cluster, run: Run) -> None:
    cluster.fault("sbatch", "after:sbatch: error: Batch job submission failed: Socket timed out")
    assert run.look().trouble == ""
    assert list(cluster.jobs) == ["100"]
    [record] = run.store.root.glob("jobs/*/submitted.json")
    assert read_json(record)["job"] == "100"


def test_a_script_that_was_taken_twice_is_cancelled_once(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.jobs = cluster.jobs | {"101": cluster.jobs["100"]}
    run.look()
    assert [set(job["states"]) for job in cluster.jobs.values()] == [{"PENDING"}, {"CANCELLED"}]


def test_the_same_cells_in_another_store_are_other_jobs(
    cluster: Cluster, run: Run, apart: Plan, tmp_path: Path
) -> None:
    run.look()
    Run(Store.open(tmp_path / "other"), apart).look()
    assert len(cluster.jobs) == 2


def test_two_operators_submit_every_cell_once(cluster: Cluster, run: Run) -> None:
    threads = [threading.Thread(target=run.look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(cluster.jobs) == ["100"]
    assert run.count() == [1, 1, 1]


def test_a_second_operator_waits_and_names_the_first(store: Store) -> None:
    with (
        store.submitting(),
        pytest.raises(StoreError, match=f"submitted from by process {os.getpid()}"),
        store.submitting(0.2),
    ):
        pass


def test_a_cell_that_runs_here_is_left_alone(cluster: Cluster, run: Run) -> None:
    with run.store.locked(run.names[1]):
        run.look()
    assert run.count() == [1, 0, 1]


def test_finished_cells_are_not_submitted_but_when_asked(cluster: Cluster, run: Run, apart: Plan) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell)
    cluster.calls()
    assert run.look().is_over
    assert cluster.calls() == [], "nothing to ask"
    assert Run(run.store, apart).look().is_over
    again = Run(run.store, replace(apart, rerun=True))
    again.look()
    assert again.count() == [2, 2, 2]


def test_chunks_below_the_clusters_limit(cluster: Cluster, run: Run) -> None:
    cluster.say("scontrol", "MaxArraySize            = 2")
    run.look()
    assert [len(job["states"]) for job in cluster.jobs.values()] == [2, 1]
    assert {job["after"] for job in cluster.jobs.values()} == {""}


def test_a_limit_of_jobs_holds_over_chunks(cluster: Cluster, store: Store) -> None:
    made = plan(
        [
            *BATCH,
            "load_path=cold",
            "checkpoints.new.seed=1,2,3,4,5",
            "cluster.max_jobs=2",
            "cluster.array_limit=3",
        ],
        multirun=True,
    )
    Run(store, made).look()
    first, second = cluster.jobs.values()
    assert "#SBATCH --array=0-2%2" in first["text"]
    assert "#SBATCH --array=0-1%2" in second["text"]
    assert (first["after"], second["after"]) == ("", "afterany:100"), (
        "one after the other: each has its own limit"
    )


@pytest.mark.parametrize(
    "message",
    ["invalid partition specified: nowhere", "Invalid account or account/partition combination specified"],
)
def test_a_refused_array_is_an_error_of_its_cells(cluster: Cluster, run: Run, message: str) -> None:
    cluster.fault("sbatch", f"sbatch: error: Batch job submission failed: {message}")
    run.look()
    assert {run.error(cell)["type"] for cell in range(3)} == {"refused"}
    assert message in run.error()["message"]
    assert run.look().is_over, "and it is not tried for ever"


def test_an_attempt_has_one_driver(tmp_path: Path) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "10"}
    assert claim(tmp_path, variables) is None
    second = claim(tmp_path, {"SLURM_JOB_ID": "11"})
    assert second is not None
    assert second["job"] == "7_3"
