"""Dimensions of a Qwen3 stack, dense or mixture of experts, full size or proxy. Imports no torch: the planner reads it
too."""

from dataclasses import dataclass

QUANTIZATIONS = ("bf16", "fp8", "nvfp4")


@dataclass
class Qwen3Config:
    """Architecture of `Qwen3ForCausalLM` and, with experts, of `Qwen3MoeForCausalLM`; defaults are the dense CPU proxy
    (`qwen3_tiny`).

    quantization: of all matrices of attention, MLP and experts; embedding, head, norms and router are BF16.
    """

    num_layers: int = 3
    hidden_size: int = 256
    vocab_size: int = 1024
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    quantization: str = "fp8"  # one of QUANTIZATIONS

    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    max_position_embeddings: int = 8192

    intermediate_size: int = (
        384  # of a dense model; three FP8 tiles, which two ranks share as two and one, padded
    )
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0

    @property
    def intermediate(self) -> int:
        """Width between the two matrices of the MLP, or of an expert."""
        return self.moe_intermediate_size if self.num_experts else self.intermediate_size
