"""Freezes a validated config into a cell: plain data, canonical JSON, an id that is the hash of what it measures."""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from collectors.gsm8k import questions as gsm8k
from orchestrator import provenance
from orchestrator.engine_env import environment_identity
from orchestrator.judge.attempt import AGAIN
from orchestrator.schema import Arm, LoadPath, Root
from workloads.loading.paths import SAVED
from workloads.models.architectures import ARCHITECTURES
from workloads.spec import Model, Step

FORMAT = 1
FRESH_VIA = "safetensors"  # how a fresh start loads
FRESH = "fresh"  # the observation of a reference; `fresh.new` in a check names the one on checkpoint `new`

Cell = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """A fresh start that checks compare with. `key` names its folder in the store; `collect` what it gathers.
    `save`: the start whose files it also writes, since nobody else would start an engine for that; else empty."""

    key: str
    arm: str
    checkpoint: str
    collect: tuple[str, ...]
    save: str = ""

    @property
    def name(self) -> str:
        return f"{FRESH}.{self.checkpoint}"


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
    return {
        "format": FORMAT,
        "experiment": root.name,
        "labels": {**labels, **({"faults": faults} if faults else {})},
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
    """The arms that run: `base` only where a path, a commit, an engine's environment or faults say which."""
    code = root.code
    told = any(of is not None for of in (code.base.path, code.base.commit, code.base.environment))
    return {"candidate": code.candidate, **({"base": code.base} if told or code.base.faults else {})}


def arm_environment(root: Root, arm: Arm) -> str | None:
    """Name of the environment that the engine of an arm lives in; None: it is in no environment of ours."""
    name = root.backend.environment if arm.environment is None else arm.environment
    return None if name is None else str(name)


def canonical(data: Any) -> bytes:
    """One spelling per value: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(data: Any) -> str:
    return hashlib.sha256(canonical(data)).hexdigest()


def cell_id(cell: Cell) -> str:
    """SHA-256 of what the cell measures. Where and under which name it runs, and how long one waits, is left out."""
    identity = {key: cell[key] for key in ("format", "model", "parallelism", "backend", "load_path")}
    identity |= {key: cell[key] for key in ("checkpoints", "inputs")}
    identity["collect"] = {**cell["collect"], "gsm8k": {**cell["collect"]["gsm8k"], "path": None}}
    identity["code"] = {name: _arm_identity(arm) for name, arm in cell["code"].items()}
    identity["policy"] = {"coverage": cell["policy"]["coverage"]}
    identity["image"] = _image(cell)
    if "needs" in cell:
        identity["needs"] = cell["needs"]
    return digest(identity)


@dataclass(frozen=True)
class SavedState:
    """Files of an engine's own that a scenario starts on. `key` names their folder in the store; steps: of the gang
    that writes them."""

    key: str
    steps: tuple[Step, ...]


def saved_state(cell: Cell, arm: str) -> SavedState | None:
    """What an arm's scenario needs before it can start; None where it starts on a checkpoint, and for
    vLLM, whose files the gang of a reference writes beside its own work."""
    first = cell["load_path"]["steps"][0]
    via, checkpoint = first["via"], first["checkpoint"]
    if via not in SAVED or cell["backend"]["engine"] == "vllm":
        return None
    start = () if via == "tensorizer_raw" else (Step("start", checkpoint, FRESH_VIA),)
    key = digest([via, _reference_key(cell, arm, checkpoint, set())])
    return SavedState(key, (*start, Step("save", checkpoint, via)))


def references(cell: Cell) -> list[Reference]:
    """The fresh starts that the cell's checks name or that its own start reads the files of, for every arm."""
    first = cell["load_path"]["steps"][:1] if cell["backend"]["engine"] == "vllm" else []
    saved = {step["checkpoint"]: step["via"] for step in first if step["via"] in SAVED}
    needs: dict[str, set[str]] = {checkpoint: set() for checkpoint in saved}
    for check in cell["load_path"]["checks"]:
        for side in (check["left"], check["right"]):
            name, _, checkpoint = side.partition(".")
            if name == FRESH:
                wanted = "generations" if check["rule"] == "same_generations" else "tensors"
                needs.setdefault(checkpoint, set()).add(wanted)
    return [
        Reference(
            _reference_key(cell, arm, checkpoint, collect, save),
            arm,
            checkpoint,
            tuple(sorted(collect)),
            save,
        )
        for arm in ("candidate", "base")
        if cell["code"][arm] is not None
        for checkpoint, collect in needs.items()
        for save in (saved.get(checkpoint, ""),)
    ]


def served(cell: Cell, arm: str) -> dict[str, str]:
    """References of an arm that its scenario's own start makes: key -> name of the observation after the start.

    None where a check would then compare what the start left with itself: a gang of its own is the evidence there.
    """
    steps = cell["load_path"]["steps"]
    if not steps or (steps[0]["do"], steps[0]["via"]) != ("start", FRESH_VIA):
        return {}
    untouched = list(takewhile(lambda step: step["do"] == "observe", steps[1:]))
    if not untouched:
        return {}
    own = {step["name"] for step in untouched}
    pairs = [{check["left"], check["right"]} for check in cell["load_path"]["checks"]]
    against_own = {name for pair in pairs if pair & own for name in pair}
    needed = [ref for ref in references(cell) if ref.arm == arm]
    unfit = {ref.key for ref in needed if ref.name in against_own}
    collected, checkpoint = set(untouched[0]["collect"]), steps[0]["checkpoint"]
    return {
        ref.key: untouched[0]["name"]
        for ref in needed
        if ref.key == _reference_key(cell, arm, checkpoint, set(ref.collect))
        and collected.issuperset(ref.collect)
        and ref.key not in unfit
    }


def _reference_key(cell: Cell, arm: str, checkpoint: str, collect: set[str], save: str = "") -> str:
    identity = {key: cell[key] for key in ("format", "model", "parallelism")}
    identity["backend"] = own_backend(cell, arm)
    identity["arm"] = _arm_identity(_as_started(cell, arm))
    draft = cell["checkpoints"][checkpoint].get("draft")
    weights = [checkpoint, draft] if draft else [checkpoint]
    identity["checkpoint"] = [{**cell["checkpoints"][name], "draft": ""} for name in weights]
    identity["input"] = [cell["inputs"].get(f"checkpoints.{name}.path") for name in weights]
    identity["image"] = _image(cell)
    identity["collect"] = sorted(collect)
    if "generations" in collect:
        identity["generations"] = {key: cell["collect"][key] for key in ("prompts", "sampling")}
    if save:
        identity["save"] = save
    return digest(identity)


def _as_started(cell: Cell, arm: str) -> dict[str, Any]:
    """Of the arm, what a fresh start sees: harm to a foreign engine is done after its last update, and to no start."""
    own: dict[str, Any] = cell["code"][arm]
    return {**own, "faults": []} if cell["backend"]["engine"] == "vllm" else own


def own_backend(cell: Cell, arm: str) -> dict[str, Any]:
    """The backend of an arm's fresh starts: where the scenario attaches to a server, they are engines of our own."""
    backend: dict[str, Any] = cell["backend"]
    if backend.get("url") is None:
        return backend
    environment = cell["code"][arm][
        "environment"
    ]  # as of a cell whose scenario starts in it: it may be shared
    return {**backend, "url": None, "environment": None if environment is None else environment["name"]}


def second_run(cell: Cell) -> list[dict[str, Any]]:
    """Steps of the second run of each of two arms whose speed is compared, so that they alternate: base, candidate,
    candidate, base. It starts on the weights that were measured in the first run, and measures. Else none."""
    measured = [check["left"] for check in cell["load_path"]["checks"] if check["rule"] == "throughput"]
    if not measured or None in cell["code"].values() or cell["backend"].get("url") is not None:
        return []
    loaded = ""
    for step in cell["load_path"]["steps"]:
        if step["do"] in ("start", "update"):
            loaded = step["checkpoint"]
        elif step["name"] == measured[0]:
            break
    start = asdict(Step("start", loaded, FRESH_VIA))
    return [start, asdict(Step("observe", name=AGAIN, collect=["throughput"]))]


@functools.cache
def _questions_digest(place: str) -> str:
    """Reads every line, so that a broken file is found before anything is submitted; once for all cells."""
    if place == gsm8k.HUB:
        return place
    return digest([asdict(question) for questions in gsm8k.load(place) for question in questions])


def _arm_identity(arm: dict[str, Any] | None) -> dict[str, Any] | None:
    """The content of the tree counts, not where it lies or what the commit is called; and the engine's packages."""
    if arm is None:
        return None
    environment = arm.get("environment")  # cells from before there were any have the ids that they had
    packages = {} if environment is None else {"environment": environment}
    return {"source": arm["source"], "faults": arm["faults"], **packages}


def _image(cell: Cell) -> list[str | None]:
    return [cell["cluster"]["image"], cell["cluster"]["image_digest"]]


def _freeze_arm(arm: Arm, environment: str | None) -> dict[str, Any]:
    tree = provenance.tree(arm.path)
    commit = None if arm.commit is None else provenance.resolve_commit(tree, arm.commit)
    source = provenance.source_hash(tree, commit)
    return {
        "path": str(tree),
        "commit": commit,
        "source": source,
        "faults": list(arm.faults),
        "environment": None if environment is None else environment_identity(environment),
    }


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
