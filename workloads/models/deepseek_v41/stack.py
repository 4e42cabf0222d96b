"""The DeepSeek-V4.1 model of one rank, and what its tensors beside the parameters are for."""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.deepseek_v4.audit import RULES as V4_RULES
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.deepseek_v41.model import DeepseekV41ForCausalLM
from workloads.models.served import Drafter, Setting, Target

RULES = (
    Rule(
        "*.engram_hash.*",
        "constant",
        "which token ids count as one, and multipliers, sizes and offsets of the hashes of n-grams: from the "
        "dimensions and the vocabulary alone",
    ),
    *V4_RULES,
)


def make_roots(setting: Setting[DeepseekV41Config]) -> Mapping[str, Target | Drafter]:
    return {"target": DeepseekV41ForCausalLM(setting)}
