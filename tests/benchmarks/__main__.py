"""`python -m tests.benchmarks NAME ...`: runs benchmarks that need a GPU; fails when a figure misses its bar."""

import sys
from importlib import import_module
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*_on_gpu.py"))


def main(names: list[str]) -> int:
    if not names or set(names) - set(NAMES):
        print(f"Usage: python -m tests.benchmarks NAME ..., of {', '.join(NAMES)}.", file=sys.stderr)
        return 2
    missed = [import_module(f"tests.benchmarks.{name}").main() for name in names]
    return 1 if any(missed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
