"""How fast a whole comparison is judged, beside merely parsing its files; prints one JSON line. Seconds are
processor time, so that a busy machine does not matter.

Full size: `python -m tests.benchmarks.test_judge_speed 16 20000`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from orchestrator.judge.policy import judge_attempt
from orchestrator.judge.records import collector_paused

STEPS = [
    {"do": "start", "checkpoint": "new", "via": "safetensors", "name": "", "collect": []},
    {"do": "observe", "checkpoint": "", "via": "", "name": "started", "collect": ["tensors"]},
]
RULES = [("equal", "started", "fresh.new"), ("replicas", "", ""), ("coverage", "", "")]


def cell(ranks: int) -> dict[str, Any]:
    arm = {"path": None, "commit": None, "faults": []}
    return {
        "labels": {},
        "model": {"size": "full"},
        "backend": {"engine": "native"},
        "parallelism": {"tp": 4, "dp": ranks // 4, "ep": ranks, "nodes": ranks // 4, "gpus_per_node": 4},
        "load_path": {
            "steps": STEPS,
            "checks": [{"name": r, "rule": r, "left": a, "right": b, "required": True} for r, a, b in RULES],
        },
        "checkpoints": {"new": {"path": "/models/k3"}},
        "code": {"candidate": arm, "base": None},
        "policy": {"coverage": 0.999},
    }


def tensor_lines(rank: int, tensors: int, address: int, noise: str) -> str:
    """`noise` changes every 1000th tensor's fingerprint."""
    lines = []
    for i in range(tensors):
        said = f"{rank % 4} {i} {noise if i % 1000 == 999 else ''}"
        record = {
            "kind": "tensor", "path": f"target:model.layers.{i // 200}.self_attn.module{i % 200}.weight",
            "root": "target", "origin": "parameter", "class": "weight", "reason": "a registered parameter",
            "dtype": "bfloat16", "shape": [128, 256], "stride": [256, 1], "nbytes": 65536,
            "storage": address + i * 65536, "offset": 0, "fp": hashlib.md5(said.encode()).hexdigest(),
            "slices": [], "nan": False, "const": None, "aliases": [],
        }  # fmt: skip
        lines.append(json.dumps(record, separators=(",", ":")))
    return "\n".join(lines)


def write_rank(folder: Path, observation: str, rank: int, body: str) -> None:
    (folder / observation).mkdir(parents=True, exist_ok=True)
    header = {"kind": "header", "rank": rank, "observation": observation, "pid": 1, "root_count": 1}
    source = {"kind": "source", "root": "target", "bytes_expected": 9, "bytes_audited": 9, "missing": []}
    text = "\n".join([json.dumps(header), body, json.dumps(source), '{"kind":"end"}', ""])
    (folder / observation / f"tensors-{rank:05d}.jsonl").write_text(text)


def write_attempt(root: Path, ranks: int, tensors: int, noise: str) -> tuple[Path, dict[str, Path]]:
    attempt, fresh = root / "cells/id/attempt-001", root / "references/key"
    for rank in range(ranks):
        write_rank(attempt / "candidate", "started", rank, tensor_lines(rank, tensors, 10**14, noise))
        write_rank(fresh, "fresh", rank, tensor_lines(rank, tensors, 2 * 10**14, ""))
        steps = [
            {"kind": "step", "index": i, "do": s["do"], "name": s["name"] or s["checkpoint"], "state": "end",
             "time": 1.0, "seconds": 1.0, "stats": None}
            for i, s in enumerate(STEPS)
        ]  # fmt: skip
        lines = "".join(json.dumps(record) + "\n" for record in [*steps, {"kind": "end"}])
        (attempt / "candidate" / f"progress-{rank:05d}.jsonl").write_text(lines)
        (attempt / "candidate" / f"lifecycle-{rank:05d}.jsonl").write_text("")
    return attempt, {"fresh.new": fresh}


def parse(root: Path, loads: Callable[[bytes], Any]) -> int:
    count = 0
    with collector_paused():
        for path in sorted(root.rglob("tensors-*.jsonl")):
            count += len([loads(line) for line in path.read_bytes().splitlines()])
    return count


def measure(root: Path, ranks: int, tensors: int, noise: str) -> dict[str, Any]:
    attempt, references = write_attempt(root, ranks, tensors, noise)
    nbytes = sum(path.stat().st_size for path in root.rglob("tensors-*.jsonl"))
    seconds: dict[str, float] = {}
    for name, action in (
        ("orjson", lambda: parse(root, orjson.loads)),
        ("json", lambda: parse(root, json.loads)),
        ("judge", lambda: judge_attempt(cell(ranks), attempt, references)),
    ):
        best = []
        for _ in range(2 if name != "json" else 1):
            start = time.process_time()
            outcome = action()
            best.append(time.process_time() - start)
        seconds[name] = min(best)
    return {
        "ranks": ranks,
        "tensors": tensors,
        "lines": 2 * ranks * tensors,
        "mb": round(nbytes / 1e6),
        "judge_s": round(seconds["judge"], 3),
        "orjson_parse_s": round(seconds["orjson"], 3),
        "json_parse_s": round(seconds["json"], 3),
        "judge_over_orjson": round(seconds["judge"] / seconds["orjson"], 2),
        "verdict": outcome["verdict"],
        "findings": [f["code"] for f in outcome["findings"]],
    }


def test_judging_costs_little_more_than_parsing(tmp_path: Path) -> None:
    equal = measure(tmp_path / "equal", 4, 4000, "")
    other = measure(tmp_path / "other", 4, 4000, "noise")
    print(json.dumps({"equal": equal, "differs": other}))
    assert (equal["verdict"], equal["findings"]) == ("PASS", [])
    assert (other["verdict"], other["findings"]) == ("FAIL", ["uninitialised"])
    assert equal["judge_over_orjson"] < 3.5
    assert other["judge_over_orjson"] < 4.5
    assert equal["judge_s"] < equal["json_parse_s"]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for change in ("", "noise"):
            sizes = (int(sys.argv[1]), int(sys.argv[2]))
            print(json.dumps(measure(Path(folder) / f"x{change}", *sizes, change)), flush=True)
