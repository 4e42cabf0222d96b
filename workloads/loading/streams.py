"""Values of float tensors, each tensor from its own counter-based stream, so that any of them can be made alone.

Values come from the raw 64-bit outputs of numpy's Philox (part of numpy's compatibility guarantee, unlike its
distributions) through integer sums and single IEEE roundings: the bytes are the same on every machine.
"""

import hashlib
from collections.abc import Iterable, Iterator
from math import prod, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK = 1 << 20  # values drawn at a time
SUM_OF_FOUR_STD = sqrt(4 * (65536**2 - 1) / 12)  # of the sum of four uniform 16-bit integers
SUM_OF_FOUR_MEAN = 2 * 65535

HEADS = ("lm_head", "head")  # modules that give logits
HEAD_GAIN = 2.0  # logits of a normalised hidden state then have a standard deviation near 2
NORM_SPREAD = 0.1
BIAS_SPREAD = 0.02  # beside sigmoid router scores, whose own spread is near 0.2
A_LOG = (-0.7, 0.7)
DT_BIAS = (-4.0, -1.0)  # with A_log: log-decays -5*sigmoid(exp(A)*dt) from about -0.002 to -1.9 per token


def float_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, heads: Iterable[str] = HEADS
) -> torch.Tensor:
    """Values of the tensor `name` of a checkpoint: contiguous, of `shape` and `dtype` (a float type).

    Matrices are normal with a spread of 1/sqrt(inputs), so that activations keep theirs; norms lie around 1;
    biases are small; decay parameters give memories of one to some hundred tokens. heads: modules whose matrix
    gives logits.
    """
    values = torch.empty(prod(shape), dtype=dtype)
    filled = 0
    for chunk in _floats(name, shape, seed, heads):
        values[filled : filled + chunk.size] = torch.from_numpy(chunk)
        filled += chunk.size
    return values.view(shape)


def _floats(
    name: str, shape: tuple[int, ...], seed: int, heads: Iterable[str]
) -> Iterator[NDArray[np.float32]]:
    """Chunks of a float tensor's values, in order."""
    stem, _, leaf = name.rpartition(".")
    module, count = stem.rpartition(".")[2], prod(shape)
    if leaf in ("A_log", "dt_bias"):
        return uniform(name, seed, count, *(A_LOG if leaf == "A_log" else DT_BIAS))
    if leaf.endswith("bias"):
        return normal(name, seed, count, 0.0, BIAS_SPREAD)
    if len(shape) <= 1:
        return normal(name, seed, count, 1.0, NORM_SPREAD)
    if module in heads or module == "markov_w2":
        return normal(name, seed, count, 0.0, HEAD_GAIN / sqrt(shape[-1]))
    if module in ("embed_tokens", "embed", "markov_w1"):
        return normal(name, seed, count, 0.0, 1.0)
    return normal(name, seed, count, 0.0, 1 / sqrt(shape[-1]))


def index_tensor(name: str, shape: tuple[int, ...], below: int, seed: int) -> torch.Tensor:
    """int64 of `shape` [..., columns], each row different numbers below `below`: an arithmetic sequence that wraps."""
    columns = shape[-1]
    words = np.concatenate(list(_words(name, seed, prod(shape[:-1]))))
    step = 1 + (words >> np.uint64(32)) % np.uint64(below // columns)
    values = words[:, None] % np.uint64(below) + step[:, None] * np.arange(columns, dtype=np.uint64)
    return torch.from_numpy((values % np.uint64(below)).astype(np.int64)).view(shape)


def _words(stream: str, seed: int, count: int) -> Iterator[NDArray[np.uint64]]:
    """`count` 64-bit words of the stream of (seed, name), in chunks."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:16], "little")
    philox = np.random.Philox(key=key)
    for start in range(0, count, CHUNK):
        yield philox.random_raw(min(CHUNK, count - start))


def normal(stream: str, seed: int, count: int, mean: float, std: float) -> Iterator[NDArray[np.float32]]:
    """Bell-shaped values within 3.46 std: sums of four uniform 16-bit integers, exact until the last steps.
    (Exact normals would need logarithms and cosines, whose last bit differs between machines.)"""
    for words in _words(stream, seed, count):
        quarters = words.view("<u2").reshape(-1, 4).astype(np.int32)
        total = quarters[:, 0] + quarters[:, 1] + quarters[:, 2] + quarters[:, 3] - SUM_OF_FOUR_MEAN
        yield total.astype(np.float32) * np.float32(std / SUM_OF_FOUR_STD) + np.float32(mean)


def uniform(stream: str, seed: int, count: int, low: float, high: float) -> Iterator[NDArray[np.float32]]:
    """Values of [low, high) in steps of 2^-24 of the width."""
    for words in _words(stream, seed, count):
        unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        yield unit * np.float32(high - low) + np.float32(low)
