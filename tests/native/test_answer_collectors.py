"""Generations, throughput and memory: what is written, and what an engine that says nothing gets."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectors.generations import gather_generations, read_prompts
from collectors.memory import gather_memory
from collectors.throughput import gather_throughput
from workloads.engines.protocol import Generation, Prompt
from workloads.engines.tokenizer import make_tokenizer
from workloads.spec import Sampling


class Echo:
    """Answers every prompt with its first tokens; `silent` prompts get none, `broken` ones NaN."""

    def __init__(self, silent: str = "", broken: str = "") -> None:
        self.tokenizer = make_tokenizer("byte", 1024, Path())
        self.silent, self.broken = silent, broken

    def generate(self, prompts: Sequence[Prompt], params: Sampling) -> list[Generation]:
        return [self._answer(prompt, params) for prompt in prompts]

    def _answer(self, prompt: Prompt, params: Sampling) -> Generation:
        tokens = [] if prompt.id == self.silent else list(prompt.token_ids[: params.max_new_tokens])
        value = float("nan") if prompt.id == self.broken else -0.5
        return Generation(prompt.id, len(prompt.token_ids), tokens, [[(t, value)] for t in tokens])

    def roots(self) -> Mapping[str, nn.Module]:
        return {"target": nn.Linear(4, 4, bias=False)}

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        return {"kv": torch.zeros(10, dtype=torch.float32)}

    def kv_capacity_tokens(self) -> int:
        return 77


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts(tmp_path: Path, engine: Any) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"p-{i}", "text": text}) + "\n" for i, text in enumerate("xyz"))
    )
    return read_prompts(path, engine)


def test_rank_zero_records_every_answer_and_the_others_nothing(tmp_path: Path) -> None:
    engine: Any = Echo()
    asked = prompts(tmp_path, engine)
    for rank in (0, 1):
        gather_generations(engine, asked, Sampling(max_new_tokens=2), tmp_path / f"{rank}.jsonl", rank)
    assert not (tmp_path / "1.jsonl").exists()
    *answers, summary, end = records(tmp_path / "0.jsonl")
    assert [answer["id"] for answer in answers] == ["p-0", "p-1", "p-2"]
    assert answers[0]["text"] == engine.tokenizer.decode(answers[0]["token_ids"])
    assert answers[0]["top_logprobs"][0][0][1] == -0.5
    assert summary["prompts"] == 3
    assert end == {"kind": "end"}


def test_a_probability_that_is_no_number_is_null(tmp_path: Path) -> None:
    engine: Any = Echo(broken="p-1")
    gather_generations(engine, prompts(tmp_path, engine), Sampling(), tmp_path / "out.jsonl", 0)
    answers = records(tmp_path / "out.jsonl")
    assert answers[1]["top_logprobs"][0][0][1] is None
    assert answers[0]["top_logprobs"][0][0][1] == -0.5


def test_an_engine_that_returns_no_tokens_is_an_error_and_leaves_no_record(tmp_path: Path) -> None:
    engine: Any = Echo(silent="p-2")
    with pytest.raises(RuntimeError, match=r"1 of 3 prompts got no tokens, first 'p-2'"):
        gather_generations(engine, prompts(tmp_path, engine), Sampling(), tmp_path / "out.jsonl", 0)
    assert not (tmp_path / "out.jsonl").exists()


def test_throughput_counts_tokens_in_and_out(tmp_path: Path) -> None:
    engine: Any = Echo()
    shape = {"prompt_tokens": 6, "new_tokens": 2, "requests": 3}
    gather_throughput(engine, shape, tmp_path / "out.jsonl", 0)
    *requests, run, _ = records(tmp_path / "out.jsonl")
    assert [request["prompt_tokens"] for request in requests] == [6, 6, 6]
    assert run["new_tokens"] == 6
    assert run["tokens_per_s"] == pytest.approx(24 / run["seconds"])
    assert run["kv_capacity_tokens"] == 77


def test_memory_tells_weights_and_runtime_apart(tmp_path: Path) -> None:
    engine: Any = Echo()
    gather_memory(engine, tmp_path / "out.jsonl", 3)
    memory = records(tmp_path / "out.jsonl")[0]
    assert memory["rank"] == 3
    assert memory["weights_bytes"] == {"target": 64}
    assert memory["runtime_bytes"] == 40
    assert memory["peak_rss"] >= memory["rss"] > 0
