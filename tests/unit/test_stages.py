"""How layers and tensors are divided over pipeline stages, without torch."""

from dataclasses import replace
from typing import Any

import pytest

from workloads.loading.tensor_table import bytes_by_component, every_tensor
from workloads.models.architectures import ARCHITECTURES, tensor_table
from workloads.models.stages import DIVIDED, stage_layers, staged


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (4, 1, [4]),
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (93, 4, [23, 23, 24, 23]),
        (2, 2, [1, 1]),
    ],
)
def test_layers_of_each_stage(layers: int, stages: int, counts: list[int]) -> None:
    """The rest goes to the stages before the last, from the back."""
    ranges = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [len(one) for one in ranges] == counts
    assert [layer for one in ranges for layer in one] == list(range(layers))


def drafted(family: str) -> Any:
    """Dimensions of the family with a drafter: the proxy's own, or stages of DSpark where it has no other."""
    config = ARCHITECTURES[family]()
    if family != "deepseek_v41":
        return config
    return replace(config, compress_ratios=[*config.compress_ratios, 0, 0], num_dspark_layers=2)


@pytest.mark.parametrize("family", DIVIDED)
def test_stages_hold_the_checkpoint_once_and_the_ends_share_the_embedding(family: str) -> None:
    config, division = drafted(family), staged(family)
    sections = list(tensor_table(family).sections(config))
    whole = sum(bytes_by_component(sections).values())
    parts = [bytes_by_component(division.sections(config, iter(sections), 2, stage)) for stage in (0, 1)]
    embedding = bytes_by_component(sections)["embedding"]
    assert division.both(config)
    assert sum(sum(part.values()) for part in parts) == whole + embedding
    assert all(part["embedding"] == embedding for part in parts)


@pytest.mark.parametrize("family", DIVIDED)
def test_a_stage_is_as_large_as_a_model_of_its_layers(family: str) -> None:
    """The dimensions that plan a stage describe the layers that it has: kinds of attention, dense and hashed ones."""
    config, division = drafted(family), staged(family)
    for stage in range(2):
        layers = stage_layers(config.num_layers, 2, stage)
        part = division.part(config, layers, stage == 1)
        held = division.sections(config, tensor_table(family).sections(config), 2, stage)
        numbered = [tensor.nbytes for tensor in every_tensor(held) if division.layer in tensor.name]
        again = [
            tensor.nbytes
            for tensor in every_tensor(tensor_table(family).sections(part))
            if division.layer in tensor.name
        ]
        assert numbered == again
