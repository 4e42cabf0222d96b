"""What a Qwen3 model says is what its definition says, however it is computed, and follows from processed weights."""

from collections.abc import Callable

import pytest
import torch
from k3_engine import evidence, generate, prompts
from qwen3_engine import CONFIGS, NEW, OLD, QUANTISED, checkpoint, qwen3_spec, start_qwen3
from qwen3_reference import Reference

from workloads.engines.native import NativeEngine
from workloads.loading.perturb import open_view
from workloads.models.qwen3.matrices import Fp8Matrices, FusedMatrices, Nvfp4Matrices
from workloads.spec import Checkpoint, Sampling

every_kind = pytest.mark.parametrize("name", list(CONFIGS))


@pytest.fixture(scope="module")
def engines() -> Callable[[str], NativeEngine]:
    started: dict[str, NativeEngine] = {}

    def engine(name: str) -> NativeEngine:
        if name not in started:
            started[name] = start_qwen3(name, max_requests=16)
        return started[name]

    return engine


@every_kind
def test_log_probabilities_are_those_of_the_definition(
    name: str, engines: Callable[[str], NativeEngine]
) -> None:
    """Up to where a rounding to BF16 falls the other way, which a rare tie in another order of sums can do."""
    reference = Reference(open_view(Checkpoint(), checkpoint(name)), CONFIGS[name])
    for prompt in prompts(1, 9):
        (generation,) = engines(name).generate([prompt], Sampling(max_new_tokens=1, top_logprobs=20))
        expected = reference.log_probabilities(list(prompt.token_ids))
        assert generation.token_ids[0] == expected.argmax()
        for token, value in generation.top_logprobs[0]:
            assert value == pytest.approx(expected[token].item(), abs=2e-3)


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("via", ["cold", "layerwise", "direct"])
def test_unprocessed_weights_are_refused_by_the_kernel(
    name: str, via: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a raw tensorizer start, which returned before post-processing, crashed in the first forward."""
    kind = Fp8Matrices if "fp8" in name else Nvfp4Matrices
    engine = NativeEngine(qwen3_spec(name), 0)
    if via != "cold":
        engine.start(OLD, "safetensors")
    monkeypatch.setattr(kind, "post_process", lambda self: None)
    engine.start(OLD, "safetensors") if via == "cold" else engine.update(NEW, via)
    with pytest.raises(RuntimeError, match=r"as the checkpoint lays it out, and the kernel reads '\w+'"):
        generate(engine, prompts(3), 1)


def test_an_expert_order_that_was_not_restored_is_not_noticed_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gate and up are alike, so that only what is said tells: why the order must follow from what was loaded."""
    engine, fresh = start_qwen3("moe_bf16"), start_qwen3("moe_bf16", NEW)
    monkeypatch.setattr(FusedMatrices, "post_process", lambda self: None)
    engine.update(NEW, "direct")
    wrong = engine.generate(prompts(9), Sampling(max_new_tokens=1))
    right = fresh.generate(prompts(9), Sampling(max_new_tokens=1))
    assert evidence(wrong) != evidence(right)


def test_stale_padding_of_the_experts_reaches_the_answer() -> None:
    """Only BF16 experts are padded on one rank."""
    engine = start_qwen3("moe_bf16")
    experts = engine.roots()["target"].get_submodule("model.layers.0.mlp.experts.w2")
    experts.get_parameter("weight")[:, :, 96:] = torch.nan
    (generation,) = engine.generate(prompts(9), Sampling(max_new_tokens=1))
    assert all(value != value for _, value in generation.top_logprobs[0])


def test_longer_requests_than_the_rotation_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Requests of 512 tokens are longer than .*max_position_embeddings 256"
    ):
        start_qwen3("dense_bf16", max_model_len=512)
