"""The W&B mirror: offline by default, one run an attempt, no secret in it."""

from pathlib import Path
from typing import Any

import pytest

from collectors.wandb_mirror import mirror_attempt

CELL: dict[str, Any] = {"experiment": "unit", "parallelism": {"tp": 4, "dp": 4}}
RESULT: dict[str, Any] = {
    "cell": "ab" * 32,
    "attempt": 1,
    "verdict": "FAIL",
    "labels": {"load_path": "direct"},
    "checks": [
        {"name": "x", "verdict": "FAIL", "required": True, "expected": "equal", "observed": "3 differ"}
    ],
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
    folder = mirror_attempt(CELL, RESULT, {"tokens_per_s": 5.0}, tmp_path / "w b", "unit")
    assert folder.name.startswith("offline-run-")
    assert folder.name.endswith("abababababababab-001")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"FAIL" in written
    assert b"0.9995" in written
    assert b"canary-4711" not in written
