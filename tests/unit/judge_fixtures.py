"""Builds the records of a whole attempt in memory, correct or with the signature of a failure, and writes them.

The model is small and has every feature the judge knows: tensor-parallel and replicated weights, experts with
scales and padding, derived, constant, handle and runtime tensors, tied names, a draft root. A fingerprint is
the MD5 of a text that says what the bytes are, so that "the same bytes" is the same text.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

STEPS = [
    {"do": "start", "checkpoint": "old", "via": "safetensors", "name": "", "collect": []},
    {"do": "observe", "name": "started", "checkpoint": "", "via": "", "collect": ["tensors", "generations"]},
    {"do": "update", "checkpoint": "new", "via": "layerwise", "name": "", "collect": []},
    {
        "do": "observe", "name": "updated", "checkpoint": "", "via": "",
        "collect": ["tensors", "generations", "gsm8k", "throughput", "memory"],
    },
    {"do": "update", "checkpoint": "new", "via": "layerwise", "name": "", "collect": []},
    {"do": "observe", "name": "repeated", "checkpoint": "", "via": "", "collect": ["tensors", "generations"]},
    {"do": "update", "checkpoint": "old", "via": "layerwise", "name": "", "collect": []},
    {"do": "observe", "name": "back", "checkpoint": "", "via": "", "collect": ["tensors", "generations"]},
]  # fmt: skip

CHECKS = [
    ("updated_equals_fresh", "equal", "updated", "fresh.new"),
    ("repeat_changes_nothing", "equal", "repeated", "updated"),
    ("back_equals_fresh", "equal", "back", "fresh.old"),
    ("every_weight_changed", "all_changed", "started", "updated"),
    ("updated_is_checkpoint", "checkpoint", "updated", ""),
    ("back_is_checkpoint", "checkpoint", "back", ""),
    ("updated_answers_as_fresh", "same_generations", "updated", "fresh.new"),
    ("nothing_moved", "stable_storage", "", ""),
    ("replicas_agree", "replicas", "", ""),
    ("lifecycle_complete", "lifecycle", "", ""),
    ("coverage", "coverage", "", ""),
    ("accuracy", "gsm8k", "updated", ""),
    ("speed", "throughput", "updated", ""),
]
INFORMATIVE = {"gsm8k", "throughput"}

NORM = "target:model.layers.1.input_layernorm.weight"
O_PROJ = "target:model.layers.1.self_attn.o_proj.weight"
W_UV = "target:model.layers.1.self_attn.w_uv"
EXPERTS = "target:model.layers.1.mlp.experts.w13_weight"
SCALES = "target:model.layers.1.mlp.experts.w13_scale"
ROPE = "target:model.rope.cos_sin_cache"
KV = "target:model.layers.1.self_attn.kv_cache"
HANDLE = "target:model.layers.1.self_attn.kernel.<cell0>.handler"
EMBED = "target:model.embed_tokens.weight"
LM_HEAD = "target:lm_head.weight"
DRAFT = "draft:model.mtp.0.eh_proj.weight"
QUESTIONS = 8


def fp(*what: object) -> str:
    return hashlib.md5("|".join(map(str, what)).encode()).hexdigest()


def make_cell(tp: int = 2, dp: int = 2, ep: int = 4, real: bool = False, base: bool = False) -> Record:
    checkpoint = {"path": "/models/k3" if real else None, "seed": 0}
    arm = {"path": None, "commit": None, "faults": []}
    return {
        "format": 1,
        "experiment": "unit",
        "labels": {"model": "kimi_k3_tiny", "layout": f"TP{tp} DP{dp} EP{ep}", "load path": "layerwise"},
        "model": {"name": "kimi_k3_tiny", "size": "full" if real else "proxy"},
        "parallelism": {"tp": tp, "dp": dp, "ep": ep, "nodes": 1, "gpus_per_node": tp * dp},
        "backend": {"engine": "native"},
        "load_path": {
            "name": "layerwise",
            "steps": [dict(step) for step in STEPS],
            "checks": [
                {"name": n, "rule": r, "left": left, "right": right, "required": r not in INFORMATIVE or real}
                for n, r, left, right in CHECKS
            ],
        },
        "checkpoints": {"old": checkpoint, "new": checkpoint},
        "code": {"candidate": arm, "base": arm if base else None},
        "collect": {"gsm8k": {"path": "/questions", "limit": QUESTIONS}},
        "policy": {"coverage": 0.999, "step_timeout_s": 60},
    }  # fmt: skip


class Audit:
    """Records of one rank's tensors, to be changed before they are written."""

    def __init__(self, world: "World", rank: int, observation: str, checkpoint: str, pid: int) -> None:
        self.rank, self.observation, self.checkpoint = rank, observation, checkpoint
        self.tensors: dict[str, Record] = {}
        self.parts: dict[str, dict[str, Record]] = {}
        self.unreachable: list[Record] = []
        self.header = {
            "kind": "header",
            "rank": rank,
            "observation": observation,
            "pid": pid,
            "root_count": 2,
        }
        self.world = world
        self._address = 1_000_000 + 10_000_000 * pid
        self._fill()
        self.sources = [
            {"kind": "source", "root": root, "bytes_expected": size, "bytes_audited": size, "missing": []}
            for root, size in (("target", 9000), ("draft", 1000))
        ]

    def _fill(self) -> None:
        tp_rank = self.rank % self.world.tp
        for layer in range(self.world.layers):
            prefix = f"target:model.layers.{layer}"
            self.weight(f"{prefix}.input_layernorm.weight", {f"layers.{layer}.input_layernorm.weight": 0})
            self.weight(
                f"{prefix}.self_attn.o_proj.weight", {f"layers.{layer}.self_attn.o_proj.weight": tp_rank}
            )
            w_uv = f"{prefix}.self_attn.w_uv"
            self.tensor(w_uv, "derived", fp("w_uv", layer, self.checkpoint, tp_rank))
            self.tensor(f"{prefix}.self_attn.kernel.<cell0>.handler", "handle", fp("pointer", self._address))
            self.tensor(f"{prefix}.self_attn.kv_cache", "runtime", None)
            self._experts(layer, f"{prefix}.mlp.experts")
        self.tensor(ROPE, "constant", fp("rope"))
        self.weight(EMBED, {"embed_tokens.weight": 0})
        self.tensors[EMBED]["aliases"] = [LM_HEAD]
        self.weight(DRAFT, {"mtp.0.eh_proj.weight": 0})

    def _experts(self, layer: int, prefix: str) -> None:
        local = self.world.experts // self.world.ep
        first = self.rank % self.world.ep * local
        names = [(e, w) for e in range(first, first + local) for w in ("w1", "w3")]
        for suffix, padding_value in (("weight", 0), ("scale", 127)):
            path = f"{prefix}.w13_{suffix}"
            sources = {f"layers.{layer}.mlp.experts.{e}.{w}.weight_{suffix}": 0 for e, w in names}
            self.weight(path, sources)
            for part in self.parts[path].values():
                part["cast"] = fp("cast", part["expected"]) if suffix == "scale" else None
            padding = {
                "kind": "part", "tensor": path, "part": "padding", "fp": fp("padding", padding_value),
                "expected": None, "cast": None, "source": None, "region": [], "nbytes": 64,
                "const": padding_value, "padding_value": padding_value,
            }  # fmt: skip
            self.parts[path]["padding"] = padding
            self.tensors[path] |= {"dtype": "uint8", "shape": [local, 4, 8], "stride": [32, 8, 1]}
            self.tensors[path]["slices"] = [fp("slice", path, e, self.checkpoint) for e in range(local)]
            self.refresh(path)

    def tensor(self, path: str, class_: str, print_: str | None, nbytes: int = 256) -> Record:
        self._address += 4096
        self.tensors[path] = {
            "kind": "tensor", "path": path, "root": path.split(":")[0], "origin": "parameter", "class": class_,
            "reason": "a rule", "dtype": "bfloat16", "shape": [8, 16], "stride": [16, 1], "nbytes": nbytes,
            "storage": self._address, "offset": 0, "fp": print_, "slices": [], "nan": False, "const": None,
            "aliases": [],
        }  # fmt: skip
        return self.tensors[path]

    def weight(self, path: str, sources: dict[str, int]) -> None:
        """A weight made of checkpoint slices: source name -> shard number."""
        self.tensor(path, "weight", None)
        self.parts[path] = {
            name: {
                "kind": "part", "tensor": path, "part": name, "fp": fp(self.checkpoint, name, shard),
                "expected": fp(self.checkpoint, name, shard), "cast": None, "source": name,
                "region": [[shard * 8, 8]], "nbytes": 256 // len(sources), "const": None, "padding_value": None,
            }
            for name, shard in sources.items()
        }  # fmt: skip
        self.refresh(path)

    def refresh(self, path: str) -> None:
        """The whole's fingerprint follows from its parts'."""
        self.tensors[path]["fp"] = fp(*(part["fp"] for part in self.parts[path].values()))

    def part(self, path: str, ending: str) -> Record:
        return next(part for name, part in self.parts[path].items() if name.endswith(ending))

    def copy_from(self, other: "Audit", path: str) -> None:
        """The tensor's bytes become those that it has in another audit."""
        for key in ("fp", "slices", "const", "nan"):
            self.tensors[path][key] = other.tensors[path][key]
        for name, part in self.parts.get(path, {}).items():
            part["fp"], part["const"] = other.parts[path][name]["fp"], other.parts[path][name]["const"]

    def remove(self, path: str) -> None:
        del self.tensors[path]
        self.parts.pop(path, None)

    def records(self) -> Iterator[Record]:
        yield self.header
        yield from self.tensors.values()
        for parts in self.parts.values():
            yield from parts.values()
        yield from self.sources
        yield from self.unreachable
        yield {"kind": "end"}


class Gang:
    """Everything that one gang writes."""

    def __init__(self, world: "World", name: str, checkpoints: dict[str, str], first_pid: int) -> None:
        self.audits = {
            observation: [
                Audit(world, rank, observation, checkpoint, first_pid + rank) for rank in range(world.ranks)
            ]
            for observation, checkpoint in checkpoints.items()
        }
        self.generations = {o: _generations(checkpoint) for o, checkpoint in checkpoints.items()}
        self.gsm8k: dict[str, list[Record]] = {"updated": _gsm8k()}
        self.rates: dict[str, float] = {"updated": 1000.0}
        self.events = {rank: list(_events(world)) for rank in range(world.ranks)}
        self.name, self.world = name, world

    def each(self, *observations: str) -> Iterator[Audit]:
        for observation in observations:
            yield from self.audits[observation]

    def write(self, folder: Path) -> None:
        for observation, audits in self.audits.items():
            for audit in audits:
                write(folder / observation / f"tensors-{audit.rank:05d}.jsonl", audit.records())
                memory = {"kind": "memory", "rank": audit.rank, "rss": 10**9, "peak_rss": 2 * 10**9}
                write(folder / observation / f"memory-{audit.rank:05d}.jsonl", [memory, {"kind": "end"}])
        for stem, by_observation in (("generations", self.generations), ("gsm8k", self.gsm8k)):
            for observation, records in by_observation.items():
                write(folder / observation / f"{stem}.jsonl", [*records, {"kind": "end"}])
        for observation, rate in self.rates.items():
            run = {"kind": "run", "requests": 4, "tokens_per_s": rate, "kv_capacity_tokens": 4096}
            write(folder / observation / "throughput.jsonl", [run, {"kind": "end"}])
        for rank, events in self.events.items():
            write(folder / f"lifecycle-{rank:05d}.jsonl", events)
            write(folder / f"progress-{rank:05d}.jsonl", [*_progress(self.world), {"kind": "end"}])
            (folder / f"rank-{rank:05d}.log").write_text(f"log of rank {rank}\n")


class World:
    """A cell, its attempt and its references, all correct until a test changes something."""

    def __init__(self, tp: int = 2, dp: int = 2, ep: int = 4, real: bool = False, base: bool = False) -> None:
        self.tp, self.ep, self.ranks, self.layers, self.experts = tp, ep, tp * dp, 2, max(8, 2 * ep)
        self.cell = make_cell(tp, dp, ep, real, base)
        seen = {"started": "old", "updated": "new", "repeated": "new", "back": "old"}
        self.candidate = Gang(self, "candidate", seen, 100)
        self.base = Gang(self, "base", seen, 200) if base else None
        self.questions = QUESTIONS
        self.fresh = {
            c: Gang(self, f"fresh.{c}", {"fresh": c}, 300 + 20 * i) for i, c in enumerate(("old", "new"))
        }
        for gang in self.fresh.values():
            gang.gsm8k, gang.rates = {}, {}

    def write(self, root: Path) -> tuple[Path, dict[str, Path]]:
        """Attempt folder and references."""
        attempt = root / "cells" / "c0ffee" / "attempt-001"
        solutions = [{"id": f"gsm8k-{i:05d}", "answer": f"It is.\n#### {i}"} for i in range(self.questions)]
        write(attempt / "prompts" / "gsm8k.jsonl", solutions)
        self.candidate.write(attempt / "candidate")
        references = {}
        for checkpoint, gang in self.fresh.items():
            references[f"fresh.{checkpoint}"] = root / "references" / f"key-{checkpoint}"
            gang.write(references[f"fresh.{checkpoint}"])
        if self.base:
            self.base.write(attempt / "base")
            references |= {f"base/{name}": path for name, path in references.items()}
        return attempt, references

    def judge(self, root: Path, damage: Callable[[Path], None] = lambda attempt: None) -> Record:
        """Writes all records, lets `damage` change the files, and judges."""
        from orchestrator.judge.policy import judge_attempt

        attempt, references = self.write(root)
        damage(attempt)
        return judge_attempt(self.cell, attempt, references)


def write(path: Path, records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def check(result: Record, name: str) -> Record:
    return next(c for c in result["checks"] if c["name"] == name)


def codes(result: Record) -> list[str]:
    return [finding["code"] for finding in result["findings"]]


def primary(world: World, tmp_path: Path, code: str) -> Record:
    """Judges, and returns the first finding, which must have `code` in a cell that FAILs."""
    result = world.judge(tmp_path)
    assert result["verdict"] == "FAIL"
    assert codes(result)[0] == code, codes(result)
    finding: Record = result["findings"][0]
    return finding


def _generations(checkpoint: str) -> list[Record]:
    seed = 7 if checkpoint == "new" else 3
    return [
        {
            "kind": "generation", "id": f"p{i}", "prompt_tokens": 4, "token_ids": [seed + i, 2, 5],
            "top_logprobs": [[[seed + i, -0.25 * i], [9, -1.5]]] * 3, "draft_token_ids": [-1, 2, 5],
            "finish_reason": "length", "first_token_s": 0.1 + i, "total_s": 0.2, "text": "abc",
        }
        for i in range(4)
    ]  # fmt: skip


def _gsm8k() -> list[Record]:
    return [
        {
            "kind": "generation",
            "id": f"gsm8k-{i:05d}",
            "token_ids": [i, 1],
            "top_logprobs": [],
            "text": "#### -1",
        }
        for i in range(QUESTIONS)
    ]


def _events(world: World) -> Iterator[Record]:
    for load, via in enumerate(("safetensors", "layerwise", "layerwise", "layerwise")):
        for root, modules in (
            ("target", ["model.layers.0.mlp", "model.layers.1.mlp"]),
            ("draft", ["model.mtp.0"]),
        ):
            yield event(root, load, "load_start", via)
            for module in modules:
                yield event(root, load, "fill_padding", via, module)
                yield event(root, load, "post_process", via, module)
            yield event(root, load, "finalize", via)
            yield event(root, load, "load_end", via)


def event(root: str, load: int, name: str, via: str, module: str = "", phase: str = "load") -> Record:
    return {
        "kind": "event", "root": root, "load": load, "event": name, "via": via, "phase": phase, "module": module,
    }  # fmt: skip


def _progress(world: World) -> Iterator[Record]:
    for index, step in enumerate(world.cell["load_path"]["steps"]):
        record = {
            "kind": "step",
            "index": index,
            "do": step["do"],
            "name": step["name"] or step["checkpoint"],
        }
        yield {**record, "state": "start", "time": 1000.0 + index}
        stats = {"read_s": 0.2, "install_s": 0.3, "post_process_s": 0.1, "finish_s": 0.05, "nbytes": 10_000}
        yield {
            **record, "state": "end", "time": 1000.9 + index, "seconds": 0.9,
            "stats": stats if step["do"] != "observe" else None,
            **({"collectors": dict.fromkeys(step["collect"], 0.4)} if step["do"] == "observe" else {}),
        }  # fmt: skip
