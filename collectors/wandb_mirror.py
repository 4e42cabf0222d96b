"""Mirrors finished attempts into W&B, from the records and after the fact: a killed run loses nothing."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def mirror_attempt(
    cell: Mapping[str, Any],
    result: Mapping[str, Any],
    throughput: Mapping[str, float],
    folder: Path,
    project: str,
) -> Path:
    """Write one finished W&B run for one attempt and return its folder.

    Offline unless WANDB_API_KEY is set. The run's id is cell and attempt, so that mirroring twice never
    makes two runs; runs of one cell share a group. The configuration holds the frozen cell only, which
    has no secret fields; the environment is not captured.
    """
    import wandb  # heavy, and only wanted at the very end

    online = bool(os.environ.get("WANDB_API_KEY"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, x_disable_stats=True, x_save_requirements=False
    )
    run = wandb.init(
        project=project,
        id=f"{result['cell'][:16]}-{result['attempt']:03d}",
        name="/".join(str(value) for value in result["labels"].values()),
        group=result["cell"][:16],
        config=dict(cell),
        dir=str(folder),
        mode="online" if online else "offline",
        settings=settings,
    )
    checks = result["checks"]
    run.log(
        {
            "checks": wandb.Table(
                columns=["check", "verdict", "required", "expected", "observed"],
                data=[
                    [c["name"], c["verdict"], c["required"], str(c["expected"]), str(c["observed"])]
                    for c in checks
                ],
            ),
            "findings": wandb.Table(
                columns=["code", "arm", "observation", "rank", "path", "detail"],
                data=[
                    [str(f.get(key, "")) for key in ("code", "arm", "observation", "rank", "path", "detail")]
                    for f in result["findings"]
                ],
            ),
        }
    )
    run.summary.update(
        {
            "verdict": result["verdict"],
            "coverage": result["coverage"]["fraction"],
            "findings": len(result["findings"]),
            "engine_starts": result.get("starts"),
            "seconds": result.get("seconds"),
            **{f"throughput/{name}": value for name, value in throughput.items()},
        }
    )
    run_folder = Path(run.dir).parent
    run.finish()
    return run_folder
