"""A toy DeepSeek-V4.1 for tests: layers that make keys of two tokens and of one, choose, filter and reuse."""

import torch

from workloads.models.deepseek_v41.config import DeepseekV41Config

TOY = DeepseekV41Config(
    num_layers=6,
    hidden_size=128,
    vocab_size=320,
    compress_ratios=[0, 2, 2, 1, 1, 1],
    kv_source_layers=[1, 3],
    index_source_layers=[1, 3, 5],
    candidate_source_layer=3,
    engram_layers=[1, 4],
    engram_vocab_size=97,
    num_experts=4,
    image_lengths=[12, 20],
)
CONSTANT = ("cos_sin_cache", "token_map", "multipliers", "sizes", "offsets")
PADDING = frozenset(
    {("weight", -torch.inf)}  # sinks of the heads that fill up the kernel's tile
    | {("weight", 0.0), ("weight_scale", 127.0)}  # of the shared experts
    | {
        (f"_transformed_l{i}_weights[{item}]", value)
        for i in (1, 2)
        for item, value in enumerate((0.0, 127.0))
    }
)
