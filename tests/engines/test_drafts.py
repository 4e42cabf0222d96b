"""Drafters in the released vLLM: they follow their target by weight transfer, and a reload leaves them stale."""

from pathlib import Path

import pytest

from tests.commands import orchestrate
from tests.engines.drafters import write_drafter

pytestmark = pytest.mark.vllm

# One start: `new` is served, `old` and `new` again are sent as a trainer does, then `old` is read by a reload.
STEPS = (
    "load_path.steps=["
    "{do: start, checkpoint: new, via: safetensors}, {do: observe, name: started, collect: [tensors, generations]},"
    "{do: update, checkpoint: old, via: transfer}, {do: observe, name: sent, collect: [tensors, generations]},"
    "{do: update, checkpoint: new, via: transfer}, {do: observe, name: back, collect: [tensors, generations]},"
    "{do: update, checkpoint: old, via: reload}, {do: observe, name: reloaded, collect: [tensors, generations]}]"
)
CHECKS = (
    "load_path.checks=["
    "{name: sent_changes_all, rule: all_changed, left: started, right: sent},"
    "{name: sent_is_checkpoint, rule: checkpoint, left: sent},"
    "{name: back_as_started, rule: equal, left: back, right: started},"
    "{name: answers_as_started, rule: same_generations, left: back, right: started},"
    "{name: reloaded_as_sent, rule: equal, left: reloaded, right: sent},"
    "{name: nothing_moved, rule: stable_storage}, {name: coverage, rule: coverage}]"
)


def _given(method: str, folder: Path) -> list[str]:
    """What the command says of the drafter: a model like its target, heads in a folder, layers of the target's own."""
    if method == "draft_model":
        return ["+exp=vllm_draft", "load_path=vllm_transfer"]
    written = write_drafter(method, folder)
    if method == "mtp":
        return [
            "model=folder", "model.tokenizer=byte", "parallelism=single", "backend=vllm_cpu", "collect=vllm",
            "load_path=vllm_transfer", f"checkpoints.old.path='{written}'", f"checkpoints.new.path='{written}'",
            "+backend.options.speculative_config={method: mtp, num_speculative_tokens: 1}",
        ]  # fmt: skip
    return [
        "+exp=vllm_draft", "load_path=vllm_transfer", f"backend.options.speculative_config.method={method}",
        f"checkpoints.draft_old.path='{written}'", f"checkpoints.draft_new.path='{written}'",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])  # eagle and medusa do as eagle3 does
def test_a_drafter_follows_by_transfer_and_is_stale_after_a_reload(
    method: str, vllm_python: Path, tmp_path: Path
) -> None:
    """A session of its own leaves both as the start made them; a reload reaches the target alone, so that answers hide
    it and drafts are rejected more often. The first release whose reload reaches drafters makes this fail."""
    outcome = orchestrate(tmp_path / "store", *_given(method, tmp_path / "drafter"), STEPS, CHECKS)
    assert outcome.exit_code == 1, outcome.output
    assert outcome.left == []
    cell = outcome.cell
    wrong = {check["name"] for check in cell["checks"] if check["verdict"] != "PASS"}
    assert wrong == {"reloaded_as_sent", "coverage"}, cell["checks"]
    assert {finding["observation"] for finding in cell["findings"]} == {"reloaded"}
    differing = [finding for finding in cell["findings"] if "reloaded_as_sent" in finding["checks"]]
    assert {finding["code"] for finding in differing} == {"stale"}, differing
    assert all(path.startswith("draft:") for finding in differing for path in finding["paths"]), differing
    assert cell["starts"] == 1
