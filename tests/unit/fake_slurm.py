"""A fake Slurm on the PATH: commands that answer from one file, count their calls, and fail as they are told to."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cluster import slurm

# The first lines are both shell and Python: a path with a space cannot stand behind `#!`.
FAKE = """#!/bin/sh
'''exec' "{python}" -S -E "$0" "$@"
' '''
import json, os, pathlib, sys
root = pathlib.Path({root!r})
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with (root / "calls").open("a") as calls:
    calls.write(name + chr(10))
fault = root / (name + ".fault")
said = fault.read_text() if fault.exists() else None
if said is not None and not said.startswith("after:"):
    print(said[8:]) if said.startswith("garbage:") else sys.exit(said)
    sys.exit(0)
jobs = json.loads((root / "jobs.json").read_text())
option = lambda start: next((a[len(start):] for a in arguments if a.startswith(start)), "")
if name == "sbatch":
    text = pathlib.Path(arguments[-1]).read_text()
    flags = dict(line[10:].partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH --"))
    flag = lambda of: flags.get(of, "").strip("'")
    job = str(100 + len(jobs))
    count = int(flag("array").partition("%")[0].partition("-")[2]) + 1
    jobs[job] = dict(states=["PENDING"] * count, reason="None", nodes="", text=text, env=dict(os.environ),
                     comment=flag("comment"), after=flag("dependency"))
    (root / "jobs.json").write_text(json.dumps(jobs))
    if said is not None:
        sys.exit(said[6:])
    print(job)
elif name == "squeue":
    for job, it in jobs.items():
        if not it.get("gone"):
            for task, state in enumerate(it["states"]):
                print(f"{{job}}_{{task}}", state, it["reason"], it["nodes"], "1:00", it["comment"], sep="|")
elif name == "sacct":
    for job in option("--jobs=").split(","):
        for task, state in enumerate(jobs.get(job, {{}}).get("accounted", [])):
            print(f"{{job}}_{{task}}", state, "None", "n1", "1:00", "", sep="|")
elif name == "scancel":
    for job in arguments:
        base, _, task = job.partition("_")
        if base in jobs:
            states = jobs[base]["states"]
            jobs[base]["states"] = [
                "CANCELLED" if task in ("", str(i)) and s in ("PENDING", "RUNNING") else s for i, s in enumerate(states)
            ]
    (root / "jobs.json").write_text(json.dumps(jobs))
elif name in ("sinfo", "scontrol"):
    print((root / name).read_text())
"""


class Cluster:
    """jobs: what the fake knows of each array by id; change it to change the cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.jobs = {}
        self.say("sinfo", "")
        self.say("scontrol", "MaxArraySize            = 1001")
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun"):
            path = root / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(FAKE.format(python=sys.executable, root=str(root)))
            path.chmod(0o755)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads((self.root / "jobs.json").read_text()))

    @jobs.setter
    def jobs(self, jobs: dict[str, dict[str, Any]]) -> None:
        (self.root / "jobs.json").write_text(json.dumps(jobs))

    def change(self, job: str, **changes: Any) -> None:
        jobs = self.jobs
        jobs[job] |= changes
        self.jobs = jobs

    def say(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def fault(self, name: str, message: str | None) -> None:
        """None: no more. `after:TEXT`: fails after it has done its work. `garbage:TEXT`: says that and succeeds."""
        path = self.root / f"{name}.fault"
        path.unlink(missing_ok=True)
        if message is not None:
            path.write_text(message)

    def calls(self) -> list[str]:
        """Names of the commands since the last time that this was asked."""
        path = self.root / "calls"
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text.split()


@pytest.fixture(name="cluster")
def cluster_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    root = tmp_path / "fake slurm"
    root.mkdir()
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    slurm.partition_limit.cache_clear()
    slurm.array_limit.cache_clear()
    return Cluster(root)
