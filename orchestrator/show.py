"""Prints a plan: cells, layout, memory, steps, checks, references. At most 100 columns."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator import memory
from orchestrator.architectures import architecture
from orchestrator.cell import Cell, Reference, canonical, references
from orchestrator.cluster.scheduling import levels, needs
from orchestrator.config.freeze import cell_arms
from orchestrator.config.planning import Plan, Planned
from orchestrator.config.schema import RULES, Root
from orchestrator.rules.cell_rules import memory_limit
from orchestrator.show_jobs import show_jobs
from orchestrator.show_where import code_lines, where_lines
from orchestrator.starts import Source, cheapest_order, engine_starts
from orchestrator.store import Store
from workloads.spec import Step

WIDTH = 100
DETAILED = 12  # of more cells only the summary is printed
SLEEP = {1: "level 1: weights stay on the host", 2: "level 2: weights are discarded"}
SHORT = 12  # digits of an id in tables


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with 1, which says FAIL; the command line knows better."""
        raise BrokenPipeError


def console() -> Console:
    """Colours and box drawing on a terminal, plain text in files and pipes."""
    terminal = Console()
    width = min(WIDTH, terminal.width) if terminal.is_terminal else WIDTH
    return _Console(width=width, highlight=False, soft_wrap=False)


def show_plan(out: Console, plan: Plan, store: Store) -> None:
    _summary(out, plan, store)
    jobs = [one for one in _running(plan, store) if one.cell["cluster"]["kind"] == "slurm"]
    if len(plan.cells) > DETAILED:
        if jobs:
            show_jobs(out, jobs, store, detailed=False)
        out.print(f"\nPlan up to {DETAILED} cells at once to see layout, memory, steps and scripts.")
        return
    for one in _distinct(plan.cells, lambda r: (r.model, r.parallelism, r.backend, r.cluster.memory_gb)):
        _layout(out, one.root)
        _memory(out, one.root)
    for one in _distinct(plan.cells, lambda r: (r.model, r.checkpoints)):
        _checkpoints(out, one.root)
    shared = len({canonical(one.cell["load_path"]["checks"]) for one in plan.cells}) == 1
    if shared:
        out.print(f"\n[bold]Checks[/]{' of every cell' if len(plan.cells) > 1 else ''}")
        _checks(out, plan.cells[0].cell)
    sources = _sources(plan, store)
    for one in plan.cells:
        _cell(out, one, sources[one.id])
        if not shared:
            _checks(out, one.cell)
        for line in [*code_lines(one.cell), *where_lines(one.cell)]:
            out.print(escape(line))
    if jobs:
        show_jobs(out, jobs, store, detailed=True)


def _running(plan: Plan, store: Store) -> list[Planned]:
    return [one for one in plan.cells if plan.rerun or store.finished(one.id) is None]


def _distinct(planned: Sequence[Planned], key: Callable[[Root], object]) -> list[Planned]:
    return list({repr(key(one.root)): one for one in reversed(planned)}.values())[::-1]


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    style = box.SIMPLE_HEAD if sys.stdout.isatty() else None
    made = Table(box=style, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def _summary(out: Console, plan: Plan, store: Store) -> None:
    planned = plan.cells
    states = [_state(one, store) for one in planned]
    todo = sum(state == "to run" for state in states)
    out.print(f"[bold]Experiment {escape(plan.name)}[/]: cells {len(planned)}, to run {todo}")
    varied = [key for key in planned[0].cell["labels"] if len({_label(one, key) for one in planned}) > 1]
    common = [f"{k}={v}" for k, v in planned[0].cell["labels"].items() if k not in varied]
    out.print(escape("  same in all: " + ", ".join(common)))
    out.print()
    rows = table("cell", *varied, "state")
    for one, state in zip(planned, states, strict=True):
        rows.add_row(one.id[:SHORT], *(escape(_label(one, key)) for key in varied), state)
    out.print(rows)


def _label(one: Planned, key: str) -> str:
    return str(one.cell["labels"].get(key, ""))


def _state(one: Planned, store: Store) -> str:
    result = None if one.root.rerun else store.finished(one.id)
    return "to run" if result is None else f"{result['verdict']}, reused"


def _layout(out: Console, root: Root) -> None:
    p, b = root.parallelism, root.backend
    unit = "GPUs" if b.device == "cuda" else "processes"
    stages = f" x PP{p.pp}" if p.pp > 1 else ""
    out.print(
        f"\n[bold]Layout[/] of {root.model.name}: {p.ranks} ranks = TP{p.tp} x DP{p.dp}{stages}, EP{p.ep}, "
        f"{p.nodes} node{'s' if p.nodes > 1 else ''} x {p.gpus_per_node} {unit}"
    )
    for line in _engine(root):
        out.print(escape(f"  {line}"))
    rows = table("node", "ranks", *(["stage"] if stages else []), "DP rank", "TP ranks", "EP group")
    for node in range(p.nodes):
        ranks = range(node * p.gpus_per_node, (node + 1) * p.gpus_per_node)
        rows.add_row(
            str(node),
            _span(ranks),
            *([_span([rank // p.stage_ranks for rank in ranks])] if stages else []),
            _span([rank % p.stage_ranks // p.tp for rank in ranks]),
            _span([rank % p.tp for rank in ranks]),
            _span([rank // p.ep for rank in ranks]),
        )
    out.print(rows)


def _engine(root: Root) -> Iterator[str]:
    """What serves, and what it is told beside the layout."""
    b = root.backend
    where = b.device if b.device == b.arch else f"{b.device} {b.arch}"
    if b.engine != "vllm":
        chosen = memory.planned_kernel(root)
        kernel = f"{b.moe_kernel} ({chosen.kernel})" if b.device == "cuda" and chosen else b.moe_kernel
        yield f"engine {b.engine} on {where}, MoE kernel {kernel}, communication {b.communication}"
        if chosen and chosen.fallback:
            yield f"no fast kernel of experts: {chosen.reason}"
        return
    sources = (("environment", b.environment), ("interpreter", b.python), ("server", b.url))
    of = [f"{kind} {name}" for kind, name in sources if name is not None]
    of += [f"container {root.cluster.image}"] if root.cluster.image is not None else []
    yield f"engine {b.engine} on {where}, {', '.join(of) or 'environments of the arms'}, dtype {b.dtype}"
    for name, arm in cell_arms(root).items():
        if arm.environment is not None:
            yield f"  {name} in environment {arm.environment}"
    if b.options:
        yield "options " + ", ".join(f"{name}={json.dumps(value)}" for name, value in b.options.items())
    if b.env:
        yield "variables " + ", ".join(f"{name}={value}" for name, value in b.env.items())


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _memory(out: Console, root: Root) -> None:
    parts = architecture(root).memory_parts(root)
    if not parts:
        out.print("\n[bold]Memory[/]: not computed for this architecture: only its engine knows the weights")
        return
    limit, limit_name = memory_limit(root)
    needed = memory.total(parts)
    name, unit = ("GB", 1e9) if needed >= 1e10 else ("MB", 1e6)
    device = "GPU" if root.backend.device == "cuda" else "rank"
    pp = root.parallelism.pp
    stage = f" of stage {memory.fullest_stage(root)}, the fullest of {pp}" if pp > 1 else ""
    out.print(f"\n[bold]Memory of one {device}[/]{stage}, from the model's dimensions")
    rows = table("part", "kind", name, "from", right=(name,))
    for part in parts:
        rows.add_row(part.name, part.kind, f"{part.nbytes / unit:,.2f}", part.basis)
    weights = memory.total(parts, "weights", "padding", "derived")
    rows.add_section()
    if weights > memory.total(parts, "weights"):
        rows.add_row("all weights", "", f"{weights / unit:,.2f}", "with padding and derived ones")
    of = (
        f"of {limit / unit:,.1f} of {limit_name}: {(limit - needed) / unit:,.1f} left"
        if limit
        else "limit not known"
    )
    rows.add_row("total", "", f"{needed / unit:,.2f}", of)
    out.print(rows)


def _update_memory(out: Console, root: Root) -> None:
    """Updates come on top of serving, for a moment."""
    extra = architecture(root).update_bytes(root)
    if extra == 0:
        return
    needed = memory.total(architecture(root).memory_parts(root)) + extra
    limit, _ = memory_limit(root)
    out.print(f"  an update needs {_size(extra)} more for a moment: {_size(needed)}")
    if limit is not None and needed > limit:
        out.print(f"[bold]Warning[/]: there are {_size(limit)}: the update will run out of memory.")


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def _checkpoints(out: Console, root: Root) -> None:
    nbytes = architecture(root).weight_bytes(root)
    size = "of unknown size" if nbytes is None else _size(nbytes)
    out.print(f"\n[bold]Checkpoints[/] of {root.model.name}, {size} each")
    for key, checkpoint in root.checkpoints.items():
        made = checkpoint.path is None
        source = architecture(root).generated(root, checkpoint.seed) if made else checkpoint.path
        change = "" if checkpoint.perturbation == "none" else f", perturbed: {checkpoint.perturbation}"
        out.print(escape(f"  {key}: {source}{change}"))
    if root.model.size == "full" and any(c.path is None for c in root.checkpoints.values()):
        out.print(
            "[bold]Warning[/]: set checkpoints.old.path and checkpoints.new.path to published weights; else"
        )
        out.print(f"the store receives random ones, {size} each, whose answers mean nothing.")


def _cell(out: Console, one: Planned, sources: Sequence[str]) -> None:
    out.print(f"\n[bold]Cell {one.id}[/]")
    out.print(escape("  " + ", ".join(f"{key}={value}" for key, value in one.cell["labels"].items())))
    if "needs" in one.cell:
        out.print(escape(f"  NOT_RUN: {one.cell['needs']}"))
    _steps(out, one.cell)
    _update_memory(out, one.root)
    for line in sources:
        out.print(line)


def _steps(out: Console, cell: Cell) -> None:
    rows = table("step", "do", "what")
    for number, step in enumerate(cell["load_path"]["steps"]):
        if step["do"] == "observe":
            what = f"{step['name']}: {', '.join(step['collect'])}"
        elif step["do"] in ("start", "update"):
            what = f"checkpoint {step['checkpoint']} via {step['via']}{_arrival(step)}"
        else:
            what = SLEEP[step["level"]] if step["do"] == "sleep" else ""
        rows.add_row(str(number), step["do"], what)
    out.print(rows)


def _arrival(step: Mapping[str, Any]) -> str:
    """What is particular about an update, for the plan."""
    kept = {key: step.get(key) for key in ("roots", "tensors", "order", "order_seed", "bucket_bytes")}
    plain = asdict(Step("update"))
    said = [f"{key} {value}" for key, value in kept.items() if value not in (None, plain[key])]
    said += ["must be refused"] if step.get("refused") else []
    return "".join(f", {text}" for text in said)


def _checks(out: Console, cell: Cell) -> None:
    rows = table("check", "must hold", "")
    for check in cell["load_path"]["checks"]:
        rule = RULES[check["rule"]].format(left=check["left"], right=check["right"])
        rows.add_row(check["name"], rule, "" if check["required"] else "informative")
    out.print(rows)


def _sources(plan: Plan, store: Store) -> dict[str, list[str]]:
    """By cell: a line for each reference that says where it comes from, and the engine starts."""
    lines = {one.id: [_reference_line(r, "in the store") for r in references(one.cell)] for one in plan.cells}
    for together in _in_order(_running(plan, store), store):
        found = engine_starts([one.cell for one in together], store.holds)
        for one, starts in zip(together, found, strict=True):
            lines[one.id] = [_reference_line(s.reference, _origin(s, one, together)) for s in starts.sources]
            lines[one.id].append(f"  engine starts: {starts.count}")
    return lines


def _in_order(running: Sequence[Planned], store: Store) -> list[list[Planned]]:
    """Cells in orders in which each finds what those before it left: those of this machine, and those of Slurm."""
    local = [one for one in running if one.cell["cluster"]["kind"] != "slurm"]
    jobs = {one.id: one for one in running if one.cell["cluster"]["kind"] == "slurm"}
    level = levels(needs({name: one.cell for name, one in jobs.items()}, store.holds))
    ordered = [local[number] for number in cheapest_order([one.cell for one in local])]
    return [ordered, [jobs[name] for name in sorted(jobs, key=level.__getitem__)]]


def _origin(source: Source, one: Planned, running: Sequence[Planned]) -> str:
    if source.by is None:
        return "in the store"
    maker = running[source.by]
    if source.is_served:
        return f"served by the start of {'this cell' if maker is one else f'cell {maker.id[:SHORT]}'}"
    return "to be built by a fresh start" if maker is one else f"built for cell {maker.id[:SHORT]}"


def _reference_line(reference: Reference, origin: str) -> str:
    saves = f"; writes the files of a start via {reference.save}" if reference.save else ""
    return f"  needs {reference.name} of {reference.arm}: {reference.key[:SHORT]}, {origin}{saves}"
