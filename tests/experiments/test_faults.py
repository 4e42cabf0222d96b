"""Every known failure is caught on every load path, with the diagnosis that names it; clean cells pass."""

from pathlib import Path

import pytest

from tests.commands import orchestrate
from workloads import faults

EXPERIMENT = ("+exp=kimi_k3_refit", "parallelism=tp2", "collect=tensors")  # sweeps three load paths

DIAGNOSIS = {
    "lazy_finalize": "finalised_late",
    "skip_finalize_on_reload": "skipped_hook",
    "rebind_derived": "moved",
    "stale_padding": "stale_padding",
    "wrong_padding_value": "wrong_padding_value",
    "swapped_expert_shards": "found_elsewhere",
    "swapped_gate_up": "found_elsewhere",
    "numeric_e8m0_cast": "numeric_cast",
    "tensor_not_reloaded": "stale",
    "double_post_process": "processed_twice",
}


def test_every_fault_has_a_diagnosis() -> None:
    assert faults.names() == sorted(DIAGNOSIS)


def test_clean_cells_pass_on_every_load_path(store: Path) -> None:
    outcome = orchestrate(store, *EXPERIMENT)
    assert outcome.exit_code == 0, outcome.output
    assert {cell["labels"]["load_path"] for cell in outcome.verdict["cells"]} == {
        "layerwise",
        "direct",
        "dummy_layerwise",
    }
    for cell in outcome.verdict["cells"]:
        assert cell["verdict"] == "PASS"
        assert cell["findings"] == []
        assert cell["coverage"]["fraction"] >= 0.999
        assert cell["coverage"]["unclassified"] == 0


@pytest.mark.parametrize("fault", sorted(DIAGNOSIS))
def test_fault_is_caught_and_named(fault: str, store: Path) -> None:
    outcome = orchestrate(store, *EXPERIMENT, f"code.candidate.faults=[{fault}]")
    assert outcome.exit_code == 1, outcome.output
    for cell in outcome.verdict["cells"]:
        assert cell["verdict"] == "FAIL"
        assert cell["findings"][0]["code"] == DIAGNOSIS[fault], (cell["labels"], cell["findings"])
    assert DIAGNOSIS[fault].replace("_", " ") in outcome.output.replace("_", " ")
