"""Every family of models: what it says does not depend on how it is computed or divided."""

from typing import Any

import pytest
from families import NEW, OLD, TOYS, fresh, start_toy, toy_spec
from forked_ranks import RanksRunner
from k3_engine import generate

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.spec import Parallelism, Sampling

NEW_TOKENS = 4
LAYOUTS = [(name, layout) for name, toy in TOYS.items() for layout in toy.layouts]
every_toy = pytest.mark.parametrize("name", TOYS)


@pytest.mark.parametrize("name", [name for name in TOYS if "dspark" not in name])  # see test_dspark_serving
def test_decode_equals_prefill(name: str) -> None:
    """Token i of a generation, its log-probabilities and the draft after it equal those of a prompt that already ends
    in the tokens before it."""
    engine, given = start_toy(name, max_requests=16), TOYS[name].given
    decoded = engine.generate(given, Sampling(max_new_tokens=NEW_TOKENS))
    longer = [
        Prompt(f"{g.id}+{i}", (*p.token_ids, *g.token_ids[:i]))
        for p, g in zip(given, decoded, strict=True)
        for i in range(NEW_TOKENS - 1)
    ]
    prefilled = iter(engine.generate(longer, Sampling(max_new_tokens=2)))
    for generation in decoded:
        assert len(generation.token_ids) == NEW_TOKENS
        assert all((token >= 0) == TOYS[name].drafter for token in generation.draft_token_ids[1:])
        for i in range(NEW_TOKENS - 1):
            first = next(prefilled)
            assert first.token_ids == generation.token_ids[i : i + 2], (generation.id, i)
            assert first.top_logprobs == generation.top_logprobs[i : i + 2], (generation.id, i)
            assert first.draft_token_ids[1] == generation.draft_token_ids[i + 1], (generation.id, i)


@every_toy
def test_a_generation_depends_on_the_weights_and_not_on_how_prompts_are_cut(name: str) -> None:
    """Chunks of 9 tokens in few slots, each prompt by itself, and another kernel of the experts."""
    given, together = TOYS[name].given, fresh(name, OLD).said
    cut = start_toy(name, max_batch_tokens=9, max_requests=2)
    assert generate(cut, given, 2) == together
    assert [said for prompt in given for said in generate(cut, [prompt], 2)] == together
    assert all(fresh(name, OLD, kernel).said == together for kernel in TOYS[name].kernels)
    assert fresh(name, NEW).said != together


@pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name}-tp{tp}-dp{dp}-ep{ep}" for name, (tp, dp, ep) in LAYOUTS]
)
def test_ranks_together_equal_one(name: str, layout: tuple[int, int, int], run_ranks: RanksRunner) -> None:
    """Started, and after an update of either kind. With four data-parallel groups one has nothing to do at times."""
    tp, dp, ep = layout
    spec = toy_spec(name, Parallelism(tp, dp, ep))

    def serve(rank: int) -> list[list[tuple[Any, ...]]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        said = [generate(engine, TOYS[name].given, 2)]
        for weights, via in ((NEW, "layerwise"), (OLD, "direct")):
            engine.update(weights, via)
            said.append(generate(engine, TOYS[name].given, 2))
        return said

    alone = {weights: fresh(name, weights).said for weights in (OLD, NEW)}
    results = run_ranks(tp * dp, serve)
    assert results[0] == [alone[OLD], alone[NEW], alone[OLD]]
    assert not any(said for result in results[1:] for said in result)
