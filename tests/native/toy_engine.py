"""An engine without a model that can be told to fail: real processes, real collectives, nothing else."""

import contextlib
import ctypes
import io
import mmap
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from workloads import heartbeat
from workloads.engines.protocol import Generation, Part, Prompt, Rule, UnsupportedError, UpdateStats
from workloads.loading.lifecycle import EventSink
from workloads.spec import WHOLE, Arrival, GangSpec, Sampling


def end_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(name)))
                with connection, contextlib.suppress(OSError):
                    connection.getpeername()  # not one that listens: gloo aborts when it is shut down
                    connection.shutdown(socket.SHUT_RDWR)


class ToyTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()


class ToyEngine:
    """`via` of a step is `sum`, or `ACTION:RANK` with actions below, joined by `+`; the other ranks wait in a
    collective."""

    def __init__(self, spec: GangSpec, rank: int, sink: EventSink | None = None) -> None:
        self.spec, self.rank = spec, rank
        self.tokenizer = ToyTokenizer()
        self.model = nn.Linear(2, 2)

    def start(self, checkpoint: str, via: str) -> UpdateStats:
        return self.update(checkpoint, via)

    def update(self, checkpoint: str, via: str, arrival: Arrival = WHOLE) -> UpdateStats:
        for one in via.split("+"):
            action, _, victim = one.partition(":")
            if victim and int(victim) == self.rank:
                getattr(self, f"_{action}")()
        total = torch.tensor([self.rank], dtype=torch.int64, device=self.spec.backend.device)
        dist.all_reduce(total)
        ranks = self.spec.parallelism.ranks
        assert total.item() == ranks * (ranks - 1) // 2
        return UpdateStats(nbytes=8)

    def _raise(self) -> None:
        raise ValueError("the toy was told to raise")

    def _leave(self) -> None:
        """The connections of this rank close some time before its end, as they may when the machine is busy."""
        end_connections()
        time.sleep(0.3)
        os._exit(7)

    def _linger(self) -> None:
        """Reports an error of its own and does not come to an end; the others fail meanwhile."""

        class Lingering(io.StringIO):
            def flush(self) -> None:
                end_connections()
                time.sleep(600)

        sys.stdout = Lingering()
        self._raise()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _segfault(self) -> None:
        ctypes.string_at(0)

    def _exit(self) -> None:
        os._exit(7)

    def _full(self) -> None:
        """From here on no file of this rank can grow, as on a full disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def _fill(self) -> None:
        """Fills the file system of the records to the last byte."""
        ballast = os.open(Path(self.spec.output) / "ballast", os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(ballast, bytes(size))
        finally:
            os.close(ballast)

    def _unsupported(self) -> None:
        raise UnsupportedError("The toy cannot do this.")

    def _late(self) -> None:
        time.sleep(1.0)

    def _hang(self) -> None:
        time.sleep(600)

    def _grip(self) -> None:
        """Native code that keeps the interpreter's lock."""
        ctypes.PyDLL(None).sleep(120)

    def _halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _work(self) -> None:
        """Takes long, unit by unit."""
        for _ in range(26):
            time.sleep(0.5)
            heartbeat.advance()

    def _crowd(self) -> None:
        """Workers of its own that do not go by themselves, and shared memory that nobody unlinks."""
        with open(f"/dev/shm/toy-{self.spec.master_port}", "w+b") as file:
            file.truncate(4096)
            self.shared = mmap.mmap(file.fileno(), 4096)
        for prepare in (
            lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
            os.setsid,
            lambda: os.kill(os.getpid(), signal.SIGSTOP),
        ):
            if os.fork() == 0:
                prepare()
                time.sleep(600)
                os._exit(0)

    def _deaf(self) -> None:
        """Hangs, and SIGTERM does not end it; has a child of its own that left the process group."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
        time.sleep(600)

    def roots(self) -> Mapping[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> Sequence[Part]:
        return []

    def rules(self) -> Sequence[Rule]:
        return []

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def kv_capacity_tokens(self) -> int:
        return 0

    def generate(self, prompts: Sequence[Prompt], params: Sampling) -> list[Generation]:
        return [
            Generation(p.id, len(p.token_ids), list(p.token_ids[: params.max_new_tokens])) for p in prompts
        ]

    def stop(self) -> None:
        self.model = nn.Linear(1, 1)
