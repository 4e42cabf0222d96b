"""The model families of the native engine, by name. Imports no torch until a stack is asked for.

Each is a package `workloads.models.NAME` with the same modules: `config` (its dimensions), `tensors` (what its
checkpoint holds), `plan` (what a rank needs; both without torch) and `stack` (the models that are loaded and run).
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

from workloads.loading.tensor_table import Section
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.medusa.config import MedusaConfig
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.planning import Experts, Load, Part
from workloads.models.qwen3.config import Qwen3Config

ARCHITECTURES: dict[str, type] = {
    "deepseek_v4": DeepseekV4Config,
    "deepseek_v41": DeepseekV41Config,
    "gpt_oss": GptOssConfig,
    "kimi_k3": KimiK3Config,
    "medusa": MedusaConfig,
    "minicpm": MiniCpmConfig,
    "openpangu": OpenPanguConfig,
    "qwen3": Qwen3Config,
}


class TensorTable(Protocol):
    """`tensors` of a family. NOT_LOADED: prefixes of tensors that are published beside those of the model."""

    NOT_LOADED: tuple[str, ...]

    def sections(self, c: Any) -> Iterator[Section]: ...


class ModelPlan(Protocol):
    """`plan` of a family, for `c`, its dimensions.

    COMPONENTS: what a memory plan calls the components of the tensor table. MAY_BE_ZERO: numbers of `c` that may be.
    """

    COMPONENTS: Mapping[str, str]
    MAY_BE_ZERO: tuple[str, ...]

    def problems(self, c: Any) -> Iterator[str]:
        """A sentence for each contradiction within the dimensions, whose keys are `model.NAME.KEY`."""

    def divided(self, c: Any) -> Mapping[str, int]:
        """What tensor-parallel ranks share equally: key of `c` -> its number."""

    def experts(self, c: Any) -> Experts | None:
        """The routed experts; None in a dense model."""

    def derived(self, c: Any, tp: int) -> list[Part]:
        """What post-processing makes beside the weights on one rank, experts excluded."""

    def caches(self, c: Any, load: Load, tp: int) -> list[Part]:
        """What the requests in flight hold on one rank."""


def tensor_table(architecture: str) -> TensorTable:
    return cast(TensorTable, import_module(f"workloads.models.{architecture}.tensors"))


def stack_module(architecture: str) -> ModuleType:
    """Its interface is `workloads.models.served.Stack`."""
    return import_module(f"workloads.models.{architecture}.stack")


def model_plan(architecture: str) -> ModelPlan:
    return cast(ModelPlan, import_module(f"workloads.models.{architecture}.plan"))
