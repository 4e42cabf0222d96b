"""`python -m tests.benchmarks NAME ...`, or `all`: runs benchmarks that need a GPU, each in a process of its own, so
that one that fails leaves the others their memory; fails when one did, or a figure misses its bar."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*_on_gpu.py"))


def main(names: list[str]) -> int:
    names = NAMES if names == ["all"] else names
    if not names or set(names) - set(NAMES):
        print(f"Usage: python -m tests.benchmarks all, or NAME ..., of {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    if len(names) == 1:
        return min(1, import_module(f"tests.benchmarks.{names[0]}").main())
    command = [sys.executable, "-m", "tests.benchmarks"]
    failed = [name for name in names if subprocess.run([*command, name], check=False).returncode]
    print(f"Missed or failed: {', '.join(failed)}." if failed else "All figures are met.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
