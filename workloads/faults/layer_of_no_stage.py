"""Two pipeline stages disagree on where the second one begins, and the layer between them is loaded by neither."""

from typing import TYPE_CHECKING, cast

from workloads.faults import EngineFault
from workloads.faults._about import About

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from torch import nn

    from workloads.models.served import Drafter, Setting, Stack, Target

ABOUT = About(
    "G",
    ("vllm#6406, whose loaders skip without a word what a stage does not have",),
    "unheld",
    needs=("stages",),
)


class InEngine(EngineFault):
    def make_roots(self, stack: "Stack", setting: "Setting[Any]") -> "Mapping[str, Target | Drafter]":
        roots = super().make_roots(stack, setting)
        if not setting.groups.on_last_stage:
            model = roots["target"].get_submodule("model")
            layers = cast("nn.ModuleDict", model.get_submodule("layers"))
            taps = vars(model).get(
                "taps", ()
            )  # the next stage would wait for what a drafter reads of the layer
            layers.pop(max((name for name in layers if int(name) not in taps), key=int))
        return roots
