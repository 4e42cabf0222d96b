"""Dimensions of a MiniCPM-V or -O stack. Imports no torch: the planner reads them too."""

from dataclasses import dataclass, field

from workloads.models.dense.config import DenseConfig
from workloads.models.media import slots


@dataclass
class MiniCpmConfig(DenseConfig):
    """A language model, the resampler of images and, for -O, the projector of sounds. Defaults are the CPU proxy of -O.

    image_heights, image_widths: of each image that a prompt may hold, in patches. audio_frames: of each sound, as the
    audio tower gives them; empty for -V.
    """

    num_queries: int = 16  # embeddings of an image
    vision_hidden_size: int = 48
    resampler_heads: int = 4
    resampler_max_size: int = 70  # patches that the table of positions knows along each side
    image_token_start: int = 258  # first id beyond the byte tokenizer's; sounds follow the images
    image_heights: list[int] = field(default_factory=lambda: [3, 2, 6, 1])
    image_widths: list[int] = field(default_factory=lambda: [4, 5, 3, 9])
    audio_frames: list[int] = field(default_factory=lambda: [12, 9])
    audio_hidden_size: int = 40
    audio_pool: int = 2  # frames that are averaged into one embedding

    @property
    def image_slots(self) -> list[range]:
        """The token ids of each image."""
        return slots(self.image_token_start, [self.num_queries] * len(self.image_heights))

    @property
    def audio_slots(self) -> list[range]:
        """The token ids of each sound."""
        first = self.image_token_start + self.num_queries * len(self.image_heights)
        return slots(first, [frames // self.audio_pool for frames in self.audio_frames])
