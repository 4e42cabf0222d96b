"""What a DSpark drafter asks of its target. Imports no torch."""

from collections.abc import Iterator
from typing import Protocol


class Drafted(Protocol):
    """Dimensions of a target with its drafter."""

    num_layers: int
    vocab_size: int
    num_dspark_layers: int
    dspark_target_layer_ids: list[int]
    dspark_mask_token_id: int

    @property
    def num_mtp_layers(self) -> int: ...


def drafter_problems(c: Drafted, family: str) -> Iterator[str]:
    """Why the drafter does not fit its target. family: under which `c` stands in `model`."""
    if not c.num_dspark_layers:
        return
    key, taps = f"model.{family}.dspark_target_layer_ids", list(c.dspark_target_layer_ids)
    if c.num_mtp_layers:
        yield (
            f"model.{family}.num_dspark_layers is {c.num_dspark_layers} and num_mtp_layers {c.num_mtp_layers}: an "
            "engine has one drafter; set one of the two to 0."
        )
    if not taps or taps != sorted(set(taps)):
        yield (
            f"{key} is {taps}; the drafter's context projection takes their outputs side by side, so it must name "
            "different layers in ascending order."
        )
    outside = [layer for layer in taps if not 0 <= layer < c.num_layers]
    if outside:
        yield (
            f"{key} names {outside}: the drafter does not fit this target, whose num_layers {c.num_layers} are 0 to "
            f"{c.num_layers - 1}."
        )
    if not 0 <= c.dspark_mask_token_id < c.vocab_size:
        yield (
            f"model.{family}.dspark_mask_token_id is {c.dspark_mask_token_id}: the drafter does not fit this target, "
            f"whose vocabulary has {c.vocab_size} tokens."
        )
