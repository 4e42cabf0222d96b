"""Starts from files that an engine wrote: what it writes where, and what a start is told of it.

sharded_state and tensorizer hold the weights as the engine had them after its post-processing; tensorizer_raw holds
the checkpoint's own tensors in the other container.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workloads.engines.protocol import UnsupportedError
from workloads.loading.checkpoint import open_checkpoint
from workloads.loading.perturb import files_beside
from workloads.spec import GangSpec

SHARDED = "sharded_state"
TENSORIZED, RAW = "tensorizer", "tensorizer_raw"


def check(spec: GangSpec) -> None:
    """Raises UnsupportedError, before an engine is started, where the environment lacks what the steps need."""
    vias = {step.via for step in spec.steps} & {TENSORIZED, RAW}
    if vias and find_spec("tensorizer") is None:
        raise UnsupportedError(
            f"A step goes via {min(vias)}, and the engine's environment has no package tensorizer: install it there "
            "(python -m pip install tensorizer), or take an environment that `python -m orchestrator engine` installs."
        )


def arguments(spec: GangSpec, via: str) -> dict[str, Any]:
    """Of `LLM`, for a start via one of these."""
    if via == SHARDED:
        return {"model": spec.saved_dir, "load_format": SHARDED}
    config = {"tensorizer_uri": tensors_uri(spec)}
    return {"load_format": "tensorizer", "model_loader_extra_config": config}


def tensors_uri(spec: GangSpec) -> str:
    """The file of tensors; of several ranks, a pattern that vLLM fills in."""
    name = "model.tensors" if spec.parallelism.tp == 1 else "model-%04d.tensors"
    return str(Path(spec.saved_dir) / name)


def make_folder(spec: GangSpec, checkpoint: Path) -> None:
    """The folder to save into, with the configuration that an engine expects beside weights."""
    folder = Path(spec.saved_dir)
    folder.mkdir(mode=0o700, parents=True)
    for file in files_beside(checkpoint):
        shutil.copyfile(file, folder / file.name)


def write_raw(checkpoint: str, file: str) -> None:
    """All tensors of a checkpoint, unchanged, for `load_format=tensorizer`."""
    from tensorizer import TensorSerializer

    reader = open_checkpoint(checkpoint)
    serializer = TensorSerializer(file)
    serializer.write_state_dict({name: reader.get(name) for name in reader.names()})
    serializer.close()
