"""How the pieces of an update come in: which ones, in which order, through which buffer, and whether all came once."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

import torch

from workloads.loading.mapping import Destination
from workloads.loading.weights import POISON
from workloads.spec import Arrival

Incoming = tuple[Destination, torch.Tensor]
Map = Mapping[str, Sequence[Destination]]  # checkpoint tensor -> places of this rank

ALIGNMENT = 16  # of a tensor in a bucket: of the widest dtype, so that it can be viewed there


class ReloadError(RuntimeError):
    """A load left the model in a state that must not serve."""


def selected(names: Iterable[str], arrival: Arrival) -> list[str]:
    """Those of the checkpoint's names that the update brings."""
    if not arrival.tensors:
        return list(names)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in arrival.tensors)]


def ordered(names: Sequence[str], arrival: Arrival, together: Mapping[str, object]) -> list[str]:
    """`names` in the order in which they come; those with an equal entry in `together` stay side by side."""
    groups: dict[object, list[str]] = {}
    for name in names:
        groups.setdefault(together.get(name, name), []).append(name)
    order = list(groups.values())
    if arrival.order == "reversed":
        order.reverse()
    elif arrival.order == "shuffled":
        random.Random(arrival.order_seed).shuffle(order)
    return [name for group in order for name in group]


def piece_bytes(destination: Destination) -> int:
    """Bytes of a piece as the checkpoint stores it."""
    placement = destination.placement
    dtype = placement.source_dtype or destination.module.weights[destination.parameter].dtype
    return prod(length for _, length in placement.source_region) * dtype.itemsize


def arrival_problems(places: Map, names: Sequence[str], arrival: Arrival) -> list[str]:
    """Why an update with `arrival` cannot be taken, each reason a sentence. names: those of the checkpoint."""
    problems = [
        f"The pattern {pattern!r} of the update matches none of the {len(names)} tensors of the checkpoint: correct "
        "it."
        for pattern in arrival.tensors
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    chosen = set(selected(places, arrival))
    problems += _half_new(places, chosen)
    sizes = {name: max(map(piece_bytes, places[name])) for name in chosen}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if 0 < arrival.bucket_bytes < sizes.get(largest, 0):
        problems.append(
            f"Tensor {largest!r} has {sizes[largest]} bytes on this rank, the buffer of the update "
            f"{arrival.bucket_bytes}: set bucket_bytes to {sizes[largest]} or more."
        )
    return problems


def _half_new(places: Map, chosen: set[str]) -> Iterator[str]:
    """A module is loaded as a whole: its fused weights and what is derived from them would be half new."""
    sources: dict[str, set[str]] = {}
    for name, destinations in places.items():
        for destination in destinations:
            sources.setdefault(destination.path, set()).add(name)
    for path, names in sources.items():
        missing = names - chosen
        if missing and names & chosen:
            yield (
                f"The update brings {len(names & chosen)} of the {len(names)} tensors that {path} is made of, and it "
                f"would be half new: bring {min(missing)!r} too, or leave {min(names & chosen)!r} out."
            )


def accounted(incoming: Iterable[Incoming], places: Map, expected: Sequence[str]) -> Iterator[Incoming]:
    """The same pieces. Raises ReloadError for one that comes twice or was not announced, and at the end for what
    did not come: an update that lost something is no success."""
    owed = {id(destination): name for name in expected for destination in places[name]}
    total = len(owed)
    for destination, tensor in incoming:
        if owed.pop(id(destination), None) is None:
            source = destination.placement.source
            raise ReloadError(
                f"Tensor {source!r} came twice, or is not part of this update: the sender must send each of the "
                f"{len(expected)} announced tensors once."
            )
        yield destination, tensor
    if owed:
        raise ReloadError(
            f"The update ended with {len(owed)} of {total} pieces missing, first {next(iter(owed.values()))!r}: the "
            "sender must send every tensor that it announced."
        )


def in_buckets(incoming: Iterable[Incoming], nbytes: int) -> Iterator[Incoming]:
    """The same pieces as views into one buffer, which is filled, handed over and filled again, as a transport does.

    It is poisoned in between: whoever still refers to a tensor of the bucket before does not see it unharmed.
    """
    if not nbytes:
        yield from incoming
        return
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    held: list[Incoming] = []
    used = 0
    for destination, tensor in incoming:
        if tensor.nbytes > nbytes:
            raise ReloadError(
                f"Tensor {destination.placement.source!r} has {tensor.nbytes} bytes, the buffer {nbytes}."
            )
        if used + tensor.nbytes > nbytes:
            yield from held
            buffer.fill_(POISON)
            held, used = [], 0
        room = buffer[used : used + tensor.nbytes]
        room.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        held.append((destination, room.view(tensor.dtype).view(tensor.shape)))
        used = -(-(used + tensor.nbytes) // ALIGNMENT) * ALIGNMENT
    yield from held
