"""The run store: exclusive, atomic, locked between processes, and no result counts for another attempt."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.planning import plan
from orchestrator.provenance import checkout
from orchestrator.store import Store, StoreError, read_json, write_json

Cell = dict[str, Any]


@pytest.fixture(scope="module")
def cell() -> Cell:
    [one] = plan(["cluster.memory_gb=2"]).cells
    return one.cell


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs")


def finish(attempt_dir: Path, verdict: str, **changes: Any) -> None:
    write_json(
        attempt_dir / "result.json",
        {
            "cell": attempt_dir.parent.name,
            "attempt": attempt_dir.name,
            "verdict": verdict,
            "error": None,
            **changes,
        },
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    attempt = store.new_attempt(name)
    folders = [store.root, store.cells, store.cell_dir(name), attempt, store.new_experiment("x")]
    assert [mode(folder) for folder in folders] == [0o700] * len(folders)


def test_a_cell_is_written_once_and_the_latest_place_to_run_counts(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    file = store.cell_dir(name) / "cell.json"
    first = file.stat().st_mtime_ns
    assert store.write_cell(cell) == name
    assert file.stat().st_mtime_ns == first
    elsewhere = {**cell, "cluster": {**cell["cluster"], "partition": "other"}}
    assert store.write_cell(elsewhere) == name
    assert read_json(file)["cluster"]["partition"] == "other"


def test_attempts_are_exclusive(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: store.new_attempt(name).name, range(24)))
    assert sorted(made) == [f"attempt-{number:03d}" for number in range(1, 25)]


def test_two_experiments_of_one_second_get_two_folders(store: Store) -> None:
    assert len({store.new_experiment("x") for _ in range(20)}) == 20


@pytest.mark.parametrize("verdict", ["PASS", "FAIL", "INCONCLUSIVE", "NOT_RUN"])
def test_a_measured_cell_is_finished(store: Store, cell: Cell, verdict: str) -> None:
    name = store.write_cell(cell)
    assert store.finished(name) is None
    finish(store.new_attempt(name), verdict)
    store.new_attempt(name)  # a later one that died changes nothing
    result = store.finished(name)
    assert result is not None
    assert result["verdict"] == verdict


def test_an_error_is_tried_again(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    finish(store.new_attempt(name), "ERROR")
    assert store.finished(name) is None


@pytest.mark.parametrize("changes", [{"cell": "other"}, {"attempt": "attempt-002"}, {"cell": None}])
def test_a_result_counts_only_for_its_own_attempt(store: Store, cell: Cell, changes: dict[str, Any]) -> None:
    name = store.write_cell(cell)
    finish(store.new_attempt(name), "PASS", **changes)
    assert store.finished(name) is None


def test_a_result_cut_short_does_not_count(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    attempt = store.new_attempt(name)
    finish(attempt, "PASS")
    whole = (attempt / "result.json").read_text()
    (attempt / "result.json").write_text(whole[:-10])
    assert store.finished(name) is None


def test_json_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies before the end leaves the old file, and readers never see half of one."""
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})

    def die(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(OSError, match="No space"):
        write_json(file, {"a": 2})
    assert read_json(file) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "y.json", float("nan"))
    assert not (tmp_path / "y.json").exists()


HOLD = """
import sys, time
from pathlib import Path
from orchestrator.store import Store
with Store(Path(sys.argv[1])).locked(sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_cell_is_locked_between_processes(store: Store, cell: Cell) -> None:
    name = store.write_cell(cell)
    command = [sys.executable, "-c", HOLD, str(store.root), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout()) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(
                StoreError, match=f"Cell {name[:12]} is being run by process {holder.pid} on .* since"
            ),
            store.locked(name),
        ):
            pass
        holder.kill()
    with store.locked(name):  # the lock of a dead process is free
        pass


def test_a_child_that_inherits_the_lock_keeps_it(store: Store, cell: Cell) -> None:
    """So that a driver whose orchestrator was killed is not joined by a second one."""
    name = store.write_cell(cell)
    with store.locked(name) as descriptors:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=descriptors
        )
    try:
        with pytest.raises(StoreError, match="is being run by"), store.locked(name):
            pass
    finally:
        child.communicate(b"\n")
    with store.locked(name):
        pass


def test_a_store_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError, match=r"store=.*file/runs cannot be written \(Not a directory: .*set store= to"
    ):
        Store.open(tmp_path / "file" / "runs")


def test_runs_are_found_by_path_name_and_beginning(store: Store) -> None:
    folders = [store.new_experiment("refit") for _ in range(2)]
    for number, folder in enumerate(folders):
        write_json(folder / "cells.json", {})
        os.utime(folder / "cells.json", (number, number))
    assert store.find_experiment(str(folders[0])) == folders[0]
    assert store.find_experiment(folders[0].name) == folders[0]
    assert store.find_experiment("refit") == folders[1]
    with pytest.raises(StoreError, match=r"There is no run 'other' .*; there are: refit-"):
        store.find_experiment("other")
    for number in range(20):
        (store.experiments / f"more-{number}").mkdir()
    with pytest.raises(StoreError, match=r"more-0, .* and 10 more\.$"):
        store.find_experiment("other")


def test_references_have_a_folder_per_arm_and_checkpoint(store: Store, cell: Cell) -> None:
    base = {"path": "/x", "commit": None, "source": "0", "faults": []}
    both = {**cell, "code": {**cell["code"], "base": base}}
    dirs = store.reference_dirs(both)
    assert set(dirs) == {"fresh.old", "fresh.new", "base/fresh.old", "base/fresh.new"}
    assert all(path.parent == store.references for path in dirs.values())
