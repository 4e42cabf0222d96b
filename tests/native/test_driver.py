"""The driver turns a cell into a result whatever happens: real processes, a toy engine, the real store and judge."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_gang import left_of, wait_until_gone

from orchestrator.config.freeze import freeze_overlay
from orchestrator.config.planning import plan
from orchestrator.config.schema import Arm, Overlaid
from orchestrator.provenance import source_hash
from orchestrator.store import Store, read_json, write_json
from orchestrator.trees import arm_source
from workloads.spec import Step

ROOT = Path(__file__).parents[2]
Cell = dict[str, Any]


def copy_of_rank_side(tree: Path) -> Path:
    for name in ("workloads", "collectors"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def arm_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in place of the checkout, which somebody may be editing."""
    return copy_of_rank_side(tmp_path_factory.mktemp("arm"))


@pytest.fixture
def cell(arm_tree: Path, tmp_path: Path) -> Cell:
    """Two ranks: start, an update to be chosen by `told`, one observation compared with a fresh start."""
    files = tmp_path / "weights"
    files.mkdir()
    (files / "model.safetensors").touch()
    [planned] = plan(["load_path=cold", "parallelism=tp2", "collect=tensors"]).cells
    cell = planned.cell
    cell["code"]["candidate"] |= {"path": str(arm_tree), "source": source_hash(arm_tree)}
    cell["backend"]["engine"] = "toy_engine:ToyEngine"
    cell["policy"]["step_timeout_s"] = 60
    for checkpoint in cell["checkpoints"].values():
        checkpoint["path"] = str(files)
    check = {
        "name": "as_fresh",
        "rule": "same_generations",
        "left": "updated",
        "right": "fresh.new",
        "required": True,
    }
    cell["load_path"] = {"name": "toy", "steps": [], "checks": [check]}
    return told(cell, "sum")


def told(cell: Cell, via: str) -> Cell:
    steps = [
        Step("start", "old", "sum"),
        Step("update", "new", via),
        Step("observe", name="updated", collect=["generations"]),
    ]
    cell["load_path"]["steps"] = [asdict(step) for step in steps]
    return cell


def new_attempt(cell: Cell, store: Path) -> Path:
    opened = Store.open(store)
    return opened.new_attempt(opened.write_cell(cell))


def start_driver(attempt: Path) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator.driver", str(attempt)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def drive(cell: Cell, store: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and result.json of a new attempt; nothing of it still runs."""
    attempt = new_attempt(cell, store)
    driver = start_driver(attempt)
    output, _ = driver.communicate(timeout=120)
    assert not left_of(attempt), output
    result = read_json(attempt / "result.json")
    assert result is not None, output
    assert (result["cell"], result["attempt"]) == (attempt.parent.name, attempt.name)
    return driver.returncode, result


def await_step(attempt: Path, index: int, ranks: int = 2) -> None:
    """Until every rank of the candidate has entered a step."""
    files = [attempt / "candidate" / f"progress-{rank:05d}.jsonl" for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and f'"index":{index}' in file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_attempt_passes_and_a_second_one_reuses_the_reference(cell: Cell, tmp_path: Path) -> None:
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["verdict"], result["error"]) == (0, "PASS", None)
    assert result["starts"] == 2  # the reference and the candidate
    assert [check["name"] for check in result["checks"] if check["verdict"] == "PASS"][-1] == "as_fresh"
    [reference] = (tmp_path / "store" / "references").iterdir()
    assert result["references"] == [reference.name]
    assert (reference / "fresh" / "generations.jsonl").exists()
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["starts"]) == (0, 1)


def test_two_drivers_at_once_build_the_same_reference(cell: Cell, tmp_path: Path) -> None:
    attempts = [new_attempt(cell, tmp_path / "store") for _ in range(2)]
    drivers = [start_driver(attempt) for attempt in attempts]
    outputs = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], outputs
    assert len(list((tmp_path / "store" / "references").iterdir())) == 1
    assert not [path for attempt in attempts for path in attempt.glob("fresh*")]


def test_attempt_that_was_run_is_refused_as_usage(cell: Cell, tmp_path: Path) -> None:
    attempt = new_attempt(cell, tmp_path / "store")
    (attempt / "events.jsonl").touch()
    driver = start_driver(attempt)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2
    assert "was run before" in output


def test_changed_cell_is_refused_as_usage(cell: Cell, tmp_path: Path) -> None:
    attempt = new_attempt(cell, tmp_path / "store")
    write_json(attempt.parent / "cell.json", {**cell, "parallelism": {**cell["parallelism"], "tp": 4}})
    driver = start_driver(attempt)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2
    assert "was changed" in output


def test_killed_rank_is_a_typed_error(cell: Cell, tmp_path: Path) -> None:
    code, result = drive(told(cell, "kill:1"), tmp_path / "store")
    assert (code, result["verdict"]) == (3, "ERROR")
    assert (result["error"]["type"], result["error"]["rank"]) == ("rank_killed", 1)


def test_engine_that_cannot_is_not_run_and_says_why(cell: Cell, tmp_path: Path) -> None:
    code, result = drive(told(cell, "unsupported:0"), tmp_path / "store")
    assert (code, result["verdict"]) == (4, "NOT_RUN")
    assert result["error"]["message"] == "The toy cannot do this."


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_everything_in_order(cell: Cell, tmp_path: Path, number: signal.Signals) -> None:
    attempt = new_attempt(told(cell, "hang:1"), tmp_path / "store")
    driver = start_driver(attempt)
    await_step(attempt, 1)
    driver.send_signal(number)
    driver.communicate(timeout=20)
    assert driver.returncode == 3
    result = read_json(attempt / "result.json")
    assert result["error"]["type"] == "stopped"
    assert number.name in result["error"]["message"]
    assert not left_of(attempt)
    events = [json.loads(line) for line in (attempt / "events.jsonl").read_text().splitlines()]
    stopped = [e for e in events if e["kind"] == "rank_exited" and e["gang"] == "candidate"]
    assert [e["stopped"] for e in stopped] == [True, True]
    assert "in _hang" in (attempt / "candidate" / "rank-00001.log").read_text()


def test_nothing_survives_kill_9_of_the_driver(cell: Cell, tmp_path: Path) -> None:
    attempt = new_attempt(told(cell, "deaf:1"), tmp_path / "store")
    driver = start_driver(attempt)
    await_step(attempt, 1)
    assert len(left_of(attempt)) >= 4  # driver, node parent, ranks
    driver.kill()
    driver.wait()
    wait_until_gone(attempt, 8)
    assert not (attempt / "result.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_disk_that_runs_full_while_recording_is_an_error_that_names_the_file(
    cell: Cell, small_disk: Path
) -> None:
    code, result = drive(told(cell, "fill:1"), small_disk / "store")
    assert (code, result["error"]["type"]) == (3, "disk_full")
    assert str(small_disk / "store" / "cells") in result["error"]["message"]


def test_nearly_full_disk_is_seen_before_anything_starts(cell: Cell, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(48 << 20))
    code, result = drive(cell, small_disk / "store")
    assert (code, result["error"]["type"], result["starts"]) == (3, "preflight", 0)
    assert "MiB free" in result["error"]["message"]


def test_preflight_tells_all_problems_at_once(cell: Cell, tmp_path: Path) -> None:
    cell["backend"]["python"] = str(tmp_path / "no-python")
    cell["checkpoints"]["old"]["path"] = str(tmp_path / "nothing")
    cell["cluster"]["kind"] = "slurm"
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["error"]["type"]) == (3, "preflight")
    for part in ("backend.python=", "checkpoints.old.path=", "in no Slurm job"):
        assert part in result["error"]["message"]


@pytest.fixture
def other_tree(cell: Cell, tmp_path: Path) -> Path:
    """Another version, which the cell then runs."""
    tree = copy_of_rank_side(tmp_path / "tree")
    with (tree / "workloads" / "__init__.py").open("a") as file:
        file.write("# another version\n")
    cell["code"]["candidate"] |= {"path": str(tree), "source": source_hash(tree)}
    return tree


def test_ranks_run_the_tree_of_their_arm(cell: Cell, other_tree: Path, tmp_path: Path) -> None:
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["error"]) == (0, None)
    [events] = (tmp_path / "store" / "cells").glob("*/attempt-001/events.jsonl")
    sources = {
        e["source"] for e in map(json.loads, events.read_text().splitlines()) if e["kind"] == "node_started"
    }
    assert sources == {str(other_tree / "workloads" / "node.py")}


def test_tree_that_changed_since_the_freeze_is_refused(cell: Cell, other_tree: Path, tmp_path: Path) -> None:
    (other_tree / "collectors" / "new.py").touch()
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["error"]["type"], result["starts"]) == (3, "code", 0)
    assert "have changed since the cell was frozen" in result["error"]["message"]


def test_commit_of_an_arm_is_unpacked_and_run_with_a_file_over_it(
    cell: Cell, other_tree: Path, tmp_path: Path
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(other_tree), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    commit = git("rev-parse", "HEAD")
    over = tmp_path / "rank.py"
    over.write_text((other_tree / "workloads" / "rank.py").read_text() + "print('laid over')\n")
    laid = freeze_overlay(Arm(overlay=[Overlaid("workloads/rank.py", str(over))]))
    source = arm_source(other_tree, commit, laid)
    assert source != source_hash(other_tree, commit)
    cell["code"]["candidate"] |= {"commit": commit, "source": source, "overlay": laid}
    (other_tree / "workloads" / "__init__.py").write_text(
        "raise RuntimeError('the working tree must not run')\n"
    )
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["error"]) == (0, None)
    [log] = (tmp_path / "store" / "cells").glob("*/attempt-001/candidate/node.log")
    assert "laid over" in log.read_text()


def test_base_arm_runs_beside_the_candidate(cell: Cell, tmp_path: Path) -> None:
    cell["code"]["base"] = dict(cell["code"]["candidate"])
    code, result = drive(cell, tmp_path / "store")
    assert (code, result["error"]) == (0, None)
    [attempt] = (tmp_path / "store" / "cells").glob("*/attempt-001")
    assert (attempt / "base" / "updated" / "generations.jsonl").exists()
    assert result["starts"] == 3  # one reference serves both arms, whose code is the same
