"""What one forward pass computes: the tokens of several requests, one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from workloads.models.parallel import Group


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one request. slot: its place in the caches; start: tokens cached before these;
    offset: row of the first token in the batch."""

    slot: int
    start: int
    length: int
    offset: int

    @property
    def rows(self) -> slice:
        return slice(self.offset, self.offset + self.length)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def decodes(self) -> bool:
        """One token after others takes the decode kernels; anything else is prefill."""
        return self.length == 1 and self.start > 0

    def pieces(self, tokens: int) -> list["Segment"]:
        """The segment cut into runs of at most `tokens` tokens."""
        cuts = range(0, self.length, tokens)
        return [
            Segment(self.slot, self.start + i, min(tokens, self.length - i), self.offset + i) for i in cuts
        ]


class Batch:
    """Tokens of one data-parallel rank, the same on each of its tensor-parallel ranks, divided over them in
    equal shares of consecutive tokens; the last shares are filled up with padding.

    token_ids: int64 [share * tp.size], zeros for padding. tokens: how many are real; may be 0.
    share: rows of each rank; local_tokens: how many of this rank's are real. Between collectives a rank holds its
    real tokens only.
    """

    def __init__(
        self, token_ids: Sequence[int], segments: Sequence[Segment], tp: Group, device: torch.device
    ) -> None:
        self.tokens = len(token_ids)
        self.share = -(-self.tokens // tp.size)
        padding = [0] * (self.share * tp.size - self.tokens)
        self.token_ids = torch.tensor([*token_ids, *padding], dtype=torch.int64, device=device)
        self.segments = tuple(segments)
        self.prefills = [segment for segment in segments if not segment.decodes]
        self.decodes = [segment for segment in segments if segment.decodes]
        self._first = tp.rank * self.share
        self.local_tokens = min(max(self.tokens - self._first, 0), self.share)

    @property
    def local_starts(self) -> list[int]:
        """Rows of this rank's tokens that are the first token of a request."""
        rows = (segment.offset - self._first for segment in self.segments if segment.start == 0)
        return [row for row in rows if 0 <= row < self.local_tokens]

    @property
    def local_token_ids(self) -> torch.Tensor:
        """Ids of this rank's real tokens, int64 [local_tokens]."""
        return self.token_ids[self._first : self._first + self.local_tokens]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Place of each token within its request, int64 [tokens]."""
        return self._indices([position for s in self.segments for position in range(s.start, s.end)])

    @cached_property
    def decode_rows(self) -> torch.Tensor:
        return self._indices([segment.offset for segment in self.decodes])

    @cached_property
    def decode_slots(self) -> torch.Tensor:
        return self._indices([segment.slot for segment in self.decodes])

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.token_ids.device)
