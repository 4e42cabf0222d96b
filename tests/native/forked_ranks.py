"""Processes that stand for ranks: forked, joined over gloo, their results collected."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

RanksRunner = Callable[[int, Callable[[int], Any]], list[Any]]
LIMIT_S = 150


class ForkedRanks:
    """Runs functions in groups of forked processes; `end` kills what a failed test left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: dict[int, int] = {}

    def run(self, size: int, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` of each of `size` ranks joined over gloo.

        A rank that fails, or that has not ended after LIMIT_S, fails the test, the former with its traceback.
        """
        store = self._folder / f"store-{time.monotonic_ns()}"
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, size, store, function)
            self._pids[rank] = pid
        self._wait(store)
        # Our own processes wrote these files; a result may hold tensors and dataclasses of the project.
        return [torch.load(f"{store}-{rank}.pt", weights_only=False) for rank in range(size)]

    def end(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _wait(self, store: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._pids and time.monotonic() < deadline:
            for rank, pid in list(self._pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    continue
                del self._pids[rank]
                if status:
                    pytest.fail(f"rank {rank} failed:\n{Path(f'{store}-{rank}.txt').read_text()}")
            time.sleep(0.01)
        if self._pids:
            pytest.fail(f"ranks {sorted(self._pids)} have not ended after {LIMIT_S} s")


def _be_rank(rank: int, size: int, store: Path, function: Callable[[int], Any]) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LIMIT_S - 10),
        )
        torch.save(function(rank), f"{store}-{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        Path(f"{store}-{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        os._exit(status)
