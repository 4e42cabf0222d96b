"""The OpenPangu models of one rank: the text model or its vision wrapper, and the MTP block.

What is known of the published models is the sinks: their parameters and what is derived from them. Around them stands
the plain form: rotation of half-split pairs over whole heads, pre-norm layers, dense SiLU-gated MLPs.
"""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.dense import audit
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.openpangu.model import OpenPanguForCausalLM
from workloads.models.openpangu.mtp import OpenPanguMTP
from workloads.models.openpangu.tensors import PROJECTOR
from workloads.models.served import Drafter, Setting, Target
from workloads.models.vision import VisionWrapper

RULES = (
    Rule("*.self_attn.sink_key", "derived", "k_layernorm of param_sink_key, which attention reads"),
    *audit.RULES,
)


def make_roots(setting: Setting[OpenPanguConfig]) -> Mapping[str, Target | Drafter]:
    config = setting.config
    text = OpenPanguForCausalLM(setting)
    target: Target = VisionWrapper(text, config, PROJECTOR) if config.vision else text
    roots: dict[str, Target | Drafter] = {"target": target}
    if config.num_mtp_layers:
        roots["draft"] = OpenPanguMTP(setting)
    return roots
