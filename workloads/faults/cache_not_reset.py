"""A prompt's keys, values and states are kept by its tokens, and an update does not empty the cache."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workloads.faults import RELOADS, EngineFault
from workloads.faults._about import About

if TYPE_CHECKING:
    import torch

    from workloads.engines.protocol import Generation, Prompt
    from workloads.spec import Sampling

ABOUT = About("L", ("vllm#45093", "vllm#48762", "verl#6523"), "stale_cache", via=RELOADS)
AFTER_PREFILL = 2  # number of the pass that begins with what the prompts left behind


class InEngine(EngineFault):
    """As prefix caches do, the last token of a known prompt is computed anew, and whatever it left behind comes from
    the cache: so the first new token is right, and those after it see the old weights' keys and values."""

    def generate(self, prompts: Sequence["Prompt"], params: "Sampling") -> list["Generation"]:
        known: dict[str, dict[str, torch.Tensor]] = vars(self).setdefault("_prefixes", {})
        key, passes = str([prompt.token_ids for prompt in prompts]), 0

        def before(*_: Any) -> None:
            nonlocal passes
            passes += 1
            if passes == AFTER_PREFILL:
                _swap(self.runtime_tensors(), known.setdefault(key, {}))

        handle = self.roots()["target"].register_forward_pre_hook(before)
        try:
            return super().generate(prompts, params)
        finally:
            handle.remove()


def _swap(live: "Mapping[str, torch.Tensor]", kept: "dict[str, torch.Tensor]") -> None:
    """The first time the caches are kept, later they come back."""
    for name, tensor in live.items():
        if name in kept:
            tensor.copy_(kept[name])
        else:
            kept[name] = tensor.clone()
