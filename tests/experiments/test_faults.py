"""Every known failure is caught with the diagnosis that names it; clean cells have no finding.

What runs here: of each fault that applies to Kimi-K3 on four load paths one cell, in turn on each of its places, and a
clean one; they are always the same. The whole matrix is `python -m orchestrator faults --run`. The last test goes the
way of an ordinary experiment, with gangs of its own.
"""

import json
from pathlib import Path

import pytest

from tests.commands import orchestrate
from workloads import faults

SAMPLED = ("model=kimi_k3_tiny", "load_path=layerwise,direct,dummy_layerwise,cold")
#: Of other load paths and models.
ELSEWHERE = {
    "buffer_lost_in_sleep",
    "context_copies_built_once",
    "converted_twice",
    "drafter_apart_from_its_target",
    "drafter_of_another_target",
    "head_of_the_last_stage_skipped",
    "permuted_at_first_load",
    "permuted_twice",
    "shared_experts_before_packing",
    "sink_keys_not_refreshed",
    "skip_post_process_on_tensorizer_raw",
    "split_by_padded_size",
    "stale_shared_padding",
    "stale_sink_padding",
    "swapped_scales",
    "taps_of_a_default",
    "tie_broken",
    "wrapped_names_not_mapped",
    "wrapper_keeps_the_hook",
}


@pytest.mark.timeout(1200)
def test_each_fault_is_caught_and_named_and_clean_cells_have_no_finding(store: Path) -> None:
    outcome = orchestrate(store, "faults", "--run", "--sample", *SAMPLED)
    assert outcome.exit_code == 0, outcome.output
    [record] = [json.loads(path.read_text()) for path in store.glob("experiments/*/faults.json")]
    assert set(record["counts"]) == {"caught", "clean"}
    assert {cell["fault"] for cell in record["cells"]} == {"none", *faults.names()} - ELSEWHERE
    listed = orchestrate(store, "faults")
    assert listed.output.count("never here") == len(ELSEWHERE), listed.output


EXPERIMENT = ("+exp=kimi_k3_refit", "parallelism=tp2", "collect=tensors")  # sweeps three load paths
LOAD_PATHS = {"layerwise", "direct", "dummy_layerwise"}


def test_clean_cells_pass_on_every_load_path(store: Path) -> None:
    outcome = orchestrate(store, *EXPERIMENT)
    assert outcome.exit_code == 0, outcome.output
    assert outcome.verdict is not None
    assert {cell["labels"]["load_path"] for cell in outcome.verdict["cells"]} == LOAD_PATHS
    for cell in outcome.verdict["cells"]:
        assert cell["verdict"] == "PASS"
        assert cell["findings"] == []
        assert cell["coverage"]["fraction"] >= 0.999
        assert cell["coverage"]["unclassified"] == 0


def test_a_fault_fails_every_cell_of_an_experiment_and_is_named(store: Path) -> None:
    outcome = orchestrate(store, *EXPERIMENT, "code.candidate.faults=[stale_padding]")
    assert outcome.exit_code == 1, outcome.output
    assert outcome.verdict is not None
    assert {cell["labels"]["load_path"] for cell in outcome.verdict["cells"]} == LOAD_PATHS
    for cell in outcome.verdict["cells"]:
        assert cell["verdict"] == "FAIL"
        assert cell["findings"][0]["code"] == "stale_padding", (cell["labels"], cell["findings"])
    assert "stale_padding" in outcome.output
