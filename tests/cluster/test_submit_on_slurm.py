"""The run verb on a real Slurm: one job per cell, its own result first, and a typed error when there is none."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.cluster import slurm as commands
from orchestrator.store import Store, read_json

pytestmark = pytest.mark.slurm

CELL = [
    "cluster=slurm",
    "cluster.exclusive=false",
    "cluster.poll_s=0.5",
    "cluster.lost_after_s=5",
    "policy.max_attempts=1",
    "backend.python=/nonexistent",  # the driver's preflight says so at once
]


def orchestrate(store: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *CELL, f"store={store}"])
    return int(str(ended.value.code))


def only_result(root: Path) -> tuple[dict[str, Any], Path]:
    [attempt] = root.glob("cells/*/attempt-*")
    result = Store(root).result(attempt)
    assert result is not None
    return result, attempt


@pytest.mark.usefixtures("slurm")
def test_the_drivers_result_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nonsense")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "99")
    assert orchestrate(tmp_path, "run", "--watch") == 3
    result, _ = only_result(tmp_path)
    assert result["error"]["type"] == "preflight"
    assert "/nonexistent" in result["error"]["message"]
    [record] = tmp_path.glob("jobs/*/submitted.json")
    assert read_json(record)["removed_variables"] == [
        "SBATCH_PARTITION",
        "SLURM_NTASKS_PER_NODE",
    ]


@pytest.mark.usefixtures("slurm")
def test_a_job_that_dies_without_a_word_is_lost(tmp_path: Path) -> None:
    assert orchestrate(tmp_path, "run", "--watch", "cluster.setup=['echo last words', 'kill -9 $$']") == 3
    result, _ = only_result(tmp_path)
    assert result["error"]["type"] == "lost"
    assert result["error"]["message"].startswith("LOST: job ")
    assert "last words" in result["error"]["log_tail"]


@pytest.mark.usefixtures("slurm")
def test_a_limit_above_the_partitions_is_refused_before_submission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.partition_limit.cache_clear()
    assert orchestrate(tmp_path, "run", "cluster.partition=debug", "cluster.time=01:00:00") == 2
    assert "partition debug allows 1800 s" in capsys.readouterr().err
    assert not list(tmp_path.glob("cells/*"))
