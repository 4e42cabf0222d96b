"""Rules of Kimi-K3 stacks, whose dimensions and kernels are this project's own."""

from collections.abc import Callable

from orchestrator import memory
from orchestrator.cluster_rules import one_of
from orchestrator.rule_parts import Problems, at_least, divides
from orchestrator.schema import Root
from workloads.models.kimi_k3.tensors import MXFP4_GROUP, checkpoint_tensors

MAY_BE_ZERO = ("num_mtp_layers", "num_dense_layers")


def problems(root: Root) -> Problems:
    if root.backend.engine != "vllm":
        for rule in _RULES:
            yield from rule(root)
        return
    yield (
        "backend.engine is vllm and model.architecture is kimi_k3: the generated Kimi-K3 proxy is the native engine's; "
        "give model.architecture=transformers with a configuration or folders of weights that vLLM loads, or set "
        "backend=native."
    )


def _positive(root: Root) -> Problems:
    for name, value in vars(root.model.kimi_k3).items():
        yield from at_least(f"model.kimi_k3.{name}", value, 0 if name in MAY_BE_ZERO else 1)


def _layout(root: Root) -> Problems:
    p, m = root.parallelism, root.model.kimi_k3
    for key, heads in (
        ("num_heads", m.num_heads),
        ("kda_num_heads", m.kda_num_heads),
        ("vocab_size", m.vocab_size),
    ):
        yield from divides("parallelism.tp", p.tp, f"model.kimi_k3.{key} {heads}", heads)
    yield from divides("parallelism.ep", p.ep, f"model.kimi_k3.num_experts {m.num_experts}", m.num_experts)


def _dimensions(root: Root) -> Problems:
    m = root.model.kimi_k3
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


def _experts(root: Root) -> Problems:
    quantization = root.model.expert_quantization
    yield from one_of("model.expert_quantization", quantization, ["mxfp4", "fp8"])
    if quantization != "mxfp4" and root.backend.moe_kernel == "reference":
        yield (
            f"model.expert_quantization is {quantization}; checkpoints of {root.model.architecture} hold mxfp4 "
            "experts only."
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


def _perturbations(root: Root) -> Problems:
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.perturbation != "one_tensor":
            continue
        known = {tensor.name for tensor in checkpoint_tensors(root.model.kimi_k3)}
        if checkpoint.perturbation_target not in known:
            yield (
                f"checkpoints.{name}.perturbation_target is {checkpoint.perturbation_target!r}, which is not one of "
                f"the {len(known)} tensors of {root.model.name}, such as {min(known)}."
            )


_RULES: tuple[Callable[[Root], Problems], ...] = (
    _positive,
    _layout,
    _dimensions,
    _experts,
    _mega_moe,
    _perturbations,
)
