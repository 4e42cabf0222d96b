"""A real Ray cluster on this machine: each node a `ray start` with an address of its own behind loopback."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orchestrator.launch import free_port

PORTS = (
    "node-manager-port",
    "object-manager-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
)
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RayNodes:
    """Node 0 is the head, without room for actors. Every node has a folder of its own, short enough for sockets."""

    def __init__(self, workers: int, cpus: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ry", dir="/tmp"))
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._cpus = cpus
        self.address = f"{self.host(0)}:{free_port()}"
        self._start(0, "--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false")
        self._await_head(30)
        for number in range(1, workers + 1):
            self.join(number)
        for number in range(workers + 1):
            self.await_node(number, 90)

    @staticmethod
    def host(number: int) -> str:
        return f"127.0.2.{10 + number}"

    def _start(self, number: int, *how: str) -> None:
        ports = [f"--{name}={free_port()}" for name in PORTS]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*how, *ports, "--min-worker-port=0", "--max-worker-port=0", "--num-gpus=0"]
        command += [f"--node-ip-address={self.host(number)}", f"--num-cpus={self._cpus if number else 0}"]
        command += ["--object-store-memory=78643200", f"--temp-dir={self._folder / str(number)}"]
        with self._log(number).open("wb") as log:
            self._nodes[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET,
                start_new_session=True,
            )

    def join(self, number: int) -> None:
        self._start(number, f"--address={self.address}")

    def await_node(self, number: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while "Ray runtime started" not in (said := self._log(number).read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.log"

    def _await_head(self, seconds: float) -> None:
        host, _, port = self.address.partition(":")
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((host, int(port)), 1).close()
            except OSError:
                assert time.monotonic() < deadline, self._log(0).read_text()
                time.sleep(0.1)
            else:
                return

    def daemons(self, number: int) -> list[psutil.Process]:
        """Ray's own processes of a node, without its workers."""
        return psutil.Process(self._nodes[number].pid).children()

    def kill(self, number: int) -> None:
        """As a crash of the node would, as far as Ray sees: its daemons are gone, without a word."""
        daemons = self.daemons(number)
        for process in [self._nodes[number], *daemons]:
            process.send_signal(signal.SIGKILL)
        self._nodes.pop(number).wait(10)

    def down(self) -> None:
        """Everything, and the folders. Fails the test when a process of the cluster is left."""
        for process in self._nodes.values():
            process.terminate()
        for process in self._nodes.values():
            process.wait(30)
        deadline = time.monotonic() + 15
        while left := self.left():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.1)
        shutil.rmtree(self._folder)

    def left(self) -> list[psutil.Process]:
        """Processes of the cluster, by their command lines; workers name the folder of their node in it."""
        found = psutil.process_iter(["cmdline", "status"])
        alive = [one for one in found if one.info["status"] != psutil.STATUS_ZOMBIE]
        return [one for one in alive if f"{self._folder}/" in " ".join(one.info["cmdline"] or [])]
