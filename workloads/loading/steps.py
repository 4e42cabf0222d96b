"""The steps that every load path is made of, for one model on one rank.

Each is a method: a fault of `workloads.faults` replaces one of them, so what is proved to be caught is what really
runs. Each leaves a lifecycle event with the name of its phase (`workloads.loading.paths`).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from workloads.loading.arrivals import (
    Incoming,
    ReloadError,
    accounted,
    in_buckets,
    ordered,
    selected,
)
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.mapping import Destination, destinations
from workloads.loading.padding import fill_padding, record_padding
from workloads.loading.weights import ModelRoot, Region, WeightModule, narrow
from workloads.spec import WHOLE


@dataclass
class UpdateStats:
    """Seconds by phase of one load or update on this rank, and bytes placed into parameters."""

    read_s: float = 0.0
    install_s: float = 0.0
    post_process_s: float = 0.0
    finish_s: float = 0.0
    nbytes: int = 0


class Reader(Protocol):
    """The part of a checkpoint reader that loading needs."""

    def slice(self, name: str, region: Region) -> torch.Tensor: ...


class Steps:
    """arrival: of the next update, or of that which runs. together: checkpoint tensors that come side
    by side whatever the order."""

    def __init__(self, name: str, root: ModelRoot, lifecycle: Lifecycle) -> None:
        self.name = name
        self.root = root
        self.lifecycle = lifecycle
        self.map = destinations(root)
        self.paths = {module: path for path, module in root.weight_modules()}
        self.stats = UpdateStats()
        self.arrival = WHOLE
        self.together: Mapping[str, object] = {}
        self.placed: set[str] = set()  # modules that have got something in this load

    def expected(self) -> Sequence[str]:
        """Checkpoint tensors that this load brings to this rank."""
        return selected(self.map, self.arrival)

    def incoming(self, reader: Reader) -> Iterator[Incoming]:
        """This rank's pieces as they come, each announced one exactly once, else ReloadError."""
        pieces = in_buckets(self._pieces(self.watched(reader)), self.arrival.bucket_bytes)
        return accounted(pieces, self.map, self.expected())

    def watched(self, reader: Reader) -> Reader:
        """The reader, with an event for each tensor that is asked for and of which this rank keeps nothing."""
        return _Watched(reader, self)

    def _pieces(self, reader: Reader) -> Iterator[Incoming]:
        """Read one at a time."""
        for source in ordered(self.expected(), self.arrival, self.together):
            for place in self.map[source]:
                started = time.perf_counter()
                tensor = reader.slice(source, place.placement.source_region)
                self.stats.read_s += time.perf_counter() - started
                yield place, tensor

    def place(self, destination: Destination, tensor: torch.Tensor) -> None:
        """Copy one piece into its region and record what it leaves of the slot."""
        started = time.perf_counter()
        if destination.path not in self.placed:
            self.placed.add(destination.path)
            self.record("place", destination.path)
        parameter = destination.module.live(destination.parameter)
        if parameter is None:
            raise ReloadError(
                f"{destination.path}.{destination.parameter} was consumed by post-processing and not restored "
                f"before {destination.placement.source!r} arrived."
            )
        raw = self.raw(tensor)
        _check_piece(destination, parameter, raw)
        target = narrow(parameter, destination.placement.target)
        target.copy_(raw.reshape(target.shape))
        record_padding(destination.module, destination.parameter, destination.placement)
        self.stats.install_s += time.perf_counter() - started
        self.stats.nbytes += tensor.nbytes

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """E8M0 scales are bytes: a numeric copy into uint8 would turn 2^-7 into 0."""
        return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor

    def allocate(self, path: str, module: WeightModule) -> None:
        self.record("allocate", path)
        module.allocate()

    def rematerialize(self, path: str, module: WeightModule) -> None:
        self.record("rematerialize", path)
        for name in module.weights:
            module.register_parameter(name, nn.Parameter(module.rematerialize(name), requires_grad=False))

    def restore(self, path: str, module: WeightModule) -> None:
        self.record("restore", path)
        self.restore_consumed(module)

    def restore_consumed(self, module: WeightModule) -> None:
        for name in module.weights:
            if module.live(name) is None:
                module.register_parameter(name, nn.Parameter(module.restore(name), requires_grad=False))

    def fill(self, path: str, module: WeightModule) -> None:
        self.record("fill_padding", path)
        fill_padding(module)

    def install_expert(self, path: str, module: WeightModule, expert: int, one: WeightModule) -> None:
        started = time.perf_counter()
        self.record("install_expert", path)
        module.install_expert(expert, one)
        self.stats.install_s += time.perf_counter() - started

    def post_process(self, path: str, module: WeightModule) -> None:
        started = time.perf_counter()
        self.record("post_process", path)
        module.post_process()
        self.stats.post_process_s += time.perf_counter() - started

    def finalize_early(self, module: WeightModule) -> None:
        """Finalise one module as soon as it has been reloaded, so that the parameters consumed by only one
        layer are back in memory at a time. The model's hook then finds it done."""
        started = time.perf_counter()
        self.record("finalize_module", self.paths[module])
        module.finalize()
        self.stats.finish_s += time.perf_counter() - started

    def copy_back(self, path: str, module: WeightModule, serving: dict[str, torch.Tensor | None]) -> None:
        """The fresh parameters into those that served, which take their place again."""
        self.record("copy_back", path)
        for name, held in serving.items():
            fresh = module.live(name)
            if held is not None and fresh is not None:
                held.copy_(fresh)
                module.register_parameter(name, nn.Parameter(held, requires_grad=False))

    def finalize(self) -> None:
        """Call the model's hook."""
        started = time.perf_counter()
        self.record("finalize")
        self.root.process_weights_after_loading()
        self.stats.finish_s += time.perf_counter() - started

    def rebalance(self, seed: int) -> None:
        """Let experts change places, and load them there from now on. Collective."""
        for module in self.paths:
            module.rebalance(seed)
        self.follow_experts()

    def follow_experts(self) -> None:
        self.map = destinations(self.root)

    def record(self, event: str, module: str = "") -> None:
        self.lifecycle.record(self.name, event, module)


@dataclass(frozen=True)
class _Watched:
    reader: Reader
    steps: Steps

    def slice(self, name: str, region: Region) -> torch.Tensor:
        if name not in self.steps.map:
            self.steps.record("read_foreign")
        return self.reader.slice(name, region)


def _check_piece(destination: Destination, parameter: torch.Tensor, piece: torch.Tensor) -> None:
    """`copy_` alone would broadcast a smaller tensor and convert another dtype as numbers."""
    placement = destination.placement
    shape = tuple(length for _, length in placement.source_region)
    dtype = placement.source_dtype or parameter.dtype
    dtype = torch.uint8 if dtype is torch.float8_e8m0fnu else dtype
    if tuple(piece.shape) != shape or piece.dtype is not dtype:
        raise ReloadError(
            f"Tensor {placement.source!r} came as {piece.dtype} {tuple(piece.shape)}, {destination.path} takes "
            f"{dtype} {shape} of it: send the tensor of the configured model, as the checkpoint stores it."
        )
