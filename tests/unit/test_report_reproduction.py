"""Reproductions: the command plans the very cell, the script is whole, short and of the engine's own interface."""

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import judge_fixtures as fx
import pytest
from judge_fixtures import World

from collectors.records import RecordWriter, rank_file
from orchestrator.config.planning import plan
from orchestrator.judge.policy import combine
from orchestrator.report.html import html
from orchestrator.report.markdown import markdown
from orchestrator.report.reproduction import reproduction

Json = dict[str, Any]


@pytest.mark.parametrize(
    "arguments",
    [
        ["+exp=kimi_k3_refit", "cluster.memory_gb=2"],
        [
            "-m",
            "load_path=cold,direct",
            "checkpoints.old.seed=1,2",
            "cluster.memory_gb=2",
            "collect.prompts=['a b','c']",
        ],
    ],
)
def test_the_command_plans_the_cell_alone(arguments: list[str], tmp_path: Path) -> None:
    cells = plan([word for word in arguments if word != "-m"], multirun="-m" in arguments).cells
    assert len(cells) > 1
    for one in cells:
        told = reproduction(one.cell, {"verdict": "ERROR"}, tmp_path, one.arguments)
        assert told is not None
        program, words = shlex.split(told["command"])[:3], shlex.split(told["command"])[3:]
        assert program == ["python", "-m", "orchestrator"]
        again = plan(words)
        assert [found.id for found in again.cells] == [one.id]
        assert again.rerun


def test_own_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "load_path").mkdir()
    (tmp_path / "load_path" / "mine.yaml").write_text("defaults: [cold, _self_]\nname: mine\n")
    [one] = plan(["load_path=mine", "cluster.memory_gb=2"], config_dir=str(tmp_path)).cells
    assert one.arguments[:2] == ("--config-dir", str(tmp_path))


def failed(tmp_path: Path, *, path: str = fx.NORM, updates: str = "reload") -> tuple[Json, Json, Path]:
    """A cell of vLLM in which one tensor is stale after the update, its result and its attempt."""
    world = World()
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, path)
    judged = world.judge(tmp_path)
    cell = world.cell
    cell["backend"] = {
        "engine": "vllm", "device": "cpu", "dtype": "float32", "max_model_len": 256, "max_batch_tokens": 64,
        "max_requests": 8, "options": {"enforce_eager": True}, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }  # fmt: skip
    cell["model"] |= {"architecture": "transformers", "transformers": {"model_type": "llama"}}
    plain = {"path": None, "seed": 3, "perturbation": "none"}
    cell["checkpoints"] = {"old": plain, "new": {**plain, "perturbation": "every_tensor"}}
    for step in cell["load_path"]["steps"]:
        if step["do"] == "update":
            step["via"] = updates
    attempt = tmp_path / "cells" / "c0ffee" / "attempt-001"
    dirs = {"old": "/store/it's old", "new": "/store/new"}
    (attempt / "candidate" / "gang.json").write_text(json.dumps({"checkpoint_dirs": dirs}))
    return cell, judged, attempt


def script(found: tuple[Json, Json, Path]) -> str:
    told = reproduction(*found, ["a=1"])
    assert told is not None
    assert told["note"] == ""
    return told["script"]


@pytest.mark.parametrize(("via", "lines"), [("reload", 45), ("iterator", 45), ("transfer", 65)])
def test_the_script_repeats_the_steps(tmp_path: Path, via: str, lines: int) -> None:
    text = script(failed(tmp_path, updates=via))
    ast.parse(text)
    assert len(text.splitlines()) <= lines
    assert "import workloads" not in text
    assert f"stale, ranks 0-3, {fx.NORM}" in text
    assert "now " in text.splitlines()[0]
    assert f"NAMES = [{fx.NORM.removeprefix('target:')!r}]" in text
    assert "'VLLM_CPU_OMP_THREADS_BIND': '0|1'" in text
    assert "'tensor_parallel_size': 2" in text
    assert """state("/store/it's old", 'safetensors'""" in text
    assert "state('/store/new', \"safetensors\", [])" in text
    assert ("'repro_iterate', {'folder': '/store/new'}" in text) == (via == "iterator")
    assert ("'reload_weights', {'weights_path': '/store/new'}" in text) == (via == "reload")
    sent = "('update_weights', {'update_info': {'folder': '/store/new'}}), ('finish_weight_update', {})"
    assert (sent in text) == ("'weight_transfer_config': {'backend': 'repro'}" in text) == (via == "transfer")


def test_the_script_says_how_weights_are_made(tmp_path: Path) -> None:
    lines = [line for line in script(failed(tmp_path)).splitlines() if line.startswith("# weights")]
    made, perturbed = (shlex.split(line[2:].replace("<(", "").replace(")", "")) for line in lines)
    assert made[-1] == "/store/it's old"
    assert {"workloads.loading.transformers_checkpoint", '{"model_type":"llama"}', "3"} <= set(made)
    assert (perturbed[-1], perturbed[-4]) == ("/store/new", "/store/it's old") or perturbed[
        -1
    ] == "/store/new"
    assert (
        json.loads(next(word for word in perturbed if word.startswith("{")))["perturbation"] == "every_tensor"
    )


def test_the_observation_of_the_finding_ends_the_script(tmp_path: Path) -> None:
    cell, judged, attempt = failed(tmp_path)
    judged["findings"][0]["observation"] = "back"
    text = script((cell, judged, attempt))
    assert text.count("'reload_weights'") == 3
    assert 'state("/store/it\'s old", "safetensors", [])' in text


def test_what_a_kernel_has_packed_is_asked_of_the_kernel(tmp_path: Path) -> None:
    cell, judged, attempt = failed(tmp_path)
    path = "target:lm_head.cpu_linear.<closure handler>.<packed>"
    judged["findings"][0] |= {"path": path, "paths": [path]}
    text = script((cell, judged, attempt))
    ast.parse(text)
    assert "NAMES = ['lm_head.cpu_linear']" in text
    assert "import inspect" in text
    assert "weight = value(identity, None, None).t()" in text


@pytest.mark.parametrize("path", ["target:model.a.<closure p>.<packed>", "target:model.cache['k']"])
def test_what_no_attribute_leads_to_is_seen_by_its_answers(tmp_path: Path, path: str) -> None:
    cell, judged, attempt = failed(tmp_path)
    judged["findings"][0] |= {"path": path, "paths": [path]}
    text = script((cell, judged, attempt))
    ast.parse(text)
    assert "NAMES = []" in text


@pytest.mark.parametrize("why", ["attach", "sleep", "coverage", "lost", "draft"])
def test_where_there_is_no_script_the_reason_is_told(tmp_path: Path, why: str) -> None:
    cell, judged, attempt = failed(tmp_path)
    if why == "attach":
        cell["load_path"]["steps"][0]["via"] = "attach"
    elif why == "sleep":
        cell["load_path"]["steps"].insert(
            2, {"do": "sleep", "name": "", "checkpoint": "", "via": "", "collect": []}
        )
    elif why == "coverage":
        judged["findings"] = [{**judged["findings"][0], "code": "unclassified"}]
    elif why == "draft":
        cell["checkpoints"]["new"]["draft"] = "small"
    elif why == "lost":
        (attempt / "candidate" / "gang.json").unlink()
    told = reproduction(cell, judged, attempt, ["a=1"])
    assert told is not None
    assert told["command"] == "python -m orchestrator a=1 rerun=true"
    assert told["script"] == ""
    assert told["note"].endswith(".")


def died(tmp_path: Path, via: str, type: str = "rank_failed", tp: int = 1) -> tuple[Json, Json, Path]:
    """A cell of vLLM whose engine died."""
    cell, judged, attempt = failed(tmp_path)
    cell["load_path"]["steps"][0]["via"] = via
    cell["parallelism"]["tp"] = tp
    for file in attempt.glob("candidate/progress-*"):
        file.unlink()
    error = {"type": type, "message": "ValueError: Missing keys ('a',)\n in loaded state!"}
    return cell, {**judged, "verdict": "ERROR", "error": error}, attempt


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("via", "said"),
    [
        ("safetensors", "llm = LLM(FOLDER, load_format='safetensors', **ARGUMENTS)"),
        ("sharded_state", 'collective_rpc("save_sharded_state", kwargs={"path": "saved"})'),
        ("tensorizer", 'collective_rpc("save_tensorized_model", kwargs={"tensorizer_config": TENSORS})'),
        ("tensorizer_raw", 'TensorSerializer(TENSORS["tensorizer_uri"]'),
    ],
)
def test_an_engine_that_died_is_started_by_a_script(tmp_path: Path, via: str, said: str, tp: int) -> None:
    text = script(died(tmp_path, via, tp=tp))
    ast.parse(text)
    assert len(text.splitlines()) <= 45
    assert "import workloads" not in text
    assert "rank_failed: ValueError: Missing keys ('a',) in loaded state!" in text.splitlines()[0]
    assert said in text
    assert 'FOLDER = "/store/it\'s old"' in text
    assert f"'tensor_parallel_size': {tp}" in text
    assert ("saved/model-%04d.tensors" in text) == (tp == 2 and via.startswith("tensorizer"))


def test_no_script_where_the_engine_had_started_or_others_were_to_blame(tmp_path: Path) -> None:
    assert script(died(tmp_path, "safetensors", "node_lost")) == ""
    cell, result, attempt = died(tmp_path / "updated", "safetensors")
    with RecordWriter(rank_file(attempt / "candidate", "progress", 0)) as progress:
        progress.write("step", {"index": 2, "do": "update", "state": "start"})
    assert script((cell, result, attempt)) == ""
    (attempt / "candidate" / "gang.json").unlink()
    assert script((cell, result, attempt)) == ""


def test_what_passed_needs_none(tmp_path: Path) -> None:
    assert reproduction({}, {"verdict": "PASS"}, tmp_path, []) is None


def test_reports_print_it_and_the_starts(tmp_path: Path) -> None:
    cell, judged, attempt = failed(tmp_path)
    told = reproduction(cell, judged, attempt, ["load_path=direct", "name='<b>`x`'"])
    verdict = combine([judged | {"reproduction": told, "starts": 3}, judged | {"cell": "other", "starts": 2}])
    text = markdown(verdict)
    assert "Engine starts: 5 in all. Audits: 8, which took 3.2 s." in text
    assert "```bash\npython -m orchestrator load_path=direct" in text
    assert "\n```python\n# repro.py: stale" in text
    assert text.count("```") % 2 == 0
    page = html(verdict)
    assert "Engine starts: 5 in all. Audits: 8, which took 3.2 s." in page
    assert "Audits, slowest rank: candidate started 0.40 s, candidate updated 0.40 s" in page
    assert "<b>`x`" not in page
    assert 'class="script"># repro.py: stale' in page


def test_reports_say_what_is_left_out(tmp_path: Path) -> None:
    judged = World().judge(tmp_path)
    judged["coverage"] |= {
        "missing": ["target:a"], "excused": 2, "excused_bytes": 3000,
        "reasons": {"target:a": "sliced twice", "target:rotary": "computed"},
    }  # fmt: skip
    for text in (markdown(combine([judged])), html(combine([judged]))):
        plain = text.replace("<code>", "`").replace("</code>", "`")
        assert "not covered: `target:a` (sliced twice)" in plain
        assert "not owed by the engine: 2 tensors of 3,000 bytes, `target:rotary`: computed" in plain
