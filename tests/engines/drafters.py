"""Tiny drafters of `tiny_llama`, and a tiny model that brings its drafter along, as folders that vLLM loads.

transformers knows none of these heads, so their tensors are listed here, as public checkpoints name them: EAGLE and
EAGLE-3 (SafeAILab/EAGLE), Medusa (FasterDecoding/Medusa), and the MTP layer of MiMo.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from tests.commands import ROOT

Shapes = Mapping[str, tuple[int, ...]]
LLAMA = yaml.safe_load((ROOT / "conf" / "model" / "tiny_llama.yaml").read_text())["transformers"]
HIDDEN, INNER, VOCABULARY = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
HEADS, SHARED = (LLAMA[key] * LLAMA["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
MEDUSA_HEADS = 2


def _layer(prefix: str, width: int = HIDDEN) -> Shapes:
    """A llama layer without norms, whose attention reads `width` values."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS, width),
        f"{prefix}.self_attn.k_proj.weight": (SHARED, width),
        f"{prefix}.self_attn.v_proj.weight": (SHARED, width),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS),
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _norms(*names: str) -> Shapes:
    return {f"{name}.weight": (HIDDEN,) for name in names}


EAGLE = {"fc.weight": (HIDDEN, 2 * HIDDEN), **_layer("layers.0")}
EAGLE3 = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    **_layer("midlayer", 2 * HIDDEN),
    **_norms("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}
MEDUSA = {
    name: shape
    for head in range(MEDUSA_HEADS)
    for name, shape in {
        f"blocks.{head}.layers.0.weight": (HIDDEN, HIDDEN),
        f"lm_heads.{head}.weight": (VOCABULARY, HIDDEN),
    }.items()
}


def _biased(prefix: str) -> Shapes:
    """A layer of Qwen2, which MiMo is made of."""
    biases = {"q": HEADS, "k": SHARED, "v": SHARED}
    return {
        **_layer(prefix),
        **_norms(f"{prefix}.input_layernorm"),
        **{f"{prefix}.self_attn.{name}_proj.bias": (size,) for name, size in biases.items()},
    }


_MTP = "model.mtp_layers.0"
MIMO = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    **_norms("model.norm"),
    **_biased("model.layers.0"),
    **_biased(_MTP),
    **_norms(f"{_MTP}.token_layernorm", f"{_MTP}.hidden_layernorm", f"{_MTP}.final_layernorm"),
    f"{_MTP}.input_proj.weight": (HIDDEN, 2 * HIDDEN),
}

_ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
CONFIGS = {
    "eagle": {**_ONE_LAYER, "architectures": ["LlamaForCausalLM"]},
    "eagle3": {
        **_ONE_LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCABULARY,
        # as many as `fc` reads, and the target has: by default a layer is asked for that two layers do not have
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
    "medusa": {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_heads": MEDUSA_HEADS,
        "num_hidden_layers": 1,
    },
    "mtp": {
        **_ONE_LAYER,
        "model_type": "qwen2",
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    },
}
TENSORS = {"eagle": EAGLE, "eagle3": EAGLE3, "medusa": MEDUSA, "mtp": MIMO}


def write_drafter(method: str, folder: Path, seed: int = 0) -> Path:
    """A folder of float32 weights that follow from the seed, of which no two are alike. method: as vLLM calls it; of
    `mtp` the folder is that of a target with its drafter inside."""
    drawn = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=drawn) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        + (1 if "norm" in name else 0)
        for name, shape in TENSORS[method].items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[method]))
    return folder
