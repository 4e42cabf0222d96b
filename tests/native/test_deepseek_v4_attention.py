"""Compressed attention of a layer against a plain computation, token by token from the checkpoint's own tensors."""

from pathlib import Path

import pytest
import torch
from deepseek_reference import PlainLayer
from deepseek_v4_engine import TOY, make_checkpoint, start_engine
from torch import Tensor

from workloads.engines.native import NativeEngine
from workloads.kernels.compressed_attention import through_fp4
from workloads.kernels.fp8_blocks import through_fp8
from workloads.kernels.linear import round_to_bf16
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v4.attention import CompressedAttention
from workloads.models.parallel import ALONE

TOKENS = 75  # 18 groups of 4, of which the indexer may choose 8; an unfinished group of 4 and of 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> NativeEngine:
    return start_engine(checkpoint)


class Reference(PlainLayer):
    """Attention of one layer over one request; every step that rounds is written out."""

    def __init__(self, checkpoint: Path, layer: int) -> None:
        super().__init__(checkpoint, layer, TOY, 128)

    def key(self, x: Tensor) -> Tensor:
        """The first 48 channels of a rotated key in FP8, its others as they are."""
        return torch.cat([through_fp8(x[:48], 64), x[48:].double()])

    def entries(self, x: Tensor, stem: str, dim: int, overlap: bool, rotated: bool) -> list[Tensor]:
        """Every finished group, pooled."""
        base, r = f"{stem}compressor.", self.ratio
        kv, z = ((x.double() @ self.tensor(f"{base}{name}.weight").t()) for name in ("wkv", "wgate"))
        ape, found = self.tensor(f"{base}ape"), []
        z = torch.stack([z[p] + ape[p % r] for p in range(len(x))])
        kv, z = kv.float().double(), z.float().double()
        for j in range(len(x) // r):
            own = range(j * r, j * r + r)
            candidates = [(kv[p][-dim:], z[p][-dim:]) for p in own]
            if overlap and j:
                candidates += [(kv[p - r][:dim], z[p - r][:dim]) for p in own]
            powers = torch.stack([torch.exp(c[1]) for c in candidates])
            pooled = (powers * torch.stack([c[0] for c in candidates])).sum(0) / powers.sum(0)
            entry = round_to_bf16(self.turn(self.norm(pooled, f"{base}norm.weight"), j * r))
            found.append(through_fp4(entry).double() if rotated else self.key(entry))
        return found

    def chosen(self, x: Tensor, latent: Tensor) -> list[list[int]]:
        """The groups that each token attends to."""
        counts = [(i + 1) // self.ratio if self.ratio else 0 for i in range(len(x))]
        if not TOY.indexed(self.layer):
            return [list(range(count)) for count in counts]
        keys = self.entries(x, "indexer.", TOY.index_head_dim, overlap=True, rotated=True)
        scores = self.scores(x, latent, keys, through_fp4)
        return [sorted(range(len(of)), key=lambda j, of=of: -of[j])[: TOY.index_topk] for of in scores]

    def __call__(self, x: Tensor) -> Tensor:
        latent = self.norm(round_to_bf16(self.fp8("wq_a", x)), "q_norm.weight")
        q = round_to_bf16(self.fp8("wq_b", latent)).view(len(x), 4, 64).double()
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        kv = self.norm(round_to_bf16(self.fp8("wkv", x)), "kv_norm.weight")
        keys = [self.key(round_to_bf16(self.turn(kv[i], i))) for i in range(len(x))]
        groups: list[Tensor] = []
        if self.ratio:
            groups = self.entries(x, "", 64, TOY.indexed(self.layer), rotated=False)
        chosen, rows = self.chosen(x, latent), []
        for i in range(len(x)):
            seen = torch.stack([*keys[max(0, i - 15) : i + 1], *(groups[j] for j in chosen[i])])
            rows.append(self.attended(q[i], seen, i))
        return self.projected(torch.stack(rows))


def inputs(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, TOY.hidden_size, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("layer", [0, 1, 2], ids=["window", "indexed groups", "all groups"])
@pytest.mark.parametrize("pieces", [[TOKENS], [30, 1, 1, 13, 1, 29]], ids=["at once", "in pieces"])
def test_attention_equals_the_plain_computation(
    engine: NativeEngine, checkpoint: Path, layer: int, pieces: list[int]
) -> None:
    model = engine.roots()["target"]
    attention = model.get_submodule(f"model.layers.{layer}.attn")
    assert isinstance(attention, CompressedAttention)
    table = model.model.rotary.of(attention.ratio)
    cache, x, out, start = attention.make_cache(3, 128), inputs(TOKENS), [], 0
    for held in vars(cache).values():
        held.fill_(torch.nan)  # a new request must read nothing that a slot held before
    for length in pieces:
        batch = Batch([0] * length, [Segment(1, start, length, 0)], ALONE, x.device)
        out.append(attention(x[start : start + length], batch, cache, table))
        start += length
    torch.testing.assert_close(torch.cat(out), Reference(checkpoint, layer)(x), rtol=1e-9, atol=1e-9)


def test_the_indexer_leaves_groups_out(checkpoint: Path) -> None:
    """So that the comparison above has something to choose."""
    x = inputs(TOKENS)
    reference = Reference(checkpoint, 1)
    latent = reference.norm(round_to_bf16(reference.fp8("wq_a", x)), "q_norm.weight")
    chosen = reference.chosen(x, latent)
    assert len(chosen[-1]) == TOY.index_topk < TOKENS // 4
    assert sorted(chosen[-1]) != list(range(TOY.index_topk))
