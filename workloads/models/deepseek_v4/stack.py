"""The DeepSeek-V4 models of one rank: the target or its vision wrapper, and the MTP block as a root of its own."""

from collections.abc import Mapping

from workloads.models.deepseek_v4.audit import RULES
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v4.model import DeepseekV4ForCausalLM
from workloads.models.deepseek_v4.mtp import DeepseekV4MTP
from workloads.models.deepseek_v4.vision import DeepseekV4ForConditionalGeneration
from workloads.models.served import Drafter, Setting, Target

__all__ = ["RULES", "make_roots"]


def make_roots(setting: Setting[DeepseekV4Config]) -> Mapping[str, Target | Drafter]:
    """Raises ValueError for experts in another format than MXFP4."""
    quantization = setting.config.expert_quantization
    if quantization != "mxfp4":
        raise ValueError(
            f"model.deepseek_v4.expert_quantization is {quantization}: the native engine runs mxfp4 experts only."
        )
    target = DeepseekV4ForConditionalGeneration if setting.config.vision else DeepseekV4ForCausalLM
    roots: dict[str, Target | Drafter] = {"target": target(setting)}
    if setting.config.num_mtp_layers:
        roots["draft"] = DeepseekV4MTP(setting)
    return roots
