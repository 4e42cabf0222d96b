"""Engine environments without an engine: a tiny wheel to install for real, and folders that look installed."""

import sys
import zipfile
from pathlib import Path

from orchestrator import engine_env


def write_wheel(folder: Path, distribution: str, version: str, module: str = "") -> None:
    """A wheel with one module, named after the distribution. module: its source."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def pretend_installed(name: str) -> Path:
    """A complete environment of that name in $REFIT_ENGINES. Its interpreter answers what its engine's version is, and
    to other questions as that of the tests. Returns the interpreter."""
    folder = engine_env.environment_folder(engine_env.environment_identity(name))
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    distribution, _, version = name.rpartition("-")
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *PackageNotFoundError*) echo {distribution} {version};; '
        f'*) exec "{sys.executable}" "$@";; esac\n'
    )
    python.chmod(0o700)
    (folder / engine_env.MARKER).touch()
    return python
