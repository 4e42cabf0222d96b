"""The vision wrapper of any family: a language model whose prompts may hold images."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from workloads.models.batch import Batch
from workloads.models.media import slots
from workloads.models.served import Cache, Target
from workloads.models.tower import MediaProjector, fill_slots


class LanguageModel(Target):
    """A target whose forward pass can be entered after the embedding."""

    @abstractmethod
    def embed(self, batch: Batch) -> torch.Tensor:
        """BF16 [n, hidden] of this rank's tokens. Collective."""

    @abstractmethod
    def run(self, embedded: torch.Tensor, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """`forward` from there on."""

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        return self.run(self.embed(batch), batch, caches)


class VisionConfig(Protocol):
    """The dimensions of a family that its wrapper needs."""

    hidden_size: int
    rms_norm_eps: float
    vision_hidden_size: int
    image_token_start: int
    image_lengths: list[int]


class VisionWrapper(Target):
    """The tower that would see the images is not built: `tower_features` stands in for what it says of them.

    prefix: of the projector's tensors in the checkpoint.
    """

    def __init__(self, language_model: LanguageModel, config: VisionConfig, prefix: str) -> None:
        super().__init__()
        self.language_model = language_model
        self.projector = MediaProjector(
            config.vision_hidden_size, config.hidden_size, config.rms_norm_eps, prefix
        )
        self.images = slots(config.image_token_start, config.image_lengths)

    def process_weights_after_loading(self) -> None:
        """Nothing of the projector's is derived; the language model has a hook of its own."""
        self.language_model.process_weights_after_loading()

    def make_caches(self, slots: int, positions: int) -> list[Cache]:
        return self.language_model.make_caches(slots, positions)

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        embedded = self.language_model.embed(batch)
        fill_slots(embedded, batch.local_token_ids, self.images, self._encode)
        return self.language_model.run(embedded, batch, caches)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.language_model.logits(hidden, rows, batch)

    def _encode(self, image: int) -> torch.Tensor:
        return self.projector.encode(image, len(self.images[image]))
