"""Likely causes of an engine's death, by what it wrote before it: foreign engines name the cause in logs only."""

import re
from typing import NamedTuple


class Cause(NamedTuple):
    """type: of the failure, where the log knows it better than the rank's exit; None keeps it."""

    pattern: re.Pattern[str]
    sentence: str
    type: str | None = None


def _cause(pattern: str, sentence: str, type: str | None = None) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), sentence, type)


# The first that fits is told, so those that others bring about stand behind them.
CAUSES = (
    _cause(
        r"illegal instruction|SIGILL|exit ?code:? -4\b",
        "the processor lacks an instruction that a kernel chose: set ONEDNN_MAX_CPU_ISA=AVX512_CORE (or AVX2) in "
        "backend.env, and backend.dtype=float32 on CPUs, where bfloat16 picks AMX kernels",
    ),
    _cause(
        r"No module named '?(workloads|collectors)",
        "a worker of the engine cannot import the code that travels with it: PYTHONPATH did not reach the worker, or "
        "backend.env replaces it",
    ),
    _cause(
        r"Not enough allowed NUMA nodes",
        "the engine wants one NUMA node for each worker: set VLLM_CPU_OMP_THREADS_BIND in backend.env, such as "
        "'0|1' for two workers on two cores, or nobind",
    ),
    _cause(
        r"(Model architectures? .* (are|is) not supported|does not recognize this architecture|"
        r"No module named '?vllm\.model_executor\.models)",
        "this release of the engine does not know the model's architecture: compare `architectures` and `model_type` "
        "in the checkpoint's config.json with what it supports, or take another environment",
    ),
    _cause(
        r"(Cannot find any model weights|Weight files referenced in index but missing|SafetensorError|"
        r"not initialized from (the )?checkpoint|No such file or directory: \S*\.safetensors)",
        "a file of the checkpoint is missing or broken: compare its folder with model.safetensors.index.json",
    ),
    _cause(
        r"(EADDRINUSE|Address already in use)",
        "another process has taken a port of the engine, perhaps an engine that an earlier run left: end it and start "
        "again",
    ),
    _cause(
        r"(CUDA out of memory|can't allocate memory|Cannot allocate memory|std::bad_alloc|oom-?kill|"
        r"No available memory for the cache blocks|Free memory on device .* is less than)",
        "memory ran out: lower VLLM_CPU_KVCACHE_SPACE (or gpu_memory_utilization), backend.max_model_len or "
        "backend.max_requests, or use more ranks",
        "out_of_memory",
    ),
)


def likely_cause(text: str) -> Cause | None:
    """The cause that a log tells; None when it tells none that is known."""
    return next((cause for cause in CAUSES if cause.pattern.search(text)), None)
