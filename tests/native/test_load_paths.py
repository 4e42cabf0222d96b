"""Every load path of the native engine on the default Kimi-K3 proxy: it equals a fresh start, by the table's phases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, different, generate, held, held_bytes, make_spec, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.loading.arrivals import ReloadError
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.paths import ONCE_PER_MODEL, SAVED, STARTS, UPDATES, LoadPath
from workloads.loading.weights import WeightModule
from workloads.spec import Arrival, Checkpoint, Parallelism

ATTENTION = "*layers.1.self_attn.*"


@pytest.fixture(scope="module")
def fresh(k3_checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Bytes of a fresh start on each checkpoint."""
    return {name: held_bytes(start_engine(k3_checkpoint, name)) for name in (OLD, NEW)}


@pytest.fixture(scope="module")
def saved(k3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What an engine on NEW saved, by the way in which it is started on."""
    engine = start_engine(k3_checkpoint, NEW)
    folders = {via: tmp_path_factory.mktemp(via) for via in SAVED}
    for via, folder in folders.items():
        engine.spec.saved_dir = str(folder)
        engine.save(NEW, via)
    return folders


def started_via(folder: Path, via: str, saved: dict[str, Path], checkpoint: str = NEW) -> NativeEngine:
    spec = make_spec(folder)
    spec.saved_dir = str(saved.get(via, ""))
    engine = NativeEngine(spec, 0)
    engine.start(checkpoint, via)
    return engine


# The table -----------------------------------------------------------------------------------------


def phases_of(engine: NativeEngine, root: str, module: str, load: int) -> list[str]:
    """Names of a module's events in one load, in order, each once (an expert repeats those of its unit)."""
    names = [
        e["event"]
        for e in engine.lifecycle.events
        if (e["root"], e["module"], e["load"]) == (root, module, load) and e["phase"] == "load"
    ]
    return list(dict.fromkeys(names))


def owed(path: LoadPath, module: WeightModule) -> list[str]:
    stacks = type(module).install_expert is not WeightModule.install_expert
    if path.unit == "expert" and not stacks:
        path = UPDATES["direct"]
    return [phase for phase in path.phases if phase not in ONCE_PER_MODEL]


def assert_table(engine: NativeEngine, path: LoadPath, load: int) -> None:
    for name, root in engine.roots().items():
        for where, module in root.weight_modules():
            assert phases_of(engine, name, where, load) == owed(path, module), (name, where)
        of_model = [
            e["event"]
            for e in engine.lifecycle.events
            if (e["root"], e["module"], e["load"]) == (name, "", load)
        ]
        hooks = [phase for phase in path.phases if phase in ONCE_PER_MODEL]
        assert of_model == ["load_start", *hooks, "load_end"]


@pytest.mark.parametrize("via", list(STARTS))
def test_a_start_runs_the_phases_of_the_table_and_equals_a_fresh_one(
    via: str, k3_checkpoint: Path, saved: dict[str, Path], fresh: dict[str, Any]
) -> None:
    engine = started_via(k3_checkpoint, via, saved)
    assert_table(engine, STARTS[via], 0)
    if via != "dummy":
        assert different(held_bytes(engine), fresh[NEW]) == []
    generate(engine, prompts(3), 2)
    engine.update(OLD, "direct")  # what was adopted can be updated like anything else
    assert different(held_bytes(engine), fresh[OLD]) == []


@pytest.mark.parametrize("via", list(UPDATES))
@pytest.mark.parametrize("kernel", ["mega_moe", "reference"])
def test_an_update_runs_the_phases_of_the_table(via: str, kernel: str, k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, OLD, moe_kernel=kernel)
    wanted = held_bytes(start_engine(k3_checkpoint, NEW, moe_kernel=kernel))
    places = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    engine.update(NEW, via)
    assert_table(engine, UPDATES[via], 1)
    assert different(held_bytes(engine), wanted) == []
    assert {path: tensor.data_ptr() for path, tensor in held(engine).items()} == places


# How weights arrive --------------------------------------------------------------------------------


def arrivals() -> Iterator[tuple[str, Arrival]]:
    for via in UPDATES:
        yield via, Arrival(order="reversed", bucket_bytes=600_000)
        yield via, Arrival(order="shuffled", order_seed=len(via), bucket_bytes=524_288)
    yield "layerwise", Arrival(bucket_bytes=1 << 28)


@pytest.mark.parametrize(("via", "arrival"), list(arrivals()))
def test_order_and_buckets_make_no_difference(
    via: str, arrival: Arrival, k3_checkpoint: Path, fresh: dict[str, Any]
) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    engine.update(NEW, via, arrival)
    assert different(held_bytes(engine), fresh[NEW]) == []


def test_a_drafter_updated_in_a_second_transaction_equals_a_fresh_one(
    k3_checkpoint: Path, fresh: dict[str, Any]
) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    engine.update(NEW, "layerwise", Arrival(roots=("target",)))
    state = held_bytes(engine)
    assert {path.partition(":")[0] for path in different(state, fresh[NEW])} == {"draft"}
    assert {path.partition(":")[0] for path in different(state, fresh[OLD])} == {"target"}
    engine.update(NEW, "direct", Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh[NEW]) == []


@pytest.mark.parametrize("via", list(UPDATES))
def test_a_partial_update_leaves_the_rest_as_it_was(
    via: str, k3_checkpoint: Path, fresh: dict[str, Any]
) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    engine.update(NEW, via, Arrival(tensors=(ATTENTION,)))
    state = held_bytes(engine)
    changed = set(different(state, fresh[OLD]))
    assert changed == {path for path in state if "layers.1.self_attn." in path}
    assert not changed & set(different(state, fresh[NEW]))


# Sleep ---------------------------------------------------------------------------------------------


def test_weights_that_slept_on_the_host_come_back(k3_checkpoint: Path, fresh: dict[str, Any]) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    before = generate(engine, prompts(4), 2)
    places = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    engine.sleep(1)
    assert len(different(held_bytes(engine), fresh[OLD])) == len(places), "nothing was released"
    with pytest.raises(RuntimeError, match="sleeps: call wake first"):
        engine.generate(prompts(2), engine_sampling())
    with pytest.raises(RuntimeError, match="sleeps: call wake first"):
        engine.update(NEW, "direct")
    engine.wake()
    assert different(held_bytes(engine), fresh[OLD]) == []
    assert {path: tensor.data_ptr() for path, tensor in held(engine).items()} == places
    assert generate(engine, prompts(4), 2) == before


@pytest.mark.parametrize("via", list(UPDATES))
def test_discarded_weights_never_serve_before_all_of_them_were_loaded(
    via: str, k3_checkpoint: Path, fresh: dict[str, Any]
) -> None:
    engine = start_engine(k3_checkpoint, OLD)
    places = {path: tensor.data_ptr() for path, tensor in held(engine).items()}
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ReloadError, match="draft, target were discarded by a sleep of level 2"):
        generate(engine, prompts(2))
    engine.update(NEW, via, Arrival(roots=("target",)))
    engine.update(NEW, via, Arrival(tensors=(ATTENTION,)))
    with pytest.raises(ReloadError, match="weights of draft were discarded"):
        generate(engine, prompts(2))
    engine.update(NEW, via, Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh[NEW]) == []
    assert {path: tensor.data_ptr() for path, tensor in held(engine).items()} == places
    generate(engine, prompts(2))


def test_sleep_hands_memory_back(tmp_path: Path) -> None:
    from workloads.loading.sleep import Asleep

    class Root(torch.nn.Module):
        def weight_modules(self) -> Iterator[tuple[str, WeightModule]]:
            yield "", self.module

    def resident() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) * 1024

    root = Root()
    root.module = WeightModule()
    root.module.weights["weight"] = None  # its name is all that is asked
    root.module.register_parameter(
        "weight", torch.nn.Parameter(torch.ones(64 << 20, dtype=torch.uint8), requires_grad=False)
    )
    before = resident()
    Asleep([root], [], level=2)
    assert before - resident() > 60 << 20


def engine_sampling() -> Any:
    from workloads.spec import Sampling

    return Sampling(max_new_tokens=2)


# Other layouts -------------------------------------------------------------------------------------


def test_sharded_state_of_another_layout_is_refused(k3_checkpoint: Path, saved: dict[str, Path]) -> None:
    for via in ("sharded_state", "tensorizer"):
        spec = make_spec(k3_checkpoint)
        spec.saved_dir, spec.parallelism = str(saved[via]), Parallelism()
        engine = NativeEngine(spec, 0)
        engine.spec.parallelism = Parallelism(tp=2, gpus_per_node=2)
        with pytest.raises(CheckpointError, match="saved with tp 1, this engine has 2"):
            engine.start(NEW, via)
        engine.spec.parallelism = Parallelism()
        with pytest.raises(CheckpointError, match="saved with checkpoint"):
            engine.start(OLD, via)
        engine.spec.checkpoints["third"] = Checkpoint(seed=3)
        engine.start(NEW, via)  # a refusal leaves it as it was


def test_every_rank_starts_on_what_it_saved(
    k3_checkpoint: Path, run_ranks: RanksRunner, tmp_path: Path
) -> None:
    """Two ranks that share attention and divide the experts; one rank cannot start on their files."""
    spec = make_spec(k3_checkpoint, Parallelism(tp=2, ep=2, gpus_per_node=2))

    def save_and_start(rank: int) -> list[list[str]]:
        engine = NativeEngine(spec, rank)
        engine.start(NEW, "safetensors")
        found = []
        for via in SAVED:
            spec.saved_dir = str(tmp_path / via)
            engine.save(NEW, via)
            again = NativeEngine(spec, rank)
            again.start(NEW, via)
            found.append(different(held_bytes(again), held_bytes(engine)))
        return found

    assert run_ranks(2, save_and_start) == [[[]] * len(SAVED)] * 2
    for via in ("sharded_state", "tensorizer"):
        alone = make_spec(k3_checkpoint)
        alone.saved_dir = str(tmp_path / via)
        with pytest.raises(CheckpointError, match="saved with tp 2, this engine has 1"):
            NativeEngine(alone, 0).start(NEW, via)
    raw = make_spec(k3_checkpoint)
    raw.saved_dir = str(tmp_path / "tensorizer_raw")
    NativeEngine(raw, 0).start(NEW, "tensorizer_raw")  # a checkpoint is for any layout
