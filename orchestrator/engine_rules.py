"""Looks, before anything is submitted, whether the engines that a config names are there."""

import sys
from collections.abc import Iterator

from orchestrator import engine_env
from orchestrator.plan import arm_environment, cell_arms
from orchestrator.schema import Root


def engine_problems(root: Root) -> Iterator[str]:
    """One sentence for each engine that is missing or of another version than its name says."""
    backend, cluster = root.backend, root.cluster
    environments = dict.fromkeys(arm_environment(root, arm) for arm in cell_arms(root).values())
    named = [name for name in environments if name is not None]
    if named and (backend.python or cluster.image):
        other = f"backend.python={backend.python}" if backend.python else f"cluster.image={cluster.image}"
        yield (
            f"The engine is to come from the environment {named[0]} and from {other}: set backend.environment=null "
            "(and that of the arms), or leave the other out."
        )
        return
    for name in named:
        yield from _environment_problems(name, backend.engine, cluster.kind)
    if None in environments and not cluster.image and not backend.url and cluster.kind == "local":
        python = backend.python or sys.executable
        yield from engine_env.engine_problems(python, backend.engine, None)


def _environment_problems(name: str, engine: str, kind: str) -> Iterator[str]:
    shared = " Jobs look for it at the same path: set REFIT_ENGINES to a folder that all nodes see, if this is none."
    found = engine_env.environment_problems(name)
    if not found:
        found = engine_env.engine_problems(str(engine_env.environment_python(name)), engine, name)
    yield from (problem + (shared if kind == "slurm" else "") for problem in found)
