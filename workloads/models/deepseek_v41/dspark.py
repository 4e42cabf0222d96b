"""The DSpark drafter of DeepSeek-V4.1: decoder layers whose window holds keys of the target's states."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from workloads.kernels.mhc import mhc_collapse
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import WindowCache
from workloads.models.deepseek_v4.window_drafter import BlockWindow, WindowDrafter
from workloads.models.deepseek_v41.attention import Shared, SharedKeyAttention, Tokens
from workloads.models.deepseek_v41.config import FP8_BLOCK
from workloads.models.deepseek_v41.decoder import DecoderLayer, V41Setting, equal_copies
from workloads.models.deepseek_v41.engram import of_images
from workloads.models.deepseek_v41.model import DeepseekV41ForCausalLM
from workloads.models.deepseek_v41.tensors import MARKOV


class BlockAttention(SharedKeyAttention, BlockWindow):
    """See `BlockWindow`."""

    def attend(
        self,
        piece: Segment,
        number: int,
        batch: Batch,
        tokens: Tokens,
        cache: WindowCache,
        table: torch.Tensor,
        shared: Shared,
    ) -> torch.Tensor:
        return self.over_block(piece, tokens.q[piece.rows], tokens.keys[piece.rows], cache)


class DeepseekV41DSpark(WindowDrafter):
    """Its copies are collapsed with the coefficients that the last sublayer found, as the target's are."""

    def __init__(self, setting: V41Setting, target: DeepseekV41ForCausalLM) -> None:
        config, model = setting.config, target.model
        super().__init__(config, setting.groups.tp, model.embed_tokens, target.lm_head, 1, FP8_BLOCK, MARKOV)
        self.copies, self.images = config.hc_mult, config.image_ids
        own = replace(setting, config=config.of_drafter())
        self.stages = nn.ModuleList(
            DecoderLayer(own, config.num_layers + stage, f"mtp.{stage}.", attention=BlockAttention)
            for stage in range(config.num_dspark_layers)
        )

    def draft(self, embedded: torch.Tensor, block: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        x, pre = equal_copies(embedded, self.copies)
        images = of_images(block.local_token_ids, self.images)
        for stage, cache in zip(self.stages, caches, strict=True):
            x, pre = stage(x, pre, images, block, cache, self.rotary, Shared())
        return mhc_collapse(x, pre)

    def layers(self) -> list[DecoderLayer]:
        return [stage for stage in self.stages if isinstance(stage, DecoderLayer)]
