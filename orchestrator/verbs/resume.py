"""The verb `resume`: runs what a run lacks, with new budgets for what was cancelled or the cluster broke."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from orchestrator import experiment
from orchestrator.cell import Cell
from orchestrator.cluster import cancelled, follow
from orchestrator.cluster.history import Experiment, lacking, load, renew
from orchestrator.cluster.slurm import available
from orchestrator.show import SHORT, console
from orchestrator.store import Store, StoreError
from orchestrator.trees import arm_source, is_kept
from orchestrator.verbs.arguments import Parser, UsageError, one_name

HELP = """\
Runs again what a run lacks, where it ran before: cells without a result, those that
were cancelled, and those whose failure is not their program's (a node, the network,
the time limit, a kill, a hang that did not come back), each with new budgets. Cells
that have been measured stay, and so do those that failed by a defect (an exception, a
crash, a hang that came back): the run's own command tries these again.

Several people may resume one run at once: nothing is submitted twice."""
ENDING_S = 60.0  # beside cluster.lost_after_s: from the order to end to the end of an attempt
POLL_S = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = Parser("resume", "NAME [--watch]", HELP)
    parser.add_argument("--watch", action="store_true", help="stay to the end of what runs on Slurm")
    options, store, names = parser.read(arguments)
    folder = store.find_experiment(one_name("resume", store, names))
    return resume(Store.open(store.root), folder, console(), options.watch)


def resume(store: Store, folder: Path, out: Console, watch: bool) -> int:
    """Returns the exit code of `run`. Raises UsageError where the cells' code is no longer there."""
    here, remote = load(store, folder, on_slurm=False), load(store, folder)
    if remote.cells and not available():
        raise UsageError("sbatch is not on the PATH: resume the run from a login node of its cluster.")
    _await_ends(store, here, remote, out)
    renewed = renew(store, folder)
    missing = dict[str, Cell]()
    for part in (load(store, folder, on_slurm=False), load(store, folder)):
        missing |= {name: part.cells[name] for name in lacking(store, part)}
    _refuse_changed_code(store, folder, missing)
    if renewed:
        kinds = Counter(kind or "broken records" for kind in renewed.values())
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        out.print(f"with new budgets: {said}", markup=False)
    if missing:
        (folder / "verdict.json").unlink(missing_ok=True)  # no longer that of all its cells
    return experiment.run(store, folder, out, watch)


def _await_ends(store: Store, here: Experiment, remote: Experiment, out: Console) -> None:
    """Attempts that were cancelled a moment ago and have not ended: their cells run again only after that."""
    cells = {**here.cells, **remote.cells}
    patience = ENDING_S + max(cell["cluster"]["lost_after_s"] for cell in cells.values())
    deadline = time.monotonic() + patience
    said: list[str] = []
    while ending := [name for name in cells if _is_ending(store, name, name in remote.cells)]:
        if not said:
            out.print(
                f"waiting for the end of {len(ending)} cancelled: {', '.join(n[:SHORT] for n in ending)}"
            )
            said = ending
        if time.monotonic() > deadline:
            raise StoreError(
                f"Cell {ending[0][:SHORT]} was cancelled and has not ended within {patience:.0f} s: see `status "
                f"{here.name}`, and resume the run when it has."
            )
        if remote.cells:
            follow.advance(store, remote, experiment.plainly(out))
        time.sleep(POLL_S)


def _is_ending(store: Store, name: str, is_job: bool) -> bool:
    attempts = store.attempts(name)
    if not attempts or not cancelled.is_marked(attempts[-1]) or store.result(attempts[-1]) is not None:
        return False
    return is_job or store.holder(name) is not None


def _refuse_changed_code(store: Store, folder: Path, cells: Mapping[str, Cell]) -> None:
    """Their drivers would refuse to run it, each after its time in the queue."""
    for name, cell in cells.items():
        for arm in filter(None, cell["code"].values()):
            tree = Path(arm["path"])
            is_there = arm["commit"] is not None or is_kept(arm, store)
            if not is_there and arm_source(tree, None, arm.get("overlay", [])) != arm["source"]:
                raise UsageError(
                    f"workloads/ or collectors/ of {tree} have changed since {folder.name} was planned, and cell "
                    f"{name[:SHORT]} is of what they were: restore them, or start a new run."
                )
