"""What the scenario runner and the collectors may ask of an engine, native or foreign."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from workloads.loading.loader import UpdateStats
from workloads.loading.weights import Part, Rule
from workloads.spec import WHOLE, Arrival, Sampling

__all__ = [
    "Audited",
    "Engine",
    "Generation",
    "InProcessEngine",
    "Observer",
    "Part",
    "Prompt",
    "Rule",
    "Tokenizer",
    "UnsupportedError",
    "UpdateStats",
]


class UnsupportedError(Exception):
    """The engine lacks what a scenario asks for. The cell is then NOT_RUN for this reason, and never PASS."""


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: tuple[int, ...]


@dataclass
class Generation:
    """Tokens of one request. `top_logprobs[i]` are the (token id, log-probability) pairs at position i,
    most probable first, as raw floats. `draft_token_ids[i]` is what the drafter proposed for position i
    from the state before it, -1 where there was none. `drafts[i]`: all that it proposed to follow token i."""

    id: str
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    finish_reason: str = "length"  # length | stop
    first_token_s: float = 0.0  # seconds from submission to the first token
    total_s: float = 0.0


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Engine(Protocol):
    """What a scenario does with an engine. Every method raises UnsupportedError for what this engine cannot do."""

    tokenizer: Tokenizer

    def start(self, checkpoint: str, via: str) -> UpdateStats: ...
    def update(self, checkpoint: str, via: str, arrival: Arrival = WHOLE) -> UpdateStats: ...
    def save(self, checkpoint: str, via: str) -> None: ...
    def sleep(self, level: int) -> None: ...
    def wake(self) -> None: ...
    def generate(self, prompts: Sequence[Prompt], params: Sampling) -> list[Generation]: ...
    def kv_capacity_tokens(self) -> int: ...
    def stop(self) -> None: ...


class Audited(Protocol):
    """The tensors of one rank, in the process that holds them."""

    def roots(self) -> Mapping[str, nn.Module]: ...
    def parts(self, root: str) -> Sequence[Part]: ...
    def rules(self) -> Sequence[Rule]: ...
    def runtime_tensors(self) -> Mapping[str, torch.Tensor]: ...


class InProcessEngine(Engine, Audited, Protocol):
    """An engine whose rank is this process."""


class Observer(Protocol):
    """Gathers what only the processes that hold the tensors see, on every rank that this process leads."""

    def tensors(self, observation: str, checkpoint: str) -> None: ...
    def memory(self, observation: str) -> None: ...
    def tracing(self) -> AbstractContextManager[object]: ...
