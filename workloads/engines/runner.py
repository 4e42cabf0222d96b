"""Runs requests to their end on one rank: forward passes, choice of tokens, draft proposals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workloads import heartbeat
from workloads.engines.protocol import Generation, Prompt
from workloads.engines.scheduler import Chunk, Limits, Scheduler, planned_passes
from workloads.kernels.sampling import sample, top_logprobs
from workloads.models.batch import Batch, Segment
from workloads.models.parallel import RankGroups, all_agree, from_last, largest
from workloads.models.served import Cache, Drafter, Target
from workloads.spec import Sampling

AGREE_EVERY = 8  # passes between the collectives that find out whether every rank has stopped early
NO_DRAFT = -1


@dataclass(frozen=True)
class Served:
    """What serves: the models of one rank with their caches."""

    groups: RankGroups
    target: Target
    target_caches: Sequence[Cache]
    draft: Drafter | None
    draft_caches: Sequence[Cache]
    device: torch.device


@dataclass
class _Request:
    prompt: Prompt
    tokens: list[int]
    generation: Generation


class Run:
    """The requests of one data-parallel rank. Its tensor-parallel ranks all run the same, and so do its pipeline
    stages, one after the other in each pass: the last one chooses the tokens and tells them to the others."""

    def __init__(
        self, served: Served, prompts: Sequence[Prompt], params: Sampling, limits: Limits, eos: frozenset[int]
    ) -> None:
        self._served, self._params, self._eos = served, params, eos
        self._requests = [_Request(p, list(p.token_ids), Generation(p.id, len(p.token_ids))) for p in prompts]
        lengths = [len(p.token_ids) for p in prompts]
        self._scheduler = Scheduler(lengths, limits)
        self._planned = largest(served.groups.world, planned_passes(lengths, limits))
        self._submitted = time.perf_counter()

    def to_end(self) -> list[Generation]:
        """Run forward passes until every rank is done; ranks without work take part with zero tokens.

        Nobody needs more passes than planned unless early stops repacked its prompts; all ranks find out
        together, so that none leaves the others waiting in a collective.
        """
        world = self._served.groups.world
        count = 0
        while not (self._asks(count) and all_agree(world, self._scheduler.done)):
            self._pass(self._scheduler.next_pass())
            heartbeat.advance()
            count += 1
        return [request.generation for request in self._requests]

    def _asks(self, count: int) -> bool:
        return count >= self._planned or (count > 0 and count % AGREE_EVERY == 0)

    def _pass(self, chunks: Sequence[Chunk]) -> None:
        served = self._served
        segments, offset = [], 0
        for chunk in chunks:
            segments.append(Segment(chunk.request.slot, chunk.start, chunk.length, offset))
            offset += chunk.length
        yielding = [(c, s) for c, s in zip(chunks, segments, strict=True) if c.yields_token]
        rows = torch.tensor([s.offset + s.length - 1 for _, s in yielding], device=served.device).long()
        batch = self._batch(chunks, segments, shift=0)
        hidden = served.target(batch, served.target_caches)
        if yielding:
            self._choose([chunk for chunk, _ in yielding], hidden, rows, batch)
        proposals: list[list[int]] = []
        if served.draft is not None:
            shifted = self._batch(chunks, segments, shift=1)
            drafted = served.draft(shifted, hidden, served.draft_caches)
            proposals = served.draft.proposals(drafted, rows, shifted, served.draft_caches)
        for (chunk, _), proposed in zip(yielding, proposals, strict=False):
            self._requests[chunk.request.index].generation.drafts.append(proposed)
        for chunk in chunks:
            self._advance(chunk)

    def _batch(self, chunks: Sequence[Chunk], segments: Sequence[Segment], shift: int) -> Batch:
        """The pass's tokens, or with shift 1 the token after each of them."""
        ids: list[int] = []
        for chunk in chunks:
            ids += self._requests[chunk.request.index].tokens[chunk.start + shift : chunk.end + shift]
        return Batch(ids, segments, self._served.groups.tp, self._served.device)

    def _choose(
        self, chunks: Sequence[Chunk], hidden: torch.Tensor, rows: torch.Tensor, batch: Batch
    ) -> None:
        """Append its next token to each request."""
        requests = [self._requests[chunk.request.index] for chunk in chunks]
        tokens = torch.empty_like(rows)
        if self._served.groups.on_last_stage:
            tokens = self._sample(requests, self._served.target.logits(hidden, rows, batch))
        chosen = from_last(self._served.groups.pp, tokens).tolist()
        for request, token in zip(requests, chosen, strict=True):
            request.tokens.append(token)
            request.generation.token_ids.append(token)

    def _sample(self, requests: Sequence[_Request], logits: torch.Tensor) -> torch.Tensor:
        """The next token of each request, int64 [R]. Notes its log-probabilities and the earlier proposal for it."""
        params = self._params
        positions = [len(request.generation.token_ids) for request in requests]
        ids = [request.prompt.id for request in requests]
        top_ids, top_values = top_logprobs(logits, params.top_logprobs)
        pairs = zip(top_ids.tolist(), top_values.tolist(), strict=True)
        for request, (best, values) in zip(requests, pairs, strict=True):
            request.generation.top_logprobs.append(list(zip(best, values, strict=True)))
            request.generation.draft_token_ids.append(_proposed(request.generation))
        return sample(logits, params.temperature, params.seed, ids, positions)

    def _advance(self, chunk: Chunk) -> None:
        request = self._requests[chunk.request.index]
        stop = chunk.yields_token and request.tokens[-1] in self._eos
        generation, seconds = request.generation, time.perf_counter() - self._submitted
        if chunk.yields_token and len(generation.token_ids) == 1:
            generation.first_token_s = seconds
        if self._scheduler.advance(chunk, stop):
            generation.total_s = seconds
            generation.finish_reason = "stop" if stop else "length"


def _proposed(generation: Generation) -> int:
    """What was proposed for the latest token: the first of the tokens that were to follow the one before it."""
    return next(iter(generation.drafts[-1]), NO_DRAFT) if generation.drafts else NO_DRAFT


def check_prompts(prompts: Sequence[Prompt], new_tokens: int, max_model_len: int, vocab_size: int) -> None:
    """ValueError with the first prompt that cannot be served: empty, too long, or with ids outside the vocabulary."""
    refusals: tuple[tuple[Callable[[Prompt], bool], str], ...] = (
        (lambda p: not p.token_ids, "is empty; give at least one token"),
        (
            lambda p: len(p.token_ids) + new_tokens > max_model_len,
            f"with {new_tokens} new tokens is longer than backend.max_model_len {max_model_len}; shorten it or raise "
            "that",
        ),
        (
            lambda p: not all(0 <= token < vocab_size for token in p.token_ids),
            f"has token ids outside the vocabulary of {vocab_size}; use the model's own tokenizer",
        ),
    )
    for prompt in prompts:
        for refused, why in refusals:
            if refused(prompt):
                raise ValueError(f"Prompt {prompt.id!r} of {len(prompt.token_ids)} tokens {why}.")
