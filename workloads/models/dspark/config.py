"""Dimensions of a DSpark drafter that families with one share. Imports no torch: the planner reads them too."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class DsparkConfig:
    """A drafter of `num_dspark_layers` layers (0: none), which proposes a block of tokens in one pass.

    Defaults fit the CPU proxies; published names are in brackets. dspark_block_size: tokens of a block, each of which
    proposes the one after it. dspark_target_layer_ids: layers of the target, from 0, whose output the drafter reads.
    dspark_mask_token_id [dspark_noise_token_id, mask_token_id]: what stands for the tokens of a block that nobody
    knows yet. dspark_markov_rank: width of the head that lets a proposal depend on the one before.
    """

    num_dspark_layers: int = 0
    dspark_block_size: int = 4
    dspark_target_layer_ids: list[int] = field(default_factory=lambda: [1, 2])
    dspark_mask_token_id: int = 510
    dspark_markov_rank: int = 32


class Blocks(Protocol):
    """What of these dimensions says how tokens are proposed."""

    dspark_block_size: int
    dspark_mask_token_id: int
