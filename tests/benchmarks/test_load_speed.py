"""Figures of loading: half of the speed at which a file is read, and padding whose cost does not grow with experts."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workloads.engines.native import NativeEngine
from workloads.loading.checkpoint import TORCH_DTYPES
from workloads.loading.padding import fill_padding, record_padding
from workloads.loading.shards import TensorMeta
from workloads.loading.tensor_table import every_tensor
from workloads.loading.weights import Placement, Weight, WeightModule, narrow, whole
from workloads.loading.writer import write_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import sections
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism

READ_SHARE = 0.5
FILL_RATIO = 0.1
RUNS = 5


def fastest(run: Callable[[], object]) -> float:
    """Processor time of the best of some runs: what others do on the machine only adds."""
    times = []
    for _ in range(RUNS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiK3Config, Path]:
    """Two layers of Kimi-K3 with the published width of the experts, and few of them."""
    config = KimiK3Config(
        num_layers=2,
        full_attention_layers=[1],
        hidden_size=1024,
        moe_latent_size=3584,
        moe_intermediate_size=3072,
        num_experts=12,
        num_experts_per_token=2,
        shared_intermediate_size=1024,
        dense_intermediate_size=2048,
        num_mtp_layers=0,
    )
    specs = {spec.name: spec for spec in every_tensor(sections(config))}

    def ones(name: str) -> torch.Tensor:
        dtype = TORCH_DTYPES[specs[name].dtype]
        return torch.ones(specs[name].shape, dtype=dtype)  # the bytes do not matter to the speed

    metas = [(spec.name, TensorMeta(spec.dtype, spec.shape)) for spec in specs.values()]
    folder = tmp_path_factory.mktemp("wide") / "checkpoint"
    return config, write_checkpoint(folder, "ones", metas, ones, 4 << 30, {})


def test_a_start_runs_at_half_of_the_speed_of_reading(checkpoint: tuple[KimiK3Config, Path]) -> None:
    """Both from the page cache: files are read into memory that is there, weights are placed and processed."""
    config, folder = checkpoint
    torch.set_num_threads(1)
    files = sorted(folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    buffer = memoryview(bytearray(max(file.stat().st_size for file in files)))

    def read() -> None:
        for file in files:
            with file.open("rb", buffering=0) as opened:
                got = 0
                while count := opened.readinto(buffer[got:]):
                    got += count

    seconds: list[float] = []

    def load() -> None:
        backend = Backend(moe_kernel="reference", max_model_len=64, max_requests=1)
        model = Model(kimi_k3=config)
        named, dirs = {"new": Checkpoint()}, {"new": str(folder)}
        engine = NativeEngine(GangSpec("speed", "", model, Parallelism(), backend, named, dirs, []), 0)
        for _ in range(2):  # the first one finds pages that nobody has touched
            started = time.process_time()
            for loader in engine.loaders.values():
                engine.lifecycle.start_load("safetensors")
                loader.cold(engine._open("new"))
            seconds.append(time.process_time() - started)

    load()
    fastest(read)
    reading, loading = fastest(read), (load(), min(seconds))[1]
    print(
        f"{total / 1e6:.0f} MB: read at {total / reading / 1e9:.2f} GB/s, loaded at {total / loading / 1e9:.2f} GB/s, "
        f"{reading / loading:.0%}"
    )
    assert reading / loading >= READ_SHARE


class Stacked(WeightModule):
    """Parameters [experts, 16, 16] of which every expert leaves a row and a column."""

    def __init__(self, parameters: int, experts: int) -> None:
        super().__init__()
        for number in range(parameters):
            pieces = tuple(
                Placement(
                    f"{number}.{e}",
                    whole((15, 15)),
                    target=((e, 1), (0, 15), (0, 15)),
                    slot=((e, 1), (0, 16), (0, 16)),
                    stacked=True,
                )
                for e in range(experts)
            )
            self.add_weight(f"w{number}", Weight((experts, 16, 16), torch.bfloat16, pieces, 1.0))


def fill_one_by_one(module: Stacked) -> int:
    """The same regions, one operation each: the row and the column that every expert leaves."""
    experts = 0
    for name in module.weights:
        for expert in module.get_parameter(name):
            expert[15:].fill_(1.0)
            expert[:, 15:].fill_(1.0)
            experts += 1
    return 2 * experts


@torch.no_grad()
def test_a_hundred_thousand_regions_are_filled_in_time_and_few_operations() -> None:
    torch.set_num_threads(1)
    few, many = Stacked(50, 10), Stacked(50, 1000)
    for module in (few, many):
        for name, weight in module.weights.items():
            for placement in weight.placements:
                record_padding(module, name, placement)
    operations = [fill_padding(few), fill_padding(many)]
    assert operations == [100, 100], "they grow with the experts"
    regions = sum(len(weight.placements) for weight in many.weights.values()) * 2
    assert regions == 100_000
    seconds = fastest(lambda: fill_padding(many))
    loop = fastest(lambda: fill_one_by_one(few)) * regions / fill_one_by_one(few)
    print(
        f"{regions} regions in {seconds * 1000:.1f} ms (at most 50 on an idle machine), {operations[1]} operations; "
        f"one by one in {loop * 1000:.0f} ms"
    )
    assert seconds <= FILL_RATIO * loop
    for name in many.weights:
        assert (narrow(many.get_parameter(name), ((0, 1000), (15, 1), (0, 16))) == 1).all()
