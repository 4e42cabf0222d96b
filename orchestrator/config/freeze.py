"""Freezes a validated config into a cell: everything that a job will read of it, and nothing else."""

import functools
import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collectors.gsm8k import questions as gsm8k
from orchestrator import provenance
from orchestrator.cell import Cell, digest
from orchestrator.config.schema import Arm, LoadPath, Root
from orchestrator.engine_env import environment_identity
from orchestrator.trees import arm_source
from workloads.models.architectures import ARCHITECTURES
from workloads.spec import Model

FORMAT = 1


def freeze(root: Root, labels: dict[str, str]) -> Cell:
    """The cell of one config.

    Raises `provenance.ProvenanceError` when an arm's tree or an input file is not there, `Gsm8kError` when the
    questions are broken, `EngineEnvironmentError` when an engine's environment has no lock file.
    """
    load_path, collect = _without_skipped(root)
    arms = {
        "base": None,
        **{name: _freeze_arm(arm, arm_environment(root, arm)) for name, arm in cell_arms(root).items()},
    }
    faults = ",".join(root.code.candidate.faults)
    laid = ",".join(one.at for one in root.code.candidate.overlay)
    return {
        "format": FORMAT,
        "experiment": root.name,
        "labels": {
            **labels,
            **{name: text for name, text in (("faults", faults), ("overlay", laid)) if text},
        },
        "model": _freeze_model(root.model),
        "parallelism": asdict(root.parallelism),
        "backend": asdict(root.backend),
        "load_path": load_path,
        "checkpoints": {name: asdict(checkpoint) for name, checkpoint in root.checkpoints.items()},
        "inputs": _inputs(root, collect["gsm8k"]["path"]),
        "code": arms,
        "collect": collect,
        "policy": asdict(root.policy),
        **({"needs": root.needs} if root.needs else {}),
        "wandb": asdict(root.wandb),
        "cluster": {**asdict(root.cluster), "env": {k: str(v) for k, v in root.cluster.env.items()}},
    }


def _freeze_model(model: Model) -> dict[str, Any]:
    """With the dimensions of its own architecture only."""
    others = {*ARCHITECTURES, "transformers"} - {model.architecture}
    return {key: value for key, value in asdict(model).items() if key not in others}


def cell_arms(root: Root) -> dict[str, Arm]:
    """The arms that run: `base` only where a path, commit, engine's environment, overlay or faults say which."""
    base = root.code.base
    told = any(of is not None for of in (base.path, base.commit, base.environment))
    is_there = told or base.overlay or base.faults
    return {"candidate": root.code.candidate, **({"base": base} if is_there else {})}


def arm_environment(root: Root, arm: Arm) -> str | None:
    """Name of the environment that the engine of an arm lives in; None: it is in no environment of ours."""
    name = root.backend.environment if arm.environment is None else arm.environment
    return None if name is None else str(name)


def _freeze_arm(arm: Arm, environment: str | None) -> dict[str, Any]:
    tree = provenance.tree(arm.path)
    commit = None if arm.commit is None else provenance.resolve_commit(tree, arm.commit)
    overlay = freeze_overlay(arm)
    return {
        "path": str(tree),
        "commit": commit,
        "source": arm_source(tree, commit, overlay),
        **({"overlay": overlay} if overlay else {}),
        "faults": list(arm.faults),
        "environment": None if environment is None else environment_identity(environment),
    }


def freeze_overlay(arm: Arm) -> list[dict[str, Any]]:
    """{"at", "file", "sha256" of its content, "replaces"} of each, by place."""
    frozen = []
    for one in sorted(arm.overlay, key=lambda one: one.at):
        file = Path(one.file).expanduser().resolve()
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        frozen.append({"at": one.at, "file": str(file), "sha256": sha256, "replaces": one.replaces})
    return frozen


def _without_skipped(root: Root) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps and checks without the collectors that have nothing to do, and where GSM8K was found.

    A check of GSM8K stays where its questions are nowhere: it becomes NOT_RUN and says how to get them.
    """
    load_path: LoadPath = root.load_path
    collect = asdict(root.collect)
    unwanted = {"gsm8k"} if root.collect.gsm8k.limit == 0 else set()
    if root.collect.throughput.requests == 0:
        unwanted.add("throughput")
    if "gsm8k" not in unwanted:
        collect["gsm8k"]["path"] = gsm8k.find(root.collect.gsm8k.path, provenance.checkout())
    off = unwanted | ({"gsm8k"} if collect["gsm8k"]["path"] is None else set())
    steps = [asdict(step) for step in load_path.steps]
    for step in steps:
        step["collect"] = [name for name in step["collect"] if name not in off]
    checks = [asdict(check) for check in load_path.checks if check.rule not in unwanted]
    return {"name": load_path.name, "steps": steps, "checks": checks}, collect


def _inputs(root: Root, gsm8k_place: str | None) -> dict[str, str | None]:
    """What lies in the files that the config names: the same name with other content is another cell."""
    inputs: dict[str, str | None] = {}
    if gsm8k_place is not None:
        inputs["collect.gsm8k"] = _questions_digest(gsm8k_place)
    for name, checkpoint in root.checkpoints.items():
        if checkpoint.path is not None:
            inputs[f"checkpoints.{name}.path"] = provenance.folder_state(Path(checkpoint.path))
    return inputs


@functools.cache
def _questions_digest(place: str) -> str:
    """Reads every line, so that a broken file is found before anything is submitted; once for all cells."""
    if place == gsm8k.HUB:
        return place
    return digest([asdict(question) for questions in gsm8k.load(place) for question in questions])
