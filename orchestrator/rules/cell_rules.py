"""Cross-field rules of layout, model, engine and memory. Each broken one yields a sentence with its values."""

from collections.abc import Callable

from orchestrator import memory
from orchestrator.architectures import ARCHITECTURES, architecture
from orchestrator.config.schema import Root
from orchestrator.rules import backend_rules, cluster_rules, code_rules, draft_rules, scenario_rules
from orchestrator.rules.rule_parts import Problems, at_least, divides, one_of


def problems(root: Root) -> list[str]:
    """Everything that is wrong with one cell's config. Later rules count on the numbers that earlier ones check."""
    found = [problem for rule in _PLAIN for problem in rule(root)]
    if not found:
        found = list(_memory(root))
    return found


_MAY_BE_ZERO = ("redundant_experts", "rebalance_seed", "lora_rank")


def _positive(root: Root) -> Problems:
    for section, holder in (("parallelism", root.parallelism), ("backend", root.backend)):
        for name, value in vars(holder).items():
            yield from at_least(f"{section}.{name}", value, 0 if name in _MAY_BE_ZERO else 1)


def _layout(root: Root) -> Problems:
    p = root.parallelism
    stages = f" x pp {p.pp}" if p.pp > 1 else ""
    if p.ranks != p.nodes * p.gpus_per_node:
        yield (
            f"parallelism: tp {p.tp} x dp {p.dp}{stages} is {p.ranks} ranks, but nodes {p.nodes} x gpus_per_node "
            f"{p.gpus_per_node} is {p.nodes * p.gpus_per_node}; the two must be equal."
        )
    of_stage = f"the {p.stage_ranks} ranks{' of a stage' if stages else ''} (tp {p.tp} x dp {p.dp})"
    yield from divides("parallelism.ep", p.ep, of_stage, p.stage_ranks)


def _model(root: Root) -> Problems:
    model = root.model
    yield from one_of("model.architecture", model.architecture, list(ARCHITECTURES))
    yield from one_of("model.size", model.size, ["proxy", "full"])
    yield from one_of("model.tokenizer", model.tokenizer, ["byte", "checkpoint"])
    if model.architecture in ARCHITECTURES:
        yield from architecture(root).problems(root)


def _memory(root: Root) -> Problems:
    limit, limit_name = memory_limit(root)
    parts = architecture(root).memory_parts(root)
    needed = memory.total(parts)
    if limit is None or needed <= limit:
        return
    largest = sorted(parts, key=lambda part: -part.nbytes)[:4]
    named = ", ".join(f"{part.name} {part.nbytes / 1e9:,.1f} GB" for part in largest)
    p = root.parallelism
    stages = f", ep {p.ep} and pp {p.pp}" if p.pp > 1 else f" and ep {p.ep}"
    yield (
        f"A rank needs {needed / 1e9:,.1f} GB and {limit_name} has {limit / 1e9:,.1f} GB ({named}, ...): with tp "
        f"{p.tp}{stages} {root.model.name} does not fit; raise tp or ep (more "
        "nodes), or lower backend.max_requests, max_model_len or max_batch_tokens."
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
    backend_rules.problems,
    draft_rules.problems,
    *cluster_rules.RULES,
    code_rules.problems,
    *scenario_rules.RULES,
)
