"""What one rank holds of a transformers model, from the files' headers or, where there are none yet, from a
configuration of the common kind: attention and a gated MLP or experts in every layer."""

from collections.abc import Collection
from functools import cache
from math import prod
from pathlib import Path

from orchestrator.config.schema import Root
from orchestrator.transformers_config import (
    EXPERTS,
    Config,
    attention,
    configs,
    draft_config,
    drafts,
    number,
    text_part,
)
from workloads.engines.vllm.drafts import OPTION
from workloads.loading.shards import CheckpointError, read_layout
from workloads.loading.tensor_table import DTYPE_BYTES
from workloads.models.planning import Part
from workloads.spec import Backend

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = ("F64", "F32", "F16", "BF16")  # stored dtypes that an engine converts to the one it serves in
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB that vLLM allocates for keys and values on a CPU
# Families of the kind that is summed here.
COMMON = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")

# Beside weights and caches. CUDA: context, NCCL's channels, activations, graph pools. CPU: the process itself.
RESERVE_BYTES = {"cuda": 6_000_000_000, "cpu": 1_000_000_000}


def memory_parts(root: Root) -> list[Part]:
    """Everything that one rank holds; nothing where the weights' size is not known before they are made, or where
    the engine is a server that runs already."""
    target, draft = weight_bytes(root), draft_bytes(root)
    if target is None or draft is None or root.backend.url is not None:
        return []
    tp, device = root.parallelism.tp, root.backend.device
    parts = [_weights("weights", target, tp, _folders(root))]
    if draft:
        parts.append(_weights("draft", draft, _draft_tp(root), _draft_folders(root)))
    reserve = Part("reserve", "reserve", RESERVE_BYTES[device], f"{device} runtime, activations")
    return [*parts, *_caches(root), reserve]


def _weights(name: str, nbytes: int, tp: int, folders: list[Path]) -> Part:
    split = f", split over TP{tp}" if tp > 1 else ""
    basis = ("headers of the files" if folders else "the configuration") + split
    return Part(name, "weights", -(-nbytes // tp), basis)


def update_bytes(root: Root) -> int:
    """What a foreign engine needs for an update is its own affair: nothing is known beforehand."""
    return 0


def weight_bytes(root: Root) -> int | None:
    """Bytes of all weights as the engine serves them, of the largest checkpoint; None where nothing tells. Those of a
    draft are not among them."""
    return _largest(root, _folders(root))


def draft_bytes(root: Root) -> int | None:
    """Of the largest draft, as `weight_bytes`; 0 without drafts. What a drafter shares with its target counts twice:
    only the engine knows which tensors that will be."""
    return _largest(root, _draft_folders(root)) if drafts(root) else 0


def _largest(root: Root, folders: list[Path]) -> int | None:
    """Of these folders or, without any, of weights that are generated for the configuration."""
    itemsize = ITEMSIZE.get(root.backend.dtype)
    stored = [_stored_bytes(folder, itemsize) for folder in folders]
    if stored:
        known = [size for size in stored if size is not None]
        return max(known) if len(known) == len(stored) else None
    parameters = _parameters(root.model.transformers)
    return None if parameters is None else parameters * _itemsize(root.backend, root.model.transformers)


def _folders(root: Root) -> list[Path]:
    return _paths(root, root.checkpoints.keys() - drafts(root))


def _draft_folders(root: Root) -> list[Path]:
    return _paths(root, drafts(root))


def _paths(root: Root, names: Collection[str]) -> list[Path]:
    given = (c.path for name, c in root.checkpoints.items() if name in names)
    return [Path(path).expanduser() for path in given if path is not None]


def _draft_tp(root: Root) -> int:
    """Ranks that vLLM splits the draft over: those of the target, unless its own option says otherwise."""
    told = root.backend.options.get(OPTION)
    own = told.get("draft_tensor_parallel_size") if isinstance(told, dict) else None
    return own if isinstance(own, int) and own > 0 else root.parallelism.tp


@cache
def _stored_bytes(folder: Path, itemsize: int | None) -> int | None:
    """Bytes of a folder's tensors, floats in the width `itemsize` that they are served in (None: as stored)."""
    try:
        metas = [location.meta for location in read_layout(folder).tensors.values()]
    except CheckpointError:
        return None  # `orchestrator.rules.checkpoint_rules` says what is wrong with it
    return sum(prod(meta.shape) * _served(meta.dtype, itemsize) for meta in metas)


def _served(stored: str, itemsize: int | None) -> int:
    return itemsize if itemsize is not None and stored in FLOATS else DTYPE_BYTES[stored]


def _itemsize(backend: Backend, config: Config) -> int:
    """Bytes of a value that is served."""
    own = str(config.get("dtype", config.get("torch_dtype", "")))
    return ITEMSIZE.get(backend.dtype, ITEMSIZE.get(own, 2))


def _parameters(config: Config) -> int | None:
    """Of a decoder whose layers are all alike; None for anything else."""
    attends, text = attention(config), text_part(config)
    hidden, vocabulary = number(config, "hidden_size"), number(config, "vocab_size")
    inner, layers = number(config, "intermediate_size"), number(config, "num_hidden_layers")
    if attends is None or hidden is None or vocabulary is None or inner is None:
        return None
    if attends.layers != layers or text.get("model_type") not in COMMON:
        return None
    projections = 2 * hidden * attends.head_dim * (attends.heads + attends.kv_heads)
    experts = number(config, *EXPERTS)
    width = number(config, "moe_intermediate_size") or inner
    mlp = 3 * hidden * inner if experts is None else experts * (3 * hidden * width + hidden)
    tables = vocabulary * hidden * (1 if text.get("tie_word_embeddings") else 2)
    return layers * (projections + mlp + 2 * hidden) + tables + hidden


def _caches(root: Root) -> list[Part]:
    """Keys and values of as many tokens as the limits allow, no more than the space that vLLM is given on a CPU, in
    which a draft's are, too."""
    config = next((config for _, config in configs(root)), {})
    per_token, given = _per_token(root, config, root.parallelism.tp), root.backend.env.get(KV_SPACE, "")
    space = int(given) << 30 if given.isdigit() and int(given) > 0 else None
    if per_token is None:
        return [] if space is None else [Part("KV cache", "cache", space, f"{KV_SPACE}={given}")]
    per_token += (
        _per_token(root, draft_config(root), _draft_tp(root)) or 0
    )  # heads such as Medusa's keep none
    tokens = root.backend.max_requests * root.backend.max_model_len
    if space is not None and space < tokens * per_token:
        return [Part("KV cache", "cache", space, f"{KV_SPACE}={given}")]
    return [Part("KV cache", "cache", tokens * per_token, f"{tokens:,} tokens x {per_token:,} B")]


def _per_token(root: Root, config: Config, tp: int) -> int | None:
    """Bytes of a token's keys and values on one rank; None where the configuration does not tell."""
    attends = attention(config)
    if attends is None:
        return None
    heads = max(1, attends.kv_heads // tp)
    return 2 * attends.layers * heads * attends.head_dim * _itemsize(root.backend, config)
