"""The gpt-oss model of one rank, and what its tensors beside the parameters are for."""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.gpt_oss.model import GptOssForCausalLM
from workloads.models.served import Drafter, Setting, Target

RULES = (
    Rule(
        "*.experts.kernel.gemm1_alpha",
        "constant",
        "slope of the activation's sigmoid for each expert, from the configuration; the MoE kernel holds it",
    ),
    Rule(
        "*.experts.kernel.gemm1_beta",
        "constant",
        "what the activation adds to its linear branch for each expert, always 1; the MoE kernel holds it",
    ),
    Rule(
        "*.experts.kernel.gemm1_clamp_limit",
        "constant",
        "limit of the activation's branches for each expert, from the configuration; the MoE kernel holds it",
    ),
    Rule("*.rotary_emb.inv_freq", "constant", "rotation per position, from the configuration"),
    Rule(
        "global:workloads.kernels.quantization.*",
        "constant",
        "values of the E2M1, E4M3 and E8M0 codes, the same in every process",
    ),
    Rule("*:caches.*", "runtime", "keys and values of the requests in flight"),
)


def make_roots(setting: Setting[GptOssConfig]) -> Mapping[str, Target | Drafter]:
    """The experts have one kernel, which `setting.kernel`, made for MegaMoE, does not replace.

    Raises ValueError for experts in another format than MXFP4.
    """
    quantization = setting.config.expert_quantization
    if quantization != "mxfp4":
        raise ValueError(
            f"model.gpt_oss.expert_quantization is {quantization}: the native engine runs mxfp4 experts only."
        )
    return {"target": GptOssForCausalLM(setting)}
