"""The DeepSeek-V4 models of one rank: the target or its vision wrapper, and the drafter as a root of its own."""

from collections.abc import Mapping

from workloads.models.deepseek_v4.audit import RULES
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v4.dspark import DeepseekV4DSpark
from workloads.models.deepseek_v4.model import DeepseekV4ForCausalLM
from workloads.models.deepseek_v4.mtp import DeepseekV4MTP
from workloads.models.deepseek_v4.tensors import ALIGNER
from workloads.models.served import Drafter, Setting, Target
from workloads.models.vision import VisionWrapper

__all__ = ["RULES", "make_roots"]


def make_roots(setting: Setting[DeepseekV4Config]) -> Mapping[str, Target | Drafter]:
    """Raises ValueError for experts in another format than MXFP4."""
    config = setting.config
    quantization = config.expert_quantization
    if quantization != "mxfp4":
        raise ValueError(
            f"model.deepseek_v4.expert_quantization is {quantization}: the native engine runs mxfp4 experts only."
        )
    text = DeepseekV4ForCausalLM(setting)
    target: Target = VisionWrapper(text, config, ALIGNER) if config.vision else text
    roots: dict[str, Target | Drafter] = {"target": target}
    if setting.groups.on_last_stage and config.num_dspark_layers:
        roots["draft"] = DeepseekV4DSpark(setting, text)
    elif setting.groups.on_last_stage and config.num_mtp_layers:
        roots["draft"] = DeepseekV4MTP(setting)
    return roots
