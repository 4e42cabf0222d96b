"""What the benchmarks on a GPU share: medians of queued work, and results with the command that repeats them."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def require_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit("These benchmarks measure a GPU, and torch finds none on this machine.")


def queued_seconds(action: Callable[[], object], rounds: int = 15) -> float:
    """Median seconds that the device takes for what `action` queues, by its own events, after two warm-up calls."""
    times = []
    for i in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def wall_seconds(action: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds on the clock, from an idle device to an idle device, after one warm-up call."""
    times = []
    for i in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        if i:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernels(action: Callable[[], object], name: str = "", rounds: int = 7) -> tuple[float, int]:
    """Seconds in the kernels whose name holds `name`, and how many of them, in one call of `action`: the median of
    several calls, by the device's own record of them."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        action()
    seconds, counts = [], []
    for _ in range(rounds):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
            action()
            torch.cuda.synchronize()
        ours = [event for event in profiled.key_averages() if name in event.key]
        seconds.append(sum(event.self_device_time_total for event in ours) / 1e6)
        counts.append(sum(event.count for event in ours))
    return statistics.median(seconds), max(counts)


def report(name: str, bars: dict[str, tuple[float, float]], figures: dict[str, Any]) -> int:
    """Prints figures and bars (name: measured, at least; negative: at most its magnitude), writes them to
    `results/<name>.json`, and returns how many bars were missed."""
    import triton

    missed = 0
    for bar, (measured, wanted) in bars.items():
        met = measured >= wanted if wanted >= 0 else measured <= -wanted
        missed += not met
        relation = "at least" if wanted >= 0 else "at most"
        print(f"  {'met   ' if met else 'MISSED'} {bar}: {measured:.4g}, {relation} {abs(wanted):g}")
    entry = {
        "command": f"python -m tests.benchmarks {name}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bars": {bar: {"measured": measured, "wanted": wanted} for bar, (measured, wanted) in bars.items()},
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(entry, indent=1) + "\n")
    return missed
