"""The Qwen3 model of one rank, and what each of its tensors beside the parameters is for."""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.qwen3.config import QUANTIZATIONS, Qwen3Config
from workloads.models.qwen3.model import Qwen3ForCausalLM
from workloads.models.served import Drafter, Setting, Target

RULES = (
    Rule(
        "*.w13.kernel_weight",
        "weight",
        "gate and up projections of the routed experts in the storage they were loaded into, in the order (up, gate) "
        "of the kernel; the parameter they were loaded as is gone",
    ),
    Rule(
        "*.weight_scale",
        "weight",
        "scales of FP8 tiles, MN-major as the kernel reads them; the parameter they were loaded as is gone",
    ),
    Rule(
        "*.weight_scale_swizzled",
        "weight",
        "block scales of NVFP4 in the tiles that the kernel reads; the parameter they were loaded as is gone",
    ),
    Rule("*.input_scale_max", "derived", "largest input_scale of the matrices that share an input"),
    Rule("*.alphas", "derived", "products of input and weight global scales of NVFP4, by expert and matrix"),
    Rule(
        "*.rotary_emb.cos_sin_cache", "constant", "cosines and sines of every position, from the dimensions"
    ),
    Rule(
        "global:workloads.kernels.quantization.*",
        "constant",
        "values of the E2M1, E4M3 and E8M0 codes, the same in every process",
    ),
    Rule("*:caches.*", "runtime", "keys and values of the requests in flight"),
)


def make_roots(setting: Setting[Qwen3Config]) -> Mapping[str, Target | Drafter]:
    """Raises ValueError for an unknown quantisation."""
    quantization = setting.config.quantization
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"model.qwen3.quantization is {quantization!r}: use one of {', '.join(QUANTIZATIONS)}."
        )
    return {"target": Qwen3ForCausalLM(setting.config, setting.groups)}
