"""A real Ray cluster on this machine: each node a `ray start` with an address of its own behind loopback."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from orchestrator.gangs.launch import free_port

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
        try:
            for number in range(workers + 1):
                self._bring_up(number)
        except BaseException:
            self.down()
            raise

    @staticmethod
    def host(number: int) -> str:
        return f"127.0.2.{10 + number}"

    def _start(self, number: int, *how: str) -> None:
        ports = [f"--{name}={free_port()}" for name in PORTS]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [*how, *ports, "--min-worker-port=0", "--max-worker-port=0", "--num-gpus=0"]
        command += [f"--node-ip-address={self.host(number)}", f"--num-cpus={self._cpus if number else 0}"]
        command += [
            "--object-store-memory=78643200",
            "--include-log-monitor=false",
            f"--temp-dir={self._folder / str(number)}",
        ]
        with self._log(number).open("wb") as log:
            self._nodes[number] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | QUIET,
                start_new_session=True,
            )

    def _bring_up(self, number: int) -> None:
        """One at a time, and again where it gives up, as Ray does on a busy machine after half a minute."""
        how = [f"--address={self.address}"]
        if number == 0:
            how = ["--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false"]
        for _ in range(3):
            self._start(number, *how)
            while self._nodes[number].poll() is None:
                if "Ray runtime started" in self._log(number).read_text():
                    return
                time.sleep(0.1)
        raise AssertionError(self._log(number).read_text())

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.log"

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
        began = [psutil.Process(process.pid) for process in self._nodes.values()]
        slow = psutil.wait_procs(began, 10)[1]  # without a head a node does not end at once
        for process in [*(child for one in slow for child in one.children(recursive=True)), *slow]:
            process.kill()
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
