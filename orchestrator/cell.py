"""A cell is plain data. Its canonical JSON, its id, and what it needs before it can run: references, saved files.

The driver reads cells, so nothing here imports Hydra.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from orchestrator.judge.attempt import AGAIN
from workloads.loading.paths import SAVED
from workloads.source import is_source
from workloads.spec import Step

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


def _arm_identity(arm: dict[str, Any] | None) -> dict[str, Any] | None:
    """The content of the tree counts, not where it lies or what the commit is called; and the engine's packages."""
    if arm is None:
        return None
    environment = arm.get("environment")  # cells from before there were any have the ids that they had
    packages = {} if environment is None else {"environment": environment}
    over_package = [[one["at"], one["sha256"]] for one in arm.get("overlay", []) if not is_source(one["at"])]
    laid = {"overlay": over_package} if over_package else {}
    return {"source": arm["source"], "faults": arm["faults"], **packages, **laid}


def _image(cell: Cell) -> list[str | None]:
    return [cell["cluster"]["image"], cell["cluster"]["image_digest"]]
