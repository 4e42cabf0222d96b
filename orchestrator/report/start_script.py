"""A script, without this project, that starts vLLM as a cell did whose engine died before its first update."""

import json
from collections.abc import Iterator
from pathlib import Path
from string import Template

from collectors.records import rank_file
from orchestrator.report.script_parts import Json, arguments, environment, weights
from workloads.loading.paths import SAVED

DIED = (
    "rank_failed",
    "rank_killed",
    "out_of_memory",
)  # types of failures that an engine's own code can bring about

_SCRIPT = Template("""\
# repro.py: $found
# `python repro.py`, where vLLM is installed, starts the engine in the same way.
$weights
import os
os.environ.update($environment)
from vllm import LLM, SamplingParams
FOLDER = $folder
ARGUMENTS = $arguments
$save
if __name__ == "__main__":
    $begin
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], greedy, use_tqdm=False)
    print("started, and answers", answer.outputs[0].token_ids)
""")
_SAVE = Template("""\
def save():
    os.makedirs("saved", exist_ok=True)
    llm = LLM(FOLDER, load_format="safetensors", **ARGUMENTS)
$call
    llm.llm_engine.engine_core.shutdown()
""")
_SHARDED = """\
    llm.collective_rpc("save_sharded_state", kwargs={"path": "saved"})
    shutil.copy(FOLDER + "/config.json", "saved")"""
_TENSORIZED = """\
    try:
        llm.collective_rpc("save_tensorized_model", kwargs={"tensorizer_config": TENSORS})
    except Exception as error:  # the tensors are written; then it asks a hub for the rest of a folder
        print(error)"""
_RAW = """\
def save():
    os.makedirs("saved", exist_ok=True)
    files = glob.glob(FOLDER + "/*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for rank in range(ARGUMENTS["tensor_parallel_size"]):
        writer = TensorSerializer(TENSORS["tensorizer_uri"] % ((rank,) if "%" in TENSORS["tensorizer_uri"] else ()))
        writer.write_state_dict(tensors)
        writer.close()
"""


def start_script(cell: Json, result: Json, attempt: Path) -> str:
    """Empty where the engine did not die so, or its gang was never laid out."""
    error = result["error"]
    if error is None or error["type"] not in DIED or _updated(attempt):
        return ""
    try:
        dirs = dict(json.loads((attempt / "candidate" / "gang.json").read_text())["checkpoint_dirs"])
    except (OSError, ValueError, KeyError):
        return ""
    start = cell["load_path"]["steps"][0]
    if cell["checkpoints"][start["checkpoint"]].get("draft"):
        return ""  # the command of this project is the way to start a pair of models
    folder = dirs[start["checkpoint"]]
    return _SCRIPT.substitute(
        found=f"{error['type']}: {' '.join(error['message'].split())[:200]}",
        weights="\n".join(weights(cell, [start["checkpoint"]], dirs)),
        environment=repr(environment(cell)),
        folder=repr(folder),
        arguments=repr(arguments(cell)),
        save="\n".join(_save(start["via"], cell["parallelism"]["tp"])),
        begin="\n    ".join(_begin(start["via"])),
    )


def _updated(attempt: Path) -> bool:
    """Whether the scenario came as far as an update."""
    try:
        lines = rank_file(attempt / "candidate", "progress", 0).read_text().splitlines()
    except OSError:
        return False
    return any('"do":"update"' in line for line in lines)


def _save(via: str, tp: int) -> Iterator[str]:
    """Lines that define how the files of such a start are written."""
    tensors = {"tensorizer_uri": "saved/model.tensors" if tp == 1 else "saved/model-%04d.tensors"}
    match via:
        case "sharded_state":
            yield from ("import shutil", _SAVE.substitute(call=_SHARDED))
        case "tensorizer":
            yield from (f"TENSORS = {tensors!r}", _SAVE.substitute(call=_TENSORIZED))
        case "tensorizer_raw":
            yield from ("import glob", "from safetensors.torch import load_file")
            yield from ("from tensorizer import TensorSerializer", f"TENSORS = {tensors!r}", _RAW)


def _begin(via: str) -> Iterator[str]:
    if via not in SAVED:
        yield f"llm = LLM(FOLDER, load_format={via!r}, **ARGUMENTS)"
        return
    yield "save()"
    if via == "sharded_state":
        yield 'llm = LLM("saved", load_format="sharded_state", **ARGUMENTS)'
    else:
        extra = "model_loader_extra_config=dict(TENSORS)"
        yield f'llm = LLM(FOLDER, load_format="tensorizer", {extra}, **ARGUMENTS)'
