"""Gathers generations of fixed prompts: token ids, raw top-k log-probabilities and text."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

from collectors.records import RecordWriter
from workloads.engines.protocol import Engine, Generation, Prompt
from workloads.spec import Sampling


def read_prompts(path: Path, engine: Engine) -> list[Prompt]:
    """Prompts of a JSONL file of {"id", "text"}, tokenised by the engine's own tokenizer."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(row["id"], tuple(engine.tokenizer.encode(row["text"]))) for row in rows]


def gather_generations(
    engine: Engine, prompts: list[Prompt], sampling: Sampling, path: Path, rank: int
) -> None:
    """Generate on every rank; global rank 0 records what all data-parallel groups produced.

    Writes one `generation` record a prompt and `end`. Raises RuntimeError when a prompt got no tokens:
    an engine that answers nothing must not look like one that agrees.
    """
    started = time.perf_counter()
    generations = engine.generate(prompts, sampling)
    if rank != 0:
        return
    _require_tokens(prompts, generations)
    with RecordWriter(path) as writer:
        for generation in generations:
            writer.write("generation", _record(generation, engine))
        writer.write("summary", {"prompts": len(prompts), "seconds": time.perf_counter() - started})


def _record(generation: Generation, engine: Engine) -> dict[str, object]:
    """All fields, and the text. JSON has no NaN: a log-probability that is no finite number becomes null."""
    finite = [
        [(token, value if math.isfinite(value) else None) for token, value in candidates]
        for candidates in generation.top_logprobs
    ]
    return {
        **asdict(generation),
        "top_logprobs": finite,
        "text": engine.tokenizer.decode(generation.token_ids),
    }


def _require_tokens(prompts: list[Prompt], generations: list[Generation]) -> None:
    produced = {generation.id for generation in generations if generation.token_ids}
    silent = [prompt.id for prompt in prompts if prompt.id not in produced]
    if silent:
        raise RuntimeError(f"{len(silent)} of {len(prompts)} prompts got no tokens, first {silent[0]!r}.")
