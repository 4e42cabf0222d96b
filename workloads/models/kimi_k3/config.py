"""Dimensions of a Kimi-K3 stack, full size or proxy. Imports no torch: the planner reads it too."""

from dataclasses import dataclass, field

from workloads.models.dspark.config import DsparkConfig


@dataclass
class KimiK3Config(DsparkConfig):
    """Architecture of `KimiK3ForCausalLM` and its drafter; defaults are the CPU proxy (`kimi_k3_tiny`).

    Layers are numbered from 0 here; the published config numbers `full_attn_layers` from 1.
    """

    num_layers: int = 4
    full_attention_layers: list[int] = field(default_factory=lambda: [3])  # MLA; every other layer is KDA
    hidden_size: int = 256
    vocab_size: int = 1024
    rms_norm_eps: float = 1e-5

    # MLA without rotation: "rope" channels exist but carry no position
    num_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32

    # Kimi delta attention
    kda_num_heads: int = 4
    kda_head_dim: int = 32
    kda_conv_size: int = 4
    kda_gate_rank: int = 32  # inner width of f_a/f_b
    kda_gate_lower_bound: float = -5.0
    kda_a_log_size: int = 8  # A_log is stored longer than kda_num_heads; the tail is never read

    attn_res_block_size: int = 2

    # feed-forward: the first layers dense, then latent MoE
    num_dense_layers: int = 1
    dense_intermediate_size: int = 512
    moe_latent_size: int = 128
    num_experts: int = 32
    num_experts_per_token: int = 4
    moe_intermediate_size: int = 96  # not a multiple of 128, so that expert padding exists in the proxy
    shared_intermediate_size: int = 192
    routed_scaling_factor: float = 1.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0

    # the drafter: an MTP block, or DSpark with dense MLA layers, which have the widths of the target's but for these
    num_mtp_layers: int = 1
    dspark_num_heads: int = 8
    dspark_intermediate_size: int = 320
    dspark_rope_theta: float = 50000.0
    dspark_rope_factor: float = 32.0
    dspark_rope_original_positions: int = 512
    dspark_rope_beta_fast: float = 32.0
    dspark_rope_beta_slow: float = 1.0
    dspark_rope_mscale_all_dim: float = 1.0

    def is_full_attention(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0; MTP blocks follow the last) is MLA."""
        return layer in self.full_attention_layers or layer >= self.num_layers

    def is_dense(self, layer: int) -> bool:
        """Whether decoder layer `layer` has a dense MLP instead of experts."""
        return layer < self.num_dense_layers
