"""The vision wrapper: a language model whose prompts may hold images."""

from collections.abc import Sequence

import torch
from torch import nn

from workloads.models.batch import Batch
from workloads.models.dense.attention import KvCache
from workloads.models.dense.model import DenseForCausalLM
from workloads.models.layers import ReplicatedLinear, RMSNorm, Rows
from workloads.models.media import slots
from workloads.models.openpangu.attention import SinkAttention
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.openpangu.tensors import PROJECTOR
from workloads.models.served import Setting, Target
from workloads.models.tower import fill_slots, tower_features


class ImageProjector(nn.Module):
    """From the tower's width to the language model's: one norm and one matrix, whole on every rank."""

    def __init__(self, config: OpenPanguConfig) -> None:
        super().__init__()
        width = config.vision_hidden_size
        self.norm = RMSNorm(width, config.rms_norm_eps, f"{PROJECTOR}norm.weight")
        self.proj = ReplicatedLinear(width, [Rows(f"{PROJECTOR}proj.weight", config.hidden_size)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """BF16 [patches, width] -> BF16 [patches, hidden]."""
        out: torch.Tensor = self.proj(self.norm(features))
        return out


class OpenPanguVL(Target):
    """The tower that would see the images is not built: `tower_features` stands in for what it says of them."""

    def __init__(self, setting: Setting[OpenPanguConfig]) -> None:
        super().__init__()
        config = setting.config
        self.language_model = DenseForCausalLM(setting, config.prefix, SinkAttention)
        self.visual = ImageProjector(config)
        self.images = slots(config.image_token_start, config.image_lengths)
        self.width = config.vision_hidden_size

    def process_weights_after_loading(self) -> None:
        """Nothing of the projector's is derived; the language model has a hook of its own."""
        self.language_model.process_weights_after_loading()

    def make_caches(self, slots: int, positions: int) -> list[KvCache]:
        return self.language_model.make_caches(slots, positions)

    def forward(self, batch: Batch, caches: Sequence[KvCache]) -> torch.Tensor:
        embedded = self.language_model.embed(batch)
        fill_slots(embedded, batch.local_token_ids, self.images, self._encode)
        return self.language_model.run(embedded, batch, caches)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.language_model.logits(hidden, rows, batch)

    def _encode(self, image: int) -> torch.Tensor:
        device = self.visual.norm.weight.device
        patches: torch.Tensor = self.visual(
            tower_features(image, len(self.images[image]), self.width, device)
        )
        return patches
