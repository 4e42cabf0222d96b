"""Whether the nodes reach one another, and how fast: pairwise, then all together. One process a node, with torch."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, but not declared

LINK_S = 30.0  # until a partner that does not answer counts as out of reach
REPEATS = (
    3  # timed collectives, of which the fastest counts: what the link can do, on a machine that does more
)
BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of one buffer: bandwidth and not latency
PINGS = 8


class Meeting:
    """The nodes of one allocation, which find one another in a store that node 0 serves.

    Raises torch.distributed.DistNetworkError when the store cannot be reached within `limit_s`.
    """

    def __init__(self, node: int, nodes: int, address: str, limit_s: float) -> None:
        self.node, self.nodes = node, nodes
        self.absent: list[int] = []  # nobody waits for them again
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=limit_s)
        self.store = TCPStore(host, int(port), None, node == 0, limit, wait_for_workers=False)

    def arrive(self, place: str, limit_s: float) -> list[int]:
        """Waits for all nodes to come to the same place; `absent`, with those that have not within `limit_s`."""
        present = [node for node in range(self.nodes) if node not in self.absent]
        self.store.set(f"{place}/{self.node}", "")
        try:
            self.store.wait([f"{place}/{node}" for node in present], timedelta(seconds=limit_s))
        except dist.DistStoreError:
            self.absent += [node for node in present if not self.store.check([f"{place}/{node}"])]
        return self.absent

    def leave(self) -> None:
        """Node 0 serves the store until the others have left."""
        if self.node == 0:
            self.arrive("end", LINK_S)
        else:
            self.store.set(f"end/{self.node}", "")

    def give_up(self) -> None:
        """Tells the others that this node reaches nobody."""
        self.store.set(f"gave up/{self.node}", "")

    def gave_up(self, node: int) -> bool:
        return bool(self.store.check([f"gave up/{node}"]))

    @contextmanager
    def group(self, name: str, members: list[int], device: str) -> Iterator[None]:
        """A process group of these nodes, as torch's default one. It has gloo for host tensors and, on GPUs, NCCL."""
        try:
            dist.init_process_group(
                "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore(name, self.store),
                rank=members.index(self.node),
                world_size=len(members),
                timeout=timedelta(seconds=LINK_S),
            )
        except Exception:
            # Groups meet under the number of groups that a process has made. The next partner has not made this one.
            dist.distributed_c10d._world.group_count = 0
            raise
        try:
            yield
        finally:
            dist.destroy_process_group()


def prepare() -> None:
    """NCCL's own watchdog would end this process where a partner is out of reach; a call that raises is wanted."""
    os.environ |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    torch.set_num_threads(1)


def versions() -> dict[str, str]:
    """Of the libraries that are loaded, which need not be those of the packages."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda), "nccl": str(nccl)}


def devices(kind: str) -> list[torch.device]:
    """One for each rail: a GPU mostly has a network card of its own."""
    if kind == "cpu":
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def partners(node: int, nodes: int) -> list[int | None]:
    """Whom `node` meets in each round of a round-robin tournament, which pairs all nodes at once; None: it rests.

    The circle method: the last place stays, the others move on by one in each round. With an odd number of nodes the
    last place is empty.
    """
    places = nodes + nodes % 2
    found: list[int | None] = []
    for turn in range(places - 1):
        if node == places - 1:
            other = turn * (places // 2) % (places - 1)
        else:
            other = (turn - node) % (places - 1)
            other = places - 1 if other == node else other
        found.append(other if other < nodes else None)
    return found


def pair(meeting: Meeting, other: int, device: str) -> dict[str, Any]:
    """{"bandwidth": by device what `bandwidth` gives, "clock": what `clock_offset` gives, of a pair with node 0}."""
    members = sorted((meeting.node, other))
    with meeting.group("pair-{}-{}".format(*members), members, device):
        clock = clock_offset(members.index(meeting.node)) if members[0] == 0 else None
        return {"clock": clock, "bandwidth": {str(one): bandwidth(2, one) for one in devices(device)}}


def whole(meeting: Meeting, device: str) -> dict[str, Any]:
    """{"bandwidth": by device, of all nodes together}."""
    with meeting.group("whole", list(range(meeting.nodes)), device):
        return {"bandwidth": {str(one): bandwidth(meeting.nodes, one) for one in devices(device)}}


def clock_offset(member: int) -> dict[str, float] | None:
    """{"offset_s": clock of member 1 minus the one of member 0, "round_trip_s"}, at member 0; None at the other.

    The answer of member 1 was given half-way between question and answer, up to half of the round trip; the shortest
    round trip of a few says most (Cristian 1989).
    """
    moment = torch.zeros(1, dtype=torch.float64)
    if member == 1:
        for _ in range(PINGS):
            dist.recv(moment, src=0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
        return None
    answers = []
    for _ in range(PINGS):
        asked = time.time()
        dist.send(moment, dst=1)
        dist.recv(moment, src=1)
        answered = time.time()
        answers.append((answered - asked, moment.item() - (asked + answered) / 2))
    trip, offset = min(answers)
    return {"offset_s": offset, "round_trip_s": trip}


def bandwidth(members: int, device: torch.device) -> dict[str, float]:
    """Bus bandwidth in 10^9 bytes/s of an all-reduce and an all-to-all over the default group, as nccl-tests defines
    it: bytes of a member's buffer / time * 2(n-1)/n, and * (n-1)/n. Raises RuntimeError when a sum or a part that
    came is not what was sent."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    count = BYTES[device.type] // 4 // members * members
    own = torch.full((count,), float(dist.get_rank()), device=device)
    parts = torch.empty_like(own)
    total = own.clone()
    dist.all_reduce(total)  # the first one connects the members
    dist.all_to_all_single(parts, own)
    expected = torch.arange(members, dtype=torch.float32, device=device).repeat_interleave(count // members)
    if not (torch.equal(parts, expected) and bool((total == members * (members - 1) / 2).all())):
        raise RuntimeError(f"A collective over {device} gave other numbers than were sent.")
    share = count * 4 / 1e9 * (members - 1) / members
    return {
        "all_reduce": 2
        * share
        / min(_seconds(device, lambda: dist.all_reduce(total)) for _ in range(REPEATS)),
        "all_to_all": share
        / min(_seconds(device, lambda: dist.all_to_all_single(parts, own)) for _ in range(REPEATS)),
    }


def _seconds(device: torch.device, collective: Any) -> float:
    if device.type == "cpu":
        began = time.perf_counter()
        collective()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    collective()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
