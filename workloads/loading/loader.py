"""Loads one model by every path: cold start, dummy, layerwise reload, direct reload.

Each path is the same steps in a different order and scope, and each step is a method: a fault of
`workloads.faults` replaces one of them, so what is proved to be caught is what really runs.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from workloads.loading.lifecycle import Lifecycle
from workloads.loading.mapping import Destination, destinations
from workloads.loading.padding import fill_padding, record_padding
from workloads.loading.weights import ModelRoot, Region, WeightModule, narrow


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


class ReloadError(RuntimeError):
    """A reload left the model in a state that must not serve."""


Incoming = tuple[Destination, torch.Tensor]


class Loader:
    """All load paths of one root on one rank."""

    def __init__(self, name: str, root: ModelRoot, lifecycle: Lifecycle) -> None:
        self.name = name
        self.root = root
        self.lifecycle = lifecycle
        self.map = destinations(root)
        self.stats = UpdateStats()

    # The paths -------------------------------------------------------------------------------------

    def cold(self, reader: Reader) -> UpdateStats:
        """Fresh parameters from files."""
        with _Load(self):
            for destination, tensor in self.incoming(reader):
                self.place(destination, tensor)
            self._fill_and_post_process_all()
            self.finalize()
        return self.stats

    def dummy(self, seed: int) -> UpdateStats:
        """Small random weights and no files; padding, post-processing and the hook as for any load."""
        with _Load(self):
            generator = torch.Generator().manual_seed(seed)
            for _, module in self.root.weight_modules():
                for name, weight in module.weights.items():
                    parameter = module.live(name)
                    assert parameter is not None, "a dummy load starts from freshly created parameters"
                    _dummy_(parameter, generator, weight.creation_value)
                    for placement in weight.placements:
                        record_padding(module, name, placement)
            self._fill_and_post_process_all()
            self.finalize()
        return self.stats

    def direct(self, reader: Reader) -> UpdateStats:
        """Write into the parameters that serve. Consumed ones are restored for the length of the load.

        Raises ReloadError when a parameter or buffer moved.
        """
        before = _addresses(self.root)
        with _Load(self):
            for _, module in self.root.weight_modules():
                self.restore_consumed(module)
            for destination, tensor in self.incoming(reader):
                self.place(destination, tensor)
            self._fill_and_post_process_all()
            self.finalize()
        self._refuse_moved(before)
        return self.stats

    def layerwise(self, reader: Reader) -> UpdateStats:
        """Load each module into fresh memory once all its tensors have arrived, then copy it back.

        Modules of which only some tensors came are processed at the end; modules that got none keep
        their old weights. Raises ReloadError when a parameter or buffer moved.
        """
        before = _addresses(self.root)
        with _Load(self):
            waiting: dict[str, list[Incoming]] = {}
            wanted: dict[str, int] = {}
            for places in self.map.values():
                for place in places:
                    wanted[place.path] = wanted.get(place.path, 0) + 1
            for destination, tensor in self.incoming(reader):
                arrived = waiting.setdefault(destination.path, [])
                arrived.append((destination, tensor))
                if len(arrived) == wanted[destination.path]:
                    self._reload_module(destination.path, destination.module, waiting.pop(destination.path))
            for path, arrived in waiting.items():
                self._reload_module(path, arrived[0][0].module, arrived)
            self.finalize()
        self._refuse_moved(before)
        return self.stats

    # The steps -------------------------------------------------------------------------------------

    def incoming(self, reader: Reader) -> Iterator[Incoming]:
        """This rank's pieces of the checkpoint, read one at a time, in declaration order."""
        for source, places in self.map.items():
            for place in places:
                started = time.perf_counter()
                tensor = reader.slice(source, place.placement.source_region)
                self.stats.read_s += time.perf_counter() - started
                yield place, tensor

    def place(self, destination: Destination, tensor: torch.Tensor) -> None:
        """Copy one piece into its region and record what it leaves of the slot."""
        started = time.perf_counter()
        parameter = destination.module.live(destination.parameter)
        if parameter is None:
            raise ReloadError(
                f"{destination.path}.{destination.parameter} was consumed by post-processing and not restored "
                f"before {destination.placement.source!r} arrived."
            )
        target = narrow(parameter, destination.placement.target)
        target.copy_(self.raw(tensor).reshape(target.shape))
        record_padding(destination.module, destination.parameter, destination.placement)
        self.stats.install_s += time.perf_counter() - started
        self.stats.nbytes += tensor.nbytes

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """E8M0 scales are bytes: a numeric copy into uint8 would turn 2^-7 into 0."""
        return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor

    def fill(self, path: str, module: WeightModule) -> None:
        self.lifecycle.record(self.name, "fill_padding", path)
        fill_padding(module)

    def post_process(self, path: str, module: WeightModule) -> None:
        started = time.perf_counter()
        self.lifecycle.record(self.name, "post_process", path)
        module.post_process()
        self.stats.post_process_s += time.perf_counter() - started

    def finalize(self) -> None:
        """Call the model's hook."""
        started = time.perf_counter()
        self.lifecycle.record(self.name, "finalize")
        self.root.process_weights_after_loading()
        self.stats.finish_s += time.perf_counter() - started

    def finalize_early(self, module: WeightModule) -> None:
        """Finalise one module as soon as it has been reloaded, so that the parameters consumed by only one
        layer are back in memory at a time. The model's hook then finds it done."""
        started = time.perf_counter()
        module.finalize()
        self.stats.finish_s += time.perf_counter() - started

    def restore_consumed(self, module: WeightModule) -> None:
        for name in module.weights:
            if module.live(name) is None:
                module.register_parameter(name, nn.Parameter(module.restore(name), requires_grad=False))

    # Parts of the paths ----------------------------------------------------------------------------

    def _fill_and_post_process_all(self) -> None:
        modules = list(self.root.weight_modules())
        for path, module in modules:
            self.fill(path, module)
        for path, module in modules:
            self.post_process(path, module)

    def _reload_module(self, path: str, module: WeightModule, arrived: list[Incoming]) -> None:
        serving = {name: module.live(name) for name in module.weights}
        for name in module.weights:
            fresh = module.rematerialize(name)
            module.register_parameter(name, nn.Parameter(fresh, requires_grad=False))
        for destination, tensor in arrived:
            self.place(destination, tensor)
        self.fill(path, module)
        self.post_process(path, module)
        self.finalize_early(module)
        for name, held in serving.items():
            fresh_parameter = module.live(name)
            if held is not None and fresh_parameter is not None:
                held.copy_(fresh_parameter)
                module.register_parameter(name, nn.Parameter(held, requires_grad=False))

    def _refuse_moved(self, before: dict[str, int]) -> None:
        after = _addresses(self.root)
        moved = [name for name, address in before.items() if after.get(name, address) != address]
        if moved:
            raise ReloadError(
                f"{len(moved)} tensors of {self.name} moved during the reload, first {moved[0]!r}: a captured graph "
                "would read the old storage. Start the engine again."
            )


class _Load:
    """Brackets one load of one root with its lifecycle events and fresh statistics."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __enter__(self) -> None:
        self._loader.stats = UpdateStats()
        self._loader.lifecycle.record(self._loader.name, "load_start")

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._loader.lifecycle.record(self._loader.name, "load_end")


def _addresses(root: ModelRoot) -> dict[str, int]:
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors}


def _dummy_(parameter: torch.Tensor, generator: torch.Generator, creation_value: float | None) -> None:
    """Random values that every kernel accepts: small floats, any FP4 nibbles, exponents near 2^-8."""
    if parameter.dtype.is_floating_point:
        parameter.copy_(torch.empty(parameter.shape).uniform_(-1e-3, 1e-3, generator=generator))
    elif creation_value:  # E8M0 scales are created as ones, packed weights as zeros
        parameter.copy_(torch.randint(117, 121, parameter.shape, generator=generator, dtype=torch.uint8))
    else:
        parameter.copy_(torch.randint(0, 256, parameter.shape, generator=generator, dtype=torch.uint8))
