"""Dimensions of a DeepSeek-V4 stack, full size or proxy. Imports no torch: the planner reads it too."""

from dataclasses import dataclass, field
from typing import Protocol

from workloads.models.dspark.config import DsparkConfig


@dataclass
class DeepseekV4Config(DsparkConfig):
    """Architecture of `DeepseekV4ForCausalLM`, its drafter and, with `vision`, what wraps it; defaults are the CPU
    proxy (`deepseek_v4_tiny`)."""

    vision: bool = False
    vision_hidden_size: int = 48
    image_token_start: int = 258  # first id beyond the byte tokenizer's
    image_lengths: list[int] = field(default_factory=lambda: [24, 40])  # tokens of each image

    num_layers: int = 6
    hidden_size: int = 256
    vocab_size: int = 1024
    rms_norm_eps: float = 1e-6

    # attention: one head of keys, which are values too; queries and outputs through low ranks
    num_heads: int = 4
    kernel_head_multiple: int = 8  # heads of a rank are padded to it for the kernel, with sinks of -inf
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 160  # a block of 128 rows and part of another
    o_groups: int = 2
    o_lora_rank: int = 128
    sliding_window: int = 16
    # of every layer, the drafter's last: 0 window only, 4 overlapping groups chosen by the indexer, more: all groups of
    # that size
    compress_ratios: list[int] = field(default_factory=lambda: [0, 0, 4, 8, 4, 0, 0])
    index_num_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 8

    # rotation: layers that compress use their own theta and YaRN
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    rope_factor: float = 16.0
    rope_original_positions: int = 512
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 8192

    # hyper-connections
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    # every feed-forward is a mixture of experts; the first layers look their experts up by token id
    num_hash_layers: int = 2
    num_experts: int = 16
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 128
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    expert_quantization: str = "mxfp4"  # mxfp4, or fp8 as the base models are published

    # the drafter: an MTP block, or the stages of DSpark; of its proposals the first below that confidence ends a block
    num_mtp_layers: int = 1
    dspark_min_confidence: float = 0.0

    @property
    def all_layers(self) -> int:
        """Those of the target and of its drafter."""
        return self.num_layers + self.num_mtp_layers + self.num_dspark_layers

    @property
    def shared_intermediate_size(self) -> int:
        """Of the shared experts, which are one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    def indexed(self, layer: int) -> bool:
        """Whether the groups of a layer overlap and are chosen by an indexer."""
        return self.compress_ratios[layer] == OVERLAPPING

    def hashed(self, layer: int) -> bool:
        """Whether a layer finds its experts by token id."""
        return layer < self.num_hash_layers


OVERLAPPING = 4  # the compress ratio whose groups overlap


class Dimensions(Protocol):
    """What DeepSeek-V4 and its successors have in common, by the names of `DeepseekV4Config`."""

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    num_heads: int
    kernel_head_multiple: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    compress_ratios: list[int]
    index_num_heads: int
    index_head_dim: int
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_positions: int
    rope_beta_fast: float
    rope_beta_slow: float
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    num_experts: int
    moe_intermediate_size: int
    expert_quantization: str
    num_layers: int
    num_dspark_layers: int
    dspark_block_size: int
    dspark_target_layer_ids: list[int]
    dspark_mask_token_id: int
    dspark_markov_rank: int
    dspark_min_confidence: float

    @property
    def shared_intermediate_size(self) -> int: ...
