"""The DeepSeek-V4.1 models of one rank, the target or its vision wrapper and the drafter as a root of its own, and what
their tensors beside the parameters are for."""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.deepseek_v4.audit import RULES as V4_RULES
from workloads.models.deepseek_v4.tensors import ALIGNER
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.deepseek_v41.dspark import DeepseekV41DSpark
from workloads.models.deepseek_v41.model import DeepseekV41ForCausalLM
from workloads.models.served import Drafter, Setting, Target
from workloads.models.vision import VisionWrapper

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
    config, text = setting.config, DeepseekV41ForCausalLM(setting)
    roots: dict[str, Target | Drafter] = {
        "target": VisionWrapper(text, config, ALIGNER) if config.vision else text
    }
    if config.num_dspark_layers and setting.groups.on_last_stage:
        roots["draft"] = DeepseekV41DSpark(setting, text)
    return roots
