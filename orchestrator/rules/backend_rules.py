"""Rules of the engine under test: where it comes from, what it is told, which layouts it can take."""

from collections.abc import Callable
from urllib.parse import urlsplit

from orchestrator import engine_env, memory
from orchestrator.cell import FRESH
from orchestrator.config import text
from orchestrator.config.freeze import cell_arms
from orchestrator.config.schema import Root
from orchestrator.rules.rule_parts import Problems, one_of, plain

NATIVE, VLLM = "native", "vllm"
DTYPES = ["auto", "float32", "bfloat16", "float16"]
MAX_LOGPROBS = 20  # of a token, unless vLLM's option of this name says otherwise; -1 is all
SET_BY = {  # arguments of vLLM that follow from the config, and the key to set instead
    "model": "checkpoints",
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.tokenizer",
    "tensor_parallel_size": "parallelism.tp",
    "data_parallel_size": "parallelism.dp",
    "enable_expert_parallel": "parallelism.ep",
    "load_format": "load_path.steps",
    "dtype": "backend.dtype",
    "max_model_len": "backend.max_model_len",
    "max_num_batched_tokens": "backend.max_batch_tokens",
    "max_num_seqs": "backend.max_requests",
    "seed": "collect.sampling.seed",
}
OURS = ("worker_extension_cls",)  # arguments that carry the audit


def problems(root: Root) -> Problems:
    engine = root.backend.engine
    if ":" not in engine:  # package.module:Class is somebody's own
        yield from one_of("backend.engine", engine, [NATIVE, VLLM])
    for rule in (_device, _variables, *(_VLLM if engine == VLLM else _NATIVE)):
        yield from rule(root)


ONLINE_FP8 = ("kimi_k3",)


def _device(root: Root) -> Problems:
    b = root.backend
    yield from one_of("backend.device", b.device, ["cpu", "cuda"])
    yield from one_of("backend.arch", b.arch, ["cpu", "sm90", "sm100"])
    if (b.device == "cpu") != (b.arch == "cpu"):
        yield f"backend.device {b.device} and backend.arch {b.arch} contradict each other: cpu goes with cpu only."


def _variables(root: Root) -> Problems:
    found = (text.environment_problem("backend.env", name, value) for name, value in root.backend.env.items())
    yield from (problem for problem in found if problem is not None)


def _online(root: Root) -> Problems:
    """Weights that are quantised as they are loaded."""
    kind = root.backend.online_quantization
    yield from one_of("backend.online_quantization", kind, ["none", "fp8"])
    if kind == "none":
        return
    if root.model.architecture not in ONLINE_FP8:
        yield (
            f"backend.online_quantization is {kind} and model.architecture {root.model.architecture}; the models whose "
            f"BF16 matrices can be quantised as they are loaded are: {', '.join(ONLINE_FP8)}. Set it to none."
        )
    if any(step.via == "sharded_state" for step in root.load_path.steps):
        yield (
            f"backend.online_quantization is {kind} and the load path starts on sharded_state, which saves parameters "
            "as they were loaded; quantised ones are gone. Use load_path=tensorizer, or set it to none."
        )


def _kernels(root: Root) -> Problems:
    b = root.backend
    yield from one_of("backend.moe_kernel", b.moe_kernel, ["mega_moe", "reference"])
    library = {"cpu": "gloo", "cuda": "nccl"}.get(b.device, b.communication)
    if b.communication != library:
        yield f"backend.communication is {b.communication}; device {b.device} communicates through {library}."
    if b.moe_kernel == "mega_moe" and not b.moe_fallback and root.parallelism.ep >= 1:
        planned = memory.planned_kernel(root)
        if planned is not None and planned.fallback:
            yield (
                f"backend.moe_fallback is false, and no fast kernel serves these experts on {b.arch}: "
                f"{planned.reason}. Change what stands in its way, or set backend.moe_fallback=true for its reference "
                "in plain torch."
            )


def _not_native(root: Root) -> Problems:
    """Keys that the native engine does not look at, so that setting them would change a cell's id and nothing else."""
    b = root.backend
    if b.engine == NATIVE:
        for key, value, unset in (
            ("options", b.options, {}),
            ("dtype", b.dtype, "auto"),
            ("url", b.url, None),
        ):
            if value != unset:
                yield (
                    f"backend.{key} is {value!r}, which the native engine does not look at: leave it out, or choose "
                    "a backend with engine vllm."
                )


def _source(root: Root) -> Problems:
    """One place says where vLLM is."""
    b, image = root.backend, root.cluster.image
    named = [key for key in ("environment", "python", "url") if getattr(b, key) is not None]
    arms = {name: arm.environment for name, arm in cell_arms(root).items()}
    if image is not None and b.environment is not None:
        yield (
            f"backend.environment is {b.environment} and cluster.image is {image}: in a container the engine is the "
            "container's; leave one of the two out."
        )
    elif len(named) > 1:
        listed = " and ".join(f"backend.{key} {getattr(b, key)}" for key in named)
        yield f"{listed} are several places where vLLM could be: keep one of them."
    elif not named and image is None and None in arms.values():
        yield (
            "backend.engine is vllm, and nothing says where vLLM is: set backend.environment to one of "
            f"{', '.join(engine_env.known())}, backend.python to an interpreter that has it, backend.url to a running "
            "server, or cluster.image to a container."
        )
    for key, name in {
        "backend": b.environment,
        **{f"code.{arm}": name for arm, name in arms.items()},
    }.items():
        if name is not None:
            yield from one_of(f"{key}.environment", name, engine_env.known())


def _url(root: Root) -> Problems:
    url, steps = root.backend.url, root.load_path.steps
    attaches = any(step.do == "start" and step.via == "attach" for step in steps)
    if url is None:
        if attaches:
            yield "load_path.steps start via attach, and no server is named: set backend.url=http://HOST:PORT."
        return
    yield from _address(url)
    if not attaches:
        yield (
            "backend.url names a running server, which load_path.steps do not use: begin them with {do: start, "
            "checkpoint: NAME, via: attach}, or leave backend.url out."
        )
    compared = any(check.rule == "same_generations" for check in root.load_path.checks)
    if compared and root.backend.max_requests > 1:
        yield (
            f"backend.max_requests is {root.backend.max_requests}, and requests reach a server one by one: which of "
            "them it computes together is chance and decides the last bits of answers that load_path.checks compare. "
            "Set backend.max_requests=1, or leave the checks of rule same_generations out."
        )
    sides = {side for check in root.load_path.checks for side in (check.left, check.right)}
    fresh = sorted(side for side in sides if side.startswith(f"{FRESH}."))
    bare = [name for name, arm in cell_arms(root).items() if arm.environment is None]
    if fresh and bare:
        yield (
            f"load_path.checks compare with {', '.join(fresh)}, a start of an engine, and backend.url only names a "
            f"server that runs already: set code.{bare[0]}.environment to what references are to be started in, or "
            "compare observations with each other."
        )


def _address(url: str) -> Problems:
    try:
        parts = urlsplit(url)
        scheme, host, secret = parts.scheme, parts.hostname, parts.username or parts.password
        parts.port  # noqa: B018  # raises where it is no number
    except ValueError:
        scheme, host, secret = "", None, None
    if secret:
        yield "backend.url holds a user name or a password, and configs are written to the run store: leave it out."
    elif scheme not in ("http", "https") or not host:
        yield f"backend.url is {url!r}, which is no address of a server: write http://HOST:PORT or https://HOST:PORT."


def _layout(root: Root) -> Problems:
    p, b = root.parallelism, root.backend
    if p.pp > 1:
        yield (
            f"parallelism.pp is {p.pp} and backend.engine is vllm: its pipeline stages are not audited here, so the "
            "engine is not started with any; set parallelism.pp=1, or backend=native."
        )
    if b.lora_rank:
        yield (
            f"backend.lora_rank is {b.lora_rank} and backend.engine is vllm, which wraps its layers when it is told: "
            "set it to 0, and backend.options.enable_lora=true."
        )
    for key in ("redundant_experts", "rebalance_seed"):
        if getattr(p, key):
            yield (
                f"parallelism.{key} is {getattr(p, key)} and backend.engine is vllm, whose load balancing is its own: "
                "set it to 0, or backend=native."
            )
    if p.tp >= 1 and p.gpus_per_node % p.tp:
        yield (
            f"parallelism.gpus_per_node is {p.gpus_per_node} and tp is {p.tp}: the tensor-parallel ranks of a replica "
            "are started by one process on one node, so a node must hold whole replicas; set gpus_per_node to a "
            "multiple of tp."
        )
    if b.max_batch_tokens < b.max_requests:
        yield (
            f"backend.max_batch_tokens is {b.max_batch_tokens}, less than max_requests {b.max_requests}: vLLM wants "
            "room for a token of each request in one pass."
        )


def _arguments(root: Root) -> Problems:
    b = root.backend
    asked, most = root.collect.sampling.top_logprobs, b.options.get("max_logprobs", MAX_LOGPROBS)
    if isinstance(most, int) and -1 < most < asked:
        yield (
            f"collect.sampling.top_logprobs is {asked}, more than the {most} that vLLM returns: lower it, or set "
            "backend.options.max_logprobs."
        )
    yield from one_of("backend.dtype", b.dtype, DTYPES)
    yield from plain("backend.options", b.options)
    for name in b.options:
        if name in OURS:
            yield f"backend.options.{name} is what carries the audit into the engine: leave it out."
        elif name in SET_BY:
            yield f"backend.options.{name} follows from another key: set {SET_BY[name]} instead."
        elif not str(name).isidentifier():
            yield f"backend.options has {name!r}, which is no argument's name: write them as enforce_eager is written."


def _harm(root: Root) -> Problems:
    """Harm to a foreign engine is done after its last update: without one it would be done to nothing, and pass."""
    if any(step.do == "update" for step in root.load_path.steps):
        return
    for name, arm in cell_arms(root).items():
        if arm.faults:
            yield (
                f"code.{name}.faults is {', '.join(arm.faults)}, which harms vLLM after its last update, and "
                f"load_path={root.load_path.name} has none: take a load path with an update, such as vllm_reload."
            )


_NATIVE: tuple[Callable[[Root], Problems], ...] = (_kernels, _online, _not_native)
_VLLM: tuple[Callable[[Root], Problems], ...] = (_source, _url, _layout, _arguments, _harm)
