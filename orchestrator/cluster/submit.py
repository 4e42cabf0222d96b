"""Brings cells onto Slurm as job arrays: everything is on disk before sbatch is called, and nothing is submitted twice.

The caller holds the store's lock of submissions (`Store.submitting`), whose descriptor every sbatch inherits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import provenance
from orchestrator.cell import Cell, digest
from orchestrator.cluster import quarantine, slurm, upstream
from orchestrator.cluster.jobs import Batch, Book, Task, new_batch_dir, write_batch
from orchestrator.cluster.sbatch import script
from orchestrator.cluster.scheduling import Array, Needs, arrays
from orchestrator.failure import Failure
from orchestrator.result import unjudged
from orchestrator.store import RESULT, Store, StoreError, write_json
from orchestrator.trees import driver_tree, keep

REFUSED = "refused"  # failure type of attempts whose script sbatch will not take
MANY_TASKS = 64  # to wait for one by one; of more, whole arrays are waited for
Report = Callable[[str], None]


@dataclass
class Submission:
    """One round of submitting for one experiment. makers: live tasks of cells that make references of others.
    live: the experiment's jobs that wait or run."""

    store: Store
    book: Book
    experiment: str
    held: Sequence[int]
    report: Report
    makers: Mapping[str, Task]
    live: Sequence[str]
    made: dict[str, Task] = field(default_factory=dict)  # by cell

    def submit(self, cells: Mapping[str, Cell], needs: Needs) -> None:
        """One attempt at each cell. Cells of an array that sbatch refuses get a result that says so, and those that
        wait for them one that says that. Raises SlurmError when Slurm does not answer; what was submitted by then
        stays, and what was written is submitted by the next round."""
        exclude, origin = quarantine.nodes(self.store), provenance.collect()
        arms = [arm for cell in cells.values() for arm in cell["code"].values() if arm is not None]
        for arm in {digest(arm): arm for arm in arms}.values():
            keep(arm, self.store)
        parts = arrays(cells, needs, slurm.array_limit())
        batches: list[Batch | None] = []
        for part in parts:
            waits_for = [batch for number in part.after if (batch := batches[number]) is not None]
            attempts = self._attempts(part, cells, needs, origin)
            batch = self._write(attempts, cells, needs, exclude, waits_for) if attempts else None
            batches.append(None if batch is None else self._sbatch(batch, cells))

    def resubmit(self, batch: Batch, cells: Mapping[str, Cell]) -> bool:
        """Submits a batch that its submitter wrote and did not get to submit. False: refused. Raises SlurmError."""
        return self._sbatch(batch, cells) is not None

    def _attempts(
        self, part: Array, cells: Mapping[str, Cell], needs: Needs, origin: Mapping[str, Any]
    ) -> dict[str, Path]:
        """New attempts by cell, without those that another process runs or whose makers were just refused."""
        made: dict[str, Path] = {}
        for name in part.cells:
            try:
                with self.store.locked(name):
                    self.store.write_cell(cells[name])
                    attempt = self.store.new_attempt(name)
            except StoreError as error:
                self.report(str(error))
                continue
            write_json(attempt / "provenance.json", origin, durable=False)
            failed = next((key for key, maker in needs[name].items() if self._has_failed(maker)), None)
            if failed is None:
                made[name] = attempt
            else:
                maker = self.made[needs[name][failed]].attempt
                not_run(self.store, cells[name], attempt, failed, maker)
        return made

    def _has_failed(self, maker: str) -> bool:
        task = self.made.get(maker)
        return task is not None and self.store.result(task.attempt) is not None

    def _write(
        self,
        attempts: Mapping[str, Path],
        cells: Mapping[str, Cell],
        needs: Needs,
        exclude: Sequence[str],
        waits_for: Sequence[Batch],
    ) -> Batch:
        folder = new_batch_dir(self.store)
        waited, needed = dict[str, Task](), dict[Path, list[dict[str, str]]]()
        for name, attempt in attempts.items():
            makers = {key: task for key, m in needs[name].items() if (task := self._maker(m)) is not None}
            waited |= {str(task.attempt): task for task in makers.values()}
            needed[attempt] = [
                {"reference": key, "cell": task.attempt.parent.name, "attempt": task.attempt.name}
                for key, task in makers.items()
            ]
        first = cells[next(iter(attempts))]
        limited = first["cluster"]["max_jobs"] is not None
        after = _ids(list(waited.values()))
        if limited:
            after += [*self.live, *(batch.job for batch in waits_for if batch.job is not None)]
        text = script(first, folder, len(attempts), exclude, sorted(set(after)))
        names = [batch.name for batch in waits_for]
        code = driver_tree(self.store)
        write_batch(folder, self.experiment, list(attempts.values()), text, code, exclude, names, needed)
        batch = self.book.batch(folder.name)
        assert batch is not None
        return batch

    def _maker(self, cell: str) -> Task | None:
        return self.made.get(cell) or self.makers.get(cell)

    def _sbatch(self, batch: Batch, cells: Mapping[str, Cell]) -> Batch | None:
        """With its job; None where Slurm refuses it. Raises SlurmError."""
        with slurm.without_inherited() as removed:
            try:
                job = slurm.sbatch(batch.script, self.held)
            except slurm.RefusedError as error:
                self._refused(batch, cells, str(error))
                return None
            except slurm.SlurmError:
                # It may have failed after the controller took the script.
                found = slurm.survey(()).commented(batch.comment)
                if not found:
                    raise
                job = found[0]
        batch = self.book.submitted(batch, job, removed, adopted=False)
        self._note(batch)
        self.report(f"job {job}: {_count(len(batch.tasks), 'cell')}")
        return batch

    def _note(self, batch: Batch) -> None:
        self.made |= {attempt.parent.name: Task(batch, i) for i, attempt in enumerate(batch.tasks)}

    def _refused(self, batch: Batch, cells: Mapping[str, Cell], reason: str) -> None:
        self._note(batch)
        message = f"Slurm refused the job, {batch.script}: {reason}"
        self.report(f"{_count(len(batch.tasks), 'cell')} refused. {message}")
        for attempt in batch.tasks:
            cell = cells.get(attempt.parent.name)
            if cell is not None:  # else of another experiment, which will find out itself
                result = unjudged(cell, attempt.parent.name, attempt.name, "ERROR", Failure(REFUSED, message))
                write_json(attempt / RESULT, result)


def not_run(store: Store, cell: Cell, attempt: Path, reference: str, maker: Path) -> dict[str, Any]:
    """Writes the result of an attempt that is not submitted, since the attempt `maker` did not make its reference."""
    failure = upstream.cause(reference, maker, store.result(maker))
    result = unjudged(cell, attempt.parent.name, attempt.name, "NOT_RUN", failure)
    write_json(attempt / RESULT, result)
    return result


def _ids(tasks: Sequence[Task]) -> list[str]:
    ids = [task.id for task in tasks] if len(tasks) <= MANY_TASKS else [task.batch.job for task in tasks]
    return sorted({job for job in ids if job is not None})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
