"""Native engines of the default proxy for tests, and what they hold."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Generation, Prompt
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Sampling

OLD, NEW = "old", "new"


def make_spec(folder: Path, parallelism: Parallelism | None = None, **backend: Any) -> GangSpec:
    """A gang that knows the checkpoint in `folder` and a view of it with every tensor changed."""
    torch.set_num_threads(1)
    return GangSpec(
        name="candidate",
        output="",
        model=Model(),
        parallelism=parallelism or Parallelism(),
        backend=replace(Backend(max_model_len=256, max_requests=8), **backend),
        checkpoints={OLD: Checkpoint(), NEW: Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={OLD: str(folder), NEW: str(folder)},
        steps=[],
    )


def start_engine(
    folder: Path, checkpoint: str = OLD, via: str = "safetensors", **backend: Any
) -> NativeEngine:
    engine = NativeEngine(make_spec(folder, **backend), 0)
    engine.start(checkpoint, via)
    return engine


def prompts(*lengths: int) -> list[Prompt]:
    """One prompt of each length, ids of bytes."""
    return [Prompt(f"p{i}", tuple((7 * i + 13 * j) % 251 for j in range(n))) for i, n in enumerate(lengths)]


def evidence(generations: Sequence[Generation]) -> list[tuple[Any, ...]]:
    """All of each generation but its times."""
    return [
        (g.id, g.prompt_tokens, g.token_ids, g.top_logprobs, g.draft_token_ids, g.drafts, g.finish_reason)
        for g in generations
    ]


def generate(engine: NativeEngine, given: Sequence[Prompt], new_tokens: int = 4) -> list[tuple[Any, ...]]:
    return evidence(engine.generate(given, Sampling(max_new_tokens=new_tokens)))


def held(engine: NativeEngine) -> dict[str, torch.Tensor]:
    """Every tensor reachable from the engine's roots, by audit path, but for counters of what was served."""
    found = {f.path: f.tensor.detach() for f in walk(engine.roots()) if f.root in engine.roots()}
    return {path: tensor for path, tensor in found.items() if not path.endswith(".invalid_ids")}


def held_bytes(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {path: t.contiguous().view(-1).view(torch.uint8).clone() for path, t in held(engine).items()}


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Paths whose bytes are not equal; fails when the paths themselves differ."""
    assert left.keys() == right.keys()
    return [path for path in left if not torch.equal(left[path], right[path])]
