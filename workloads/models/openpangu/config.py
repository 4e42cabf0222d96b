"""Dimensions of an OpenPangu stack with parameter sinks. Imports no torch: the planner reads them too."""

from dataclasses import dataclass, field

from workloads.models.dense.config import DenseConfig


@dataclass
class OpenPanguConfig(DenseConfig):
    """The text model, its MTP block and, with `vision`, what wraps it. Defaults are the CPU proxy."""

    num_sinks: int = 6  # published as param_sink_number
    num_mtp_layers: int = 1
    vision: bool = False
    vision_hidden_size: int = 48
    image_token_start: int = 258  # first id beyond the byte tokenizer's
    image_lengths: list[int] = field(default_factory=lambda: [24, 40])  # tokens of each image

    @property
    def prefix(self) -> str:
        """Of the text model's tensors in the checkpoint."""
        return "language_model." if self.vision else ""
