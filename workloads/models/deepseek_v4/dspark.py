"""The DSpark drafter of DeepSeek-V4: decoder layers whose window holds keys of the target's states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import CompressedAttention, Tokens, WindowCache
from workloads.models.deepseek_v4.decoder import DecoderLayer, V4Setting
from workloads.models.deepseek_v4.mhc import HyperHead
from workloads.models.deepseek_v4.model import DeepseekV4ForCausalLM
from workloads.models.deepseek_v4.tensors import FP8_BLOCK, MARKOV
from workloads.models.deepseek_v4.window_drafter import BlockWindow, WindowDrafter


class BlockAttention(CompressedAttention, BlockWindow):
    """See `BlockWindow`."""

    def attend(
        self, piece: Segment, batch: Batch, tokens: Tokens, cache: Any, table: torch.Tensor
    ) -> torch.Tensor:
        return self.over_block(piece, tokens.q[piece.rows], tokens.keys[piece.rows], cache)


class DeepseekV4DSpark(WindowDrafter):
    """Its last stage has the collapse of the copies, too."""

    def __init__(self, setting: V4Setting, target: DeepseekV4ForCausalLM) -> None:
        config, model = setting.config, target.model
        copies, tp = config.hc_mult, setting.groups.tp
        super().__init__(config, tp, model.embed_tokens, target.lm_head, copies, FP8_BLOCK, MARKOV)
        self.copies = copies
        stages = config.num_dspark_layers
        self.stages = nn.ModuleList(
            DecoderLayer(setting, config.num_layers + stage, f"mtp.{stage}.", attention=BlockAttention)
            for stage in range(stages)
        )
        self.hc_head = HyperHead(config, f"mtp.{stages - 1}.hc_head")

    def draft(self, embedded: torch.Tensor, block: Batch, caches: Sequence[WindowCache]) -> torch.Tensor:
        x = embedded.unsqueeze(1).repeat(1, self.copies, 1)
        for stage, cache in zip(self.stages, caches, strict=True):
            x = stage(x, block, cache, self.rotary)
        out: torch.Tensor = self.hc_head(x)
        return out

    def layers(self) -> list[DecoderLayer]:
        return [stage for stage in self.stages if isinstance(stage, DecoderLayer)]
