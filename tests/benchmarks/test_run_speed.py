"""The main experiment as a user runs it: 16 ranks, three load paths; cold, warm, and what memory it takes.

Bars on an idle machine of 2 cores: 120 s cold, half of that with the same command on a warm store, 8 GiB in all.
Times are printed and compared with each other only.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MEMORY_BAR = 8 * 2**30


class Footprint(threading.Thread):
    """Largest proportional set size of a process and all below it; pages shared by ranks count once."""

    def __init__(self, process: psutil.Process) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = process, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            self.peak = max(self.peak, sum(map(_pss, [self.process, *_below(self.process)])))


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):  # it ended while we looked
        return 0


def run(store: Path, *arguments: str) -> tuple[float, int]:
    """Seconds and bytes of one `python -m orchestrator +exp=kimi_k3_refit`."""
    command = [sys.executable, "-m", "orchestrator", "+exp=kimi_k3_refit", f"store='{store}'", *arguments]
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        footprint = Footprint(psutil.Process(process.pid))
        footprint.start()
        output = process.communicate(timeout=800)[0].decode()
        footprint.ended.set()
        footprint.join()
    assert process.returncode == 0, output[-3000:]
    return time.perf_counter() - started, footprint.peak


@pytest.mark.timeout(1800)
def test_cold_warm_and_memory(tmp_path: Path) -> None:
    cold, memory = run(tmp_path)
    reused, _ = run(tmp_path)
    rerun, _ = run(tmp_path, "rerun=true")
    print(
        f"\n3 cells x 16 ranks: cold {cold:.0f} s, {memory / 2**30:.2f} GiB; the same command again {reused:.1f} s; "
        f"all cells run again on the references {rerun:.0f} s"
    )
    assert reused <= cold / 2
    assert memory <= MEMORY_BAR
