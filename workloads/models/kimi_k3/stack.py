"""The Kimi-K3 models of one rank: the target, and its drafter as a root of its own."""

from collections.abc import Mapping

from workloads.models.kimi_k3.audit import RULES
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.dspark import KimiK3DSpark
from workloads.models.kimi_k3.model import KimiK3ForCausalLM
from workloads.models.kimi_k3.mtp import KimiK3MTP
from workloads.models.served import Drafter, Setting, Target

__all__ = ["RULES", "make_roots"]


def make_roots(setting: Setting[KimiK3Config]) -> Mapping[str, Target | Drafter]:
    target = KimiK3ForCausalLM(setting)
    roots: dict[str, Target | Drafter] = {"target": target}
    if setting.groups.on_last_stage and setting.config.num_dspark_layers:
        roots["draft"] = KimiK3DSpark(setting, target)
    elif setting.groups.on_last_stage and setting.config.num_mtp_layers:
        roots["draft"] = KimiK3MTP(setting)
    return roots
