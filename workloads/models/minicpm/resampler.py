"""The resampler of images: learned queries attend once to the patches of an image, whatever their number."""

import numpy as np
import torch

from workloads.kernels.linear import linear_partial, round_to_bf16
from workloads.kernels.norm import layer_norm
from workloads.kernels.resampler import cross_attention
from workloads.loading.weights import Placement, Weight, WeightModule, whole
from workloads.models.layers import ReplicatedLinear, Rows, vector
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.minicpm.tensors import RESAMPLER

LAYER_NORM_EPS = 1e-6


def sincos_positions(width: int, side: int) -> torch.Tensor:
    """Two-dimensional sine-cosine table, float32 [side, side, width] (row, column), rounded once.

    The first half of the channels encodes the column, the second the row; a half holds the sines of p * w_i, then the
    cosines, with w_i = 10000^(-i / (width/4)). As the published table, where the column comes first.
    """
    frequencies = 10000.0 ** (-np.arange(width // 4) / (width / 4))
    angles = np.arange(side)[:, None] * frequencies
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # [side, width/2]
    shape = (side, side, width // 2)
    table = np.concatenate([np.broadcast_to(line, shape), np.broadcast_to(line[:, None], shape)], axis=-1)
    return torch.from_numpy(table.astype(np.float32))


class LayerNorm(WeightModule):
    """`weight` and `bias` [size]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, source: str) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.add_weight(name, vector(f"{source}.{name}", size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, LAYER_NORM_EPS)


class BiasedLinear(WeightModule):
    """A matrix [rows, columns] with a bias [rows], whole on every rank."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, columns: int, rows: int, weight: str, bias: str) -> None:
        super().__init__()
        self.add_weight("weight", _matrix(weight, rows, columns))
        self.add_weight("bias", vector(bias, rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """BF16 [T, columns] -> BF16 [T, rows]."""
        return round_to_bf16(linear_partial(x, self.weight) + self.bias)


class Resampler(WeightModule):
    """Of every image the same number of embeddings, as wide as the language model. Whole on every rank.

    `query` BF16 [num_queries, width], `proj` BF16 [width, width], which is multiplied from the right. `pos_embed`
    float32 [side, side, width] follows from the dimensions, is in no checkpoint, and is made on the host: whichever
    way the weights arrive, the model's hook brings it to where they are.
    """

    query: torch.Tensor
    proj: torch.Tensor
    pos_embed: torch.Tensor

    def __init__(self, config: MiniCpmConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.resampler_heads
        self.add_weight("query", _matrix(f"{RESAMPLER}query", config.num_queries, width))
        self.kv_proj = ReplicatedLinear(
            config.vision_hidden_size, [Rows(f"{RESAMPLER}kv_proj.weight", width)]
        )
        attention = f"{RESAMPLER}attn."
        self.in_proj = BiasedLinear(
            width, 3 * width, f"{attention}in_proj_weight", f"{attention}in_proj_bias"
        )
        self.out_proj = BiasedLinear(width, width, f"{attention}out_proj.weight", f"{attention}out_proj.bias")
        self.ln_q, self.ln_kv, self.ln_post = (
            LayerNorm(width, f"{RESAMPLER}{name}") for name in ("ln_q", "ln_kv", "ln_post")
        )
        self.add_weight("proj", _matrix(f"{RESAMPLER}proj", width, width))
        table = sincos_positions(width, config.resampler_max_size)
        self.register_buffer("pos_embed", table, persistent=False)

    def finalize(self) -> None:
        self.pos_embed = self.pos_embed.to(self.query.device)  # the buffer itself where it is there already

    def forward(self, patches: torch.Tensor, height: int, columns: int) -> torch.Tensor:
        """Patches BF16 [height * columns, vision width], row by row -> BF16 [num_queries, width]."""
        values = self.ln_kv(self.kv_proj(patches))
        positions = self.pos_embed[:height, :columns].flatten(0, 1)
        keys = round_to_bf16(values.to(torch.float64) + positions)
        weights, biases = self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3)
        q, k, v = (
            round_to_bf16(linear_partial(x, weight) + bias)
            for x, weight, bias in zip((self.ln_q(self.query), keys, values), weights, biases, strict=True)
        )
        attended = self.ln_post(self.out_proj(cross_attention(q, k, v, self.heads)))
        return round_to_bf16(attended.to(torch.float64) @ self.proj.to(torch.float64))


def _matrix(source: str, rows: int, columns: int) -> Weight:
    shape = (rows, columns)
    return Weight(shape, torch.bfloat16, (Placement(source, whole(shape), whole(shape), whole(shape)),))
