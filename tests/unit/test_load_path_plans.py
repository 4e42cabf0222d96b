"""Load paths on the control side: rules of what an update brings, saved state before a start, what a load owes."""

import re
from typing import Any

import pytest

from orchestrator.cell import saved_state
from orchestrator.config.compose import compose
from orchestrator.config.planning import plan
from orchestrator.judge.attempt import timeline
from orchestrator.judge.lifecycle import violations
from orchestrator.rules.cell_rules import problems
from orchestrator.staging import ArmGangs, Staged, arm_gangs
from orchestrator.starts import engine_starts
from orchestrator.store import Store
from workloads.loading.paths import MANIFEST, PHASES, STARTS, UPDATES

QUICK = ["cluster.memory_gb=2", "collect=tensors"]
STEPS = "load_path.steps=[{do: start, checkpoint: old, via: safetensors}, {do: update, checkpoint: new, via: direct"


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("roots: [eagle]", r"steps\[1\]\.roots names 'eagle'; the models of an engine are: target, draft\."),
        ("order: random", r"steps\[1\]\.order is 'random'; .*: natural, reversed, shuffled\."),
        ("order_seed: 3", r"steps\[1\]\.order_seed is 3, which only order=shuffled reads"),
        ("tensors: ['']", r"steps\[1\]\.tensors has an empty pattern"),
        ("bucket_bytes: -1", r"steps\[1\]\.bucket_bytes is -1; it is a size"),
    ],
)
def test_an_update_that_cannot_be_meant_is_refused_before_it_runs(field: str, sentence: str) -> None:
    [cell] = compose(
        [f"{STEPS}, {field}}}, {{do: observe, name: updated, collect: [tensors, generations]}}]", *QUICK]
    )
    assert cell.root is not None
    found = "\n".join(problems(cell.root))
    assert re.search(sentence, found), found


def test_a_pattern_of_a_perturbation_must_match_tensors() -> None:
    changed = ["load_path=partial", "checkpoints.new.perturbation=some_tensors"]
    [cell] = compose([*changed, "checkpoints.new.perturbation_target='*nothing*'", *QUICK])
    assert cell.root is not None
    assert "perturbation_target is '*nothing*', which is not one of" in "\n".join(problems(cell.root))


def test_every_phase_of_a_path_is_explained() -> None:
    used = {phase for path in (*STARTS.values(), *UPDATES.values()) for phase in path.phases}
    assert used == PHASES.keys()


# Saved state ---------------------------------------------------------------------------------------


def frozen(load_path: str, *overrides: str) -> dict[str, Any]:
    [one] = plan([f"load_path={load_path}", *QUICK, *overrides]).cells
    return one.cell


def gangs_of(cell: dict[str, Any], store: Store) -> ArmGangs:
    attempt = store.new_attempt(store.write_cell(cell))
    return arm_gangs(
        Staged(cell, store, attempt, None, dict.fromkeys(cell["checkpoints"], "/weights"), {}), "candidate"
    )


@pytest.mark.parametrize(
    ("load_path", "saving", "starts"),
    [
        ("tensorizer", ["start old safetensors", "save old tensorizer"], 4),
        ("sharded_state", ["start old safetensors", "save old sharded_state"], 4),
        ("tensorizer_raw", ["save old tensorizer_raw"], 3),
    ],
)
def test_state_is_saved_once_before_the_scenario_starts_on_it(
    load_path: str, saving: list[str], starts: int, tmp_path: Any
) -> None:
    store, cell = Store.open(tmp_path / "runs"), frozen(load_path)
    gangs = gangs_of(cell, store).gang_set.gangs
    assert [spec.name for spec in gangs] == ["fresh.old", "fresh.new", "saved", "candidate"]
    assert [f"{s.do} {s.checkpoint} {s.via}" for s in gangs[2].steps] == saving
    assert gangs[2].saved_dir == gangs[3].saved_dir != ""
    assert [one.count for one in engine_starts([cell], store.holds)] == [starts]
    state = saved_state(cell, "candidate")
    assert state is not None
    assert gangs[3].saved_dir == str(store.saved / state.key)
    (store.saved / state.key).mkdir(parents=True)
    assert not store.holds(state.key), "a save that did not end is done again"
    (store.saved / state.key / MANIFEST).write_text("{}")
    assert [spec.name for spec in gangs_of(cell, store).gang_set.gangs] == [
        "fresh.old",
        "fresh.new",
        "candidate",
    ]
    assert [one.count for one in engine_starts([cell], store.holds)] == [3]


def test_saved_state_is_of_one_layout_way_and_checkpoint() -> None:
    keys = {
        state.key
        for cell in (
            frozen("tensorizer"),
            frozen("sharded_state"),
            frozen("tensorizer", "parallelism=tp2_dp2_ep4"),
            frozen("tensorizer", "checkpoints.old.seed=7"),
            frozen("tensorizer", "code.candidate.faults=[stale_padding]"),
        )
        if (state := saved_state(cell, "candidate")) is not None
    }
    assert len(keys) == 5
    assert saved_state(frozen("layerwise"), "candidate") is None


# What a load owes ----------------------------------------------------------------------------------


def events(
    load: int, via: str, phases: list[str], modules: tuple[str, ...] = ("a", "b"), root: str = "target"
) -> Any:
    def event(name: str, module: str = "") -> dict[str, Any]:
        return {"root": root, "load": load, "event": name, "via": via, "phase": "load", "module": module}

    of_modules = [event(phase, module) for module in modules for phase in phases if phase != "finalize"]
    hook = [event("finalize")] if "finalize" in phases else []
    return [event("load_start"), *of_modules, *hook, event("load_end")]


def load_of(load: int, via: str, **what: Any) -> Any:
    return events(load, via, list({**STARTS, **UPDATES}[via].phases), **what)


def codes(records: Any, *steps: dict[str, Any]) -> list[str]:
    return [v.code for v in violations(0, records, len(steps), steps)]


def step(via: str, **fields: Any) -> dict[str, Any]:
    return {"do": "update", "via": via, **fields}


@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("update", list(UPDATES))
def test_loads_that_run_their_phases_violate_nothing(start: str, update: str) -> None:
    assert codes(load_of(0, start) + load_of(1, update), step(start), step(update)) == []


def test_an_update_after_an_adopted_start_owes_what_was_adopted() -> None:
    adopted = load_of(0, "tensorizer")
    assert codes(adopted + load_of(1, "direct", modules=("a",)), step("tensorizer"), step("direct")) == [
        "skipped_hook"
    ]
    without_hook = [e for e in load_of(1, "direct") if e["event"] != "finalize"]
    assert codes(adopted + without_hook, step("tensorizer"), step("direct")) == ["skipped_hook"]


def test_a_partial_update_owes_only_what_it_touches() -> None:
    start, part = load_of(0, "safetensors"), load_of(1, "layerwise", modules=("a",))
    assert codes(start + part, step("safetensors"), step("layerwise", tensors=["*.a.*"])) == []
    assert codes(start + part, step("safetensors"), step("layerwise")) == ["skipped_hook"]
    unprocessed = [e for e in part if e["event"] != "post_process"]
    assert codes(start + unprocessed, step("safetensors"), step("layerwise", tensors=["*.a.*"])) == [
        "skipped_hook"
    ]


def test_an_update_of_one_model_owes_nothing_to_the_other() -> None:
    start = load_of(0, "safetensors") + load_of(0, "safetensors", root="draft")
    update = load_of(1, "direct", root="draft")
    assert codes(start + update, step("safetensors"), step("direct", roots=["draft"])) == []
    assert codes(start + update, step("safetensors"), step("direct")) == ["stale"]


def test_an_update_that_must_be_refused_is_no_load() -> None:
    steps = [
        {"do": "start", "checkpoint": "old", "via": "safetensors", "name": "", "collect": []},
        {"do": "update", "checkpoint": "new", "via": "direct", "name": "", "collect": [], "refused": True},
        {"do": "observe", "checkpoint": "", "via": "", "name": "same", "collect": ["tensors"]},
    ]
    moment = timeline(steps)["same"]
    assert (moment.load, moment.checkpoint, moment.via) == (0, "old", "safetensors")


def test_roots_updated_one_after_another_replace_what_was_there_before_the_first() -> None:
    update = {"do": "update", "via": "layerwise"}
    steps = [
        {"do": "start", "checkpoint": "old", "via": "safetensors"},
        {"do": "observe", "name": "started", "collect": []},
        {**update, "checkpoint": "new", "roots": ["target"]},
        {**update, "checkpoint": "new", "roots": ["draft"]},
        {"do": "observe", "name": "updated", "collect": []},
        {**update, "checkpoint": "new"},
        {**update, "checkpoint": "old"},
        {"do": "observe", "name": "back", "collect": []},
    ]
    moments = timeline(steps)
    assert (moments["updated"].previous, moments["updated"].before, moments["updated"].load) == (
        "old",
        "started",
        2,
    )
    assert (moments["back"].previous, moments["back"].before) == ("new", None)
