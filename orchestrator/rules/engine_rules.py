"""Looks, before anything is submitted, whether the engines that a config names are there."""

import sys
from collections.abc import Iterator

from orchestrator import engine_env
from orchestrator.config.freeze import arm_environment, cell_arms
from orchestrator.config.schema import Root


def engine_problems(root: Root) -> Iterator[str]:
    """One sentence for each engine that is missing or of another version than its name says.

    In a container only a step can look, and an interpreter of other nodes is left to the preflight there.
    """
    backend, cluster = root.backend, root.cluster
    if cluster.image is not None:
        return
    for name in dict.fromkeys(arm_environment(root, arm) for arm in cell_arms(root).values()):
        if name is not None:
            yield from _environment_problems(name, backend.engine, cluster.kind)
        elif backend.url is None and cluster.kind == "local":
            yield from engine_env.engine_problems(backend.python or sys.executable, backend.engine, None)


def _environment_problems(name: str, engine: str, kind: str) -> Iterator[str]:
    shared = " Jobs look for it at the same path: set REFIT_ENGINES to a folder that all nodes see, if this is none."
    found = engine_env.environment_problems(name)
    if not found:
        found = engine_env.engine_problems(str(engine_env.environment_python(name)), engine, name)
    yield from (problem + (shared if kind == "slurm" else "") for problem in found)
