"""What a family built on the ordinary decoder says does not depend on how it is computed or divided."""

from pathlib import Path
from typing import Any

import pytest
from dense_families import MEDIA, VARIANTS, checkpoint
from family_engine import make_spec, start_engine
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, evidence, generate, prompts

from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.spec import Parallelism, Sampling

GIVEN = [*prompts(1, 30, 6), MEDIA]
NEW_TOKENS = 4
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@every_variant
def test_decode_equals_prefill(folder: Path, variant: str) -> None:
    """Token i of a generation, its log-probabilities and the draft after it equal those of a prompt that already ends
    in the tokens before it."""
    engine = start_engine(checkpoint(folder, variant), VARIANTS[variant], max_requests=32)
    decoded = engine.generate(GIVEN, Sampling(max_new_tokens=NEW_TOKENS))
    longer = [
        Prompt(f"{g.id}+{i}", (*p.token_ids, *g.token_ids[:i]))
        for p, g in zip(GIVEN, decoded, strict=True)
        for i in range(NEW_TOKENS - 1)
    ]
    prefilled = iter(engine.generate(longer, Sampling(max_new_tokens=2)))
    drafts = "draft" in engine.roots()
    for generation in decoded:
        assert all((token >= 0) == drafts for token in generation.draft_token_ids[1:])
        for i in range(NEW_TOKENS - 1):
            first = next(prefilled)
            assert first.token_ids == generation.token_ids[i : i + 2], (generation.id, i)
            assert first.top_logprobs == generation.top_logprobs[i : i + 2], (generation.id, i)
            assert first.draft_token_ids[1] == generation.draft_token_ids[i + 1], (generation.id, i)


@every_variant
def test_a_generation_does_not_depend_on_how_prompts_are_cut(folder: Path, variant: str) -> None:
    where, config = checkpoint(folder, variant), VARIANTS[variant]
    whole = generate(start_engine(where, config), GIVEN, NEW_TOKENS)
    cut = start_engine(where, config, max_batch_tokens=7, max_requests=2)
    assert generate(cut, GIVEN, NEW_TOKENS) == whole
    assert generate(start_engine(where, config, NEW), GIVEN, NEW_TOKENS) != whole


@every_variant
@pytest.mark.parametrize(
    "parallelism",
    [Parallelism(tp=2, dp=1, ep=1), Parallelism(tp=2, dp=2, ep=4)],
    ids=lambda p: f"tp{p.tp}-dp{p.dp}-ep{p.ep}",
)
def test_ranks_together_equal_one(
    folder: Path, parallelism: Parallelism, variant: str, run_ranks: RanksRunner
) -> None:
    """Started, and after an update."""
    where, config = checkpoint(folder, variant), VARIANTS[variant]
    spec = make_spec(where, config, parallelism)

    def serve(rank: int) -> list[list[tuple[Any, ...]]]:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        said = [evidence(engine.generate(GIVEN, Sampling(max_new_tokens=NEW_TOKENS)))]
        engine.update(NEW, "layerwise")
        return [*said, evidence(engine.generate(GIVEN, Sampling(max_new_tokens=NEW_TOKENS)))]

    results = run_ranks(parallelism.ranks, serve)
    alone = [generate(start_engine(where, config, entry), GIVEN, NEW_TOKENS) for entry in (OLD, NEW)]
    assert results[0] == alone
