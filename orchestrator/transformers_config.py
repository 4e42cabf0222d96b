"""Reads configurations of transformers models as the control side needs them: plain JSON, no transformers."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.config.schema import Root
from workloads.loading.shards import CheckpointError, read_config

CONFIG = "config.json"
KEY = "model.transformers"
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")  # of `layer_types`
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")  # names in use

Config = Mapping[str, Any]


def drafts(root: Root) -> set[str]:
    """Names of the checkpoints that a drafter loads: of another model, perhaps."""
    return {checkpoint.draft for checkpoint in root.checkpoints.values() if checkpoint.draft}


def configs(root: Root) -> list[tuple[str, Config]]:
    """Each configuration that the cell names for its model, with the key or file in which it stands. A folder without
    a readable one is left out here: `orchestrator.rules.checkpoint_rules` says what is wrong with it."""
    given: list[tuple[str, Config]] = [(KEY, root.model.transformers)] if root.model.transformers else []
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.path is not None and name not in drafts(root):
            folder = Path(checkpoint.path).expanduser()
            try:
                given.append((str(folder / CONFIG), read_model_config(folder)))
            except CheckpointError:
                continue
    return list({where: (where, config) for where, config in given}.values())


def draft_config(root: Root) -> Config:
    """Of the drafts: that of a folder of one, else the model's, which drafts are generated for as well; empty without
    drafts, or where the folder has none that can be read."""
    names = drafts(root)
    given = [c.path for name, c in root.checkpoints.items() if name in names and c.path is not None]
    if not given:
        return root.model.transformers if names else {}
    try:
        return read_config(Path(given[0]).expanduser())
    except CheckpointError:
        return {}  # `orchestrator.rules.checkpoint_rules` says what is wrong with it


@cache
def read_model_config(folder: Path) -> Config:
    """The folder's config.json. Raises CheckpointError when it is absent or names no model."""
    config = read_config(folder)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{folder / CONFIG}: there is no model_type in it, so no engine knows what model this is. Fetch the file "
            "again."
        )
    return config


def text_part(config: Config) -> Config:
    """Of a model with several towers, the configuration of its language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def has_experts(config: Config) -> bool:
    """Whether any part of it counts experts; families have many names for that."""
    return any(
        has_experts(value) if isinstance(value, dict) else "expert" in str(key) and bool(value)
        for key, value in config.items()
    )


def number(config: Config, *names: str) -> int | None:
    """The first of these entries that is a positive whole number."""
    values = (text_part(config).get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


class Attention(NamedTuple):
    """Sizes of a model's attention; `layers` counts those that keep keys and values of past tokens."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def attention(config: Config) -> Attention | None:
    """None where the configuration does not say it in the common way."""
    heads, layers = number(config, "num_attention_heads"), number(config, "num_hidden_layers")
    hidden = number(config, "hidden_size")
    if heads is None or layers is None or hidden is None:
        return None
    kinds = text_part(config).get("layer_types")
    if isinstance(kinds, list):
        layers = sum(str(kind) in ATTENTION_LAYERS for kind in kinds)
    kv_heads = number(config, "num_key_value_heads") or heads
    return Attention(layers, heads, kv_heads, number(config, "head_dim") or hidden // heads)
