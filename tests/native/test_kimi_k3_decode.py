"""What a Kimi-K3 generation says depends on what decode reads; drafts, sampling, ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from k3_engine import NEW, OLD, generate, prompts, start_engine

from workloads.engines.native import NativeEngine
from workloads.models.kimi_k3.kda import FusedGatedNorm, FusedShortConvolution
from workloads.models.kimi_k3.mla import KvBProj
from workloads.spec import Sampling

LENGTHS = (1, 5, 70)  # 70 is more than one chunk of KDA
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def engine(k3_checkpoint: Path) -> NativeEngine:
    return start_engine(k3_checkpoint, max_requests=32)


def test_the_first_token_has_no_draft_and_later_ones_do(engine: NativeEngine) -> None:
    (generation,) = engine.generate(prompts(9), Sampling(max_new_tokens=4))
    assert generation.draft_token_ids[0] == -1
    assert all(0 <= token < 1024 for token in generation.draft_token_ids[1:])
    assert generation.first_token_s <= generation.total_s
    assert generation.finish_reason == "length"


def test_a_generation_does_not_depend_on_its_batch(engine: NativeEngine) -> None:
    together = generate(engine, prompts(*LENGTHS))
    for i, prompt in enumerate(prompts(*LENGTHS)):
        assert generate(engine, [prompt]) == together[i : i + 1]


def _conv(module: torch.nn.Module) -> list[torch.Tensor]:
    return [module.decode_conv1d_weight] if isinstance(module, FusedShortConvolution) else []


def _norm(module: torch.nn.Module) -> list[torch.Tensor]:
    return [module.decode_norm_weight] if isinstance(module, FusedGatedNorm) else []


def _keys(module: torch.nn.Module) -> list[torch.Tensor]:
    return [module.absorbed()[0]] if isinstance(module, KvBProj) else []


def _values(module: torch.nn.Module) -> list[torch.Tensor]:
    return [module.absorbed()[1]] if isinstance(module, KvBProj) else []


@pytest.mark.parametrize("derived", [_conv, _norm, _keys, _values], ids=["conv", "norm", "W_UK_T", "W_UV"])
def test_a_stale_derived_tensor_changes_decode_only(
    k3_checkpoint: Path, derived: Callable[[torch.nn.Module], list[torch.Tensor]]
) -> None:
    fresh, stale = start_engine(k3_checkpoint, NEW), start_engine(k3_checkpoint, NEW)
    old = start_engine(k3_checkpoint, OLD)
    replaced = 0
    for source, target in zip(
        old.roots()["target"].modules(), stale.roots()["target"].modules(), strict=True
    ):
        for before, now in zip(derived(source), derived(target), strict=True):
            now.copy_(before)
            replaced += 1
    assert replaced in (1, 3)
    right = fresh.generate(prompts(20), Sampling(max_new_tokens=3))[0]
    wrong = stale.generate(prompts(20), Sampling(max_new_tokens=3))[0]
    assert wrong.top_logprobs[0] == right.top_logprobs[0]
    assert wrong.top_logprobs[1] != right.top_logprobs[1]


def test_experts_that_were_not_finalised_are_refused(k3_checkpoint: Path) -> None:
    engine = start_engine(k3_checkpoint)
    for loader in engine.loaders.values():
        for _, module in loader.root.weight_modules():
            loader.restore_consumed(module)
            for layer in (1, 2):
                if hasattr(module, f"_transformed_l{layer}_weights"):
                    setattr(module, f"_transformed_l{layer}_weights", None)
    with pytest.raises(RuntimeError, match="routed experts are not finalised"):
        generate(engine, prompts(3))


def test_sampling_follows_the_seed_alone(engine: NativeEngine) -> None:
    def sampled(seed: int, *which: int) -> list[list[int]]:
        given = [prompts(*LENGTHS)[i] for i in which]
        drawn = engine.generate(given, Sampling(max_new_tokens=5, temperature=1.5, seed=seed))
        return [generation.token_ids for generation in drawn]

    assert sampled(1, 0, 1, 2) == sampled(1, 0, 1, 2)
    assert sampled(1, 0, 1, 2) != sampled(2, 0, 1, 2)
    assert sampled(1, 1) == sampled(1, 0, 1, 2)[1:2]


def test_generation_stops_at_the_end_token(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    unstopped = engine.generate(prompts(5, 9), Sampling(max_new_tokens=NEW_TOKENS))
    last = unstopped[0].token_ids[2]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({last}))
    stopped = engine.generate(prompts(5, 9), Sampling(max_new_tokens=NEW_TOKENS))
    assert stopped[0].token_ids == unstopped[0].token_ids[:3]
    assert stopped[0].finish_reason == "stop"
    assert stopped[1].token_ids == unstopped[1].token_ids
    assert stopped[1].finish_reason == "length"
