"""Runs the node parents of a set of gangs as actors of a Ray cluster: the launch command where cluster.kind is ray.

`python -P ray_launch.py --address A --nodes N --ranks R --set SET -- COMMAND...` makes a placement group of N bundles
on N nodes and starts COMMAND in an actor on each. Standard output carries the events of all node parents, and one of
kind `launch_failed` where Ray is at fault. Standard input goes to all of them; its end tells them to stop.

Standard library and ray only, and run by its path: Ray then sends the actor's class by value, so that the nodes need
nothing of this project outside of the arm's tree.
"""

import argparse
import ipaddress
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.placement_group import remove_placement_group as remove
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

CONNECT_S = 5.0
START_S = 60.0  # for an actor to start and answer
HEAD_S = 5.0  # so long without an answer of the head, and it is lost
POLL_S = 0.2


class LaunchError(Exception):
    """type: of the failure that the attempt ends with. node: number of the node parent that it is about."""

    def __init__(self, type: str, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.type, self.node = type, node


class NodeParent:
    """The actor: one process, `workloads.node`. Its methods run beside each other, since a read waits for output.

    The process sees the end of its standard input when it is told to stop, and when this actor dies in any way.
    """

    def usable(self, port: int) -> int:
        """`port`, or the next above it that nothing on this node uses."""
        while True:
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    port += 1
                else:
                    return port

    def start(self, command: Sequence[str], folder: str, log: str, variables: Mapping[str, str]) -> str:
        """Empty, or why the process cannot be started here."""
        gpus = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES" and ray.get_gpu_ids()}
        try:
            with open(log, "ab") as errors:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=folder,
                    env={**variables, **gpus},
                    start_new_session=True,
                )
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def read(self) -> bytes:
        """What it wrote; waits for that. Empty at its end."""
        assert self.process.stdout is not None
        return os.read(self.process.stdout.fileno(), 65536)

    def write(self, data: bytes) -> None:
        """Empty: nothing more will come."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `read` and `wait` tell
            if data:
                os.write(self.process.stdin.fileno(), data)
            else:
                self.process.stdin.close()

    def wait(self) -> int:
        return self.process.wait()


class Output:
    """Standard output as it was; what Ray prints goes to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def write(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # the driver is gone; standard input has ended with it
            while data:
                data = data[os.write(self._fd, data) :]

    def failed(self, error: LaunchError) -> None:
        event = {"kind": "launch_failed", "type": error.type, "message": str(error), "node": error.node}
        self.write(json.dumps({**event, "time": time.time()}).encode() + b"\n")


def said() -> bytes | None:
    """What has come on standard input, empty at its end; None when there is nothing new."""
    return os.read(0, 4096) if select.select([0], [], [], 0)[0] else None


def connect(address: str) -> str:
    """Joins the cluster as a driver; its address as HOST:PORT. Raises LaunchError."""
    advice = (
        f"Set cluster.ray.address to the HOST:PORT of its head (`ray start --head` prints it), and run this on one of "
        f"its nodes with the versions of Python and Ray that it has (here {sys.version.split()[0]} and "
        f"{ray.__version__}), and with RAY_AUTH_MODE and RAY_AUTH_TOKEN set where it asks for a token."
    )
    try:
        if address != "auto" and not answers(address, CONNECT_S):  # Ray itself would try for a minute
            raise ConnectionError("nothing answers there")
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise LaunchError("preflight", f"No Ray cluster at {address}: {error}. {advice}") from error
    return str(ray.get_runtime_context().gcs_address)


def answers(address: str, timeout_s: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError):
        return False
    return True


def bundle(options: argparse.Namespace) -> dict[str, float]:
    """Of one node. An engine whose own executor takes the GPUs of the cluster needs them to be free."""
    return {"CPU": 1, "GPU": options.ranks} if options.gpus else {"CPU": options.ranks}


def unfit(options: argparse.Namespace) -> str:
    """Empty, or which nodes fall short even when nothing else runs on them."""
    nodes, wanted = [node for node in ray.nodes() if node["Alive"]], bundle(options)
    fit = [node for node in nodes if all(node["Resources"].get(key, 0) >= n for key, n in wanted.items())]
    if len(fit) >= options.nodes:
        return ""
    has = "; ".join(f"{name(node)} {amounts(node['Resources'], wanted)}" for node in nodes)
    return (
        f"The layout needs {options.nodes} Ray nodes with {amounts(wanted, wanted)} each, the cluster has {len(fit)} "
        f"of {len(nodes)}: {has}. Start Ray on more nodes, or choose a smaller parallelism."
    )


def amounts(resources: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(key, 0):g} {key}" for key in wanted)


def name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, Ray node {node['NodeID'][:8]})"


class Launch:
    """The placement group and the actors in it, in the order of their nodes' addresses: rank 0 on the lowest."""

    def __init__(self, options: argparse.Namespace, output: Output, address: str) -> None:
        self.options, self.output, self.address = options, output, address
        self.actors: list[Any] = []
        self.nodes: list[Mapping[str, Any]] = []
        self.is_stopped = False
        self._asked = self._answered = time.monotonic()

    def place(self) -> None:
        """Raises LaunchError when the cluster is too small, or stays too busy."""
        deadline = time.monotonic() + (self.options.wait if self.options.growing else 0)
        while short := unfit(self.options):
            if time.monotonic() >= deadline or said() == b"":
                raise LaunchError("launch_failed", short)
            time.sleep(POLL_S)
        group = placement_group([bundle(self.options)] * self.options.nodes, strategy="STRICT_SPREAD")
        try:
            self._await(group)
            self._make_actors(group)
        except BaseException:
            remove(group)
            raise
        self.group = group

    def _await(self, group: PlacementGroup) -> None:
        deadline = time.monotonic() + self.options.wait
        while not group.wait(1):
            if time.monotonic() > deadline:
                free = ray.available_resources()
                raise LaunchError(
                    "launch_failed",
                    f"The Ray cluster had no place for {self.options.nodes} nodes with "
                    f"{amounts(bundle(self.options), bundle(self.options))} each within {self.options.wait:g} s; free "
                    f"in all: {amounts(free, bundle(self.options))}. Wait for its other jobs, or raise "
                    "cluster.ray.wait_s.",
                )
            if said() == b"":
                raise LaunchError("launch_failed", "Told to stop before the Ray cluster had a place.")

    def _make_actors(self, group: PlacementGroup) -> None:
        known = {node["NodeID"]: node for node in ray.nodes()}
        placed = placement_group_table(group)["bundles_to_node_id"]
        order = sorted(placed, key=lambda k: ipaddress.ip_address(known[placed[k]]["NodeManagerAddress"]))
        self.nodes = [known[placed[number]] for number in order]
        wanted = bundle(self.options)
        for number in order:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            made = ray.remote(NodeParent).options(
                num_cpus=wanted["CPU"],
                num_gpus=wanted.get("GPU", 0),
                max_concurrency=3,
                scheduling_strategy=place,
            )
            self.actors.append(made.remote())

    def get(self, node: int, reference: Any) -> Any:
        """What the actor of the node answers. Raises LaunchError where it died."""
        try:
            return ray.get(reference, timeout=START_S)
        except RayError as error:
            died = " ".join(str(error).split())
            raise LaunchError(
                "node_lost",
                f"The Ray actor of node {node}, on {name(self.nodes[node])}, is lost: {type(error).__name__}: {died}",
                node,
            ) from error

    def prepare(self) -> None:
        """Where rank 0 listens is known only now: it goes into the files of the gangs, which nobody has read yet."""
        for file in json.loads((self.options.set / "gangs.json").read_text()):
            gang = json.loads(Path(file).read_text())
            gang["master_addr"] = self.nodes[0]["NodeManagerAddress"]
            gang["master_port"] = self.get(0, self.actors[0].usable.remote(gang["master_port"]))
            Path(file).write_text(json.dumps(gang, indent=1) + "\n")

    def start(self) -> None:
        ranks, folder = self.options.ranks, str(Path.cwd())
        variables = {**os.environ, "RAY_ADDRESS": self.address}
        if all(ipaddress.ip_address(node["NodeManagerAddress"]).is_loopback for node in self.nodes):
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        started = []
        for number, actor in enumerate(self.actors):
            own = ["--node-rank", str(number), "--ranks", f"{number * ranks}:{(number + 1) * ranks}"]
            log = str(self.options.set / f"node-{number}.log")
            started.append(actor.start.remote([*self.options.command, *own], folder, log, variables))
        for number, reference in enumerate(started):
            if problem := self.get(number, reference):
                raise LaunchError(
                    "launch_failed",
                    f"The node parent cannot be started on {name(self.nodes[number])}: {problem}. All nodes of the Ray "
                    "cluster must see the store, the arm's tree and the interpreter at the same paths.",
                    number,
                )

    def follow(self) -> int:
        """Forwards events until all node parents have ended; the first exit code that is not 0."""
        reads = {actor.read.remote(): number for number, actor in enumerate(self.actors)}
        codes: dict[int, int] = {}
        partial = dict.fromkeys(range(len(self.actors)), b"")
        while reads:
            for reference in ray.wait(list(reads), num_returns=1, timeout=POLL_S)[0]:
                number = reads.pop(reference)
                try:
                    data = self.get(number, reference)
                    if data:
                        reads[self.actors[number].read.remote()] = number
                    else:
                        codes[number] = self.get(number, self.actors[number].wait.remote())
                except LaunchError as error:
                    codes[number] = 1
                    self.output.failed(error)
                    data = b""
                whole, newline, partial[number] = (partial[number] + data).rpartition(b"\n")
                self.output.write(whole + newline)
            if any(codes.values()) or not self._head_answers():
                self.tell(b"")
            elif (data := said()) is not None:
                self.tell(data)
        return next(filter(None, codes.values()), 0)

    def _head_answers(self) -> bool:
        """Looks at times whether the head is there. Ray would end this process after a minute without it."""
        now = time.monotonic()
        if self.is_stopped or now - self._asked < HEAD_S / 5:
            return True
        self._asked = now
        if answers(self.address, HEAD_S / 5):
            self._answered = now
        if now - self._answered < HEAD_S:
            return True
        message = f"The head of the Ray cluster, {self.address}, has not answered for {HEAD_S:g} s."
        self.output.failed(LaunchError("node_lost", message))
        return False

    def tell(self, data: bytes) -> None:
        """All node parents; nothing after the order to stop, which is empty."""
        if not self.is_stopped:
            self.is_stopped = not data
            for actor in self.actors:
                actor.write.remote(data)

    def close(self) -> None:
        """Gives the place back. Node parents that are left die with their actors."""
        if answers(self.address, HEAD_S / 5):
            remove(self.group)


def run(options: argparse.Namespace, output: Output) -> int:
    address = connect(options.address)
    launch = Launch(options, output, address)
    launch.place()
    try:
        launch.prepare()
        launch.start()
        return launch.follow()
    finally:
        launch.close()


def check(options: argparse.Namespace) -> int:
    """Says why a launch would fail at once."""
    connect(options.address)
    if short := unfit(options):
        raise LaunchError("preflight", short)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="ray_launch.py")
    parser.add_argument("--address", required=True, help="of the cluster: HOST:PORT, or auto")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each node")
    parser.add_argument("--gpus", action="store_true", help="reserve a GPU for each rank")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for other jobs to make room")
    parser.add_argument("--growing", action="store_true", help="wait as long for nodes to join the cluster")
    parser.add_argument("--check", action="store_true", help="only look whether a launch could succeed")
    parser.add_argument("--set", type=Path, help="folder with gangs.json")
    parser.add_argument("command", nargs="*", help="of a node parent, after --")
    options = parser.parse_args()
    output = Output()
    try:
        return check(options) if options.check else run(options, output)
    except LaunchError as error:
        output.failed(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
