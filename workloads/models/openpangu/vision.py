"""The vision wrapper: a language model whose prompts may hold images."""

from collections.abc import Sequence

import torch

from workloads.models.batch import Batch
from workloads.models.dense.attention import KvCache
from workloads.models.media import slots
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.openpangu.model import OpenPanguForCausalLM
from workloads.models.openpangu.tensors import PROJECTOR
from workloads.models.served import Setting, Target
from workloads.models.tower import MediaProjector, fill_slots


class OpenPanguVL(Target):
    """The tower that would see the images is not built: `tower_features` stands in for what it says of them."""

    def __init__(self, setting: Setting[OpenPanguConfig]) -> None:
        super().__init__()
        config = setting.config
        self.language_model = OpenPanguForCausalLM(setting)
        self.visual = MediaProjector(
            config.vision_hidden_size, config.hidden_size, config.rms_norm_eps, PROJECTOR
        )
        self.images = slots(config.image_token_start, config.image_lengths)

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
        return self.visual.encode(image, len(self.images[image]))
