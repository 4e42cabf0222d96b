"""The matrix faults x models x load paths: which cells there are, what must come out of each, and what did."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from orchestrator.cell import FRESH_VIA, cell_id
from orchestrator.config.compose import Composed, ConfigError, compose, group_options
from orchestrator.config.freeze import freeze
from orchestrator.config.planning import Planned
from orchestrator.config.schema import Root
from orchestrator.rules.cell_rules import problems
from orchestrator.rules.checkpoint_rules import checkpoint_problems
from orchestrator.rules.engine_rules import engine_problems
from orchestrator.rules.scenario_rules import VIA
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
        if via <= native | has and not any(problems(_root_of(model, layout, path, tuple(overrides))))
    ]


def _via(load_path: str, overrides: Sequence[str]) -> frozenset[str]:
    """How the loads of a load path go, how deep it sleeps, and `draft` where it names the drafter."""
    steps = _root(_selected((f"load_path={load_path}",), tuple(overrides))).load_path.steps
    found = {step.via or f"sleep{step.level}" for step in steps if step.via or step.do == "sleep"}
    return frozenset(found | {root for step in steps for root in step.roots if root == "draft"})


@cache
def _features(model: str, layout: tuple[str, ...], overrides: tuple[str, ...]) -> frozenset[str] | None:
    """None where the model does not run on the layout."""
    if model not in FEATURES:
        raise ConfigError(
            [f"model={model} is not in the fault matrix; its models are: {', '.join(FEATURES)}."]
        )
    root = _placed(model, layout, overrides)
    if any(problems(root)):
        return None
    ranks = root.parallelism
    kernel, moved, wrapped = root.backend.moe_kernel, bool(ranks.rebalance_seed), bool(root.backend.lora_rank)
    return features(model, ranks.tp, ranks.ep, kernel, ranks.pp, ranks.redundant_experts, moved, wrapped)


@cache
def _selected(option: tuple[str, ...], overrides: tuple[str, ...]) -> Composed:
    """The experiment with one model, one layout or one load path, and all else as it is by default."""
    [one] = compose([EXPERIMENT, *overrides, *option])
    return one


def _placed(model: str, layout: tuple[str, ...], overrides: tuple[str, ...]) -> Root:
    """A model on a layout. They are composed apart, each once, since neither has a part in the other."""
    on = _root(_selected(layout, overrides))
    of = _root(_selected((f"model={model}",), overrides))
    return replace(of, parallelism=on.parallelism, backend=on.backend)


def _root_of(model: str, layout: tuple[str, ...], load_path: str, overrides: tuple[str, ...]) -> Root:
    path = _root(_selected((f"load_path={load_path}",), overrides))
    return replace(_placed(model, layout, overrides), load_path=path.load_path)


def _root(one: Composed) -> Root:
    if one.root is None:
        raise ConfigError(one.problems)
    return one.root


def _options(group: str) -> list[str]:
    """`partial` needs to be told a tensor, which every model names otherwise."""
    return [o for o in group_options()[group] if not o.startswith("vllm") and o != "partial"]


def cells(at: Iterable[Place], names: Sequence[str]) -> list[MatrixCell]:
    """Every fault, for each model and load path on the first layout on which it can do something. Before them a clean
    cell of every place that a fault has, and of each model and load path on the first layout of all."""
    at = list(at)
    faulty: list[MatrixCell] = []
    for name in names:
        about = faults.about(name)
        able = [place for place in at if not about.why_not(place.via, place.features)]
        faulty += [
            MatrixCell(name, place, about.expected(place.via, place.features))
            for place in at
            if place in _first(able).values()
        ]
    held = {*(cell.place for cell in faulty), *_first(at).values()}
    return [*(MatrixCell(CLEAN, place, "") for place in at if place in held), *faulty]


def _first(at: Sequence[Place]) -> dict[tuple[str, str], Place]:
    """Of each model and load path the first of some places, on the cheapest layout."""
    return {(place.model, place.load_path): place for place in reversed(at)}


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


def pairs(every: Sequence[MatrixCell]) -> list[MatrixCell]:
    """Every fault at least once on every model and on every load path where it can do something, and a clean cell of
    every model on each of its layouts and of every load path."""
    kept: list[MatrixCell] = []
    for number, name in enumerate(dict.fromkeys(cell.fault for cell in every)):
        own = [cell for cell in every if cell.fault == name]
        rows = list(dict.fromkeys(_row(cell) for cell in own))
        columns = list(dict.fromkeys(cell.place.load_path for cell in own))

        def diagonal(cell: MatrixCell, rows: Any = rows, columns: Any = columns, shift: int = number) -> int:
            """Cells of one diagonal share neither a row nor a column; each fault begins with another one."""
            at = columns.index(cell.place.load_path) - rows.index(_row(cell)) - shift
            return int(at % max(len(rows), len(columns)))

        seen: set[object] = set()
        for cell in sorted(own, key=diagonal):
            if not {_row(cell), cell.place.load_path} <= seen:
                kept.append(cell)
                seen |= {_row(cell), cell.place.load_path}
    return kept


def _row(cell: MatrixCell) -> tuple[str, ...]:
    return (cell.place.model, *(cell.place.layout if cell.fault == CLEAN else ()))


@dataclass(frozen=True)
class Play:
    """One cell as any experiment would plan it. reference: whose fresh starts it is compared with: its own, or those of
    the clean cell where the fault does nothing to a start from files, so that they are equal and made once."""

    planned: Planned
    cell: MatrixCell
    reference: Planned


def planned(every: Sequence[MatrixCell], overrides: Sequence[str]) -> dict[str, Play]:
    """The cells by id. A place is planned once: only the fault differs."""
    found = {}
    clean = {place: _clean(place, tuple(overrides)) for place in dict.fromkeys(c.place for c in every)}
    for cell in every:
        reference = one = clean[cell.place]
        if cell.fault != CLEAN:
            one = _with_fault(one, cell.fault)
            reference = one if FRESH_VIA in faults.about(cell.fault).via else reference
        found[one.id] = Play(one, cell, reference)
    return found


def _clean(place: Place, overrides: tuple[str, ...]) -> Planned:
    """What `plan` makes of the command line, of parts that are each composed once."""
    words = (EXPERIMENT, *place.layout, *overrides, f"model={place.model}", f"load_path={place.load_path}")
    options = ((f"model={place.model}",), place.layout, (f"load_path={place.load_path}",))
    of, on, path = (_selected(option, overrides) for option in options)
    root = _root_of(place.model, place.layout, place.load_path, overrides)
    if wrong := problems(root) or [*engine_problems(root), *checkpoint_problems(root)]:
        raise ConfigError([f"{problem} ({' '.join(words)})" for problem in wrong])
    labels = {**of.labels, **{key: on.labels[key] for key in ("parallelism", "backend")}}
    cell = freeze(root, {**labels, "load_path": path.labels["load_path"]})
    return Planned(cell_id(cell), cell, root, words)


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
