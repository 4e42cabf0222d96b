"""Submission and waiting against a fake Slurm: four commands that read and write one folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator import slurm
from orchestrator.failure import Failure
from orchestrator.planning import Planned, plan
from orchestrator.result import unjudged
from orchestrator.sbatch import script
from orchestrator.store import Store, StoreError, read_json, write_json
from orchestrator.submit import SubmitError, Watch, live_attempt, run_jobs, submit, wait

# The first lines are both shell and Python: a path with a space cannot stand behind `#!`.
FAKE = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, pathlib, sys
root = pathlib.Path({root!r})
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
fault = root / (name + ".fault")
if fault.exists():
    sys.exit(fault.read_text())
jobs = json.loads((root / "jobs.json").read_text())
if name == "sbatch":
    text = pathlib.Path(arguments[0]).read_text()
    comment = next(l.split("=", 1)[1] for l in text.splitlines() if l.startswith("#SBATCH --comment="))
    job = str(100 + len(jobs))
    jobs[job] = dict(state="PENDING", comment=comment, script=arguments[0], text=text, env=dict(os.environ))
    (root / "jobs.json").write_text(json.dumps(jobs))
    print("Submitted batch job", job)
elif name == "squeue":
    for job, it in jobs.items():
        if not it.get("gone"):
            print(job, it["state"], it["comment"], it["script"], sep="|")
elif name == "sacct":
    it = jobs.get(arguments[arguments.index("-j") + 1])
    if it and it.get("accounted"):
        print(it["accounted"])
elif name == "sinfo":
    print((root / "sinfo").read_text())
"""


class Cluster:
    """jobs: what the fake knows of each job id; change it to change the cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = {}
        for name in ("sbatch", "squeue", "sacct", "sinfo", "srun"):
            path = root / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(FAKE.format(python=sys.executable, root=str(root)))
            path.chmod(0o755)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads((self.root / "jobs.json").read_text()))

    @jobs.setter
    def jobs(self, jobs: dict[str, dict[str, Any]]) -> None:
        (self.root / "jobs.json").write_text(json.dumps(jobs))

    def change(self, job: str, **changes: Any) -> None:
        jobs = self.jobs
        jobs[job] |= changes
        self.jobs = jobs

    def fault(self, name: str, message: str | None) -> None:
        path = self.root / f"{name}.fault"
        path.unlink(missing_ok=True)
        if message is not None:
            path.write_text(message)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    slurm.partition_limit.cache_clear()
    return Cluster(tmp_path)


@pytest.fixture(scope="module")
def planned() -> Planned:
    [one] = plan(["cluster=slurm", "cluster.partition=batch", "cluster.partition_limit=02:00:00"]).cells
    return one


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs")


def finish(attempt_dir: Path, verdict: str = "PASS") -> None:
    result = {"cell": attempt_dir.parent.name, "attempt": attempt_dir.name, "verdict": verdict, "error": None}
    write_json(attempt_dir / "result.json", result)


def submitted(store: Store, planned: Planned) -> Path:
    attempt = submit(store, planned.cell, planned.id)
    assert attempt is not None
    return attempt


def test_what_is_submitted_is_what_was_planned(cluster: Cluster, store: Store, planned: Planned) -> None:
    attempt = submitted(store, planned)
    job = cluster.jobs["100"]
    assert job["text"] == script(planned.cell, planned.id, attempt)
    assert read_json(attempt / "job.json")["job"] == "100"
    assert (attempt / "slurm" / "100_submission.sh").is_file()


def test_all_that_the_job_reads_is_there_before_sbatch(
    cluster: Cluster, store: Store, planned: Planned
) -> None:
    cluster.fault("sbatch", "sbatch: error: Batch job submission failed: Invalid account")
    with pytest.raises(SubmitError, match=r"sbatch refused cell .*Invalid account"):
        submit(store, planned.cell, planned.id)
    [attempt] = store.attempts(planned.id)
    assert read_json(attempt.parent / "cell.json") == planned.cell
    assert (attempt / "provenance.json").is_file()
    assert not list(attempt.rglob("*.pkl")), "the job is a command: there is no pickle to strand"


def test_inherited_variables_do_not_reach_sbatch(
    cluster: Cluster, store: Store, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaking = {"SBATCH_PARTITION": "x", "SLURM_NTASKS_PER_NODE": "9", "SRUN_DEBUG": "1", "PMI_RANK": "0"}
    for name, value in leaking.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    attempt = submitted(store, planned)
    seen = cluster.jobs["100"]["env"]
    assert leaking.keys().isdisjoint(seen)
    assert seen["SLURM_CONF"] == "/etc/slurm.conf"
    assert read_json(attempt / "job.json")["removed_variables"] == sorted(leaking)
    assert os.environ["SBATCH_PARTITION"] == "x", "only taken out for the submission"


def test_a_live_job_is_found_again(cluster: Cluster, store: Store, planned: Planned) -> None:
    first = submitted(store, planned)
    assert submit(store, planned.cell, planned.id) == first
    (first / "job.json").unlink()  # its submitter died right after sbatch
    assert submit(store, planned.cell, planned.id) == first
    assert read_json(first / "job.json")["job"] == "100"
    assert len(cluster.jobs) == 1


def test_the_same_cell_in_another_store_is_another_job(
    cluster: Cluster, store: Store, planned: Planned, tmp_path: Path
) -> None:
    submitted(store, planned)
    submitted(Store.open(tmp_path / "other"), planned)
    assert len(cluster.jobs) == 2


@pytest.mark.parametrize("ended", [{"gone": True}, {"state": "NODE_FAIL"}])
def test_a_dead_job_is_replaced(
    cluster: Cluster, store: Store, planned: Planned, ended: dict[str, Any]
) -> None:
    first = submitted(store, planned)
    cluster.change("100", **ended)
    assert live_attempt(store, planned.id) is None
    assert submitted(store, planned).name == "attempt-002"
    assert first.name == "attempt-001"


def test_a_finished_cell_is_not_submitted(cluster: Cluster, store: Store, planned: Planned) -> None:
    finish(submitted(store, planned))
    assert submit(store, planned.cell, planned.id) is None
    again = submit(store, planned.cell, planned.id, rerun=True)
    assert again is not None
    assert again.name == "attempt-002"


def test_two_submitters_at_once_make_one_job(cluster: Cluster, store: Store, planned: Planned) -> None:
    store.write_cell(planned.cell)
    with store.locked(planned.id), pytest.raises(StoreError, match="is being run by"):
        submit(store, planned.cell, planned.id)
    assert cluster.jobs == {}


def test_without_slurm_it_says_so(store: Store, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SubmitError, match="sbatch is not on the PATH"):
        submit(store, planned.cell, planned.id)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(cluster: Cluster, store: Store, planned: Planned, clock: Clock) -> Watch:
    return Watch(store, planned.cell, submitted(store, planned), clock)


def test_its_own_result_comes_first(watch: Watch, cluster: Cluster) -> None:
    assert watch.look() is None
    assert watch.state == "PENDING"
    cluster.fault("squeue", "down")
    finish(watch.attempt)
    result = watch.look()
    assert result is not None
    assert result["verdict"] == "PASS"


@pytest.mark.parametrize(
    "state", ["PENDING", "RUNNING", "SUSPENDED", "REQUEUE_HOLD", "COMPLETING", "NEW_IN_25.11"]
)
def test_states_that_are_not_known_to_be_the_end_are_not(
    watch: Watch, cluster: Cluster, clock: Clock, state: str
) -> None:
    cluster.change("100", state=state)
    clock.now = 1e6
    assert watch.look() is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"gone": True}, "lost"),
        ({"gone": True, "accounted": "COMPLETED|n1"}, "lost"),
        ({"gone": True, "accounted": "FAILED|n1"}, "lost"),
        ({"gone": True, "accounted": "TIMEOUT|n1"}, "time_limit"),
        ({"gone": True, "accounted": "CANCELLED by 0|n1"}, "stopped"),
        ({"gone": True, "accounted": "PREEMPTED|n1"}, "preempted"),
        ({"state": "NODE_FAIL"}, "node_failed"),
        ({"state": "OUT_OF_MEMORY"}, "out_of_memory"),
    ],
)
def test_a_vanished_job_is_lost_after_a_grace_time(
    watch: Watch, cluster: Cluster, clock: Clock, changes: dict[str, Any], kind: str
) -> None:
    (watch.attempt / "slurm" / "100_0_log.out").write_text("last words\n")
    cluster.change("100", **changes)
    assert watch.look() is None, "its result may still be on its way"
    clock.now = 61.0
    result = watch.look()
    assert result is not None
    assert result["verdict"] == "ERROR"
    assert result["error"]["type"] == kind
    assert result["error"]["message"].startswith("LOST: job 100 is not in the queue any more")
    assert result["error"]["log_tail"] == "last words"
    assert read_json(watch.attempt / "result.json") == result


def test_accounting_that_is_down_does_not_hide_a_lost_job(
    watch: Watch, cluster: Cluster, clock: Clock
) -> None:
    cluster.change("100", gone=True)
    cluster.fault("sacct", "Slurm accounting storage is disabled")
    clock.now = 61.0
    result = watch.look()
    assert result is not None
    assert "Slurm says nothing" in result["error"]["message"]


def test_a_controller_that_fails_over_loses_no_job(watch: Watch, cluster: Cluster, clock: Clock) -> None:
    cluster.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    for clock.now in (10.0, 50.0):
        assert watch.look() is None
    cluster.fault("squeue", None)
    assert watch.look() is None
    assert watch.state == "PENDING"


def test_a_controller_that_never_answers_ends_the_wait(watch: Watch, cluster: Cluster, clock: Clock) -> None:
    cluster.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    limit = 3600  # the job's own, of conf/cluster/slurm.yaml
    clock.now = limit - 1.0
    assert watch.look() is None, "it may be running all the same"
    clock.now = limit + 61.0
    result = watch.look()
    assert result is not None
    assert "Unable to contact" in result["error"]["message"]


def test_waiting_reports_changes_and_ends(watch: Watch, cluster: Cluster) -> None:
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        if "RUNNING" in text:
            finish(watch.attempt)
        cluster.change("100", state="RUNNING")

    watch.cell = {**watch.cell, "cluster": {**watch.cell["cluster"], "poll_s": 0.01}}
    wait([watch], report)
    assert [text.rpartition(" ")[2] for text in said] == ["PENDING", "RUNNING"]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("batch|4:00:00", 14400),
        ("batch|1-00:00:00", 86400),
        ("batch|30:00", 1800),
        ("batch|infinite", None),
        ("", None),
    ],
)
def test_the_partitions_own_limit(cluster: Cluster, said: str, seconds: int | None) -> None:
    (cluster.root / "sinfo").write_text(said)
    assert slurm.partition_limit("batch") == seconds


def test_a_plan_asks_slurm_for_the_limit(cluster: Cluster) -> None:
    (cluster.root / "sinfo").write_text("batch|30:00")
    with pytest.raises(Exception, match="partition batch allows 1800 s"):
        plan(["cluster=slurm", "cluster.partition=batch"])


def test_a_hanging_command_is_a_sentence(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **options: Any) -> None:
        raise subprocess.TimeoutExpired("squeue", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(slurm.SlurmError, match="squeue did not answer within 30 s"):
        slurm.queue()


@pytest.mark.parametrize(
    ("said", "end"),
    [("RUNNING|1796002774", 1796002774.0), ("COMPLETING|1796002774", None), ("RUNNING|NONE", None)],
)
def test_a_job_that_is_being_ended_is_not_at_its_limit(
    monkeypatch: pytest.MonkeyPatch, said: str, end: float | None
) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *_: f"{said}\n")
    assert slurm.job_end("1") == end


def run_failing(
    cluster: Cluster, store: Store, planned: Planned, kinds: list[tuple[str, str | None]], retries: int = 1
) -> tuple[dict[str, Path], list[str]]:
    """Runs a cell whose jobs fail with the (type, node) of `kinds`, one after the other, and then pass."""
    cell = {**planned.cell, "policy": {**planned.cell["policy"], "retries": retries}}
    scripts: list[str] = []

    def report(text: str) -> None:
        if ": job " not in text:
            return
        attempt = store.attempts(planned.id)[-1]
        scripts.append(cluster.jobs[text.rpartition(" ")[2]]["text"])
        if kinds:
            kind, node = kinds.pop(0)
            failure = Failure(kind, "It broke.", node=node)
            write_json(attempt / "result.json", unjudged(cell, planned.id, attempt.name, "ERROR", failure))
        else:
            finish(attempt)

    return run_jobs(store, {planned.id: cell}, report), scripts


def test_a_failure_of_the_cluster_is_retried_without_the_bad_node(
    cluster: Cluster, store: Store, planned: Planned
) -> None:
    counted, scripts = run_failing(cluster, store, planned, [("node_lost", "gb200-3")])
    assert counted[planned.id].name == "attempt-002"
    assert "--exclude" not in scripts[0]
    assert "#SBATCH --exclude=gb200-3" in scripts[1].splitlines()
    assert read_json(store.cell_dir(planned.id) / "cell.json")["cluster"]["exclude"] == "gb200-3"


@pytest.mark.parametrize(
    "kind", ["rank_failed", "out_of_memory", "hang", "time_limit", "stopped", "disk_full"]
)
def test_a_failure_of_the_program_is_not_retried(
    cluster: Cluster, store: Store, planned: Planned, kind: str
) -> None:
    counted, scripts = run_failing(cluster, store, planned, [(kind, "gb200-3")])
    assert counted[planned.id].name == "attempt-001"
    assert len(scripts) == 1


def test_retries_end(cluster: Cluster, store: Store, planned: Planned) -> None:
    failures: list[tuple[str, str | None]] = [
        ("lost", "gb200-[0-3]"),
        ("preempted", None),
        ("node_failed", "gb200-1"),
    ]
    counted, scripts = run_failing(cluster, store, planned, failures, retries=2)
    assert counted[planned.id].name == "attempt-003"
    assert len(scripts) == 3
    assert not any("--exclude" in text for text in scripts), "nobody said which of the four nodes it was"
