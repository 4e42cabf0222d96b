"""What one rank holds of a transformers model, from the files' headers or, where there are none yet, from a
configuration of the common kind: attention and a gated MLP or experts in every layer."""

from functools import cache
from math import prod
from pathlib import Path

from orchestrator.schema import Root
from orchestrator.transformers_config import EXPERTS, Config, attention, configs, number, text_part
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
    weights = weight_bytes(root)
    if weights is None or root.backend.url is not None:
        return []
    tp, device = root.parallelism.tp, root.backend.device
    split = f", split over TP{tp}" if tp > 1 else ""
    basis = ("headers of the files" if _folders(root) else "the configuration") + split
    reserve = Part("reserve", "reserve", RESERVE_BYTES[device], f"{device} runtime, activations")
    return [Part("weights", "weights", -(-weights // tp), basis), *_caches(root), reserve]


def update_bytes(root: Root) -> int:
    """What a foreign engine needs for an update is its own affair: nothing is known beforehand."""
    return 0


def weight_bytes(root: Root) -> int | None:
    """Bytes of all weights as the engine serves them, of the largest checkpoint; None where nothing tells."""
    itemsize = ITEMSIZE.get(root.backend.dtype)
    stored = [_stored_bytes(folder, itemsize) for folder in _folders(root)]
    if stored:
        known = [size for size in stored if size is not None]
        return max(known) if len(known) == len(stored) else None
    parameters = _parameters(root.model.transformers)
    return None if parameters is None else parameters * _itemsize(root.backend, root.model.transformers)


def _folders(root: Root) -> list[Path]:
    return [Path(c.path).expanduser() for c in root.checkpoints.values() if c.path is not None]


@cache
def _stored_bytes(folder: Path, itemsize: int | None) -> int | None:
    """Bytes of a folder's tensors, floats in the width `itemsize` that they are served in (None: as stored)."""
    try:
        metas = [location.meta for location in read_layout(folder).tensors.values()]
    except CheckpointError:
        return None  # `orchestrator.checkpoint_rules` says what is wrong with it
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
    """Keys and values of as many tokens as the limits allow, no more than the space that vLLM is given on a CPU."""
    config = next((config for _, config in configs(root)), {})
    attends, given = attention(config), root.backend.env.get(KV_SPACE, "")
    space = int(given) << 30 if given.isdigit() and int(given) > 0 else None
    if attends is None:
        return [] if space is None else [Part("KV cache", "cache", space, f"{KV_SPACE}={given}")]
    heads = max(1, attends.kv_heads // root.parallelism.tp)
    per_token = 2 * attends.layers * heads * attends.head_dim * _itemsize(root.backend, config)
    tokens = root.backend.max_requests * root.backend.max_model_len
    if space is not None and space < tokens * per_token:
        return [Part("KV cache", "cache", space, f"{KV_SPACE}={given}")]
    return [Part("KV cache", "cache", tokens * per_token, f"{tokens:,} tokens x {per_token:,} B")]
