"""A draft model in the released vLLM: it follows its target by weight transfer, and a reload leaves it stale."""

from pathlib import Path

import pytest

from tests.commands import Outcome, orchestrate

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def drafted(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return orchestrate(tmp_path_factory.mktemp("run store"), "+exp=vllm_draft")


def test_a_session_of_its_own_updates_the_draft(drafted: Outcome) -> None:
    cells = {cell["labels"]["load_path"]: cell for cell in drafted.verdict["cells"]}
    transferred = cells["vllm_transfer"]
    assert transferred["verdict"] == "PASS", transferred["findings"]
    assert transferred["coverage"]["fraction"] == 1.0
    assert transferred["coverage"]["expected"] > 2 * 5_000_000, "both models"


def test_a_draft_that_no_session_updated_is_stale(drafted: Outcome) -> None:
    """Its target is not: answers hide it, only the drafts are rejected more often."""
    assert drafted.exit_code == 1, drafted.output
    cells = {cell["labels"]["load_path"]: cell for cell in drafted.verdict["cells"]}
    reloaded = cells["vllm_reload"]
    wrong = {check["name"] for check in reloaded["checks"] if check["verdict"] == "FAIL"}
    assert {"updated_equals_fresh", "every_weight_changed", "updated_is_checkpoint"} <= wrong
    stale = [finding for finding in reloaded["findings"] if finding["code"] == "stale"]
    assert stale
    assert all(finding["path"].startswith("draft:") for finding in reloaded["findings"]), reloaded["findings"]
