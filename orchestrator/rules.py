"""Cross-field rules of layout, model, kernel and memory. Each broken one yields a sentence with its values."""

from collections.abc import Callable, Iterator
from functools import cache

from orchestrator import cluster_rules, memory, scenario_rules
from orchestrator.cluster_rules import one_of
from orchestrator.provenance import checkout
from orchestrator.schema import Root
from workloads.models.kimi_k3.tensors import MXFP4_GROUP

Problems = Iterator[str]


def problems(root: Root) -> list[str]:
    """Everything that is wrong with one cell's config. Later rules count on the numbers that earlier ones check."""
    found = [problem for rule in _PLAIN for problem in rule(root)]
    if not found:
        found = list(_memory(root))
    return found


def _positive(root: Root) -> Problems:
    for section, holder in (
        ("parallelism", root.parallelism),
        ("model.kimi_k3", root.model.kimi_k3),
        ("backend", root.backend),
    ):
        for name, value in vars(holder).items():
            least = 0 if name in ("num_mtp_layers", "num_dense_layers") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                yield f"{section}.{name} is {value}; it must be at least {least}."


def _layout(root: Root) -> Problems:
    p, m = root.parallelism, root.model.kimi_k3
    if p.tp * p.dp != p.nodes * p.gpus_per_node:
        yield (
            f"parallelism: tp {p.tp} x dp {p.dp} is {p.tp * p.dp} ranks, but nodes {p.nodes} x gpus_per_node "
            f"{p.gpus_per_node} is {p.nodes * p.gpus_per_node}; the two must be equal."
        )
    yield from _divides("parallelism.ep", p.ep, f"the {p.ranks} ranks (tp {p.tp} x dp {p.dp})", p.ranks)
    for key, heads in (
        ("num_heads", m.num_heads),
        ("kda_num_heads", m.kda_num_heads),
        ("vocab_size", m.vocab_size),
    ):
        yield from _divides("parallelism.tp", p.tp, f"model.kimi_k3.{key} {heads}", heads)
    yield from _divides("parallelism.ep", p.ep, f"model.kimi_k3.num_experts {m.num_experts}", m.num_experts)


def _divides(key: str, divisor: int, of: str, value: int) -> Problems:
    if divisor < 1 or value % divisor:
        fitting = ", ".join(str(n) for n in range(1, min(value, 64) + 1) if value % n == 0)
        yield f"{key} is {divisor}, which does not divide {of}: use one of {fitting}."


def _model(root: Root) -> Problems:
    model, m = root.model, root.model.kimi_k3
    yield from one_of("model.architecture", model.architecture, _models())
    yield from one_of("model.size", model.size, ["proxy", "full"])
    yield from one_of("model.tokenizer", model.tokenizer, ["byte", "checkpoint"])
    yield from one_of("model.expert_quantization", model.expert_quantization, ["mxfp4", "fp8"])
    outside = [layer for layer in m.full_attention_layers if not 0 <= layer < m.num_layers]
    if outside:
        yield (
            f"model.kimi_k3.full_attention_layers names {outside}; with num_layers {m.num_layers} layers are "
            f"0 to {m.num_layers - 1}."
        )
    if m.num_experts_per_token > m.num_experts:
        yield (
            f"model.kimi_k3.num_experts_per_token is {m.num_experts_per_token}, more than the num_experts "
            f"{m.num_experts} there are."
        )
    if m.kda_a_log_size < m.kda_num_heads:
        yield (
            f"model.kimi_k3.kda_a_log_size is {m.kda_a_log_size}; it must hold a value for each of the "
            f"kda_num_heads {m.kda_num_heads}."
        )
    for key in ("moe_latent_size", "moe_intermediate_size"):
        if getattr(m, key) % MXFP4_GROUP:
            yield (
                f"model.kimi_k3.{key} is {getattr(m, key)}; MXFP4 shares a scale between {MXFP4_GROUP} "
                "values, so it must be a multiple of that."
            )


@cache
def _models() -> list[str]:
    folders = (checkout() / "workloads" / "models").glob("[!_]*/")
    return sorted(folder.name for folder in folders)


def _backend(root: Root) -> Problems:
    b = root.backend
    if ":" not in b.engine:  # package.module:Class is somebody's own
        yield from one_of("backend.engine", b.engine, ["native", "vllm"])
    yield from one_of("backend.device", b.device, ["cpu", "cuda"])
    yield from one_of("backend.arch", b.arch, ["cpu", "sm90", "sm100"])
    yield from one_of("backend.moe_kernel", b.moe_kernel, ["mega_moe", "reference"])
    if (b.device == "cpu") != (b.arch == "cpu"):
        yield f"backend.device {b.device} and backend.arch {b.arch} contradict each other: cpu goes with cpu only."
    library = {"cpu": "gloo", "cuda": "nccl"}.get(b.device, b.communication)
    if b.communication != library:
        yield f"backend.communication is {b.communication}; device {b.device} communicates through {library}."
    if root.model.expert_quantization != "mxfp4" and b.moe_kernel == "reference":
        yield (
            f"model.expert_quantization is {root.model.expert_quantization}; checkpoints of "
            f"{root.model.architecture} hold mxfp4 experts only."
        )


def _mega_moe(root: Root) -> Problems:
    b, m, p = root.backend, root.model.kimi_k3, root.parallelism
    if b.moe_kernel != "mega_moe":
        return
    if b.arch == "sm90":
        yield (
            "backend.moe_kernel is mega_moe and backend.arch is sm90: DeepGEMM's Mega MoE for Hopper takes FP8 "
            "weights, none released reads MXFP4 experts there; set backend.moe_kernel=reference or an sm100 backend."
        )
    if p.ep < 2:
        yield (
            f"backend.moe_kernel is mega_moe and parallelism.ep is {p.ep}: the kernel dispatches between ranks and "
            "needs expert parallelism, ep of 2 or more; or set backend.moe_kernel=reference."
        )
    if root.model.expert_quantization == "fp8":
        yield (
            "backend.moe_kernel is mega_moe and model.expert_quantization is fp8: the FP8xFP4 kernel refuses FP8 "
            "expert weights; it reads mxfp4."
        )
    alignment = memory.EXPERT_ALIGNMENT.get(b.arch)
    if alignment is not None and m.moe_latent_size % alignment:
        yield (
            f"model.kimi_k3.moe_latent_size is {m.moe_latent_size}; mega_moe on {b.arch} needs a multiple of "
            f"{alignment} (the expert input is not padded, only moe_intermediate_size is)."
        )
    if m.num_experts_per_token > 32:
        yield f"model.kimi_k3.num_experts_per_token is {m.num_experts_per_token}; mega_moe dispatches to at most 32."


def _memory(root: Root) -> Problems:
    limit, limit_name = memory_limit(root)
    parts = memory.memory_parts(root)
    needed = memory.total(parts)
    if limit is None or needed <= limit:
        return
    largest = sorted(parts, key=lambda part: -part.nbytes)[:4]
    named = ", ".join(f"{part.name} {part.nbytes / 1e9:,.1f} GB" for part in largest)
    yield (
        f"A rank needs {needed / 1e9:,.1f} GB and {limit_name} has {limit / 1e9:,.1f} GB ({named}, ...): with tp "
        f"{root.parallelism.tp} and ep {root.parallelism.ep} {root.model.name} does not fit; raise ep (more nodes), or "
        "lower backend.max_requests, max_model_len or max_batch_tokens."
    )


def memory_limit(root: Root) -> tuple[int | None, str]:
    """Bytes that one rank may use and what sets them; None where nobody knows before the job runs."""
    if root.cluster.memory_gb is not None:
        return int(root.cluster.memory_gb * 1e9), f"one {root.cluster.arch} GPU"
    if root.cluster.kind == "local":
        ranks = root.parallelism.ranks
        return memory.machine_bytes() // ranks, f"one of {ranks} ranks on this machine"
    return None, ""


_PLAIN: tuple[Callable[[Root], Problems], ...] = (
    _positive,
    _layout,
    _model,
    _backend,
    _mega_moe,
    *cluster_rules.RULES,
    *scenario_rules.RULES,
)
