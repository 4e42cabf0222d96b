"""The models of one rank: an ordinary target, and its Medusa heads as a root of their own."""

from collections.abc import Mapping

from workloads.models.dense.audit import RULES
from workloads.models.dense.model import DenseForCausalLM
from workloads.models.medusa.config import MedusaConfig
from workloads.models.medusa.heads import MedusaHeads
from workloads.models.served import Drafter, Setting, Target

__all__ = ["RULES", "make_roots"]


def make_roots(setting: Setting[MedusaConfig]) -> Mapping[str, Target | Drafter]:
    return {"target": DenseForCausalLM(setting), "draft": MedusaHeads(setting)}
