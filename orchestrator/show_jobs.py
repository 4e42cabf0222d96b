"""Prints the part of a plan that is about Slurm: the job arrays, what they wait for, and what sbatch is given."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from orchestrator.cluster import quarantine, slurm
from orchestrator.cluster.jobs import batches_dir
from orchestrator.cluster.sbatch import script
from orchestrator.cluster.scheduling import arrays, needs
from orchestrator.config.planning import Planned
from orchestrator.store import Store

BATCH, JOB = "BATCH", "JOB{}"  # stand for names that only a submission gives


def show_jobs(out: Console, cells: Sequence[Planned], store: Store, detailed: bool) -> None:
    """cells: those to run on Slurm. detailed: with the scripts."""
    by_id = {one.id: one.cell for one in cells}
    parts = arrays(by_id, needs(by_id, store.holds), slurm.array_limit())
    exclude = quarantine.nodes(store)
    counted = "1 job array" if len(parts) == 1 else f"{len(parts)} job arrays"
    out.print(f"\n[bold]Slurm[/]: {counted}, {len(by_id)} task{'s' if len(by_id) > 1 else ''}")
    if exclude:
        out.print(escape(f"  in quarantine, and avoided: {', '.join(exclude)}"))
    for number, part in enumerate(parts, 1):
        waits = f", after array {', '.join(str(other + 1) for other in part.after)}" if part.after else ""
        out.print(f"  array {number}: {len(part.cells)} task{'s' if len(part.cells) > 1 else ''}{waits}")
    if not detailed:
        return
    out.print(f"  Below, {BATCH} stands for a name of its own, {JOB.format(1)} for the job of array 1.")
    for number, part in enumerate(parts, 1):
        after = [JOB.format(other + 1) for other in part.after]
        text = script(by_id[part.cells[0]], batches_dir(store) / BATCH, len(part.cells), exclude, after)
        out.print(f"  sbatch script of array {number}:")
        for line in text.splitlines():
            out.print(f"    {line}", markup=False, soft_wrap=True)
