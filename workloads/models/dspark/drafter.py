"""A DSpark drafter: from states of some of the target's layers, a block of proposals in one pass."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch

from workloads.kernels.sampling import greedy
from workloads.loading.weights import WeightModule
from workloads.models.batch import Batch, Segment
from workloads.models.dspark.config import Blocks
from workloads.models.dspark.heads import MarkovHead
from workloads.models.layers import ParallelLMHead, VocabParallelEmbedding, all_tokens
from workloads.models.parallel import Group
from workloads.models.served import Cache, Drafter

NO_TOKEN = -1


class BlockDrafter(Drafter):
    """The block of a request whose target has just chosen token y at position p is y and then mask tokens, at p and
    after. Its tokens see each other, whatever their order, and of what the target has read whatever `write_context`
    keeps. Token i of the block proposes the token at p + i + 1.

    Embedding and head are the target's own modules: no load of the drafter touches them.
    """

    markov_head: MarkovHead

    def __init__(
        self, config: Blocks, tp: Group, embed_tokens: VocabParallelEmbedding, lm_head: ParallelLMHead
    ) -> None:
        super().__init__()
        self.tp, self.block_size, self.mask = tp, config.dspark_block_size, config.dspark_mask_token_id
        self.embed_tokens, self.lm_head = embed_tokens, lm_head

    def weight_modules(self) -> Iterator[tuple[str, WeightModule]]:
        shared = (self.embed_tokens, self.lm_head)
        return ((path, module) for path, module in super().weight_modules() if module not in shared)

    @abstractmethod
    def context(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target returned, [n, ...] -> what the layers read of the target's tokens, BF16 [n, H]."""

    @abstractmethod
    def write_context(self, context: torch.Tensor, batch: Batch, caches: Sequence[Cache]) -> None:
        """Keep what later blocks attend to. context: BF16 [T, H] of all tokens of the batch."""

    @abstractmethod
    def draft(self, embedded: torch.Tensor, block: Batch, caches: Sequence[Cache]) -> torch.Tensor:
        """BF16 [n, H], embeddings of this rank's tokens of the blocks -> BF16 [n, H] for `logits`. Collective."""

    def kept(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """bool [R]: which proposals are worth a check by the target. hidden: BF16 [R, H], what `draft` made of a token
        of the block; embedded: BF16 [R, rank], of the token before the proposal."""
        return torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)

    def forward(self, batch: Batch, hidden: torch.Tensor, caches: Sequence[Cache]) -> torch.Tensor:
        """Reads the target's states and not its tokens; returns the states."""
        context = all_tokens(self.tp, batch, self.context(hidden))
        if batch.tokens:
            self.write_context(context, batch, caches)
        return hidden

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden, rows, batch.share)
        return logits

    def proposals(
        self, drafted: torch.Tensor, rows: torch.Tensor, batch: Batch, caches: Sequence[Cache]
    ) -> list[list[int]]:
        anchors = batch.token_ids[rows]
        block = self._block(anchors.tolist(), rows.tolist(), batch)
        embedded = self.embed_tokens(block.token_ids)[: block.local_tokens]
        hidden = self.draft(embedded, block, caches)
        return self._chosen(hidden, anchors, block) if block.tokens else []

    def _block(self, anchors: Sequence[int], rows: Sequence[int], batch: Batch) -> Batch:
        """The blocks of the requests whose last token in `batch` stands in these rows."""
        last = {segment.offset + segment.length - 1: segment for segment in batch.segments}
        size = self.block_size
        segments = [Segment(last[row].slot, last[row].end, size, i * size) for i, row in enumerate(rows)]
        ids = [token for anchor in anchors for token in (anchor, *[self.mask] * (size - 1))]
        return Batch(ids, segments, self.tp, batch.token_ids.device)

    def _chosen(self, hidden: torch.Tensor, anchors: torch.Tensor, block: Batch) -> list[list[int]]:
        """The likeliest tokens, one after the other, up to the first that is not kept."""
        shape = (len(anchors), self.block_size, -1)
        logits = self.logits(hidden, torch.arange(block.tokens, device=anchors.device), block).view(shape)
        states = all_tokens(self.tp, block, hidden).view(shape)
        chosen, previous, kept = [], anchors, torch.ones_like(anchors, dtype=torch.bool)
        for place in range(self.block_size):
            embedded = self.markov_head.markov_w1(previous)
            kept = kept & self.kept(states[:, place], embedded)
            previous = greedy(logits[:, place] + self.markov_head.bias(embedded))
            chosen.append(torch.where(kept, previous, NO_TOKEN))
        return [[token for token in row if token != NO_TOKEN] for row in torch.stack(chosen, 1).tolist()]
