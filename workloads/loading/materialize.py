"""Writes a perturbed checkpoint as files of its own, for engines that read folders and not views."""

import json
import sys
from pathlib import Path

from workloads.loading.perturb import PerturbedCheckpoint, open_view, write_perturbed
from workloads.loading.shards import CheckpointError
from workloads.spec import Checkpoint


def materialize(base: Path, checkpoint: Checkpoint, folder: Path) -> Path:
    """Write the files in `base`, changed as `checkpoint` says, to `folder` with the base's configuration and tokenizer.
    Atomic, and kept when already there. Raises CheckpointError."""
    view = open_view(checkpoint, base)
    if not isinstance(view, PerturbedCheckpoint):
        raise CheckpointError(
            f"{base}: the perturbation is {checkpoint.perturbation!r}, nothing is to write. Use it as it is."
        )
    return write_perturbed(view, folder)


def main() -> None:
    """`python -m workloads.loading.materialize BASE_FOLDER CHECKPOINT.json FOLDER`; the JSON has the fields of
    `workloads.spec.Checkpoint`."""
    base, checkpoint, folder = sys.argv[1:]
    try:
        materialize(Path(base), Checkpoint(**json.loads(Path(checkpoint).read_text())), Path(folder))
    except CheckpointError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
