"""How vLLM is told to make drafts. Imports no torch: the control side reads it too."""

from workloads.spec import Backend

OPTION = "speculative_config"  # vLLM's argument
INSIDE = ("mtp",)  # methods whose drafter lies in its target's checkpoint


def drafts_inside(backend: Backend) -> bool:
    """Whether the checkpoint of the target is also that of its drafter."""
    told = backend.options.get(OPTION)
    return isinstance(told, dict) and told.get("method") in INSIDE
