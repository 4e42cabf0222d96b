"""Rules of the models that the native engine runs, whose dimensions and kernels are this project's own."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from math import ceil

from orchestrator import memory
from orchestrator.config.schema import Root
from orchestrator.memory import dimensions_of
from orchestrator.rules.rule_parts import Problems, at_least, divides
from workloads.loading.tensor_table import every_tensor
from workloads.models.architectures import model_plan, tensor_table
from workloads.models.planning import Experts
from workloads.models.stages import DIVIDED, staged

WITH_ADAPTERS = ("qwen3",)  # families whose linear layers can be wrapped for adapters
WITH_SLOTS = ("deepseek_v4", "kimi_k3")  # families whose experts may have more slots than there are experts
MAX_PER_TOKEN = 32  # experts that MegaMoE dispatches a token to


def problems(root: Root) -> Problems:
    if root.backend.engine != "vllm":
        for rule in _RULES:
            yield from rule(root)
        return
    yield (
        f"backend.engine is vllm and model.architecture is {root.model.architecture}: what is generated of it is for "
        "the native engine; give model.architecture=transformers with a configuration or folders of weights that "
        "vLLM loads, or set backend=native."
    )


def _positive(root: Root) -> Problems:
    may_be_zero = model_plan(root.model.architecture).MAY_BE_ZERO
    for name, value in vars(dimensions_of(root)).items():
        yield from at_least(_key(root, name), value, 0 if name in may_be_zero else 1)


def _layout(root: Root) -> Problems:
    p, plan = root.parallelism, model_plan(root.model.architecture)
    for name, number in plan.divided(dimensions_of(root)).items():
        yield from divides("parallelism.tp", p.tp, f"{_key(root, name)} {number}", number)
    experts = plan.experts(dimensions_of(root))
    if experts is not None:
        key = f"{_key(root, experts.keys['count'])} {experts.count}"
        key += f" and redundant_experts {p.redundant_experts}" if p.redundant_experts else ""
        yield from divides("parallelism.ep", p.ep, key, experts.count + p.redundant_experts)
        if experts.drafter is not None:
            key = f"{_key(root, experts.drafter.keys['count'])} {experts.drafter.count}"
            yield from divides("parallelism.ep", p.ep, key, experts.drafter.count)
        yield from _blocks(root, experts)


def _stages(root: Root) -> Problems:
    """Which families can be divided into pipeline stages, and into how many."""
    pp, name, dimensions = root.parallelism.pp, root.model.architecture, dimensions_of(root)
    if pp == 1:
        return
    if name not in DIVIDED:
        yield (
            f"parallelism.pp is {pp} and model.architecture is {name}: the native engine divides the layers of "
            f"{', '.join(DIVIDED)} into pipeline stages, of no other family; set parallelism.pp=1."
        )
        return
    if pp > dimensions.num_layers:
        yield (
            f"parallelism.pp is {pp} and {_key(root, 'num_layers')} {dimensions.num_layers}: every stage "
            f"needs a layer, so lower pp to {dimensions.num_layers} or less."
        )
        return
    yield from staged(name).problems(dimensions, pp)


def _adapters(root: Root) -> Problems:
    rank, name = root.backend.lora_rank, root.model.architecture
    if rank and name not in WITH_ADAPTERS:
        yield (
            f"backend.lora_rank is {rank} and model.architecture is {name}: the native engine wraps linear layers of "
            f"{', '.join(WITH_ADAPTERS)} for adapters, of no other family; set it to 0."
        )


def _slots(root: Root) -> Problems:
    """Where experts may have second copies, and may move."""
    p, name = root.parallelism, root.model.architecture
    asked = [key for key in ("redundant_experts", "rebalance_seed") if getattr(p, key)]
    keys = " and ".join(f"parallelism.{key} {getattr(p, key)}" for key in asked)
    if asked and name not in WITH_SLOTS:
        yield (
            f"{keys}: the native engine deals the experts of {', '.join(WITH_SLOTS)} out over slots, of no other "
            f"family, and model.architecture is {name}; set them to 0."
        )
    elif asked and p.ep < 2:
        yield (
            f"{keys}: experts change places between ranks, and parallelism.ep is {p.ep}; set ep to 2 or more, or them "
            "to 0."
        )
    saved = [
        step.via
        for step in root.load_path.steps
        if step.do == "start" and step.via in ("sharded_state", "tensorizer")
    ]
    if p.rebalance_seed and saved:
        yield (
            f"parallelism.rebalance_seed is {p.rebalance_seed} and load_path={root.load_path.name} starts via "
            f"{saved[0]}: what an engine saves has its experts where they had been moved, and no file says where; set "
            "rebalance_seed=0."
        )


def _blocks(root: Root, experts: Experts) -> Problems:
    """Ranks that share an expert take whole blocks of it, and each must have one."""
    tp, blocks = root.parallelism.tp, experts.blocks
    if blocks is None or root.parallelism.ep > 1 or tp < 2 or (tp - 1) * ceil(blocks / tp) < blocks:
        return
    key = f"{_key(root, experts.keys['intermediate'])} {experts.intermediate}"
    yield (
        f"parallelism.tp is {tp} and parallelism.ep is 1: {key} is {blocks} blocks that share a scale, of which the "
        "last rank would have none; lower tp, or use expert parallelism."
    )


def _dimensions(root: Root) -> Problems:
    plan = model_plan(root.model.architecture)
    yield from plan.problems(dimensions_of(root))
    experts = plan.experts(dimensions_of(root))
    for one in (experts, experts and experts.drafter):
        if one is not None and one.per_token > one.count:
            yield (
                f"{_key(root, one.keys['per_token'])} is {one.per_token}, more than the {one.keys['count']} "
                f"{one.count} there are."
            )


def _key(root: Root, name: str) -> str:
    return f"model.{root.model.architecture}.{name}"


def _mega_moe(root: Root) -> Problems:
    b, p = root.backend, root.parallelism
    experts = model_plan(root.model.architecture).experts(dimensions_of(root))
    if b.moe_kernel != "mega_moe" or experts is None:
        return
    if p.ep < 2 and b.arch != "sm90":  # our own kernel for Hopper needs no other rank
        yield (
            f"backend.moe_kernel is mega_moe and parallelism.ep is {p.ep}: the kernel dispatches between ranks and "
            "needs expert parallelism, ep of 2 or more; or set backend.moe_kernel=reference."
        )
    if experts.quantization != "mxfp4":
        yield (
            f"backend.moe_kernel is mega_moe and the experts of {root.model.name} are {experts.quantization}: the "
            f"FP8xFP4 kernel refuses {experts.quantization.upper()} expert weights; it reads mxfp4. Set "
            "backend.moe_kernel=reference."
        )
    alignment = memory.EXPERT_ALIGNMENT.get(b.arch)
    if alignment is not None and experts.hidden % alignment:
        yield (
            f"{_key(root, experts.keys['hidden'])} is {experts.hidden}; mega_moe on {b.arch} needs a multiple of "
            f"{alignment} (the expert input is not padded, only {experts.keys['intermediate']} is)."
        )
    if experts.per_token > MAX_PER_TOKEN:
        yield (
            f"{_key(root, experts.keys['per_token'])} is {experts.per_token}; mega_moe dispatches to at most "
            f"{MAX_PER_TOKEN}."
        )


def _perturbations(root: Root) -> Problems:
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.perturbation not in ("one_tensor", "some_tensors"):
            continue
        sections = tensor_table(root.model.architecture).sections(dimensions_of(root))
        known = {tensor.name for tensor in every_tensor(sections)}
        found = [name for name in known if fnmatchcase(name, checkpoint.perturbation_target)]
        if checkpoint.perturbation == "some_tensors" and found:
            continue
        if checkpoint.perturbation_target not in known:
            yield (
                f"checkpoints.{name}.perturbation_target is {checkpoint.perturbation_target!r}, which is not one of "
                f"the {len(known)} tensors of {root.model.name}, such as {min(known)}."
            )


def _roots(root: Root) -> Problems:
    if memory.has_drafter(root):
        return
    for number, step in enumerate(root.load_path.steps):
        if "draft" in step.roots:
            yield (
                f"load_path.steps[{number}].roots names 'draft', and {root.model.name} has no drafter: choose a model "
                "with one (num_mtp_layers or num_dspark_layers above 0, where the family has them), or a load path "
                "that updates the target alone."
            )


_RULES: tuple[Callable[[Root], Problems], ...] = (
    _positive,
    _layout,
    _stages,
    _slots,
    _adapters,
    _dimensions,
    _mega_moe,
    _perturbations,
    _roots,
)
