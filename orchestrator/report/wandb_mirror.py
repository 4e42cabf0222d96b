"""Mirrors finished attempts into W&B, from the records and after the fact: a killed run loses nothing."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHECK_COLUMNS = ("name", "verdict", "required", "expected", "observed")
FINDING_COLUMNS = ("code", "arm", "observation", "rank", "path", "detail")


class MirrorError(RuntimeError):
    """W&B did not take the run; the records and the verdict do not depend on it."""


def mirror_attempt(cell: Mapping[str, Any], result: Mapping[str, Any], folder: Path) -> Path:
    """Write one finished W&B run for one attempt below `folder` and return its own folder.

    Offline unless WANDB_API_KEY is set. The run's id is cell and attempt, so that mirroring twice never
    makes two runs; runs of one cell share a group. The configuration holds the frozen cell only, which
    has no secret fields; neither environment nor console is captured. Raises MirrorError.
    """
    import wandb  # heavy, and only wanted at the very end

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, x_disable_stats=True, x_save_requirements=False
    )
    try:
        run = wandb.init(
            project=cell["wandb"]["project"],
            id=f"{result['cell'][:16]}-{result['attempt']}",
            name="/".join(str(value) for value in result["labels"].values()),
            group=result["cell"][:16],
            config=dict(cell),
            dir=str(folder),
            mode="online" if os.environ.get("WANDB_API_KEY") else "offline",
            settings=settings,
        )
        tables = {"checks": CHECK_COLUMNS, "findings": FINDING_COLUMNS}
        run.log(
            {
                name: wandb.Table(columns=list[str | int](columns), data=_rows(result[name], columns))
                for name, columns in tables.items()
            }
        )
        run.summary.update(_summary(result))
        own = Path(run.dir).parent
        run.finish()
        wandb.teardown()  # `finish` returns before an offline file is whole
    except (wandb.Error, OSError) as error:
        raise MirrorError(f"W&B did not take {result['cell'][:12]} {result['attempt']}: {error}") from error
    return own


def _rows(records: list[Mapping[str, Any]], columns: tuple[str, ...]) -> list[Iterable[Any]]:
    return [[str(record.get(column, "")) for column in columns] for record in records]


def _summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict, coverage, and the figures of the accuracy and speed checks, flat."""
    figures = {
        f"{check['rule']}/{name}": value
        for check in result["checks"]
        if check["rule"] in ("gsm8k", "throughput")
        for name, value in check["counts"].items()
        if isinstance(value, int | float)
    }
    return {
        "verdict": result["verdict"],
        "coverage": result["coverage"]["fraction"],
        "findings": len(result["findings"]),
        "engine_starts": result["starts"],
        "seconds": result["seconds"],
        **figures,
    }
