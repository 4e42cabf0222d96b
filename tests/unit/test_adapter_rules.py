"""Which engines and models may be asked to wrap their layers for adapters."""

import re

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.schema import RULES  # noqa: F401  # registers the schema
from orchestrator.rules.cell_rules import problems


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model=qwen3_moe_tiny",), None),
        (
            ("model=kimi_k3_tiny",),
            r"^backend.lora_rank is 8 and model.architecture is kimi_k3: .* set it to 0\.$",
        ),
        (("model=qwen3_tiny", "backend.lora_rank=-1"), r"^backend.lora_rank is -1; it must be at least 0\.$"),
        (
            ("model=tiny_llama", "backend.engine=vllm", "load_path=vllm_reload"),
            r"^backend.lora_rank is 8 and backend.engine is vllm, .* backend.options.enable_lora=true\.$",
        ),
    ],
)
def test_adapters_of_other_engines_and_families_are_refused(
    words: tuple[str, ...], sentence: str | None
) -> None:
    [one] = compose(["backend=native_adapters", "parallelism=single", *words])
    assert one.root is not None, one.problems
    found = problems(one.root)
    if sentence is None:
        assert found == []
    else:
        assert any(re.search(sentence, problem) for problem in found), found
