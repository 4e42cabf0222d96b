"""The life of the weights of one rank of the native engine: start, update, save, sleep, and whether they may serve."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import torch

from workloads.engines.protocol import UnsupportedError
from workloads.loading import saved
from workloads.loading.arrivals import ReloadError, arrival_problems, selected
from workloads.loading.checkpoint import CheckpointError, CheckpointReader
from workloads.loading.lifecycle import Lifecycle
from workloads.loading.loader import Loader, UpdateStats
from workloads.loading.paths import STARTS, UPDATES
from workloads.loading.perturb import open_view
from workloads.loading.shards import mismatches
from workloads.loading.sleep import Asleep
from workloads.loading.snapshot import NotSavableError
from workloads.loading.tensor_table import TensorSpec, every_tensor
from workloads.loading.tensorizer_files import TensorizerMissingError
from workloads.models.architectures import tensor_table
from workloads.models.parallel import RankGroups, everywhere, gather_objects
from workloads.models.served import Drafter, Target
from workloads.spec import WHOLE, Arrival, GangSpec


class NativeWeights:
    """loaders: one for each root, `target` and, if the model has one, `draft`.

    A load that is refused before anything was touched leaves the engine as it was; one that breaks off later leaves
    it unusable, and then everything but `stop` raises ReloadError.
    """

    def __init__(
        self,
        spec: GangSpec,
        rank: int,
        groups: RankGroups,
        roots: Mapping[str, Target | Drafter],
        make_loader: type[Loader],
        lifecycle: Lifecycle,
    ) -> None:
        self.spec, self.rank, self.groups, self.lifecycle = spec, rank, groups, lifecycle
        self._roots = roots
        self._architecture = spec.model.architecture
        self.config = getattr(spec.model, self._architecture)
        self.loaders = {name: make_loader(name, root, lifecycle) for name, root in roots.items()}
        self._names = everywhere(groups.pp, list(roots))  # of all models; a stage may lack the drafter
        self._started = False
        self._unusable = ""
        self._asleep: Asleep | None = None
        self._discarded: set[str] = (
            set()
        )  # roots whose weights a sleep took, until an update has brought them

    def roots(self) -> Mapping[str, Target | Drafter]:
        return self._roots

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        """What serving writes, by audit path."""
        return {}

    # Loads -----------------------------------------------------------------------------------------

    def start(self, checkpoint: str, via: str) -> UpdateStats:
        """Load the named checkpoint into fresh parameters, or random weights (`dummy`), or what a step `save` wrote.

        Raises CheckpointError, before anything is touched, when the files are not this engine's.
        """
        self._require_usable()
        if self._started:
            raise RuntimeError("This engine has started already; use update, or a new engine.")
        if via not in STARTS:
            raise ValueError(f"via={via!r} is no way to start; choose one of {', '.join(STARTS)}.")
        one, after = self._way_to_start(checkpoint, via)

        def complete() -> None:
            after()
            self._rebalance()

        stats = self._load(via, self.loaders.values(), one, complete)
        self._started = True
        return stats

    def update(self, checkpoint: str, via: str, arrival: Arrival = WHOLE) -> UpdateStats:
        """Replace the weights that serve, or those that `arrival` names.

        Raises CheckpointError before anything is touched, ReloadError when the models must not serve any more.
        """
        self._require_awake()
        if via not in UPDATES:
            raise ValueError(f"via={via!r} is no way to update; choose one of {', '.join(UPDATES)}.")
        reader = self._open(checkpoint, arrival)
        loaders = self._taking_part(arrival, list(reader.names()))

        def run(loader: Loader) -> UpdateStats:
            ways = {"layerwise": loader.layerwise, "direct": loader.direct, "per_expert": loader.per_expert}
            loader.arrival = arrival
            return ways[via](reader)

        stats = self._load(via, loaders, run, reader.require_unchanged)
        if not arrival.tensors:
            self._discarded -= {loader.name for loader in loaders}
        return stats

    def save(self, checkpoint: str, via: str) -> None:
        """Write files to `spec.saved_dir` that `start` takes with the same `via`. Collective."""
        folder, layout = Path(self.spec.saved_dir), saved.layout_of(self.spec, via, checkpoint)
        try:
            if via == "tensorizer_raw":
                if self.rank == 0:
                    saved.save_raw(folder, self._open(checkpoint))
            else:
                self._require_serving()
                write = {"sharded_state": saved.save_parameters, "tensorizer": saved.save_processed}[via]
                write(folder, self.rank, self._roots)
        except (TensorizerMissingError, NotSavableError) as error:
            raise UnsupportedError(str(error)) from error
        gather_objects(self.groups.world, None)  # every rank has written
        if self.rank == 0:
            saved.write_manifest(folder, layout)

    def _rebalance(self) -> None:
        """Shuffle the routed experts over their slots, as load balancing does while an engine serves. Collective."""
        if seed := self.spec.parallelism.rebalance_seed:
            with torch.no_grad():
                for loader in self.loaders.values():
                    loader.rebalance(seed)

    def _way_to_start(
        self, checkpoint: str, via: str
    ) -> tuple[Callable[[Loader], UpdateStats], Callable[[], None]]:
        """What each loader does, and what is asked afterwards."""
        if via == "dummy":
            seed = self.spec.checkpoints[checkpoint].seed
            return lambda loader: loader.dummy(seed), lambda: None
        if via in ("safetensors", "streamed"):
            reader = self._open(checkpoint)
            streams = via == "streamed"
            return (
                lambda one: one.streamed(reader) if streams else one.cold(reader)
            ), reader.require_unchanged
        folder = Path(self.spec.saved_dir)
        saved.require_layout(folder, saved.layout_of(self.spec, via, checkpoint))
        if via == "sharded_state":
            own = saved.RankParameters(folder, self.rank, self._roots)
            return lambda loader: loader.sharded(own.of(loader.name)), own.require_unchanged
        try:
            if via == "tensorizer_raw":
                raw = self._checked(saved.RawCheckpoint(folder))
                return lambda loader: loader.cold(raw), raw.require_unchanged
            state = saved.ProcessedState(folder, self.rank)
            return lambda loader: loader.serialized(state), lambda: None
        except TensorizerMissingError as error:
            raise UnsupportedError(str(error)) from error

    def _load(
        self,
        via: str,
        loaders: Iterable[Loader],
        one: Callable[[Loader], UpdateStats],
        after: Callable[[], None],
    ) -> UpdateStats:
        """One load of some roots; the statistics of all. Whatever goes wrong in it leaves the engine unusable."""
        self.lifecycle.start_load(via)
        self._unusable = f"the load via {via} did not end"
        try:
            each = [one(loader) for loader in loaders]
            after()
        except CheckpointError as error:
            self._unusable = f"the load via {via} broke off: {error}"
            raise ReloadError(self._why_unusable()) from error
        except BaseException as error:
            self._unusable = f"the load via {via} broke off with {type(error).__name__}: {error}"
            raise
        self._unusable = ""
        return UpdateStats(**{f.name: sum(getattr(s, f.name) for s in each) for f in fields(UpdateStats)})

    def _open(self, checkpoint: str, arrival: Arrival = WHOLE) -> CheckpointReader:
        reader = open_view(self.spec.checkpoints[checkpoint], Path(self.spec.checkpoint_dirs[checkpoint]))
        return self._checked(reader, arrival)

    def _checked(self, reader: CheckpointReader, arrival: Arrival = WHOLE) -> CheckpointReader:
        """Refuse a checkpoint of another model. An update of some tensors needs those only."""
        table = tensor_table(self._architecture)
        specs: dict[str, TensorSpec] = {s.name: s for s in every_tensor(table.sections(self.config))}
        needed = set(selected(specs, arrival))
        stored = {n: reader.meta(n) for n in reader.names() if n in needed or n not in specs}
        wanted = (spec for name, spec in specs.items() if name in needed)
        problems = mismatches(reader.folder, stored, wanted, table.NOT_LOADED)
        if problems:
            raise CheckpointError(problems)
        return reader

    def _taking_part(self, arrival: Arrival, names: list[str]) -> list[Loader]:
        """Loaders of the models that an update is for. Raises CheckpointError when any rank cannot take it."""
        unknown = [root for root in arrival.roots if root not in self._names]
        problems = [
            f"The update is for the model {root!r}; this engine has {', '.join(self._names)}."
            for root in unknown
        ]
        loaders = [one for name, one in self.loaders.items() if name in (arrival.roots or self.loaders)]
        for loader in loaders:
            problems += arrival_problems(loader.map, names, arrival)
        if of_all := everywhere(self.groups.world, problems):
            raise CheckpointError(of_all)
        return loaders

    # Sleep -----------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Release the memory of weights and caches. 1 keeps the weights on the host, 2 discards them."""
        self._require_serving()
        if self.spec.backend.device != "cpu":
            raise UnsupportedError(
                "The native engine sleeps on CPUs only: its CUDA weights stay where they serve."
            )
        self._asleep = Asleep(self._roots.values(), self.runtime_tensors().values(), level)
        self._discarded = set(self._roots) if level == 2 else set()

    def wake(self) -> None:
        """After level 2 an update must bring all weights of every model before the engine serves again."""
        self._require_usable()
        if self._asleep is None:
            raise RuntimeError("This engine does not sleep: call sleep first.")
        self._asleep.wake()
        self._asleep = None

    # What may be asked of an engine in its state -----------------------------------------------------

    def _require_serving(self) -> None:
        self._require_awake()
        if self._discarded:
            raise ReloadError(
                f"The weights of {', '.join(sorted(self._discarded))} were discarded by a sleep of level 2 and no "
                "update has brought them since: update the whole model before it serves."
            )

    def _require_awake(self) -> None:
        self._require_usable()
        if not self._started:
            raise RuntimeError("This engine holds no weights yet: call start first.")
        if self._asleep is not None:
            raise RuntimeError("This engine sleeps: call wake first.")

    def _require_usable(self) -> None:
        if self._unusable:
            raise ReloadError(self._why_unusable())

    def _why_unusable(self) -> str:
        return f"This engine must not serve, {self._unusable}. Start a new one."
