"""Whole experiments, in a store of their own."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that each clean reference is made once."""
    return tmp_path_factory.mktemp("run store")  # with a space
