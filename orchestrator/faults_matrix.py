"""The matrix faults x models x load paths: which cells there are, what must come out of each, and what did."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from orchestrator.compose import ConfigError, compose, group_options
from orchestrator.plan import cell_id
from orchestrator.planning import Planned, plan
from orchestrator.rules import problems
from orchestrator.scenario_rules import VIA
from orchestrator.schema import Root
from workloads import faults
from workloads.faults._about import CRASH, FEATURES, features

Json = dict[str, Any]

CLEAN = "none"  # instead of a fault's name
EXPERIMENT = "+exp=fault_matrix"
#: How a crash shows: a rank fails, or will not serve; other errors (no disk, no memory) say nothing about a fault.
_CRASHES = ("rank_failed", "unusable")


#: Where faults are injected, the cheapest first: one rank; two that divide everything; two that deal experts out, with
#: the kernel that consumes them; two that divide the layers; two
#: with experts in more than one slot, which have moved; one whose layers are wrapped for adapters.
LAYOUTS = (
    ("parallelism=single", "backend=native_reference"),
    ("parallelism=tp2_ep1", "backend=native_reference"),
    ("parallelism=tp2", "backend=native"),
    ("parallelism=pp2", "backend=native_reference"),
    ("parallelism=tp2_redundant", "backend=native"),
    ("parallelism=single", "backend=native_adapters"),
)


@dataclass(frozen=True)
class Place:
    """A model on a load path, both by option name. layout: overrides, of LAYOUTS. via: how its loads go; features: of
    the model on its layout."""

    model: str
    load_path: str
    layout: tuple[str, ...]
    via: frozenset[str]
    features: frozenset[str]


@dataclass(frozen=True)
class MatrixCell:
    """expected: diagnosis that must come first, CRASH, or "" where nothing may be found."""

    fault: str
    place: Place
    expected: str


@dataclass(frozen=True)
class Outcome:
    """What one cell showed. state: caught, clean, missed, misnamed, false_alarm or error. found: codes of its findings,
    the first one first; `detail`: the first one's sentence, or the error."""

    fault: str
    model: str
    load_path: str
    layout: str
    expected: str
    state: str
    found: tuple[str, ...]
    detail: str
    cell: str
    attempt: str

    def record(self) -> Json:
        return asdict(self)


def places(models: Sequence[str], load_paths: Sequence[str], overrides: Sequence[str]) -> list[Place]:
    """Every small model of the native engine on each of its load paths, or those that are named, on each layout."""
    ways = {path: _via(path, overrides) for path in load_paths or _options("load_path")}
    native = {way for of in VIA["native"].values() for way in of} | {"sleep1", "sleep2"}
    return [
        Place(model, path, layout, via, has)
        for model, layout in product(models or FEATURES, LAYOUTS)
        if (has := _features(model, layout, tuple(overrides))) is not None
        for path, via in ways.items()
        if via <= native and ("draft" in has or not _updates_drafts(path, tuple(overrides)))
    ]


def _via(load_path: str, overrides: Sequence[str]) -> frozenset[str]:
    """How the loads of a load path go, and how deep it sleeps."""
    steps = _composed([*overrides, f"load_path={load_path}"]).load_path.steps
    return frozenset(step.via or f"sleep{step.level}" for step in steps if step.via or step.do == "sleep")


@cache
def _updates_drafts(load_path: str, overrides: tuple[str, ...]) -> bool:
    """Whether a load path has an update for the drafter, which a model must then have."""
    steps = _composed([*overrides, f"load_path={load_path}"]).load_path.steps
    return any("draft" in step.roots for step in steps)


@cache
def _features(model: str, layout: tuple[str, ...], overrides: tuple[str, ...]) -> frozenset[str] | None:
    """None where the model does not run on the layout."""
    if model not in FEATURES:
        raise ConfigError(
            [f"model={model} is not in the fault matrix; its models are: {', '.join(FEATURES)}."]
        )
    root = _composed([*layout, *overrides, f"model={model}"])
    if any(problems(root)):
        return None
    ranks = root.parallelism
    kernel, moved, wrapped = root.backend.moe_kernel, bool(ranks.rebalance_seed), bool(root.backend.lora_rank)
    return features(model, ranks.tp, ranks.ep, kernel, ranks.pp, ranks.redundant_experts, moved, wrapped)


def _composed(words: Sequence[str]) -> Root:
    [one] = compose([EXPERIMENT, *words])
    if one.root is None:
        raise ConfigError(one.problems)
    return one.root


def _options(group: str) -> list[str]:
    """`partial` needs to be told a tensor, which every model names otherwise."""
    return [o for o in group_options()[group] if not o.startswith("vllm") and o != "partial"]


def cells(at: Iterable[Place], names: Sequence[str]) -> list[MatrixCell]:
    """The clean cell of every place; then every fault, for each model and load path on the first layout on which it can
    do something."""
    at = list(at)
    found = [MatrixCell(CLEAN, place, "") for place in at]
    for name in names:
        about = faults.about(name)
        able = [place for place in at if not about.why_not(place.via, place.features)]
        first = {(place.model, place.load_path): place for place in reversed(able)}
        found += [MatrixCell(name, place, about.finding) for place in at if place in first.values()]
    return found


def sample(every: Sequence[MatrixCell]) -> list[MatrixCell]:
    """The same few cells each time: of every fault one, in turn on each of its places, and one clean cell of every
    model."""
    kept: list[MatrixCell] = []
    for number, name in enumerate(dict.fromkeys(cell.fault for cell in every)):
        own = [cell for cell in every if cell.fault == name]
        kept += (
            list({cell.place.model: cell for cell in own}.values())
            if name == CLEAN
            else [own[number % len(own)]]
        )
    return kept


def planned(every: Sequence[MatrixCell], overrides: Sequence[str]) -> dict[str, tuple[Planned, MatrixCell]]:
    """The cells as any experiment would plan them, by id. A place is planned once: only the fault differs."""
    found = {}
    clean = {place: _clean(place, overrides) for place in dict.fromkeys(cell.place for cell in every)}
    for cell in every:
        one = clean[cell.place] if cell.fault == CLEAN else _with_fault(clean[cell.place], cell.fault)
        found[one.id] = one, cell
    return found


def _clean(place: Place, overrides: Sequence[str]) -> Planned:
    words = [EXPERIMENT, *place.layout, *overrides, f"model={place.model}", f"load_path={place.load_path}"]
    [one] = plan(words).cells
    return one


def _with_fault(one: Planned, fault: str) -> Planned:
    cell = {
        **one.cell,
        "code": {**one.cell["code"], "candidate": {**one.cell["code"]["candidate"], "faults": [fault]}},
    }
    cell["labels"] = {**cell["labels"], "faults": fault}
    return replace(
        one, id=cell_id(cell), cell=cell, arguments=(*one.arguments, f"code.candidate.faults=[{fault}]")
    )


def outcome(cell: MatrixCell, result: Mapping[str, Any]) -> Outcome:
    """What the result of a cell shows of its fault."""
    findings = [finding for finding in result["findings"] if finding["arm"] == "candidate"]
    error = result["error"]
    found = [finding["code"] for finding in findings]
    if error is not None and error["type"] in _CRASHES:
        found.insert(0, CRASH)
    detail = error["message"] if error is not None else findings[0]["detail"] if findings else ""
    return Outcome(
        fault=cell.fault,
        model=cell.place.model,
        load_path=cell.place.load_path,
        layout=" ".join(cell.place.layout),
        expected=cell.expected,
        state=_state(cell, found, result),
        found=tuple(found),
        detail=detail,
        cell=result["cell"],
        attempt=result["attempt"],
    )


def _state(cell: MatrixCell, found: Sequence[str], result: Mapping[str, Any]) -> str:
    if result["error"] is not None and CRASH not in found:
        return "error"
    if not cell.expected:
        return "clean" if not found and result["verdict"] == "PASS" else "false_alarm"
    if not found or result["verdict"] == "PASS":
        return "missed"
    return "caught" if found[0] == cell.expected else "misnamed"


GOOD = ("caught", "clean")
