"""Decides which tokens of which requests each forward pass of one data-parallel rank computes.

Knows token counts only: the same code plans how many passes a workload needs at most and drives the real run.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """requests: that may run together. batch_tokens: of one pass. new_tokens: of one request."""

    requests: int
    batch_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.requests <= self.batch_tokens or self.new_tokens < 1:
            raise ValueError(
                f"max_requests {self.requests}, max_batch_tokens {self.batch_tokens} and max_new_tokens "
                f"{self.new_tokens} leave a running request without its token per pass: all must be positive, and "
                "max_batch_tokens at least max_requests."
            )


@dataclass
class Progress:
    """One request. index: its place in the list given. computed: tokens in the caches; generated: new tokens."""

    index: int
    prompt: int
    slot: int = -1
    computed: int = 0
    generated: int = 0

    @property
    def known(self) -> int:
        return self.prompt + self.generated


@dataclass(frozen=True)
class Chunk:
    """Tokens start..start+length-1 of one request, to be computed in one pass."""

    request: Progress
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def yields_token(self) -> bool:
        """Whether all known tokens are computed after this pass, so that the next one can be chosen."""
        return self.end == self.request.known


class Scheduler:
    """First come, first served. Running requests come first in a pass, one token each; what is left of the pass
    goes to prompts, cut where they do not fit."""

    def __init__(self, prompt_tokens: Sequence[int], limits: Limits) -> None:
        self._limits = limits
        self._waiting = deque(Progress(index, count) for index, count in enumerate(prompt_tokens))
        self._running: list[Progress] = []
        self._free = list(reversed(range(limits.requests)))

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    def next_pass(self) -> list[Chunk]:
        """The chunks of the next pass; empty when there is nothing left to do."""
        budget = self._limits.batch_tokens
        chunks: list[Chunk] = []
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            self._running.append(request)
        for request in self._running:
            length = min(request.known - request.computed, budget)
            if length:
                chunks.append(Chunk(request, request.computed, length))
            budget -= length
        return chunks

    def advance(self, chunk: Chunk, stop: bool = False) -> bool:
        """Account for a computed chunk and, where it yields one, for the new token. stop: that token ends the
        request. Returns whether the request is finished; its slot is then free."""
        request = chunk.request
        yields = chunk.yields_token
        request.computed = chunk.end
        if not yields:
            return False
        request.generated += 1
        if not stop and request.generated < self._limits.new_tokens:
            return False
        self._running.remove(request)
        self._free.append(request.slot)
        return True


def planned_passes(prompt_tokens: Sequence[int], limits: Limits) -> int:
    """Passes that the requests need when none stops early."""
    scheduler = Scheduler(prompt_tokens, limits)
    passes = 0
    while not scheduler.done:
        for chunk in scheduler.next_pass():
            scheduler.advance(chunk)
        passes += 1
    return passes
