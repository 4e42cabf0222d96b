"""Loads one model by every path of `workloads.loading.paths`, each the same steps in a different order and scope."""

from collections import Counter
from collections.abc import Mapping

import torch

from workloads.loading.arrivals import Incoming, ReloadError
from workloads.loading.experts import ExpertSlice, expert_of, takes_single_experts
from workloads.loading.mapping import Destination
from workloads.loading.padding import filled_together, record_padding
from workloads.loading.saved import ProcessedState
from workloads.loading.steps import Reader, Steps, UpdateStats
from workloads.loading.weights import ModelRoot, Weight, WeightModule

__all__ = ["Incoming", "Loader", "Reader", "ReloadError", "UpdateStats"]

Serving = dict[str, torch.Tensor | None]  # parameters of a module that served when its reload began


class Loader(Steps):
    """All load paths of one root on one rank. Every path raises ReloadError, or what its reader raises, when it
    could not be completed; the model must not serve then."""

    # Starts ----------------------------------------------------------------------------------------

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
            for path, module in self.root.weight_modules():
                self.record("draw", path)
                for name, weight in module.weights.items():
                    parameter = module.live(name)
                    assert parameter is not None, "a dummy load starts from freshly created parameters"
                    _dummy_(parameter, generator, weight)
                    for placement in weight.placements:
                        record_padding(module, name, placement)
            self._fill_and_post_process_all()
            self.finalize()
        return self.stats

    def streamed(self, reader: Reader) -> UpdateStats:
        """Each module gets its memory with its first tensor and is processed with its last."""
        with _Load(self):
            for _, module in self.root.weight_modules():
                module.release()
            self._stream(reader, fresh=True, serving=False)
            self._process_weightless()
            self.finalize()
        return self.stats

    def sharded(self, saved: Reader) -> UpdateStats:
        """This rank's own parameters, padding included, from what `saved.save_parameters` wrote. saved: by
        `PATH.PARAMETER`."""
        with _Load(self):
            for path, module in self.root.weight_modules():
                self.record("place", path)
                for name in module.weights:
                    parameter = module.live(name)
                    assert parameter is not None, "a start finds freshly created parameters"
                    tensor = saved.slice(f"{path}.{name}", tuple((0, size) for size in parameter.shape))
                    parameter.copy_(tensor)
                    self.stats.nbytes += tensor.nbytes
            for path, module in self.root.weight_modules():
                self.post_process(path, module)
            self.finalize()
        return self.stats

    def serialized(self, saved: ProcessedState) -> UpdateStats:
        """Tensors as post-processing left them, derived ones included. Nothing is loaded, so nothing is processed:
        what the files lack is missing."""
        own = {path for path, _ in self.root.weight_modules()}  # a drafter's may lack what is its target's
        with _Load(self):
            for path, nbytes in saved.adopt(self.name, self.root):
                if path in own:
                    self.record("adopt", path)
                self.stats.nbytes += nbytes
        return self.stats

    # Updates ---------------------------------------------------------------------------------------

    def layerwise(self, reader: Reader) -> UpdateStats:
        """Load each module into fresh memory as its tensors arrive, and copy it back once they are complete.
        Modules that get none keep their old weights. Raises ReloadError when a parameter or buffer moved."""
        return self._update(reader, fresh=True)

    def direct(self, reader: Reader) -> UpdateStats:
        """Write into the parameters that serve. Those of a module that post-processing consumed are restored from
        its first tensor to its last. Raises ReloadError when a parameter or buffer moved."""
        return self._update(reader, fresh=False)

    def per_expert(self, reader: Reader) -> UpdateStats:
        """As `direct`, but modules that stack experts take them one after the other, in any order, so that one
        expert is in memory beside those that serve."""
        units = {name: unit for name in self.map if (unit := self._expert_unit(name)) is not None}
        return self._update(reader, fresh=False, units=units)

    def _update(self, reader: Reader, fresh: bool, units: Mapping[str, object] | None = None) -> UpdateStats:
        before = _addresses(self.root)
        with _Load(self):
            self.together = units or {}
            self._stream(reader, fresh)
            if not self.arrival.tensors:
                self._process_weightless()
            self.finalize()
        self._refuse_moved(before)
        return self.stats

    def _stream(self, reader: Reader, fresh: bool, serving: bool = True) -> None:
        """Open each module at its first piece, close it at its last. serving: there are parameters to copy back to."""
        left = Counter(place.path for name in self.expected() for place in self.map[name])
        opened: dict[str, tuple[WeightModule, Serving]] = {}
        experts = _ExpertStream(self)
        for destination, tensor in self.incoming(reader):
            path, module = destination.path, destination.module
            left[path] -= 1
            if destination.placement.source in self.together:
                experts.place(destination, tensor)
                if not left[path]:
                    self.post_process(path, module)
                continue
            if path not in opened:
                opened[path] = module, self._open(path, module, fresh, serving)
            self.place(destination, tensor)
            if not left[path]:
                self._close(path, *opened.pop(path), fresh and serving)
        for path, (module, held) in opened.items():  # of which only some tensors came
            self._close(path, module, held, fresh and serving)

    def _open(self, path: str, module: WeightModule, fresh: bool, serving: bool) -> Serving:
        held = {name: module.live(name) for name in module.weights}
        if not serving:
            self.allocate(path, module)
        elif fresh:
            self.rematerialize(path, module)
        else:
            self.restore(path, module)
        return held

    def _close(self, path: str, module: WeightModule, serving: Serving, back: bool) -> None:
        self._process(path, module)
        self.finalize_early(module)
        if back:
            self.copy_back(path, module, serving)

    # Parts of the paths ----------------------------------------------------------------------------

    def _process(self, path: str, module: WeightModule) -> None:
        self.fill(path, module)
        self.post_process(path, module)

    def _process_weightless(self) -> None:
        """What owns no weights may still derive something from others'."""
        for path, module in self.root.weight_modules():
            if not module.weights:
                self._process(path, module)

    def _fill_and_post_process_all(self) -> None:
        modules = list(self.root.weight_modules())
        with filled_together():
            for path, module in modules:
                self.fill(path, module)
        for path, module in modules:
            self.post_process(path, module)

    def _expert_unit(self, name: str) -> tuple[str, int] | None:
        """What of a tensor's module comes together; None where the module takes no single experts."""
        [first, *_] = self.map[name]
        expert = expert_of(first.placement)
        if expert is None or not takes_single_experts(first.module):
            return None
        return first.path, expert

    def _refuse_moved(self, before: dict[str, int]) -> None:
        after = _addresses(self.root)
        moved = [name for name, address in before.items() if after.get(name, address) != address]
        if moved:
            raise ReloadError(
                f"{len(moved)} tensors of {self.name} moved during the reload, first {moved[0]!r}: a captured graph "
                "would read the old storage. Start the engine again."
            )


class _ExpertStream:
    """The experts that have begun to arrive, each in memory of its own until it is complete."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._slices: dict[tuple[str, int], ExpertSlice] = {}

    def place(self, destination: Destination, tensor: torch.Tensor) -> None:
        """Take one piece; an expert that is complete with it enters its module."""
        expert = expert_of(destination.placement)
        assert expert is not None, "only pieces of one expert come here"
        key, loader = (destination.path, expert), self._loader
        if key not in self._slices:
            self._slices[key] = ExpertSlice(destination.module, expert)
            loader.rematerialize(destination.path, self._slices[key])
        one = self._slices[key]
        loader.place(one.destination(destination), tensor)
        if one.is_complete:
            del self._slices[key]
            loader.fill(destination.path, one)
            loader.install_expert(destination.path, destination.module, expert, one)


class _Load:
    """Brackets one load of one root with its lifecycle events and fresh statistics."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __enter__(self) -> None:
        loader = self._loader
        loader.stats, loader.placed, loader.together = UpdateStats(), set(), {}
        loader.record("load_start")

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self._loader.record("load_end")


def _addresses(root: ModelRoot) -> dict[str, int]:
    tensors = [*root.named_parameters(), *root.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in tensors}


def _dummy_(parameter: torch.Tensor, generator: torch.Generator, weight: Weight) -> None:
    """Random values that every kernel accepts: small floats, any FP4 nibbles, exponents 2^-6 to 2^-3, valid indices.

    The exponents are above those of weights in blocks of 128 x 128, whose few scales would else equal them by chance.
    """
    if weight.below is not None:
        parameter.copy_(torch.randint(0, weight.below, parameter.shape, generator=generator))
    elif parameter.dtype.is_floating_point:
        parameter.copy_(torch.empty(parameter.shape).uniform_(-1e-3, 1e-3, generator=generator))
    elif weight.creation_value:  # E8M0 scales are created as ones, packed weights as zeros
        parameter.copy_(torch.randint(121, 125, parameter.shape, generator=generator, dtype=torch.uint8))
    else:
        parameter.copy_(torch.randint(0, 256, parameter.shape, generator=generator, dtype=torch.uint8))
