"""Submission and following with a fake Slurm: nothing submitted twice, nothing lost, every end has its type."""

import os
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401

from orchestrator import follow, quarantine, slurm
from orchestrator.experiment import start
from orchestrator.failure import AttemptError, Failure
from orchestrator.follow import Look, advance
from orchestrator.history import Experiment, load, renew
from orchestrator.jobs import Book, claim
from orchestrator.plan import references
from orchestrator.planning import Plan, plan
from orchestrator.result import unjudged
from orchestrator.sbatch import script
from orchestrator.store import Store, StoreError, read_json, write_json
from orchestrator.upstream import check

BATCH = ["cluster=slurm", "cluster.partition=batch", "cluster.partition_limit=02:00:00", "collect=tensors"]


@pytest.fixture(scope="module")
def apart() -> Plan:
    """Three cells that share nothing."""
    return plan([*BATCH, "load_path=cold", "checkpoints.new.seed=1,2,3"], multirun=True)


@pytest.fixture(scope="module")
def sharing() -> Plan:
    """Two cells that need the same fresh start, which the first one makes."""
    return plan([*BATCH, "load_path=cold,direct"], multirun=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs")


class Run:
    """One experiment on the fake cluster. said: what was reported."""

    def __init__(self, store: Store, made: Plan) -> None:
        self.store, self.folder = store, start(store, made, [])
        self.experiment: Experiment = load(store, self.folder)
        self.names = list(self.experiment.cells)
        self.said: list[str] = []

    def look(self) -> Look:
        return advance(self.store, self.experiment, self.said.append)

    def attempt(self, cell: int = 0) -> Path:
        return self.store.attempts(self.names[cell])[-1]

    def count(self) -> list[int]:
        return [len(self.store.attempts(name)) for name in self.names]

    def error(self, cell: int = 0) -> dict[str, Any]:
        result = self.store.result(self.attempt(cell))
        assert result is not None
        return dict(result["error"])

    def finish(self, cell: int, type_: str | None = None, node: str | None = None) -> None:
        """The driver's result: a PASS that leaves its references, or a typed ERROR."""
        attempt, frozen = self.attempt(cell), self.experiment.cells[self.names[cell]]
        if type_ is None:
            for reference in references(frozen):
                (self.store.references / reference.key).mkdir(exist_ok=True)
        verdict, failure = (
            ("PASS" if type_ is None else "ERROR"),
            Failure(type_ or "", "It broke.", node=node),
        )
        result = unjudged(frozen, attempt.parent.name, attempt.name, verdict, failure)
        write_json(attempt / "result.json", result if type_ else {**result, "error": None})

    def age(self, cell: int, seconds: float) -> None:
        """As if the look that found the attempt's job gone had been so long ago."""
        marker = self.attempt(cell) / "gone"
        then = marker.stat().st_mtime - seconds
        os.utime(marker, (then, then))


@pytest.fixture
def run(cluster: Cluster, store: Store, apart: Plan) -> Run:
    return Run(store, apart)


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


def test_its_own_result_comes_first(cluster: Cluster, run: Run) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell)
    cluster.fault("squeue", "down")
    assert run.look().is_over


@pytest.mark.parametrize(
    "state", ["PENDING", "RUNNING", "SUSPENDED", "REQUEUE_HOLD", "COMPLETING", "NEW_IN_25.11"]
)
def test_states_that_are_not_known_to_be_the_end_are_not(cluster: Cluster, run: Run, state: str) -> None:
    run.look()
    cluster.change("100", states=[state] * 3)
    words = set(run.look().words.values())
    assert words == {f"UNKNOWN ({state})" if state.startswith("NEW") else state}
    assert not (run.attempt() / "gone").exists()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"gone": True}, "lost"),
        ({"gone": True, "accounted": ["COMPLETED"]}, "lost"),
        ({"gone": True, "accounted": ["FAILED"]}, "lost"),
        ({"gone": True, "accounted": ["TIMEOUT"]}, "time_limit"),
        ({"gone": True, "accounted": ["CANCELLED by 0"]}, "stopped"),
        ({"gone": True, "accounted": ["PREEMPTED"]}, "preempted"),
        ({"states": ["NODE_FAIL"] * 3}, "node_failed"),
        ({"states": ["BOOT_FAIL"] * 3}, "boot_failed"),
        ({"states": ["OUT_OF_MEMORY"] * 3}, "out_of_memory"),
    ],
)
def test_a_vanished_job_is_lost_after_a_grace_time(
    cluster: Cluster, run: Run, changes: dict[str, Any], kind: str
) -> None:
    run.look()
    task = Book(run.store).task(run.attempt())
    assert task is not None
    assert task.output is not None
    task.output.write_text("last words\n")
    cluster.change("100", **changes)
    run.look()
    assert run.store.result(run.attempt()) is None, "its result may still be on its way"
    lost = run.attempt()
    run.age(0, 61.0)
    run.look()
    result = run.store.result(lost)
    assert result is not None
    assert (result["verdict"], result["error"]["type"]) == ("ERROR", kind)
    assert result["error"]["message"].startswith("LOST: job 100_0 is not in the queue any more")
    assert result["error"]["log_tail"] == "last words"


def test_a_job_that_shows_again_was_not_gone(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.change("100", gone=True)
    run.look()
    run.age(0, 50.0)
    cluster.change("100", gone=False)
    run.look()
    cluster.change("100", gone=True)
    run.look()
    run.age(0, 50.0)
    run.look()
    assert run.store.result(run.attempt()) is None


@pytest.mark.parametrize("fault", ["Slurm accounting storage is disabled", "garbage:<html>", "garbage:"])
def test_without_accounting_a_lost_job_is_found(cluster: Cluster, run: Run, fault: str) -> None:
    run.look()
    cluster.change("100", gone=True)
    cluster.fault("sacct", fault)
    run.look()
    lost = run.attempt()
    run.age(0, 61.0)
    run.look()
    result = run.store.result(lost)
    assert result is not None
    assert "Slurm says nothing" in result["error"]["message"]


@pytest.mark.parametrize(
    "fault",
    [
        "slurm_load_jobs error: Unable to contact slurm controller",
        "garbage:<html>oops</html>",
        "garbage:100_0|RUN",
    ],
)
def test_a_squeue_that_fails_or_babbles_loses_no_job(cluster: Cluster, run: Run, fault: str) -> None:
    run.look()
    cluster.fault("squeue", fault)
    look = run.look()
    assert look.trouble
    assert set(look.words.values()) == {"UNKNOWN"}
    assert not (run.attempt() / "gone").exists()
    cluster.fault("squeue", None)
    assert run.look().trouble == ""
    assert run.count() == [1, 1, 1]


def test_a_controller_that_never_answers_ends_the_wait_and_nothing_else(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    times = iter([0.0, 0.0, 0.0, 3600.0, 3600.0, 3661.0, 3661.0])
    with pytest.raises(slurm.SlurmError, match="said nothing for 3661 s"):
        follow.watch(run.store, run.experiment, run.said.append, lambda: next(times), lambda _: None)
    assert run.store.result(run.attempt()) is None, "it may be running all the same"


def test_a_job_that_can_never_start_is_cancelled_and_said(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.change("100", reason="BadConstraints")
    run.look()
    assert set(cluster.jobs["100"]["states"]) == {"PENDING"}, "an administrator may be changing something"
    for cell in range(3):
        run.age(cell, 61.0)
    run.look()
    assert run.error()["type"] == "never_starts"
    assert "BadConstraints" in run.error()["message"]
    assert set(cluster.jobs["100"]["states"]) == {"CANCELLED"}


@pytest.mark.parametrize(
    "reason", ["ReqNodeNotAvail, UnavailableNodes:n1", "PartitionNodeLimit", "JobHeldAdmin"]
)
def test_a_job_that_waits_for_repair_is_waited_for(cluster: Cluster, run: Run, reason: str) -> None:
    run.look()
    cluster.change("100", reason=reason)
    run.look()
    assert not (run.attempt() / "gone").exists()


def test_a_failure_of_the_cluster_is_retried_without_the_bad_node(cluster: Cluster, run: Run) -> None:
    run.look()
    run.finish(0, "node_lost", "gb200-3")
    run.finish(1)
    run.look()
    assert run.count() == [2, 1, 1]
    assert "--exclude" not in cluster.jobs["100"]["text"]
    assert "#SBATCH --exclude=gb200-3" in cluster.jobs["101"]["text"].splitlines()
    run.look()
    assert len(quarantine.entries(run.store)) == 1, "each failure counts once"
    cell = run.experiment.cells[run.names[0]]
    assert "exclude" in cell["cluster"], "the cell itself is not changed"
    assert cell["cluster"]["exclude"] is None


def test_a_quarantine_expires(store: Store) -> None:
    failure = {"type": "node_lost", "message": "It broke."}
    attempt = store.cells / "c" / "attempt-001"
    quarantine.add(store, "n1", failure, attempt, 100.0)
    quarantine.add(store, "n2", failure, attempt, 0.0)
    assert quarantine.nodes(store) == ["n1"]
    [until] = [line["until"] for line in quarantine.entries(store) if line["node"] == "n1"]
    assert quarantine.nodes(store, until + 1) == []


@pytest.mark.parametrize(
    "kind", ["rank_failed", "rank_killed", "out_of_memory", "hang", "time_limit", "stopped", "disk_full"]
)
def test_a_failure_of_the_program_is_not_retried(cluster: Cluster, run: Run, kind: str) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell, kind, "gb200-3")
    cluster.change("100", states=["FAILED"] * 3)
    assert run.look().is_over
    assert quarantine.nodes(run.store) == []


def test_budgets_are_by_type_and_all_together(cluster: Cluster, run: Run) -> None:
    """lost: 1, preempted: 3, attempts: 4."""
    kinds = [("lost", "preempted"), ("lost", "preempted"), (None, "lost"), (None, "preempted")]
    for first, second in kinds:
        run.look()
        if first:
            run.finish(0, first)
        run.finish(1, second)
    run.look()
    assert run.count() == [2, 4, 1]
    renew(run.store, run.folder)
    run.experiment = load(run.store, run.folder)
    run.look()
    assert run.count() == [3, 5, 1], "an operator who resumes gives what failed new budgets"
    renew(run.store, run.folder)
    run.experiment = load(run.store, run.folder)
    run.look()
    assert run.count() == [3, 5, 1], "and a second operator does not start it twice"


def test_a_driver_that_was_stopped_by_preemption_says_so(cluster: Cluster, run: Run) -> None:
    run.look()
    run.finish(0, "stopped")
    cluster.change("100", states=["COMPLETING", "RUNNING", "RUNNING"])
    assert run.look().words[run.names[0]] == "COMPLETING"
    assert run.count() == [1, 1, 1], "Slurm has not said why yet"
    cluster.change("100", states=["PREEMPTED", "RUNNING", "RUNNING"])
    run.look()
    first = run.store.result(run.store.attempts(run.names[0])[0])
    assert first is not None
    assert first["error"]["type"] == "preempted"
    assert run.count() == [2, 1, 1]


def test_a_node_that_slurm_took_down_is_avoided(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.change("100", states=["NODE_FAIL", "RUNNING", "RUNNING"], nodes="n[1-2]")
    cluster.say("sinfo", "n1|idle\nn2|down*\nn1|idle\nn2|down*")
    run.look()
    run.age(0, 61.0)
    run.look()
    assert quarantine.nodes(run.store) == ["n2"]
    assert "#SBATCH --exclude=n2" in cluster.jobs["101"]["text"].splitlines()


@pytest.fixture
def pair(cluster: Cluster, store: Store, sharing: Plan) -> Run:
    made = Run(store, sharing)
    made.look()
    return made


def test_a_shared_reference_is_waited_for(cluster: Cluster, pair: Run) -> None:
    assert [len(job["states"]) for job in cluster.jobs.values()] == [1, 1]
    assert cluster.jobs["101"]["after"] == "afterany:100_0"
    record = read_json(pair.attempt(1) / "job.json")
    assert [(need["cell"], need["attempt"]) for need in record["needs"]] == [(pair.names[0], "attempt-001")]
    with pytest.raises(AttemptError, match="left no result"):
        check(pair.store, pair.attempt(1), 0.0)
    pair.finish(0)
    check(pair.store, pair.attempt(1), 0.0)


def test_its_failure_is_the_cause_of_those_that_wait(cluster: Cluster, pair: Run) -> None:
    pair.finish(0, "rank_failed")
    with pytest.raises(AttemptError, match="ended with ERROR rank_failed: It broke") as raised:
        check(pair.store, pair.attempt(1), 60.0)
    pair.finish(1, "upstream")
    result = pair.store.result(pair.attempt(1))
    assert result is not None
    write_json(pair.attempt(1) / "result.json", {**result, "verdict": "NOT_RUN"})
    assert raised.value.failure.type == "upstream"
    assert pair.look().is_over
    assert pair.count() == [1, 1]
    assert pair.store.finished(pair.names[1]) is None, "it is tried again with the cell it waits for"


def test_a_retried_reference_brings_those_that_wait_back(cluster: Cluster, pair: Run) -> None:
    pair.finish(0, "preempted")
    pair.finish(1, "upstream")
    pair.look()
    assert pair.count() == [2, 2]
    assert cluster.jobs["103"]["after"] == "afterany:102_0"


def test_those_that_wait_for_a_refused_cell_are_not_submitted(
    cluster: Cluster, store: Store, sharing: Plan
) -> None:
    cluster.fault("sbatch", "sbatch: error: invalid partition specified: nowhere")
    made = Run(store, sharing)
    made.look()
    results = [store.result(made.attempt(cell)) for cell in range(2)]
    assert [result["verdict"] for result in results if result] == ["ERROR", "NOT_RUN"]
    assert "nowhere" in made.error(1)["message"]
    assert made.look().is_over


def test_an_attempt_has_one_driver(tmp_path: Path) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "10"}
    assert claim(tmp_path, variables) is None
    second = claim(tmp_path, {"SLURM_JOB_ID": "11"})
    assert second is not None
    assert second["job"] == "7_3"


def test_a_look_is_a_constant_number_of_calls(cluster: Cluster, run: Run) -> None:
    run.look()
    cluster.change("100", gone=True)
    cluster.calls()
    run.look()
    assert cluster.calls() == ["squeue", "sacct"]


def test_watching_reports_changes_and_asks_slurm_seldom(cluster: Cluster, run: Run) -> None:
    """Twelve looks, of which only those after 40 and 100 s ask; the results come as files."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now == 50.0:
            cluster.change("100", states=["RUNNING"] * 3)
        if now == 110.0:
            for cell in range(3):
                run.finish(cell)

    cluster.calls()
    follow.watch(run.store, run.experiment, run.said.append, lambda: now, sleep)
    assert run.said == ["job 100: 3 cells", "SUBMITTED 3", "PENDING 3", "RUNNING 3"]
    calls = [name for name in cluster.calls() if name != "scontrol"]
    assert calls == ["sbatch", "squeue", "squeue"]


def test_what_has_ended_is_asked_about_until_it_is_settled(cluster: Cluster, run: Run) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now == 20.0:
            cluster.change("100", states=["CANCELLED"] * 3)
        for cell in range(3):
            if (run.attempt(cell) / "gone").exists():
                run.age(cell, seconds)

    follow.watch(run.store, run.experiment, run.said.append, lambda: now, sleep)
    assert [run.error(cell)["type"] for cell in range(3)] == ["stopped"] * 3
    assert now <= 40.0 + 60.0 + 2 * 10.0, "the pause that ran, the time of grace, and a look or two"


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
    cluster.say("sinfo", said)
    assert slurm.partition_limit("batch") == seconds


def test_a_plan_asks_slurm_for_the_limit(cluster: Cluster) -> None:
    cluster.say("sinfo", "batch|30:00")
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
