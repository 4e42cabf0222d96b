"""Cells: the fast composition equals Hydra's, ids follow what is measured and nothing else, plan texts are golden."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import pretend_installed
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from orchestrator.cell import canonical, cell_id, digest, references
from orchestrator.cluster.sbatch import script, segment_nodes
from orchestrator.config.compose import compose, conf_dir
from orchestrator.config.freeze import freeze
from orchestrator.config.planning import plan
from orchestrator.engine_env import known
from orchestrator.provenance import checkout, source_hash
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Step

GOLDEN = Path(__file__).parents[1] / "golden"
Cell = dict[str, Any]


def planned(*overrides: str) -> Cell:
    [one] = plan(["cluster.memory_gb=2", *overrides]).cells
    return one.cell


@pytest.fixture(scope="module")
def cell() -> Cell:
    return planned("parallelism=tp2_dp2_ep4")


@pytest.mark.parametrize(
    "overrides",
    [
        ["+exp=kimi_k3_refit", "load_path=cold"],
        ["cluster=gb200", "model=kimi_k3", "checkpoints.old.seed=7", "+cluster.env.A=b"],
        ["code.candidate.faults=[a,b]", "collect=tensors", "load_path.update=direct"],
        [
            "load_path.steps=[{do: start, checkpoint: old, via: dummy}]",
            "model.kimi_k3.full_attention_layers=[1,2]",
        ],
    ],
)
def test_composition_equals_that_of_hydra(overrides: list[str]) -> None:
    loader = ConfigLoaderImpl(create_config_search_path(f"file://{conf_dir()}"))
    [cell] = compose(overrides)
    naive = loader.load_configuration("config", [*overrides, "hydra.mode=RUN"], RunMode.RUN)
    with open_dict(naive):
        del naive["hydra"]
    assert cell.root == OmegaConf.to_object(naive)


def test_cells_of_a_sweep_do_not_leak_into_each_other() -> None:
    swept = compose(["checkpoints.old.seed=1,2", "model.kimi_k3.num_layers=4,5"], multirun=True)
    alone = [
        compose([f"checkpoints.old.seed={s}", f"model.kimi_k3.num_layers={n}"])[0]
        for s in (1, 2)
        for n in (4, 5)
    ]
    assert [one.root for one in swept] == [one.root for one in alone]


def test_a_section_that_looks_at_another_follows_it(tmp_path: Path) -> None:
    """Sections are shared between cells only when nothing outside of them can change their values."""
    (tmp_path / "exp").mkdir()
    text = (
        "# @package _global_\npolicy: {step_timeout_s: '${parallelism.tp}'}\nname: x${checkpoints.old.seed}\n"
    )
    (tmp_path / "exp" / "mine.yaml").write_text(text)
    overrides = ["+exp=mine", "parallelism.tp=1,2", "checkpoints.old.seed=7,8"]
    cells = compose(overrides, multirun=True, config_dir=str(tmp_path))
    roots = [cell.root for cell in cells if cell.root is not None]
    assert [root.policy.step_timeout_s for root in roots] == [1, 1, 2, 2]
    assert [root.name for root in roots] == ["x7", "x8", "x7", "x8"]


def test_canonical_json_has_one_spelling() -> None:
    assert canonical({"b": [1, 2.5, "ü"], "a": None}) == canonical({"a": None, "b": [1, 2.5, "ü"]})
    assert canonical({"b": 1, "a": 2}) == b'{"a":2,"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_a_frozen_cell_is_plain_json_and_fits_the_gang(cell: Cell) -> None:
    assert json.loads(json.dumps(cell)) == cell
    steps = [Step(**step) for step in cell["load_path"]["steps"]]
    assert steps[0] == Step("start", "old", "safetensors")
    spec = GangSpec(
        name="candidate",
        output="/x",
        model=Model(**{**cell["model"], "kimi_k3": {}}),
        parallelism=Parallelism(**cell["parallelism"]),
        backend=Backend(**cell["backend"]),
        checkpoints={name: Checkpoint(**c) for name, c in cell["checkpoints"].items()},
        checkpoint_dirs={},
        steps=steps,
    )
    assert spec.parallelism.ranks == 4


MEASURED = [
    ("model", "kimi_k3", "num_layers", 5),
    ("model", "name", "other"),
    ("parallelism", "ep", 2),
    ("backend", "max_batch_tokens", 1),
    ("load_path", "steps", 0, "via", "dummy"),
    ("load_path", "checks", 0, "required", False),
    ("checkpoints", "new", "seed", 9),
    ("inputs", "collect.gsm8k", "sha256:0"),
    ("code", "candidate", "source", "0"),
    ("code", "candidate", "faults", ["x"]),
    ("code", "base", {"path": "/x", "commit": None, "source": "0", "faults": []}),
    ("collect", "sampling", "seed", 1),
    ("policy", "coverage", 0.5),
    ("cluster", "image", "vllm/vllm:1"),
    ("cluster", "image_digest", "sha256:0"),
]
ONLY_EXECUTION = [
    ("experiment", "other"),
    ("labels", {"a": "b"}),
    ("code", "candidate", "path", "/elsewhere"),
    ("code", "candidate", "commit", "f" * 40),
    ("policy", "step_timeout_s", 1),
    ("policy", "step_timeouts_s", "start", 9),
    ("policy", "max_attempts", 5),
    ("cluster", "kind", "slurm"),
    ("cluster", "partition", "other"),
    ("cluster", "time", "01:00:00"),
    ("cluster", "exclude", "n1"),
    ("cluster", "memory_gb", 99.0),
    ("wandb", "enabled", False),
]


def changed(cell: Cell, path: tuple[Any, ...]) -> Cell:
    other = copy.deepcopy(cell)
    node = other
    *keys, last, value = path
    for key in keys:
        node = node[key]
    node[last] = value
    return other


@pytest.mark.parametrize("path", MEASURED, ids=str)
def test_what_is_measured_makes_another_cell(cell: Cell, path: tuple[Any, ...]) -> None:
    assert cell_id(changed(cell, path)) != cell_id(cell)


@pytest.mark.parametrize("path", ONLY_EXECUTION, ids=str)
def test_where_and_how_it_runs_does_not(cell: Cell, path: tuple[Any, ...]) -> None:
    assert cell_id(changed(cell, path)) == cell_id(cell)


def test_every_key_of_a_cell_is_sorted_into_one_of_the_two(cell: Cell) -> None:
    """A new key must be decided on, or results of different things would be mixed up."""
    sorted_keys = {path[0] for path in (*MEASURED, *ONLY_EXECUTION)}
    assert set(cell) == {*sorted_keys, "format"}


def test_references_are_shared_by_load_paths_and_told_apart_by_content(cell: Cell) -> None:
    keys = {ref.name: ref.key for ref in references(cell)}
    assert set(keys) == {"fresh.new", "fresh.old"}
    direct = planned("parallelism=tp2_dp2_ep4", "load_path=direct")
    assert {ref.name: ref.key for ref in references(direct)} == keys
    assert {ref.collect for ref in references(cell)} == {("generations", "tensors")}
    for path in (
        ("code", "candidate", "source", "0"),
        ("backend", "max_requests", 3),
        ("model", "name", "x"),
    ):
        assert {ref.key for ref in references(changed(cell, path))}.isdisjoint(keys.values())
    seeded = {ref.name: ref.key for ref in references(changed(cell, ("checkpoints", "new", "seed", 9)))}
    assert seeded["fresh.old"] == keys["fresh.old"]
    assert seeded["fresh.new"] != keys["fresh.new"]


def test_references_collect_what_checks_compare(cell: Cell) -> None:
    other = copy.deepcopy(cell)
    other["load_path"]["checks"] = [
        c for c in other["load_path"]["checks"] if c["rule"] != "same_generations"
    ]
    assert {ref.collect for ref in references(other)} == {("tensors",)}
    assert references(changed(other, ("collect", "prompts", ["x"]))) == references(other)
    other["load_path"]["checks"] = [c for c in other["load_path"]["checks"] if c["rule"] == "coverage"]
    assert references(other) == []


def test_the_base_arm_has_references_of_its_own(cell: Cell) -> None:
    base = {"path": "/x", "commit": None, "source": "0", "faults": []}
    both = references(changed(cell, ("code", "base", base)))
    assert {(ref.arm, ref.name) for ref in both} == {
        (arm, name) for arm in ("candidate", "base") for name in ("fresh.old", "fresh.new")
    }
    assert len({ref.key for ref in both}) == 4


def test_collectors_without_work_are_left_out() -> None:
    quick = planned("collect=tensors")
    collected = {name for step in quick["load_path"]["steps"] for name in step["collect"]}
    assert collected == {"tensors", "generations", "memory"}
    assert {c["rule"] for c in quick["load_path"]["checks"]}.isdisjoint({"gsm8k", "throughput"})


def test_a_base_commit_is_resolved_and_hashed(tmp_path: Path) -> None:
    for folder in ("workloads", "collectors"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "workloads" / "a.py").write_text("old\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "old"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "workloads" / "a.py").write_text("new\n")
    cell = planned(f"code.base.path={tmp_path}", "code.base.commit=HEAD", f"code.candidate.path={tmp_path}")
    base, candidate = cell["code"]["base"], cell["code"]["candidate"]
    assert len(base["commit"]) == 40
    assert candidate["commit"] is None
    assert base["source"] != candidate["source"]
    (tmp_path / "workloads" / "a.py").write_text("old\n")
    source_hash.cache_clear()
    assert source_hash(tmp_path) == base["source"]  # equal content, however it came there
    with pytest.raises(Exception, match="'nowhere' is not a commit of the git repository at"):
        planned(f"code.base.path={tmp_path}", "code.base.commit=nowhere")


def test_changed_input_files_make_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchestrator.config.planning.checkpoint_problems", lambda root: []
    )  # these are no weights
    names = []
    for folder, answer in (("a", "#### 1"), ("same", "#### 1"), ("other", "#### 2")):
        (tmp_path / folder).mkdir()
        for file in ("test.jsonl", "train.jsonl"):
            (tmp_path / folder / file).write_text(json.dumps({"question": "1?", "answer": answer}))
        names.append(cell_id(planned(f"collect.gsm8k.path={tmp_path / folder}")))
    assert names[0] == names[1] != names[2]
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.safetensors").write_bytes(b"1")
    second = planned(f"checkpoints.old.path={weights}")
    (weights / "a.safetensors").write_bytes(b"22")
    assert cell_id(planned(f"checkpoints.old.path={weights}")) != cell_id(second)


def test_equal_cells_are_planned_once() -> None:
    assert len(plan(["policy.step_timeout_s=10,20", "cluster.memory_gb=2"], multirun=True).cells) == 1


def test_labels_tell_cells_apart() -> None:
    [old, new] = plan(["checkpoints.old.seed=1,2", "cluster.memory_gb=2"], multirun=True).cells
    assert (old.cell["labels"]["checkpoints.old.seed"], new.cell["labels"]["checkpoints.old.seed"]) == (
        "1",
        "2",
    )
    assert old.cell["labels"]["load_path"] == "layerwise"


GB200 = ["plan", "+exp=kimi_k3_refit", "model=kimi_k3", "cluster=gb200"]
GOLDENS = {
    "plan_refit_local": ["plan", "+exp=kimi_k3_refit", "cluster.memory_gb=2"],
    "plan_k3_gb200": [*GB200, "load_path=layerwise"],
    "plan_k3_ep8_refused": [*GB200, "parallelism={tp: 4, dp: 2, ep: 8, nodes: 2, gpus_per_node: 4}"],
    "plan_v4_flash_gb200": [
        "plan",
        "+exp=kimi_k3_refit",
        "model=deepseek_v4_flash",
        "cluster=gb200",
        "load_path=layerwise",
    ],
    "plan_k3_h200": [
        "plan",
        "+exp=kimi_k3_refit",
        "model=kimi_k3",
        "backend=native_hopper_mega_moe",
        "parallelism=tp4_dp8_ep32",
        "cluster=slurm",
        "cluster.device=cuda",
        "cluster.arch=sm90",
        "cluster.memory_gb=141",
        "load_path=direct",
        "backend.max_batch_tokens=1024",
    ],
    "plan_slurm_options": [
        "plan",
        "cluster=slurm",
        "load_path=cold",
        "cluster.partition=batch",
        "cluster.account=team",
        "cluster.time=1-00:00:00",
        "cluster.partition_limit=2-00:00:00",
        "cluster.exclude='n[1-2],n7'",
        "cluster.exclusive=false",
        "cluster.setup=['module load cuda']",
    ],
    "plan_foreign_engine": ["plan", "+exp=foreign", "--config-dir", "tests/unit/conf", "cluster.memory_gb=2"],
    "plan_foreign_engine_refused": [
        "plan",
        "+exp=foreign",
        "--config-dir",
        "tests/unit/conf",
        "cluster.memory_gb=2",
        "parallelism={tp: 3, dp: 1, ep: 2, nodes: 3, gpus_per_node: 1}",
        "+backend.options.seed=1",
        "backend.url=http://localhost:8000",
    ],
}


def normal(text: str) -> str:
    """Without what differs from machine to machine and from commit to commit."""
    for shown in (shlex.quote(sys.executable), sys.executable):
        text = text.replace(shown, "<python>")
    for shown in (shlex.quote(str(checkout())), str(checkout())):
        text = text.replace(shown, "<checkout>")
    text = re.sub(r"\b[0-9a-f]{64}\b", "<id>", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "<short-id>", text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where every engine environment looks installed."""
    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REFIT_ENGINES", str(folder))
        for name in known():
            pretend_installed(name)
    return folder


@pytest.fixture(scope="module", name="questions")
def questions_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with GSM8K's files: a plan asks questions only where there are any."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split in ("test", "train"):
        (folder / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 20)
    return folder


@pytest.mark.parametrize("name", GOLDENS)
def test_plan_text(
    name: str, engines: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wanted change: UPDATE_GOLDEN=1 pytest, then read the difference."""
    monkeypatch.setenv("REFIT_ENGINES", str(engines))
    monkeypatch.setenv("GSM8K_DIR", str(questions))
    command = [sys.executable, "-m", "orchestrator", *GOLDENS[name], f"store={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout(), timeout=120)
    text = normal(done.stdout + done.stderr).replace(str(tmp_path), "<store>")
    text = f"$ orchestrator {' '.join(GOLDENS[name])}\nexit code {done.returncode}\n\n{text}"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
    assert all(len(line) <= 100 for line in done.stdout.partition("sbatch script of")[0].splitlines())
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_the_script_is_submitits_template_with_our_rules(tmp_path: Path) -> None:
    [one] = plan([*GB200[1:], "load_path=cold"]).cells
    text = script(one.cell, tmp_path / "B", 7, ["n3"], ["12", "13_4"])
    lines = text.splitlines()
    flags = ("no-requeue", "kill-on-invalid-dep=yes", "comment=refit:B", "exclusive", "segment=4", "nodes=4")
    for flag in (*flags, "gpus-per-node=4", "array=0-6%7", "exclude=n3", "dependency=afterany:12:13_4"):
        assert f"#SBATCH --{flag}" in lines
    assert "#SBATCH --signal=B:TERM@120" in lines, "submitit's own would kill the ranks before the driver"
    assert not any(line.startswith("srun") for line in lines)
    assert "wckey" not in text
    assert lines.index("set -euo pipefail") < next(
        i for i, line in enumerate(lines) if line.startswith("exec ")
    )


@pytest.mark.parametrize(("ep", "nodes"), [(16, 4), (32, 8), (4, 1), (2, 1)])
def test_a_segment_holds_one_ep_group(ep: int, nodes: int) -> None:
    assert segment_nodes({"ep": ep, "gpus_per_node": 4}) == nodes


def test_freeze_keeps_environment_values_as_text() -> None:
    [cell] = compose(["+cluster.env.A=1"])
    assert cell.root is not None
    assert freeze(cell.root, {})["cluster"]["env"] == {"A": "1"}
    assert len(digest({})) == 64
