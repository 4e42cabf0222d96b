"""vLLM in processes of our own, through its offline `LLM` class."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads.engines.protocol import Generation, Prompt, UnsupportedError
from workloads.engines.vllm import drafts, saved, transfer
from workloads.loading.paths import SAVED
from workloads.spec import GangSpec, Sampling

EXTENSION = "workloads.engines.vllm.worker.AuditExtension"
FROM_FOLDER = ("safetensors", "dummy")  # starts that vLLM calls by the same names
STARTS = (*FROM_FOLDER, *SAVED)


class OfflineEngine:
    """One replica. Its worker runs in this process where one is enough, else in processes that vLLM starts."""

    def __init__(self, spec: GangSpec, folder: Path, via: str, draft: Path | None) -> None:
        saved.check(spec)
        os.environ.update(_environment(spec))
        from vllm import LLM
        from vllm.platforms import current_platform

        if _sleeps(spec) and not current_platform.is_sleep_mode_available():
            raise UnsupportedError(f"vLLM has no sleep mode on {current_platform.device_name}.")
        self._llm = LLM(**arguments(spec, folder, via, draft))
        self._spec = spec

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method on every worker; their results in the order of the ranks."""
        return list(self._llm.collective_rpc(method, kwargs=arguments))

    def served(self) -> str:
        """The folder whose model is served."""
        return str(self._llm.llm_engine.model_config.model)

    def generate(self, prompts: Sequence[Prompt], params: Sampling, stop: frozenset[int]) -> list[Generation]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            seed=params.seed if params.temperature else None,
            logprobs=params.top_logprobs,
            stop_token_ids=sorted(stop),
            ignore_eos=True,  # of the model's configuration: the tokenizer in use says where text ends
            detokenize=False,
        )
        asked = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        return [_generation(*pair, params) for pair in zip(prompts, outputs, strict=True)]

    def reset_caches(self) -> None:
        """Forget what was computed with the weights before."""
        self._llm.reset_prefix_cache()

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)

    def wake(self) -> None:
        self._llm.wake_up()

    def kv_capacity_tokens(self) -> int:
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _sleeps(spec: GangSpec) -> bool:
    return any(step.do == "sleep" for step in spec.steps)


def _environment(spec: GangSpec) -> dict[str, str]:
    """Read by vLLM when it is imported. Nothing is asked of a hub, nothing is reported to anybody."""
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if spec.backend.device == "cpu":
        own["VLLM_CPU_OMP_THREADS_BIND"] = _cores(spec.parallelism.tp)
    return own | spec.backend.env


def _cores(workers: int) -> str:
    """Which cores each worker's threads are bound to: vLLM asks for it once a replica has several."""
    if workers == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    lists = [cores[i * share : (i + 1) * share] or [cores[i % len(cores)]] for i in range(workers)]
    return "|".join(",".join(map(str, one)) for one in lists)


def arguments(spec: GangSpec, folder: Path, via: str, draft: Path | None) -> dict[str, Any]:
    """Of `LLM`. draft: folder of the drafter's weights, where they are not in the target's."""
    backend, options = spec.backend, dict(spec.backend.options)
    if draft is not None:
        options[drafts.OPTION] = {**options[drafts.OPTION], "model": str(draft)}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tensor_parallel_size": spec.parallelism.tp,
        "dtype": backend.dtype,
        "load_format": via,
        "skip_tokenizer_init": True,  # prompts are token ids, so that every engine gets the same
        "max_model_len": backend.max_model_len,
        "max_num_batched_tokens": backend.max_batch_tokens,
        "max_num_seqs": backend.max_requests,
        "worker_extension_cls": EXTENSION,
        "seed": 0,
        "disable_log_stats": False,  # else no request says when its first token came
    }
    if spec.parallelism.ep > 1:
        arguments["enable_expert_parallel"] = True
    if _sleeps(spec):
        arguments["enable_sleep_mode"] = True
    if any(step.via == "transfer" for step in spec.steps):
        arguments["weight_transfer_config"] = {"backend": transfer.NAME}
    if via not in FROM_FOLDER:
        arguments |= saved.arguments(spec, via)
    return arguments | options


def _generation(prompt: Prompt, output: Any, params: Sampling) -> Generation:
    [completion] = output.outputs
    stats = output.metrics
    return Generation(
        id=prompt.id,
        prompt_tokens=len(prompt.token_ids),
        token_ids=list(completion.token_ids),
        top_logprobs=[_top(one, params.top_logprobs) for one in completion.logprobs or ()],
        finish_reason=str(completion.finish_reason),
        first_token_s=float(stats.first_token_latency) if stats else 0.0,
        total_s=float(stats.first_token_latency + stats.last_token_ts - stats.first_token_ts)
        if stats
        else 0.0,
    )


def _top(candidates: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """The most probable tokens first, equally probable ones as their ids are: as a server's answers are read. vLLM adds
    the sampled token where it is not among them."""
    ranked = sorted(
        ((token, float(entry.logprob)) for token, entry in candidates.items()),
        key=lambda item: (-item[1], item[0]),
    )
    return ranked[:count]
