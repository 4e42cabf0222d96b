"""Provenance says what ran, and no secret reaches the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import provenance
from orchestrator.store import write_json
from workloads.source import package_versions

CANARY = "canary-5f2b9c"


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "SSH_AUTH_SOCK", "my_credential"],
)
def test_no_secret_value_lands_in_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:{CANARY}@proxy:80")
    monkeypatch.setenv("PLAIN", "visible")
    write_json(tmp_path / "provenance.json", provenance.collect())
    text = (tmp_path / "provenance.json").read_text()
    assert CANARY not in text
    assert name in text
    assert "visible" in text


def test_no_secret_value_reaches_the_store_on_the_way_of_a_run(tmp_path: Path) -> None:
    """The whole control side, up to a driver that refuses at once."""
    environment = {**os.environ, "HF_TOKEN": CANARY, "WANDB_API_KEY": CANARY}
    command = [sys.executable, "-m", "orchestrator", f"store={tmp_path}", "backend.python=/nonexistent"]
    subprocess.run(command, env=environment, cwd=provenance.checkout(), capture_output=True, timeout=120)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "provenance.json" for path in files)
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def repository(folder: Path) -> list[str]:
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    (folder / "a").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    return git


def test_git_state_sees_commits_changes_and_new_files(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) == {"commit": None, "dirty": None}
    repository(tmp_path)
    clean = provenance.git_state(tmp_path)
    assert clean["dirty"] is None
    assert len(clean["commit"]) == 40
    (tmp_path / "a").write_text("2")
    changed = provenance.git_state(tmp_path)
    (tmp_path / "b").write_text("3")
    added = provenance.git_state(tmp_path)
    assert len({clean["dirty"], changed["dirty"], added["dirty"]}) == 3


def test_source_hash_follows_names_and_contents(tmp_path: Path) -> None:
    def state() -> str:
        provenance.source_hash.cache_clear()
        return provenance.source_hash(tmp_path)

    with pytest.raises(provenance.ProvenanceError, match="holds no workloads/ and collectors/"):
        state()
    (tmp_path / "workloads").mkdir()
    file = tmp_path / "workloads" / "a.py"
    file.write_text("1")
    first = state()
    (tmp_path / "orchestrator.py").write_text("not run beside the engine")
    (tmp_path / "workloads" / "__pycache__").mkdir()
    (tmp_path / "workloads" / "__pycache__" / "a.pyc").write_text("x")
    assert state() == first
    file.write_text("2")
    second = state()
    file.rename(file.with_name("b.py"))
    assert len({first, second, state()}) == 3


def test_package_versions_name_what_is_installed() -> None:
    versions = package_versions(provenance.PACKAGES)
    assert versions["hydra-core"].startswith("1.3")
    assert "vllm" not in versions or versions["vllm"]
