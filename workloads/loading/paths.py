"""Which phases of the weight lifecycle each load path runs, in order: the one table of it. Imports no torch.

The loader is built after it, the judge asks it what a load owes, and a test walks it against lifecycle records, whose
event names are these phases.
"""

from dataclasses import dataclass

#: What each phase does. All but `finalize` have one event for each module; `finalize` has one for each model.
PHASES = {
    "draw": "random values instead of a checkpoint's",
    "adopt": "tensors that were post-processed before they were saved are put in place, derived ones included",
    "allocate": "parameters that have had no memory since the start get theirs, and stay the same parameters",
    "rematerialize": "fresh memory for the parameters, that of the serving ones is kept",
    "restore": "parameters that post-processing consumed come back, in the layout in which they are loaded",
    "place": "pieces of the checkpoint are mapped, narrowed to this rank and copied into parameters",
    "fill_padding": "what the pieces leave of their slots gets the value that it was created with",
    "install_expert": "one expert, complete, enters the stacked parameters or the kernel's layout",
    "post_process": "what is derived from one module's weights is built, or refreshed in place",
    "finalize_module": "the module's weights enter the kernel's layout, before the hook, to need little memory",
    "copy_back": "the fresh parameters are copied into the serving ones, whose addresses stay",
    "finalize": "the model's hook process_weights_after_loading",
}
ONCE_PER_MODEL = ("finalize",)


@dataclass(frozen=True)
class LoadPath:
    """phases: of one module, in order, then those of the model.

    unit: what goes through the phases together: the whole `model`, phase by phase; a `module` as soon as its tensors
    are there; or, where a module stacks experts, one `expert` up to its install. saved: reads files of this engine's
    own, which a step `save` wrote, instead of a checkpoint.
    """

    phases: tuple[str, ...]
    unit: str = "model"
    saved: bool = False


_PROCESS = ("fill_padding", "post_process", "finalize")

STARTS = {
    "safetensors": LoadPath(("place", *_PROCESS)),
    "dummy": LoadPath(("draw", *_PROCESS)),
    # Parameters get their memory as their tensors arrive: with online quantisation, one module's at a time.
    "streamed": LoadPath(
        ("allocate", "place", "fill_padding", "post_process", "finalize_module", "finalize"),
        unit="module",
    ),
    "tensorizer_raw": LoadPath(("place", *_PROCESS), saved=True),
    # Parameters were saved with their padding, in the layout of loading.
    "sharded_state": LoadPath(("place", "post_process", "finalize"), saved=True),
    "tensorizer": LoadPath(("adopt",), saved=True),
}
UPDATES = {
    "layerwise": LoadPath(
        (
            "rematerialize",
            "place",
            "fill_padding",
            "post_process",
            "finalize_module",
            "copy_back",
            "finalize",
        ),
        unit="module",
    ),
    "direct": LoadPath(
        ("restore", "place", "fill_padding", "post_process", "finalize_module", "finalize"), unit="module"
    ),
    "per_expert": LoadPath(
        ("rematerialize", "place", "fill_padding", "install_expert", "post_process", "finalize"),
        unit="expert",
    ),
}
SAVED = tuple(via for via, path in STARTS.items() if path.saved)
MANIFEST = "saved.json"  # written last into a folder of saved state
ORDERS = ("natural", "reversed", "shuffled")


def load_path(via: str) -> LoadPath | None:
    """The path by its name; None for a way of another engine."""
    return {**STARTS, **UPDATES}.get(via)
