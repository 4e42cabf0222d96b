"""Lifecycle rules: each broken one is found, named, and explains the tensors that it spoiled."""

from collections.abc import Callable
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, codes, event

from orchestrator.judge.lifecycle import violations

Events = list[fx.Record]


def broken(events: Events, loads: int = 4) -> list[str]:
    return [v.code for v in violations(0, events, loads)]


def clean() -> Events:
    return World().candidate.events[0]


def test_complete_loads_violate_nothing() -> None:
    assert broken(clean()) == []


def late_finalize(events: Events) -> Events:
    """The hook of load 1 runs in the first forward."""
    return [
        e | {"phase": "forward"} if (e["root"], e["load"], e["event"]) == ("target", 1, "finalize") else e
        for e in events
    ]


def without(events: Events, **match: object) -> Events:
    return [e for e in events if any(e[key] != value for key, value in match.items())]


def filled_after(events: Events) -> Events:
    found = without(events, root="target", load=1, event="fill_padding", module="model.layers.0.mlp")
    place = next(i for i, e in enumerate(found) if e["load"] == 1 and e["event"] == "finalize")
    return [
        *found[:place],
        event("target", 1, "fill_padding", "layerwise", "model.layers.0.mlp"),
        *found[place:],
    ]


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("finalised_late", late_finalize),
        ("finalised_late", lambda e: [*e, event("target", 3, "post_process", "layerwise", "m", "forward")]),
        ("skipped_hook", lambda e: without(e, root="target", load=1, event="finalize")),
        ("skipped_hook", lambda e: without(e, root="draft", load=2, event="load_end")),
        ("skipped_hook", lambda e: without(e, load=1, event="post_process", module="model.layers.1.mlp")),
        ("skipped_hook", lambda e: without(e, root="target", load=1, event="post_process")),
        ("skipped_hook", lambda e: without(e, load=1, module="model.layers.1.mlp")),
        ("processed_twice", lambda e: [*e, event("target", 1, "finalize", "layerwise")]),
        ("processed_twice", lambda e: [*e, event("draft", 0, "post_process", "safetensors", "model.mtp.0")]),
        ("stale_padding", filled_after),
        ("stale_padding", lambda e: without(e, load=1, event="fill_padding", module="model.layers.1.mlp")),
        ("stale_padding", lambda e: without(e, root="target", load=2, event="fill_padding")),
        ("stale", lambda e: without(e, root="draft", load=1)),
        ("read_foreign", lambda e: [*e, event("target", 1, "read_foreign", "layerwise")]),
    ],
)
def test_each_broken_rule_has_its_code(code: str, change: Callable[[Events], Events]) -> None:
    assert set(broken(change(clean()))) == {code}


def test_a_coarser_path_may_fill_once_for_all_modules() -> None:
    events = without(clean(), root="target", load=1, event="fill_padding")
    start = next(i for i, e in enumerate(events) if e["load"] == 1)
    events.insert(start + 1, event("target", 1, "fill_padding", "direct"))
    assert broken(events) == []


def test_a_skipped_hook_explains_stale_and_left_over_tensors(tmp_path: Path) -> None:
    world = World()
    for rank, events in world.candidate.events.items():
        world.candidate.events[rank] = [
            e for e in events if e["event"] != "finalize" or e["load"] == 0 or e["root"] == "draft"
        ]
    for observation in ("updated", "repeated"):
        for audit, old in zip(
            world.candidate.each(observation), world.candidate.each("started"), strict=True
        ):
            audit.copy_from(old, fx.EXPERTS)
            audit.tensor(f"{fx.EXPERTS}_raw", "weight", fx.fp("raw", audit.rank))
    result = world.judge(tmp_path)
    assert result["verdict"] == "FAIL"
    assert codes(result) == ["skipped_hook"]
    finding = result["findings"][0]
    assert finding["ranks"] == [0, 1, 2, 3]
    assert finding["observation"] == "updated"
    assert "the model's finalise hook did not run" in finding["detail"]
    assert {"stale", "extra"} <= {c["code"] for c in finding["consequences"]}


def test_modules_that_no_weights_reached_are_stale_and_not_skipped(tmp_path: Path) -> None:
    world = World()
    for rank, events in world.candidate.events.items():
        world.candidate.events[rank] = [
            e for e in events if e["module"] != "model.layers.1.mlp" or e["load"] == 0
        ]
    for observation in ("updated", "repeated"):
        for audit, old in zip(
            world.candidate.each(observation), world.candidate.each("started"), strict=True
        ):
            audit.copy_from(old, fx.EXPERTS)
            audit.copy_from(old, fx.SCALES)
    result = world.judge(tmp_path)
    assert codes(result) == ["stale"]
    assert [(c["code"], c["observation"]) for c in result["findings"][0]["consequences"]] == [
        ("skipped_hook", "updated"), ("skipped_hook", "repeated"), ("skipped_hook", "back"),
    ]  # fmt: skip


def test_a_module_that_was_filled_and_not_processed_is_skipped(tmp_path: Path) -> None:
    world = World()
    for rank, events in world.candidate.events.items():
        world.candidate.events[rank] = without(
            events, load=1, event="post_process", module="model.layers.1.mlp"
        )
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.EXPERTS)
    assert codes(world.judge(tmp_path)) == ["skipped_hook"]


def test_a_broken_module_does_not_explain_other_modules(tmp_path: Path) -> None:
    world = World()
    for events in world.candidate.events.values():
        events.append(event("target", 1, "post_process", "layerwise", "model.layers.1.mlp"))
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)
    assert codes(world.judge(tmp_path)) == ["processed_twice", "stale"]


def test_late_finalisation_is_not_also_a_skipped_hook(tmp_path: Path) -> None:
    world = World()
    for rank, events in world.candidate.events.items():
        world.candidate.events[rank] = late_finalize(events)
    result = world.judge(tmp_path)
    assert codes(result) == ["finalised_late"]
    assert "inside a forward pass" in result["findings"][0]["detail"]


def test_another_number_of_loads_is_an_error(tmp_path: Path) -> None:
    world = World()
    for rank, events in world.candidate.events.items():
        world.candidate.events[rank] = [e for e in events if e["load"] < 3]
    result = world.judge(tmp_path)
    assert result["verdict"] == "ERROR"
    assert "recorded 3 loads, the scenario has 4" in fx.check(result, "lifecycle_complete")["observed"]
