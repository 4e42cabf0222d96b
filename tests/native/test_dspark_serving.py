"""What a DSpark drafter proposes after each token, and that the target's answer does not depend on it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dspark_engine import GIVEN, NEW, OLD, TOYS, fresh, start
from family_engine import start_engine
from k3_engine import generate

from workloads.engines.acceptance import accepted
from workloads.engines.protocol import Generation, Prompt
from workloads.loading.generate import generate_checkpoint
from workloads.models.batch import Batch, Segment
from workloads.models.kimi_k3.dspark import KimiK3DSpark
from workloads.models.parallel import ALONE
from workloads.models.served import Target
from workloads.spec import Sampling

NEW_TOKENS = 6
every_toy = pytest.mark.parametrize("name", TOYS)


@every_toy
def test_decode_equals_prefill(name: str) -> None:
    """Token i of a generation and the block proposed after it are those of a prompt that ends in the tokens before."""
    engine = start(name, max_requests=16)
    decoded = engine.generate(GIVEN, Sampling(max_new_tokens=3))
    longer = [
        Prompt(f"{g.id}+{i}", (*p.token_ids, *g.token_ids[:i]))
        for p, g in zip(GIVEN, decoded, strict=True)
        for i in range(3)
    ]
    prefilled = iter(engine.generate(longer, Sampling(max_new_tokens=1)))
    lengths = set()
    for generation in decoded:
        for i in range(3):
            one = next(prefilled)
            assert (one.token_ids, one.drafts) == (
                generation.token_ids[i : i + 1],
                generation.drafts[i : i + 1],
            )
            assert one.top_logprobs == generation.top_logprobs[i : i + 1]
            lengths.add(len(one.drafts[0]))
        first = [next(iter(block), -1) for block in generation.drafts[:2]]
        assert generation.draft_token_ids == [-1, *first]
    whole = TOYS[name].dspark_block_size
    assert lengths == {whole} if name == "kimi_k3" else 0 <= min(lengths) < max(lengths) <= whole


@every_toy
def test_a_target_answers_the_same_without_its_drafter(name: str, tmp_path: Path) -> None:
    without = replace(TOYS[name], num_dspark_layers=0)
    if name == "deepseek_v4":
        without.compress_ratios = without.compress_ratios[: without.num_layers]
    folder = generate_checkpoint(without, 0, tmp_path / "checkpoint")
    alone = start_engine(folder, without, moe_kernel="mega_moe")
    assert [one[:4] for one in generate(alone, GIVEN, 3)] == [one[:4] for one in fresh(name, OLD)[1]]


def proposals(kind: str, blocks: Sequence[Sequence[int]], answer: Sequence[int], at: int) -> list[int]:
    """To follow token `at`: the drafter's own, the target's own, or those with a wrong one in third place."""
    right = list(answer[at + 1 : at + 5])
    return {"own": list(blocks[at]), "right": right, "partly": [*right[:2], right[2] ^ 1, *right[3:]]}[kind]


def verified(target: Target, ids: Sequence[int], size: int) -> list[int]:
    """The target's choice after each of the last `size` tokens, all in one pass."""
    batch = Batch(ids, [Segment(0, 0, len(ids), 0)], ALONE, torch.device("cpu"))
    hidden = target(batch, target.make_caches(1, len(ids)))
    rows = torch.arange(len(ids) - size, len(ids))
    return target.logits(hidden, rows, batch).argmax(dim=-1).tolist()


def speculated(target: Target, prompt: Prompt, one: Generation, kind: str) -> Iterator[list[int]]:
    """What speculative serving says, a pass at a time: proposals are taken as far as they are the target's choice."""
    said = verified(target, prompt.token_ids, 1)
    yield list(said)
    while len(said) < NEW_TOKENS:
        block = proposals(kind, one.drafts, one.token_ids, len(said) - 1)
        chosen = verified(target, [*prompt.token_ids, *said, *block], len(block) + 1)
        agreed = next((i for i, token in enumerate(block) if token != chosen[i]), len(block))
        said += chosen[: agreed + 1]
        yield chosen[: agreed + 1]


@pytest.mark.parametrize("kind", ["own", "right", "partly"])
@every_toy
def test_accepting_proposals_does_not_change_the_greedy_answer(name: str, kind: str) -> None:
    engine = start(name)
    target, prompt = engine.roots()["target"], GIVEN[1]
    assert isinstance(target, Target)
    [one] = engine.generate([prompt], Sampling(max_new_tokens=NEW_TOKENS + 5))
    with torch.no_grad():
        passes = list(speculated(target, prompt, one, kind))
    assert [token for said in passes for token in said] == one.token_ids[: sum(map(len, passes))]
    blocks = [proposals(kind, one.drafts, one.token_ids, i) for i in range(NEW_TOKENS)]
    if kind == "own":
        return
    taken = {"right": 4, "partly": 2}[kind]
    assert [len(said) for said in passes[1:]] == [taken + 1] * (len(passes) - 1)
    assert accepted(one.token_ids[:NEW_TOKENS], blocks) == {"right": (4, 4), "partly": (6, 4)}[kind]


@pytest.mark.parametrize("copy", ["context_kv_proj", "_context_kv_norm_weights"])
def test_a_wrong_copy_changes_proposals_only(copy: str) -> None:
    engine = start("kimi_k3", NEW)
    draft = engine.roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    getattr(draft.context_proj, copy).neg_()
    said, right = generate(engine, GIVEN, 3), fresh("kimi_k3", NEW)[1]
    assert [one[:4] for one in said] == [one[:4] for one in right]
    assert [one[5] for one in said] != [one[5] for one in right]
