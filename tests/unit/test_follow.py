"""Following jobs of the fake Slurm: nothing is lost, every end has its type, what the cluster broke runs again."""

from typing import Any

import pytest
from fake_slurm import Cluster, cluster_fixture  # noqa: F401
from slurm_runs import BATCH, Run, apart_fixture, pair_fixture, run_fixture, sharing_fixture, store_fixture  # noqa: F401

from orchestrator.cluster import follow, quarantine, slurm
from orchestrator.cluster.history import load, renew
from orchestrator.cluster.jobs import Book
from orchestrator.config.planning import plan
from orchestrator.store import Store, write_json


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
    "kind", ["rank_failed", "rank_killed", "out_of_memory", "time_limit", "stopped", "disk_full"]
)
def test_a_failure_of_the_program_is_not_retried(cluster: Cluster, run: Run, kind: str) -> None:
    run.look()
    for cell in range(3):
        run.finish(cell, kind, "gb200-3")
    cluster.change("100", states=["FAILED"] * 3)
    assert run.look().is_over
    assert quarantine.nodes(run.store) == []


@pytest.mark.parametrize(("nodes", "avoided"), [("abc", ["c"]), ("ac", []), ("aBc", [])])
def test_a_hang_is_retried_once_elsewhere_where_there_are_nodes(
    cluster: Cluster, store: Store, nodes: str, avoided: list[str]
) -> None:
    """A node that is drained, written as a capital, is none. The second hang is the program's."""
    layout = "parallelism={tp: 2, dp: 1, ep: 2, nodes: 2, gpus_per_node: 1}"
    run = Run(store, plan([*BATCH, "load_path=cold", "backend.moe_kernel=reference", layout]))
    states = [f"{node.lower()}|{'idle' if node.islower() else 'draining'}" for node in nodes]
    cluster.say("sinfo", "\n".join(states))
    run.look()
    run.finish(0, "hang", "c")
    run.look()
    assert run.count() == [2]
    assert quarantine.nodes(store) == avoided
    assert ("#SBATCH --exclude=c" in cluster.jobs["101"]["text"].splitlines()) == bool(avoided)
    run.finish(0, "hang", "a")
    assert run.look().is_over
    assert quarantine.nodes(store) == avoided, "nothing runs again that would have to avoid it"
    assert renew(store, run.folder) == {}


def test_who_resumes_tries_again_what_the_program_may_not_have_broken(cluster: Cluster, run: Run) -> None:
    """A rank that somebody killed, and a hang that the budget of all attempts left without a second try."""
    for cell in run.experiment.cells.values():
        cell["policy"]["max_attempts"] = 1
    run.look()
    for cell, kind in enumerate(("hang", "rank_killed", "rank_failed")):
        run.finish(cell, kind)
    assert run.look().is_over
    for name, cell in run.experiment.cells.items():
        write_json(run.store.cell_dir(name) / "cell.json", cell)
    assert renew(run.store, run.folder) == {run.names[0]: "hang", run.names[1]: "rank_killed"}


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
