"""Dimensions that ordinary decoders share, full size or proxy. Imports no torch: the planner reads them too."""

from dataclasses import dataclass


@dataclass
class DenseConfig:
    """A decoder of grouped-query attention and gated MLPs; families add what is their own. Defaults are a CPU proxy."""

    num_layers: int = 3
    hidden_size: int = 128
    intermediate_size: int = 320
    vocab_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 16
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e4
