"""Dimensions of a DeepSeek-V4.1 stack, full size or proxy. Imports no torch: the planner reads it too."""

from dataclasses import dataclass, field, replace

from workloads.models.dspark.config import DsparkConfig

FP8_BLOCK = 32  # rows and columns of an FP8 matrix that share a scale, and columns of an activation's group
QUERY_CHUNK, OUTPUT_CHUNK = 16, 32  # channels of the heads that take turns in the attention kernel's order


@dataclass
class DeepseekV41Config(DsparkConfig):
    """Architecture of `DeepseekV41ForCausalLM`, its drafter and, with `vision`, what wraps it; defaults are the CPU
    proxy (`deepseek_v41_tiny`). The drafter reads the mean of the copies at the entry of `dspark_target_layer_ids`."""

    vision: bool = False
    vision_hidden_size: int = 48

    num_layers: int = 8
    hidden_size: int = 256
    vocab_size: int = 1024
    rms_norm_eps: float = 1e-20

    # attention: one head of keys, which are values too; queries and outputs through low ranks
    num_heads: int = 4
    kernel_head_multiple: int = 8  # heads of a rank are padded to it for the kernel, with sinks of -inf
    head_dim: int = 96  # six chunks of a query for four heads: an order that is not its own inverse
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 96
    o_groups: int = 2
    o_lora_rank: int = 64
    sliding_window: int = 16

    # tokens that an entry pools, by layer, the drafter's last: 0 window only. A source's keys serve the layers after
    # it, up to the next.
    compress_ratios: list[int] = field(default_factory=lambda: [0, 0, 2, 2, 1, 1, 1, 1])
    kv_source_layers: list[int] = field(default_factory=lambda: [2, 4])
    index_source_layers: list[int] = field(default_factory=lambda: [2, 4, 6])
    index_num_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 8
    # the layer that chooses blocks of entries, among which the indexers after it choose
    candidate_source_layer: int = 4
    candidate_topk_blocks: int = 6
    candidate_block_size: int = 4

    # rotation: layers that compress use their own theta and YaRN
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    rope_factor: float = 16.0
    rope_original_positions: int = 512
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    max_position_embeddings: int = 8192

    # hyper-connections, each collapsed with the coefficients of the sublayer before
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    # engram: in these layers, tables of hashed n-grams of 2 to this many tokens, in `heads` parts each
    engram_layers: list[int] = field(default_factory=lambda: [1, 3])
    engram_max_ngram_size: int = 3
    engram_num_heads: int = 2
    engram_vocab_size: int = 199  # of a head at least; its size is a prime
    engram_head_dim: int = 32
    engram_pad_token: int = 2

    # every feed-forward is a mixture of experts
    num_experts: int = 16
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 96
    kernel_intermediate_multiple: int = 128  # to which the shared experts are padded for the kernel
    routed_scaling_factor: float = 1.5
    gate_temperature: float = 1.0
    swiglu_limit: float = 10.0
    expert_quantization: str = "mxfp4"

    # token ids that stand for parts of images: they break n-grams and are routed by a bias of their own
    image_token_start: int = 258  # first id beyond the byte tokenizer's
    image_lengths: list[int] = field(default_factory=lambda: [24, 40])  # tokens of each image

    # the drafter's stages are layers with experts of their own number; of its proposals the first below that
    # confidence ends a block
    dspark_num_experts: int = 8
    dspark_num_experts_per_token: int = 2
    dspark_min_confidence: float = 0.0

    @property
    def num_mtp_layers(self) -> int:
        """DSpark is its only drafter."""
        return 0

    @property
    def all_layers(self) -> int:
        """Those of the target and of its drafter."""
        return self.num_layers + self.num_dspark_layers

    @property
    def image_tokens(self) -> int:
        """Of all images."""
        return sum(self.image_lengths)

    @property
    def image_ids(self) -> range:
        return range(self.image_token_start, self.image_token_start + self.image_tokens)

    def of_drafter(self) -> "DeepseekV41Config":
        """Dimensions of the drafter's stages, which are numbered after the target's layers."""
        experts, per_token = self.dspark_num_experts, self.dspark_num_experts_per_token
        return replace(self, num_experts=experts, num_experts_per_token=per_token)

    @property
    def shared_intermediate_size(self) -> int:
        """Of the shared experts, which are one MLP."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def engram_heads(self) -> int:
        """Of all orders of n-grams."""
        return (self.engram_max_ngram_size - 1) * self.engram_num_heads

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed keys a layer attends to; None: it attends to its window only."""
        return _latest(self.kv_source_layers, layer) if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose choice among those keys it follows."""
        return _latest(self.index_source_layers, layer) if self.compress_ratios[layer] else None


def _latest(sources: list[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)
