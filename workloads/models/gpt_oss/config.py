"""Dimensions of a gpt-oss stack, full size or proxy. Imports no torch: the planner reads it too."""

from dataclasses import dataclass

from workloads.loading.tensor_table import MXFP4_GROUP

#: How a checkpoint holds the experts: all experts of a layer in one tensor, as published; one expert at a time, named
#: as compressed-tensors does; the same, named as Quark does.
CHECKPOINT_LAYOUTS = ("combined", "per_expert", "quark")


@dataclass
class GptOssConfig:
    """Architecture of `GptOssForCausalLM`; defaults are the CPU proxy (`gpt_oss_tiny`)."""

    num_layers: int = 4  # the even ones see a window of keys only
    hidden_size: int = 96
    vocab_size: int = 1024
    rms_norm_eps: float = 1e-5

    num_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 16
    sliding_window: int = 16

    rope_theta: float = 150_000.0
    rope_factor: float = 32.0
    rope_original_positions: int = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0

    num_experts: int = 16
    num_experts_per_token: int = 4
    intermediate_size: int = 160  # five blocks of MXFP4, which two ranks share as three and two
    expert_alignment: int = 128  # the experts' kernel pads hidden and intermediate size to a multiple of it
    expert_quantization: str = "mxfp4"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    checkpoint_layout: str = "combined"  # one of CHECKPOINT_LAYOUTS

    def window(self, layer: int) -> int | None:
        """How many keys a query of decoder layer `layer` (from 0) sees; None: all before it."""
        return self.sliding_window if layer % 2 == 0 else None

    def intermediate_share(self, rank: int, ranks: int) -> tuple[int, int]:
        """(start, length) of what one of `ranks` tensor-parallel ranks has of the experts' intermediate size.

        Ranks share whole blocks, since a scale cannot be divided; the last ones may have fewer.
        Raises ValueError when one would have none.
        """
        blocks = self.intermediate_size // MXFP4_GROUP
        each = -(-blocks // ranks)
        start, end = min(rank * each, blocks), min((rank + 1) * each, blocks)
        if (ranks - 1) * each >= blocks:
            raise ValueError(
                f"intermediate_size {self.intermediate_size} is {blocks} blocks of {MXFP4_GROUP}, which {ranks} "
                f"tensor-parallel ranks share as {each} each, so that the last has none: use fewer, or expert "
                "parallelism."
            )
        return start * MXFP4_GROUP, (end - start) * MXFP4_GROUP

    def padded(self, width: int) -> int:
        """A width of the experts, or a share of one, as their kernel lays it out."""
        return -(-width // self.expert_alignment) * self.expert_alignment
