"""The engine around the model: scheduling, tokenizers, refusals, and what it tells the auditor."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from k3_engine import OLD, held, make_spec, prompts, start_engine

from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.engines.scheduler import Limits, Scheduler, planned_passes
from workloads.engines.tokenizer import BOS, EOS, ByteTokenizer, CheckpointTokenizer, make_tokenizer
from workloads.spec import Sampling

# Scheduling ----------------------------------------------------------------------------------------


def passes(lengths: list[int], limits: Limits) -> list[list[tuple[int, int, int]]]:
    """(request, start, length) of every chunk, pass by pass."""
    scheduler = Scheduler(lengths, limits)
    made = []
    while not scheduler.done:
        chunks = scheduler.next_pass()
        made.append([(c.request.index, c.start, c.length) for c in chunks])
        for chunk in chunks:
            scheduler.advance(chunk)
    return made


def test_prompts_that_fit_are_computed_together_and_then_decoded() -> None:
    made = passes([3, 2], Limits(requests=2, batch_tokens=8, new_tokens=3))
    assert made == [[(0, 0, 3), (1, 0, 2)], [(0, 3, 1), (1, 2, 1)], [(0, 4, 1), (1, 3, 1)]]


def test_prompts_are_cut_where_a_pass_is_full_and_decode_goes_first() -> None:
    made = passes([3, 6], Limits(requests=2, batch_tokens=4, new_tokens=2))
    assert made == [[(0, 0, 3), (1, 0, 1)], [(0, 3, 1), (1, 1, 3)], [(1, 4, 2)], [(1, 6, 1)]]


def test_a_finished_request_makes_room() -> None:
    scheduler = Scheduler([1, 1, 1], Limits(requests=2, batch_tokens=4, new_tokens=4))
    first, second = scheduler.next_pass()
    assert scheduler.advance(first, stop=True)
    assert not scheduler.advance(second)
    again = scheduler.next_pass()
    assert [chunk.request.index for chunk in again] == [1, 2]
    assert again[1].request.slot == first.request.slot


def test_every_token_is_computed_once() -> None:
    lengths, limits = [1, 9, 4, 30, 2], Limits(requests=3, batch_tokens=5, new_tokens=4)
    made = passes(lengths, limits)
    for index, length in enumerate(lengths):
        computed = [
            t for chunks in made for i, start, n in chunks if i == index for t in range(start, start + n)
        ]
        assert computed == list(range(length + limits.new_tokens - 1))
    assert all(sum(n for _, _, n in chunks) <= limits.batch_tokens for chunks in made)
    assert planned_passes(lengths, limits) == len(made)
    assert planned_passes([], limits) == 0


@pytest.mark.parametrize("limits", [(5, 4, 1), (0, 4, 1), (2, 4, 0)])
def test_limits_without_room_for_a_token_per_request_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="leave a running request without its token"):
        Limits(*limits)


# Tokenizers ----------------------------------------------------------------------------------------


def test_bytes_survive_the_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a") == [BOS, 97]
    for text in ("", "Janet’s ducks lay 16 eggs\n", "日本"):
        assert tokenizer.decode([*tokenizer.encode(text), EOS]) == text
    assert tokenizer.decode([104, 700, 105]) == "h\ufffdi"


def test_tokenizers_are_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="vocab_size is 200, but the byte tokenizer needs 258"):
        make_tokenizer("byte", 200, tmp_path)
    with pytest.raises(ValueError, match="choose byte or checkpoint"):
        make_tokenizer("words", 1024, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(RuntimeError, match="needs the package `tokenizers`"):
        make_tokenizer("checkpoint", 1024, tmp_path)


class _FakeTokenizers:
    """Stands for the `tokenizers` package, which the test environment need not have."""

    class Tokenizer:
        @classmethod
        def from_file(cls, path: str) -> "_FakeTokenizers.Tokenizer":
            return cls()

        def encode(self, text: str) -> "_FakeTokenizers.Tokenizer":
            self.ids = [len(word) for word in text.split()]
            return self

        def decode(self, ids: list[int]) -> str:
            return " ".join("x" * i for i in ids)


def test_the_tokenizer_of_a_checkpoint_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", _FakeTokenizers)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        CheckpointTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    tokenizer = CheckpointTokenizer(tmp_path)
    assert tokenizer.encode("ab c") == [2, 1]
    assert tokenizer.decode((2, 1)) == "xx x"
    assert tokenizer.eos_ids == {7}


# Refusals ------------------------------------------------------------------------------------------


def test_unserved_specifications_are_refused(k3_checkpoint: Path) -> None:
    spec = make_spec(k3_checkpoint)
    spec.model.architecture = "transformers"
    with pytest.raises(ValueError, match=r"architecture is 'transformers'; the native engine runs .*kimi_k3"):
        NativeEngine(spec, 0)
    spec = make_spec(k3_checkpoint, moe_kernel="cutlass")
    with pytest.raises(ValueError, match=r"backend\.moe_kernel is 'cutlass'"):
        NativeEngine(spec, 0)
    spec = make_spec(k3_checkpoint)
    spec.model.kimi_k3.num_mtp_layers = 2
    with pytest.raises(ValueError, match="num_mtp_layers is 2"):
        NativeEngine(spec, 0)
    spec = make_spec(k3_checkpoint)
    spec.faults = ["gremlins"]
    with pytest.raises(ValueError, match="Unknown fault 'gremlins'"):
        NativeEngine(spec, 0)


def test_steps_out_of_order_are_refused(k3_checkpoint: Path) -> None:
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    with pytest.raises(RuntimeError, match="call start first"):
        engine.update(OLD, "direct")
    with pytest.raises(RuntimeError, match="call start first"):
        engine.generate(prompts(2), Sampling())
    with pytest.raises(ValueError, match="no way to start; choose one of safetensors, dummy"):
        engine.start(OLD, "telepathy")
    engine.start(OLD, "safetensors")
    with pytest.raises(RuntimeError, match="has started already"):
        engine.start(OLD, "safetensors")
    with pytest.raises(ValueError, match="no way to update; choose one of layerwise, direct"):
        engine.update(OLD, "nccl")
    engine.stop()
    assert engine.runtime_tensors() == {}


def test_prompts_that_cannot_be_served_are_refused(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, via="dummy")
    for tokens, why in (
        ((), "is empty"),
        ((1,) * 255, "longer than backend.max_model_len 256"),
        ((1024,), "outside"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.generate([*prompts(2), Prompt("bad", tokens)], Sampling(max_new_tokens=2))


# What the auditor and the collectors ask -----------------------------------------------------------


def test_every_tensor_beside_the_parameters_has_a_rule(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    parameters = {f"{name}:{p}" for name, root in engine.roots().items() for p, _ in root.named_parameters()}
    others = {found.path for found in walk(engine.roots()) if found.root in engine.roots()} - parameters
    used = set()
    for path in others:
        rules = [rule for rule in engine.rules() if fnmatchcase(path, rule.pattern)]
        assert len(rules) == 1, path
        used.add(rules[0].pattern)
        counted = "runtime" if path.endswith(".invalid_ids") else "derived"
        assert rules[0].tensor_class == ("weight" if "_transformed_" in path else counted)
    of_experts = 4 + 1  # two pairs of tensors, and what counts
    assert len(others) == 3 * 2 + 1 * 2 + 3 * of_experts + (
        2 + of_experts
    )  # KDA, MLA, experts of the target; MLA, experts of the draft
    runtime = engine.runtime_tensors()
    assert len(runtime) == 5 * 2
    for path in runtime:
        assert [r.tensor_class for r in engine.rules() if fnmatchcase(path, r.pattern)] == ["runtime"]
    constants = [found.path for found in walk(engine.roots()) if found.root not in engine.roots()]
    assert constants
    for path in constants:
        assert [r.tensor_class for r in engine.rules() if fnmatchcase(path, r.pattern)] == ["constant"], path
    of_dspark = {"*._context_kv_norm_weights", "*.context_kv_proj"}  # a drafter that this proxy lacks
    of_weights = {rule.pattern for rule in engine.rules() if rule.tensor_class in ("weight", "derived")}
    assert used - {"*.experts.invalid_ids"} == of_weights - of_dspark
    assert of_dspark <= of_weights


def test_the_reference_kernel_keeps_its_parameters(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, moe_kernel="reference")
    assert "target:model.layers.1.block_sparse_moe.experts.w13_weight" in held(engine)
    assert not any("_transformed_" in path for path in held(engine))


def test_parts_name_tensors_that_the_walk_finds(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    found = held(engine)
    for root in engine.roots():
        assert {part.tensor for part in engine.parts(root)} <= found.keys()


def test_caches_and_capacity(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint, via="dummy")
    assert engine.kv_capacity_tokens() == 8 * 256
    assert engine.runtime_tensors()["target:caches.3.c"].shape == (8, 256, 64)
    assert engine.runtime_tensors()["target:caches.0.state"].dtype is torch.float64


def test_statistics_of_a_load_cover_both_models(k3_checkpoint: Path) -> None:
    engine = NativeEngine(make_spec(k3_checkpoint), 0)
    stats = engine.start(OLD, "safetensors")
    assert stats.nbytes == sum(loader.stats.nbytes for loader in engine.loaders.values())
    assert engine.loaders.keys() == {"target", "draft"}
    assert min(stats.read_s, stats.install_s, stats.post_process_s, stats.finish_s) > 0


def test_a_model_without_a_drafter_serves(k3_checkpoint: Path) -> None:
    spec = make_spec(k3_checkpoint)
    spec.model.kimi_k3.num_mtp_layers = 0
    engine = NativeEngine(spec, 0)
    engine.start(OLD, "dummy")
    (generation,) = engine.generate(prompts(3), Sampling(max_new_tokens=3))
    assert generation.draft_token_ids == [-1, -1, -1]
    assert engine.roots().keys() == {"target"}
