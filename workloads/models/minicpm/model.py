"""MiniCPM-V and -O: a language model whose prompts may hold images and sounds."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.kernels.linear import round_to_bf16
from workloads.models.batch import Batch
from workloads.models.dense.model import DenseForCausalLM
from workloads.models.kv_cache import KvCache
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.minicpm.resampler import BiasedLinear, Resampler
from workloads.models.minicpm.tensors import AUDIO, LANGUAGE
from workloads.models.served import Setting, Target
from workloads.models.tower import fill_slots, tower_features


class AudioProjector(nn.Module):
    """Two matrices with a ReLU between them, then the mean of every `pool` frames; a rest of frames is dropped."""

    def __init__(self, config: MiniCpmConfig) -> None:
        super().__init__()
        width, self.pool = config.hidden_size, config.audio_pool
        first, second = (f"{AUDIO}{name}." for name in ("linear1", "linear2"))
        self.linear1 = BiasedLinear(config.audio_hidden_size, width, f"{first}weight", f"{first}bias")
        self.linear2 = BiasedLinear(width, width, f"{second}weight", f"{second}bias")

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """BF16 [frames, audio width] -> BF16 [frames // pool, width]."""
        projected = self.linear2(self.linear1(frames).relu())
        pooled = len(projected) // self.pool
        used = projected[: pooled * self.pool].to(torch.float64)
        return round_to_bf16(used.view(pooled, self.pool, -1).mean(dim=1))


class MiniCpm(Target):
    """The towers that would see the images and hear the sounds are not built: `tower_features` stands in for what
    they say of them, different for every image and every sound."""

    def __init__(self, setting: Setting[MiniCpmConfig]) -> None:
        super().__init__()
        self.config = setting.config
        self.llm = DenseForCausalLM(setting, LANGUAGE)
        self.resampler = Resampler(setting.config)
        self.audio_projection_layer = AudioProjector(setting.config) if setting.config.audio_frames else None

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        return self.llm.make_caches(slots, positions)

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        embedded, ids = self.llm.embed(batch), batch.local_token_ids
        fill_slots(embedded, ids, self.config.image_slots, self.image)
        fill_slots(embedded, ids, self.config.audio_slots, self.sound)
        return self.llm.run(embedded, batch, caches)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.llm.logits(hidden, rows, batch)

    def image(self, number: int) -> torch.Tensor:
        """Embeddings of an image, BF16 [num_queries, hidden]."""
        config, device = self.config, self.resampler.query.device
        height, columns = config.image_heights[number], config.image_widths[number]
        patches = tower_features(number, height * columns, config.vision_hidden_size, device)
        embeddings: torch.Tensor = self.resampler(patches, height, columns)
        return embeddings

    def sound(self, number: int) -> torch.Tensor:
        """Embeddings of a sound, BF16 [frames // audio_pool, hidden]."""
        config, device = self.config, self.resampler.query.device
        assert self.audio_projection_layer is not None, "only a model with sounds has ids for them"
        different = len(config.image_heights) + number
        frames = tower_features(different, config.audio_frames[number], config.audio_hidden_size, device)
        embeddings: torch.Tensor = self.audio_projection_layer(frames)
        return embeddings
