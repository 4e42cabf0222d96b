"""Measures requests of one fixed shape, all in flight together."""

import time
from pathlib import Path

from collectors.records import RecordWriter
from workloads.engines.protocol import Engine, Prompt
from workloads.spec import Sampling


def gather_throughput(engine: Engine, shape: dict[str, int], path: Path, rank: int) -> None:
    """Run `shape["requests"]` requests of prompt_tokens in, new_tokens out; rank 0 records them.

    Token ids follow from the request's number, so every engine sees the same prompts. Writes one
    `request` record each (seconds to first token and in all) and one `run` record.
    """
    prompts = [
        Prompt(f"throughput-{i}", tuple((7 * i + 13 * j) % 251 + 1 for j in range(shape["prompt_tokens"])))
        for i in range(shape["requests"])
    ]
    started = time.perf_counter()
    generations = engine.generate(prompts, Sampling(max_new_tokens=shape["new_tokens"], top_logprobs=1))
    seconds = time.perf_counter() - started
    if rank != 0:
        return
    new_tokens = sum(len(generation.token_ids) for generation in generations)
    tokens = new_tokens + sum(generation.prompt_tokens for generation in generations)
    with RecordWriter(path) as writer:
        for generation in generations:
            writer.write(
                "request",
                {
                    "id": generation.id,
                    "prompt_tokens": generation.prompt_tokens,
                    "new_tokens": len(generation.token_ids),
                    "first_token_s": generation.first_token_s,
                    "total_s": generation.total_s,
                },
            )
        writer.write(
            "run",
            {
                "requests": len(prompts),
                "concurrency": len(prompts),
                "prompt_tokens": shape["prompt_tokens"],
                "new_tokens": new_tokens,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "kv_capacity_tokens": engine.kv_capacity_tokens(),
            },
        )
