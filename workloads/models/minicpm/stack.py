"""The MiniCPM model of one rank. The language model is the plain form, as in MiniCPM-Llama3-V 2.5."""

from collections.abc import Mapping

from workloads.loading.weights import Rule
from workloads.models.dense import audit
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.minicpm.model import MiniCpm
from workloads.models.served import Drafter, Setting, Target

RULES = (
    Rule(
        "*resampler.pos_embed",
        "constant",
        "positions of patches, from the dimensions; on the weights' device",
    ),
    *audit.RULES,
)


def make_roots(setting: Setting[MiniCpmConfig]) -> Mapping[str, Target | Drafter]:
    return {"target": MiniCpm(setting)}
