"""The W&B mirror: offline by default, one run an attempt, no secret in it."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.report.wandb_mirror import MirrorError, mirror_attempt

CELL: dict[str, Any] = {"parallelism": {"tp": 4, "dp": 4}, "wandb": {"enabled": True, "project": "unit"}}
CHECK = {"name": "x", "rule": "equal", "verdict": "FAIL", "required": True, "counts": {"differs": 3}}
SPEED = {"name": "speed", "rule": "throughput", "verdict": "PASS", "counts": {"tokens_per_s": 12345.5}}
RESULT: dict[str, Any] = {
    "cell": "ab" * 32,
    "attempt": "attempt-001",
    "verdict": "FAIL",
    "labels": {"load_path": "direct"},
    "checks": [CHECK, SPEED],
    "findings": [
        {"code": "stale", "arm": "candidate", "observation": "updated", "rank": 3, "path": "target:a"}
    ],
    "coverage": {"fraction": 0.9995},
    "starts": 2,
    "seconds": 10.0,
}


def test_offline_run_holds_the_verdict_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("MY_SERVICE_TOKEN", "canary-4711")
    folder = mirror_attempt(CELL, RESULT, tmp_path / "w b")
    assert folder.name.startswith("offline-run-")
    assert folder.name.endswith("abababababababab-attempt-001")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"FAIL" in written
    assert b"0.9995" in written
    assert b"12345.5" in written
    assert b"canary-4711" not in written


def test_what_wandb_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises((MirrorError, OSError), match="file"):
        mirror_attempt(CELL, RESULT, tmp_path / "file" / "below")
