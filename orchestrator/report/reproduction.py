"""Says how to see a failure again: the command that runs this cell alone, and for vLLM a script without this project.

The script uses public entry points of vLLM only, so that it can be sent to whoever maintains the engine.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from orchestrator.judge.attempt import timeline
from orchestrator.judge.sentences import rank_list
from orchestrator.report.script_parts import TRANSFER, Json, arguments, environment, weights
from orchestrator.report.start_script import start_script

FAILED = ("FAIL", "ERROR")
#: Codes of findings whose evidence a script can show: bytes, addresses or answers of a running engine.
_SHOWN = frozenset(
    {
        "found_elsewhere", "wrong_layout", "uninitialised", "stale", "moved", "alias_broken", "dtype", "layout",
        "missing", "extra", "checkpoint_mismatch", "wrong_derived", "differs", "not_changed", "stale_cache",
        "generation_differs",
    }
)  # fmt: skip
_STARTS = {"safetensors": "safetensors", "dummy": "dummy"}
_UPDATES = ("reload", "iterator", "transfer")
#: What attributes lead to, where the last one may be a layer's function whose kernel has packed the weight.
_SEEN = re.compile(r"(target|draft):(\w+(?:\.\w+)*)(\.<closure handler>\.<packed>)?")
_MODEL = {"target": "get_model", "draft": "get_draft_model"}

_SCRIPT = Template("""\
# repro.py: $found
# `python repro.py`, where vLLM is installed, updates a running engine and compares it with a fresh start.
$weights
import glob, hashlib, os
os.environ.update($environment)
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
${transfer}NAMES = $names
class Probe:
    def repro_probe(self, names):
        return {name: self.repro_read(name) for name in names}
    def repro_read(self, name):
        value = self.$model()
        for step in name.split("."):
            value = getattr(value, step, None)
        if value is None:
            return "absent", ""
${packed}        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(data.numpy()).hexdigest()[:16], hex(value.data_ptr())
    def repro_iterate(self, folder):
        files = sorted(glob.glob(folder + "/*.safetensors"))
        self.reload_weights(weights_iterator=(item for file in files for item in load_file(file).items()))
def state(folder, load_format, updates):
    llm = LLM(folder, load_format=load_format, worker_extension_cls="repro.Probe", **$arguments)
    started = llm.collective_rpc("repro_probe", args=(NAMES,))
    for method, arguments in updates:
        llm.collective_rpc(method, kwargs=arguments)
    llm.reset_prefix_cache()
    held = llm.collective_rpc("repro_probe", args=(NAMES,))
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], greedy, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return started, held, str(answer.outputs[0].logprobs)
if __name__ == "__main__":
    started, held, answer = state($start, $load_format, $updates)
    _, fresh, expected = state($fresh, "safetensors", [])
    for rank, name in [(rank, name) for rank in range(len(held)) for name in NAMES]:
        before, now, owed = (one[rank][name] for one in (started, held, fresh))
        same = "same" if now[0] == owed[0] else "DIFFERS"
        moved = "moved" if before[1] != now[1] else "not moved"
        print(f"rank {rank} {name}: before {before[0]} observed {now[0]} expected {owed[0]}: {same}, {moved}")
    print("greedy tokens and log-probabilities:", "same" if answer == expected else "DIFFER")
""")

_PACKED = """\
        # The kernel of a linear layer has packed its weight: times the identity it tells which one.
        kernel = inspect.getclosurevars(value).nonlocals.get("handler") if inspect.isfunction(value) else None
        if kernel is not None:
            identity = torch.eye(kernel.k, dtype=next(self.get_model().parameters()).dtype)
            weight = value(identity, None, None).t().contiguous().view(torch.uint8)
            return hashlib.sha256(weight.numpy()).hexdigest()[:16], "in its kernel"
"""


def reproduction(
    cell: Json, result: Json, attempt: Path, words: Sequence[str] | None
) -> dict[str, str] | None:
    """What verdict.json holds of a failed cell: {"command", "script", "note"}, each "" where there is none; None of
    a cell that did not fail. words: of the command line that plans the cell alone."""
    if result["verdict"] not in FAILED:
        return None
    command = "" if words is None else _command(words)
    if cell["backend"]["engine"] != "vllm":
        return {"command": command, "script": "", "note": ""}
    if result["verdict"] == "ERROR":
        return {"command": command, "script": start_script(cell, result, attempt), "note": ""}
    shown = (finding for finding in result["findings"] if finding["code"] in _SHOWN)
    finding = next(shown, None)
    if finding is None:
        return {
            "command": command,
            "script": "",
            "note": "No finding is about what a running engine holds or says.",
        }
    why_not = _why_no_script(cell, finding)
    dirs = _checkpoint_dirs(attempt / finding["arm"] / "gang.json")
    if not why_not and dirs is None:
        why_not = "The folders of the checkpoints are not recorded any more."
    script = "" if why_not or dirs is None else _script(cell, finding, dirs)
    return {"command": command, "script": script, "note": why_not}


def _command(words: Sequence[str]) -> str:
    """Exact repetitions are left out; of two values of a key the last one counts, as on any command line."""
    kept = dict.fromkeys(word for word in words if not word.startswith("rerun="))
    return shlex.join(["python", "-m", "orchestrator", *kept, "rerun=true"])


def _checkpoint_dirs(gang_file: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads(gang_file.read_text())["checkpoint_dirs"])
    except (OSError, ValueError, KeyError):
        return None


def _steps(cell: Json, finding: Json) -> list[Json]:
    """The loads before the observation in which the failure was found, or all of them."""
    steps: list[Json] = cell["load_path"]["steps"]
    ends = [
        i
        for i, step in enumerate(steps)
        if step["do"] == "observe" and step["name"] == finding["observation"]
    ]
    return [step for step in steps[: ends[0] if ends else len(steps)] if step["do"] != "observe"]


def _why_no_script(cell: Json, finding: Json) -> str:
    if any(checkpoint.get("draft") for checkpoint in cell["checkpoints"].values()):
        return "The script has no draft model; the command runs it."
    for step in _steps(cell, finding):
        known = _STARTS if step["do"] == "start" else _UPDATES if step["do"] == "update" else ()
        if step["do"] in ("sleep", "wake"):
            return f"The script has no step {step['do']}; the command runs it."
        if step["via"] not in known:
            return f"The script cannot {step['do']} via {step['via']}, which takes more than vLLM; the command can."
    if _against_base(cell, finding):
        return "Two versions of the engine are compared, which no single script can start; the command does."
    return ""


def _against_base(cell: Json, finding: Json) -> bool:
    checks = [check for check in cell["load_path"]["checks"] if check["name"] in finding["checks"]]
    return bool(checks) and all(check["right"].startswith("base/") for check in checks)


def _script(cell: Json, finding: Json, dirs: Mapping[str, str]) -> str:
    steps = _steps(cell, finding)
    moment = timeline(cell["load_path"]["steps"]).get(finding["observation"])
    matches = [match for path in (finding["path"], *finding["paths"]) if (match := _SEEN.fullmatch(path))]
    root = matches[0][1] if matches else "target"
    names = list(dict.fromkeys(match[2] for match in matches if match[1] == root))
    packed = any(match[3] for match in matches if match[1] == root)
    fingerprints = " ".join(finding["detail"].partition(" E.g. ")[2].split())
    where = f"{finding['code']}, {rank_list(finding['ranks'])}, {finding['path'] or 'generations'}"
    loaded = dict.fromkeys(step["checkpoint"] for step in steps)
    transfers = any(step["via"] == "transfer" for step in steps)
    told = arguments(cell) | ({"weight_transfer_config": {"backend": "repro"}} if transfers else {})
    return _SCRIPT.substitute(
        found=f"{where}{'; ' + fingerprints if fingerprints else ''}",
        weights="\n".join(weights(cell, list(loaded), dirs)),
        environment=repr(environment(cell)),
        names=repr(names),
        model=_MODEL[root],
        arguments=repr(told),
        transfer=("import inspect\n" if packed else "") + (TRANSFER if transfers else ""),
        packed=_PACKED if packed else "",
        start=repr(dirs[steps[0]["checkpoint"]]),
        load_format=repr(_STARTS[steps[0]["via"]]),
        updates=repr([call for step in steps[1:] for call in _calls(step["via"], dirs[step["checkpoint"]])]),
        fresh=repr(dirs[moment.checkpoint if moment else steps[-1]["checkpoint"]]),
    )


def _calls(via: str, folder: str) -> list[tuple[str, dict[str, Any]]]:
    if via == "iterator":
        return [("repro_iterate", {"folder": folder})]
    if via == "transfer":
        return [
            ("init_weight_transfer_engine", {"init_info": {}}),
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"folder": folder}}),
            ("finish_weight_update", {}),
        ]
    # After a dummy start the loader would make random weights again.
    from_files = {"overrides": {"load_config": {"load_format": "auto"}}}
    return [("update_config", from_files), ("reload_weights", {"weights_path": folder})]
