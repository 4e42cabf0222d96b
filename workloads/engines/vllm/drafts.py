"""How vLLM is told to make drafts. Imports no torch: the control side reads it too."""

from workloads.spec import Backend

OPTION = "speculative_config"  # vLLM's argument
INSIDE = "mtp"  # the drafter lies in its target's checkpoint; also as the end of a name, such as mimo_mtp
APART = (
    "draft_model",
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "dflash",
    "dspark",
)  # in one of its own


def draft_method(backend: Backend) -> str:
    """As vLLM names it; empty where none is named."""
    told = backend.options.get(OPTION)
    return str(told.get("method", "")) if isinstance(told, dict) else ""


def drafts_inside(backend: Backend) -> bool:
    """Whether the checkpoint of the target is also that of its drafter."""
    return draft_method(backend).split("_")[-1] == INSIDE
