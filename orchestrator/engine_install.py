"""Installs an engine environment: a virtual environment, the pinned packages of its lock file, a look at the engine.

Nothing of it survives this process: pip is ended with it, and what a killed installation left is made anew.
"""

import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from orchestrator import engine_env
from orchestrator.engine_env import MARKER, EngineEnvironmentError, command
from orchestrator.provenance import checkout
from orchestrator.store import write_json
from workloads.processes import kill_group

STEP_TIMEOUT_S = 3600
SAID = 1200  # last characters of a failed step's output
NO_SPACE = "No space left on device"

# Runs a command so that it and all that it starts end with process argv[1], even when that is killed.
_SUPERVISE = """\
import os, signal, subprocess, sys
from workloads.processes import die_with_parent
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
die_with_parent(signal.SIGTERM, int(sys.argv[1]))
code = subprocess.run(sys.argv[2:]).returncode
sys.exit(code if code >= 0 else 128 - code)
"""


def install(name: str, out: Console) -> Path:
    """Makes the environment unless it is complete, and returns its interpreter.

    Another process that installs the same one is waited for. Raises EngineEnvironmentError.
    """
    lock = engine_env.lock_file(name)
    identity = engine_env.environment_identity(name)
    folder = engine_env.environment_folder(identity)
    head = _head(lock)
    problem = _platform_problem(name, head)
    if problem is not None:
        raise EngineEnvironmentError(problem)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(folder, out):
            if not (folder / MARKER).is_file():
                _make(name, folder, lock, head, out)
                write_json(folder / MARKER, identity)
    except OSError as error:
        raise EngineEnvironmentError(f"Installing {name} into {folder} failed: {error}.") from error
    return engine_env.environment_python(name)


def platform_problem(name: str) -> str | None:
    """Why the wheels of an environment cannot run here, as a sentence."""
    return _platform_problem(name, _head(engine_env.lock_file(name)))


def show(out: Console) -> None:
    """The known environments: whether each is installed, and where."""
    for name in engine_env.known():
        folder = engine_env.environment_folder(engine_env.environment_identity(name))
        there = not engine_env.environment_problems(name)
        state = "installed" if there else "incomplete" if folder.is_dir() else "not installed"
        out.print(f"{name:20} {state:14} {escape(str(folder))}", soft_wrap=True)
    out.print(f"`{command('NAME')}` installs one.")


def _head(lock: Path) -> dict[str, str]:
    """What a lock file says of itself: `# python: 3.11 to 3.13`, `# machine: Linux x86_64`, `# disk: 4 GB`, and the
    `# module:` whose import shows that the engine works."""
    return dict(re.findall(r"^# (python|machine|disk|module): (.+)$", lock.read_text(), re.MULTILINE))


def _platform_problem(name: str, head: dict[str, str]) -> str | None:
    here = f"{platform.system()} {platform.machine()}"
    if head.get("machine", here) != here:
        return f"{name} has wheels for {head['machine']} only, and this machine is {here}."
    if "python" in head:
        first, last = (tuple(map(int, version.split("."))) for version in head["python"].split(" to "))
        if not first <= sys.version_info[:2] <= last:
            return (
                f"{name} needs Python {head['python']}, and this is {platform.python_version()} ({sys.executable}): "
                "run the command with another."
            )
    return None


@contextmanager
def _alone(folder: Path, out: Console) -> Iterator[None]:
    """Holds the right to write `folder`; the kernel takes it back from a process that dies."""
    with folder.with_name(f".{folder.name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            out.print(f"waiting for the process that installs {folder.name}", soft_wrap=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Inherited by what is started here: a killed installation holds the lock until all of it has ended.
        os.set_inheritable(file.fileno(), True)
        yield


def _make(name: str, folder: Path, lock: Path, head: dict[str, str], out: Console) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)  # of an installation that was killed
    needed = float(head.get("disk", "0 GB").removesuffix(" GB"))
    free = shutil.disk_usage(folder.parent).free / 1e9
    if free < needed:
        raise EngineEnvironmentError(
            f"{name} takes {needed:g} GB, and {folder.parent} has {free:.1f} GB free: make room, or set REFIT_ENGINES "
            "to a folder on another disk."
        )
    out.print(f"installing {name} into {folder}", soft_wrap=True)
    try:
        with out.status(f"{name}: virtual environment") as shown:
            run_step(f"Making the virtual environment of {name}", [sys.executable, "-m", "venv", str(folder)])
            python = str(folder / "bin" / "python")
            pip = [python, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--no-input"]
            follow = _Follow(lambda text: shown.update(f"{name}: {escape(text)}"), lock)
            run_step(f"pip install for {name}", [*pip, "--progress-bar", "off", "-r", str(lock)], follow)
            shown.update(f"{name}: looking whether it can be imported")
            _verify(name, python, head.get("module"))
    except EngineEnvironmentError:
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes that nobody can use
        raise


class _Follow:
    """Tells how far pip is, from what it prints."""

    def __init__(self, tell: Callable[[str], None], lock: Path) -> None:
        self.tell, self.count = tell, 0
        self.total = sum(not line.startswith("#") and "==" in line for line in lock.read_text().splitlines())

    def __call__(self, line: str) -> None:
        if line.startswith("Collecting "):
            self.count += 1
            self.tell(f"package {self.count} of {self.total}, {line.split()[1]}")
        elif line.startswith("Installing collected"):
            self.tell(f"writing {self.total} packages")


def run_step(
    what: str, step: Sequence[str], follow: Callable[[str], None] = lambda line: None
) -> Sequence[str]:
    """Runs one step to its end and returns what it printed; `follow` sees each line.

    Raises EngineEnvironmentError with the last lines of a step that fails.
    """
    supervised = [sys.executable, "-c", _SUPERVISE, str(os.getpid()), *step]
    lines: list[str] = []
    with subprocess.Popen(
        supervised,
        cwd=checkout(),  # where the supervisor finds `workloads`
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        close_fds=False,
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(STEP_TIMEOUT_S, kill_group, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                follow(line)
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                kill_group(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise EngineEnvironmentError(_failed(what, process.returncode, lines))
    return lines


def _failed(what: str, code: int, lines: Sequence[str]) -> str:
    if any(NO_SPACE in line for line in lines):
        return f"The disk is full at {what}: make room, or set REFIT_ENGINES and TMPDIR to folders on another one."
    said = " ".join(line for line in lines if line and not line.startswith("WARNING"))[-SAID:]
    number = code - 128 if code > 128 else -code  # as the supervisor tells it, or its own
    how = f"failed with code {code}" if number < 0 else f"was ended by {signal.Signals(number).name}"
    return f"{what} {how}: {said}"


def _verify(name: str, python: str, module: str | None) -> None:
    """The version is that of the name, and the engine can be imported."""
    distribution, _, wanted = name.rpartition("-")
    asked = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    found = run_step(f"Looking for {distribution} after installing {name}", [python, "-I", "-c", asked])[-1]
    if found != wanted:
        raise EngineEnvironmentError(
            f"The lock file of {name} installs {distribution} {found}: correct one of them."
        )
    if module is not None:
        run_step(f"Importing {module} after installing {name}", [python, "-I", "-c", f"import {module}"])
