"""Memory of transformers models: from files where there are any, from common configurations, else unknown."""

import json
from pathlib import Path

import pytest

from orchestrator import transformers_memory as memory
from orchestrator.config.schema import Root
from orchestrator.memory import Part
from workloads.spec import Checkpoint

HIDDEN, INNER, LAYERS, HEADS, SHARED, VOCABULARY = 256, 512, 2, 4, 2, 512
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "vocab_size": VOCABULARY,
}
ATTENTION = 2 * HIDDEN * (HIDDEN // HEADS) * (HEADS + SHARED)
DENSE = LAYERS * (ATTENTION + 3 * HIDDEN * INNER + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN


def root(**config: object) -> Root:
    made = Root()
    made.model.architecture = "transformers"
    made.model.transformers = {**LLAMA, **config}
    made.backend.engine, made.backend.dtype = "vllm", "float32"
    made.backend.max_requests, made.backend.max_model_len = 8, 128
    made.checkpoints = {"old": Checkpoint(), "new": Checkpoint(perturbation="every_tensor")}
    return made


def parts(of: Root) -> dict[str, Part]:
    return {part.name: part for part in memory.memory_parts(of)}


def test_a_dense_decoder_is_summed_from_its_configuration() -> None:
    assert memory.weight_bytes(root()) == 4 * DENSE
    assert memory.weight_bytes(root(tie_word_embeddings=True)) == 4 * (DENSE - VOCABULARY * HIDDEN)


def test_experts_replace_the_mlp() -> None:
    added = LAYERS * (4 * (3 * HIDDEN * 64 + HIDDEN) - 3 * HIDDEN * INNER)
    assert memory.weight_bytes(root(num_experts=4, moe_intermediate_size=64)) == 4 * (DENSE + added)


def test_tensor_parallelism_divides_weights_and_key_value_heads() -> None:
    split = root()
    split.parallelism.tp = split.parallelism.gpus_per_node = 4
    one, four = parts(root()), parts(split)
    assert four["weights"].nbytes == one["weights"].nbytes // 4
    assert four["KV cache"].nbytes == one["KV cache"].nbytes // 2, "two ranks share a head"
    assert one["KV cache"].nbytes == 8 * 128 * 2 * LAYERS * SHARED * 64 * 4


def test_the_cache_is_no_larger_than_its_space() -> None:
    wide = root()
    wide.backend.max_requests, wide.backend.max_model_len = 1024, 8192
    wide.backend.env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert parts(wide)["KV cache"].nbytes == 1 << 30
    wide.backend.env = {"VLLM_CPU_KVCACHE_SPACE": "0"}  # vLLM then chooses
    assert parts(wide)["KV cache"].nbytes > 1 << 30


def test_layers_without_attention_keep_no_keys() -> None:
    kinds = ["linear_attention", "full_attention"]
    mixed = root(layer_types=kinds)
    assert memory.memory_parts(mixed) == [], "what else such a layer holds is not known here"
    folderless = parts(root(layer_types=["sliding_attention", "full_attention"]))
    assert folderless["weights"].nbytes == 4 * DENSE


@pytest.mark.parametrize(
    "unusual", [{"model_type": "gpt2"}, {"intermediate_size": None}, {"hidden_size": None}]
)
def test_what_is_not_known_is_not_computed(unusual: dict[str, object]) -> None:
    assert memory.memory_parts(root(**unusual)) == []
    assert memory.weight_bytes(root(**unusual)) is None


def folder(path: Path, config: dict[str, object]) -> str:
    """Eight 2-byte floats and 16 other bytes."""
    header = {
        "a": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [16], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def drafted(*drafts: Checkpoint, **options: object) -> Root:
    made = root()
    made.backend.options = {"speculative_config": {"method": "draft_model", **options}}
    for name, draft in zip(("old", "new"), drafts, strict=True):
        made.checkpoints[name].draft = f"draft_{name}"
        made.checkpoints[f"draft_{name}"] = draft
    return made


def test_a_draft_and_its_keys_come_on_top() -> None:
    alone, both = parts(root()), parts(drafted(Checkpoint(seed=7), Checkpoint(seed=8)))
    assert both["weights"].nbytes == alone["weights"].nbytes == 4 * DENSE
    assert both["draft"].nbytes == 4 * DENSE, "generated for the same configuration"
    assert (both["draft"].kind, both["draft"].basis) == ("weights", "the configuration")
    assert both["KV cache"].nbytes == 2 * alone["KV cache"].nbytes


def test_a_draft_of_files_is_as_large_as_they_are(tmp_path: Path) -> None:
    """One of them is a head without attention, as Medusa's: it keeps no keys."""
    head = {"model_type": "medusa", "hidden_size": HIDDEN}
    folders = [folder(tmp_path / name, head) for name in ("a", "b")]
    both = drafted(*(Checkpoint(path=path) for path in folders))
    assert parts(both)["weights"].nbytes == 4 * DENSE, "its folder says nothing of the target"
    assert parts(both)["draft"].nbytes == 8 * 4 + 16
    assert parts(both)["KV cache"] == parts(root())["KV cache"]
    both.checkpoints["draft_new"].path = str(tmp_path / "gone")
    assert memory.memory_parts(both) == []


@pytest.mark.parametrize(("option", "split"), [({}, 2), ({"draft_tensor_parallel_size": 1}, 1)])
def test_a_draft_is_split_as_its_target_unless_told_otherwise(option: dict[str, object], split: int) -> None:
    made = drafted(Checkpoint(), Checkpoint(), **option)
    made.parallelism.tp = made.parallelism.gpus_per_node = 2
    assert parts(made)["weights"].nbytes == 4 * DENSE // 2
    assert parts(made)["draft"].nbytes == 4 * DENSE // split


def test_files_say_their_own_size_in_the_dtype_that_is_served(tmp_path: Path) -> None:
    given = root()
    given.model.transformers = {}
    given.checkpoints = {"old": Checkpoint(path=folder(tmp_path, LLAMA))}
    assert memory.weight_bytes(given) == 8 * 4 + 16
    given.backend.dtype = "auto"
    assert memory.weight_bytes(given) == 32
    given.parallelism.tp = 2
    assert parts(given)["weights"].basis == "headers of the files, split over TP2"
    given.checkpoints["new"] = Checkpoint(path=str(tmp_path / "gone"))
    assert memory.memory_parts(given) == []


def test_nothing_of_a_running_server_is_counted() -> None:
    attached = root()
    attached.backend.url = "http://node:8000"
    assert memory.memory_parts(attached) == []
