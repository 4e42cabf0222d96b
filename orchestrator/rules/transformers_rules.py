"""Rules of models that transformers describes: a configuration to generate weights for, or folders of weights."""

from collections.abc import Callable
from pathlib import Path

from orchestrator.config.schema import Root
from orchestrator.rules.rule_parts import Problems, divides, plain
from orchestrator.transformers_config import KEY, configs, has_experts, number
from workloads.loading.shards import CheckpointError, read_layout
from workloads.models.architectures import ARCHITECTURES
from workloads.spec import Checkpoint

BYTE_VOCABULARY = 258  # of the byte tokenizer: 256 bytes, a first and a last token
QUANTIZED = (
    "scales_only",
    "expert_tagged",
)  # perturbations of tensors that generated checkpoints do not have


def problems(root: Root) -> Problems:
    for rule in _RULES:
        yield from rule(root)


def _engine(root: Root) -> Problems:
    if root.backend.engine == "native":
        names = ", ".join(sorted(ARCHITECTURES))
        yield (
            "backend.engine is native and model.architecture is transformers: the native engine runs "
            f"{names} only; set backend=vllm_cpu or another backend whose engine loads transformers models."
        )


def _config(root: Root) -> Problems:
    given = root.model.transformers
    if given:
        yield from plain(KEY, given)
        if not isinstance(given.get("model_type"), str):
            yield (
                f"{KEY} has no model_type; it names the family, such as llama, whose other entries the configuration "
                "then gives."
            )
        return
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.path is None:
            yield (
                f"checkpoints.{name}.path is not set and {KEY} is empty: give a folder of weights, or a configuration "
                "with its model_type to generate them for."
            )


def _one_model(root: Root) -> Problems:
    """An update keeps the model: all weights of a cell are of one."""
    types = {where: config.get("model_type") for where, config in configs(root)}
    if len(set(types.values())) > 1:
        listed = ", ".join(f"{kind} in {where}" for where, kind in types.items())
        yield f"model_type is {listed}: all checkpoints of a cell must be weights of one model."


def _experts(root: Root) -> Problems:
    """They are dealt out over all ranks of one engine. A replica of vLLM that we start is an engine of its own."""
    p, b = root.parallelism, root.backend
    per_replica = b.engine == "vllm" and b.url is None
    ranks = p.tp if per_replica else p.ranks
    if (
        p.ep not in (1, ranks) and p.ep >= 1 and p.ranks % p.ep == 0
    ):  # else `orchestrator.rules.cell_rules` says so
        yield (
            f"parallelism.ep is {p.ep}; experts are either not dealt out or over all {ranks} ranks of an engine (tp "
            f"{p.tp}, dp {p.dp}; one engine {'for each replica' if per_replica else 'in all'}): use 1 or {ranks}."
        )
    for where, config in configs(root) if p.ep > 1 else ():
        if not has_experts(config):
            yield (
                f"parallelism.ep is {p.ep}, but the model of {where} has no experts to deal out: set parallelism.ep=1, "
                "as parallelism=single and parallelism=tp2_ep1 do."
            )


def _layout(root: Root) -> Problems:
    p = root.parallelism
    for where, config in configs(root):
        heads, shared = number(config, "num_attention_heads"), number(config, "num_key_value_heads")
        if heads is not None:
            yield from divides("parallelism.tp", p.tp, f"num_attention_heads {heads} of {where}", heads)
        fits = p.tp >= 1 and (heads is None or heads % p.tp == 0)
        if shared is not None and fits and p.tp % shared and shared % p.tp:
            yield (
                f"parallelism.tp is {p.tp} and num_key_value_heads is {shared} in {where}: one must divide the other, "
                "so that each rank has whole heads or a whole number of ranks shares one."
            )


def _vocabulary(root: Root) -> Problems:
    if root.model.tokenizer == "byte":
        for where, config in configs(root):
            size = number(config, "vocab_size")
            if size is not None and size < BYTE_VOCABULARY:
                yield (
                    f"vocab_size is {size} in {where}, but model.tokenizer=byte needs {BYTE_VOCABULARY} ids: 256 "
                    "bytes, a first and a last token."
                )
    for name, checkpoint in root.checkpoints.items():
        if root.model.tokenizer == "checkpoint" and checkpoint.path is not None:
            folder = Path(checkpoint.path).expanduser()
            if folder.is_dir() and not (folder / "tokenizer.json").is_file():
                yield (
                    f"checkpoints.{name}.path is {checkpoint.path}, where no tokenizer.json lies, and model.tokenizer "
                    "is checkpoint: add the file, or set model.tokenizer=byte."
                )


def _perturbations(root: Root) -> Problems:
    for name, checkpoint in root.checkpoints.items():
        key = f"checkpoints.{name}"
        if checkpoint.perturbation in QUANTIZED and checkpoint.path is None:
            yield (
                f"{key}.perturbation is {checkpoint.perturbation}, which changes scales or packed experts; weights "
                "generated for a transformers configuration have none: use every_tensor or one_tensor."
            )
        if checkpoint.perturbation == "one_tensor":
            yield from _target(key, checkpoint)


def _target(key: str, checkpoint: Checkpoint) -> Problems:
    """Names of a generated checkpoint are known once transformers has made it: then the view refuses others."""
    target = checkpoint.perturbation_target
    if not target:
        yield f"{key}.perturbation_target is not set; one_tensor needs the name of the tensor to change."
    elif checkpoint.path is not None:
        try:
            names = read_layout(Path(checkpoint.path).expanduser()).tensors
        except CheckpointError:
            return  # `orchestrator.rules.checkpoint_rules` says what is wrong with the folder
        if target not in names:
            yield (
                f"{key}.perturbation_target is {target!r}, which is not one of the {len(names)} tensors of "
                f"{checkpoint.path}, such as {min(names, default='none')}."
            )


_RULES: tuple[Callable[[Root], Problems], ...] = (
    _engine,
    _config,
    _one_model,
    _experts,
    _layout,
    _vocabulary,
    _perturbations,
)
