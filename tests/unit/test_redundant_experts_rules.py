"""What a plan says of experts that lie in more than one slot, and that move."""

import re

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import RULES, Root  # noqa: F401  # registers the schema
from orchestrator.rules.cell_rules import problems


def root(*words: str) -> Root:
    [one] = compose(["parallelism=tp2_redundant", *words])
    assert one.root is not None, one.problems
    return one.root


def test_the_layout_is_valid_for_the_families_with_slots() -> None:
    assert problems(root("load_path=layerwise")) == []
    assert problems(root("model=deepseek_v4_tiny", "load_path=tensorizer_raw")) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("parallelism.redundant_experts=-2",),
            r"^parallelism.redundant_experts is -2; it must be at least 0\.$",
        ),
        (
            ("parallelism.redundant_experts=3",),
            r"^parallelism.ep is 2, .*num_experts 32 and redundant_experts 3: use",
        ),
        (
            ("model=gpt_oss_tiny", "backend=native_reference"),
            r"^parallelism.redundant_experts 2 and parallelism.rebalance_seed 1: .* of no other family, .* gpt_oss;",
        ),
        (
            ("parallelism.ep=1", "backend=native_reference"),
            r"between ranks, and parallelism.ep is 1; set ep to 2",
        ),
        (
            ("load_path=sharded_state",),
            r"^parallelism.rebalance_seed is 1 and load_path=sharded_state .* rebalance_seed=0",
        ),
    ],
)
def test_what_has_no_slots_is_refused(words: tuple[str, ...], sentence: str) -> None:
    found = problems(root(*words))
    assert any(re.search(sentence, problem) for problem in found), found


def test_second_copies_take_memory_on_every_rank() -> None:
    with_copies, without = root(), root("parallelism.redundant_experts=0")
    added = memory.total(memory.memory_parts(with_copies), "weights") - memory.total(
        memory.memory_parts(without), "weights"
    )
    c = with_copies.model.kimi_k3
    padded = 128
    expert = 3 * c.moe_latent_size * padded // 2 + 3 * c.moe_latent_size * padded // 32
    assert added == expert * (c.num_layers - c.num_dense_layers + c.num_mtp_layers), "one of two on each rank"
    assert memory.update_bytes(with_copies) == memory.update_bytes(without) // 16 * 17
