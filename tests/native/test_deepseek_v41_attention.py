"""Attentions of DeepSeek-V4.1 that share keys and choices, against a plain computation, token by token from the
checkpoint's own tensors."""

from functools import cached_property
from pathlib import Path

import pytest
import torch
from deepseek_reference import PlainLayer
from deepseek_v41_toy import TOY
from family_engine import start_engine
from torch import Tensor

from workloads.engines.native import NativeEngine
from workloads.kernels.compressed_attention import through_mxfp4, through_nvfp4
from workloads.kernels.fp8_blocks import through_fp8
from workloads.kernels.linear import round_to_bf16
from workloads.loading.generate import generate_checkpoint
from workloads.models.batch import Batch, Segment
from workloads.models.deepseek_v41.attention import Shared, SharedKeyAttention
from workloads.models.parallel import ALONE

TOKENS = 45  # more entries than the indexer may choose, and than the blocks that the filter lets through hold


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return generate_checkpoint(TOY, 0, tmp_path_factory.mktemp("deepseek_v41") / "checkpoint")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> NativeEngine:
    return start_engine(checkpoint, TOY)


class Reference(PlainLayer):
    """Attention of one layer over one request with inputs `x`. Layers that share say so by number: of keys, and of who
    chooses among them."""

    def __init__(self, checkpoint: Path, layer: int, x: Tensor, earlier: list["Reference"]) -> None:
        super().__init__(checkpoint, layer, TOY, 32)
        self.x = x
        self.latent = self.norm(round_to_bf16(self.fp8("wq_a", x)), "q_norm.weight")
        every = [*earlier, self]
        if not self.ratio:
            return
        source, chooser = TOY.kv_source(layer), TOY.index_source(layer)
        assert source is not None
        assert chooser is not None
        if source == layer:
            self.make_keys()
        self.source = every[source]
        if chooser == layer:
            self.choose(every[TOY.candidate_source_layer] if layer > TOY.candidate_source_layer else None)
        self.chooser = every[chooser]

    def make_keys(self) -> None:
        r = self.ratio
        kv = (self.x.double() @ self.tensor("compressor.wkv.weight").t()).float().double()
        if r > 1:
            z = (self.x.double() @ self.tensor("compressor.wgate.weight").t()).float().double()
            powers = torch.exp(z[: len(z) // r * r]).view(-1, r, TOY.head_dim)
            kv = (powers * kv[: len(z) // r * r].view(powers.shape)).sum(1) / powers.sum(1)
        latents = self.norm(kv, "compressor.norm.weight")
        self.entries = [
            through_nvfp4(round_to_bf16(self.turn(latent, j * r))) for j, latent in enumerate(latents)
        ]
        keys = self.norm(
            round_to_bf16(latents.double() @ self.tensor("indexer.wk.weight").t()), "indexer.k_norm.weight"
        )
        self.keys = [
            through_mxfp4(round_to_bf16(self.turn(key, j * r))).double() for j, key in enumerate(keys)
        ]

    def choose(self, filtered_by: "Reference | None") -> None:
        self.chosen, self.candidates = [], []
        size = TOY.candidate_block_size
        for i, scores in enumerate(self.scores(self.x, self.latent, self.source.keys, through_mxfp4)):
            best = {
                block: max(scores[block * size : (block + 1) * size])
                for block in range(-(-len(scores) // size))
            }
            best[(len(scores) - 1) // size] = float("inf")
            blocks = sorted(best, key=lambda block, best=best: -best[block])[: TOY.candidate_topk_blocks]
            self.candidates.append({j for j in range(len(scores)) if j // size in blocks})
            allowed = range(len(scores)) if filtered_by is None else sorted(filtered_by.candidates[i])
            self.chosen.append(sorted(allowed, key=lambda j, of=scores: -of[j])[: TOY.index_topk])

    @cached_property
    def output(self) -> Tensor:
        q = round_to_bf16(self.fp8("wq_b", self.latent)).view(len(self.x), TOY.num_heads, TOY.head_dim)
        kv = self.norm(round_to_bf16(self.fp8("wkv", self.x)), "kv_norm.weight")
        own = [through_fp8(round_to_bf16(self.turn(kv[i], i)), 32) for i in range(len(self.x))]
        rows = []
        for i in range(len(self.x)):
            seen = own[max(0, i - TOY.sliding_window + 1) : i + 1]
            if self.ratio:
                seen = seen + [self.source.entries[j].double() for j in self.chooser.chosen[i]]
            rows.append(self.attended(q[i], torch.stack(seen), i))
        return self.projected(torch.stack(rows))


@pytest.fixture(scope="module")
def references(checkpoint: Path) -> list[Reference]:
    """Every layer has inputs of its own."""
    generator, made = torch.Generator().manual_seed(5), []
    for layer in range(TOY.num_layers):
        x = torch.randn(TOKENS, TOY.hidden_size, generator=generator).to(torch.bfloat16)
        made.append(Reference(checkpoint, layer, x, made))
    return made


@pytest.mark.parametrize("pieces", [[TOKENS], [20, 1, 1, 13, 1, 9]], ids=["at once", "in pieces"])
def test_attentions_equal_the_plain_computation(
    engine: NativeEngine, references: list[Reference], pieces: list[int]
) -> None:
    model = engine.roots()["target"].model
    attentions: list[SharedKeyAttention] = [layer.attn for layer in model.decoder_layers()]
    caches = [attention.make_cache(3, 128) for attention in attentions]
    for held in (tensor for cache in caches for tensor in vars(cache).values()):
        held.fill_(torch.nan)  # a new request must read nothing that a slot held before
    out: list[list[Tensor]] = [[] for _ in attentions]
    start = 0
    for length in pieces:
        batch, shared = (
            Batch([0] * length, [Segment(1, start, length, 0)], ALONE, torch.device("cpu")),
            Shared(),
        )
        for attention, cache, reference, of_layer in zip(attentions, caches, references, out, strict=True):
            x = reference.x[start : start + length]
            table = model.rotary.of(attention.ratio)
            of_layer.append(attention(x, batch, cache, table, shared))
        start += length
    for reference, of_layer in zip(references, out, strict=True):
        torch.testing.assert_close(torch.cat(of_layer), reference.output, rtol=1e-9, atol=1e-9)


def test_layers_choose_and_the_filter_leaves_entries_out(references: list[Reference]) -> None:
    """So that the comparison above has something to compare."""
    pairs, singles, filtered = references[1], references[3], references[5]
    assert len(pairs.chosen[-1]) == TOY.index_topk < len(pairs.entries) == TOKENS // 2
    allowed = TOY.candidate_topk_blocks * TOY.candidate_block_size
    assert TOY.index_topk < len(singles.candidates[-1]) <= allowed < len(singles.entries) == TOKENS
    scores = filtered.scores(filtered.x, filtered.latent, singles.keys, through_mxfp4)[-1]
    unfiltered = sorted(range(TOKENS), key=lambda j: -scores[j])[: TOY.index_topk]
    assert set(filtered.chosen[-1]) <= singles.candidates[-1]
    assert set(filtered.chosen[-1]) != set(unfiltered)
