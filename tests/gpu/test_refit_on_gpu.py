"""The refit experiment on GPUs, by the command that a user gives, and every fault of its list on one GPU."""

from pathlib import Path

import pytest
import torch
from rehearsal import CONFIG, Rehearsal, observed

from tests.commands import orchestrate
from workloads import faults
from workloads.faults._about import CRASH, RELOADS, features
from workloads.loading.generate import generate_checkpoint
from workloads.spec import Backend, Step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

EXPERIMENT = ("+exp=kimi_k3_refit", "cluster=local_hopper", "collect=tensors")
LOAD_PATHS = ("layerwise", "direct", "dummy_layerwise")
FEATURES = features("kimi_k3_tiny", tp=1, ep=1, moe_kernel="mega_moe")
#: Ways to start and to update; each fault is played on the first on which it does something.
WAYS = [(start, update) for start in ("safetensors", "dummy") for update in RELOADS]


def way(fault: str) -> tuple[str, str] | None:
    about = faults.about(fault)
    return next((via for via in WAYS if not about.why_not(via, FEATURES)), None)


#: What is found instead where experts lie in our kernel's layout: it refuses shapes that are not those of loaded
#: experts, and scales that nobody wrote, which are NaN in memory of this project.
OTHERWISE = dict.fromkeys(("double_post_process", "reload_per_chunk", "stale_padding"), CRASH)
FAULTS = [name for name in faults.names() if way(name) is not None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run store")  # with a space


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "gpus"), [("single", 1), ("tp2", 2), ("dp2", 2)])
def test_the_experiment_passes_on_our_kernel(store: Path, layout: str, gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    outcome = orchestrate(store, *EXPERIMENT, f"parallelism={layout}")
    assert outcome.exit_code == 0, outcome.output
    cells = outcome.verdict["cells"]
    assert [cell["labels"]["load_path"] for cell in cells] == list(LOAD_PATHS)
    for cell in cells:
        assert (cell["verdict"], cell["findings"]) == ("PASS", [])
        assert cell["coverage"]["fraction"] >= 0.999
        [served] = [check for check in cell["checks"] if check["name"] == "gate:kernels"]
        assert served["observed"].startswith("hopper_mega_moe in ")
        assert not {"fast_kernel", "same_kernels"} & {check["name"] for check in cell["checks"]}
    assert outcome.left == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "gpus", "fault"), [("single", 1, "rebind_derived"), ("tp2", 2, "expert_ids_made_local")]
)
def test_a_fault_of_the_experiment_is_named(store: Path, layout: str, gpus: int, fault: str) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    injected = f"code.candidate.faults=[{fault}]"
    outcome = orchestrate(store, *EXPERIMENT, f"parallelism={layout}", "load_path=layerwise", injected)
    assert outcome.exit_code == 1, outcome.output
    assert outcome.cell["findings"][0]["code"] == faults.about(fault).finding


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """One rank in this process, so that a fault costs a second and no start of CUDA."""
    folder = tmp_path_factory.mktemp("rehearsal")
    backend = Backend(device="cuda", arch="sm90", communication="nccl", moe_fallback=False)
    return Rehearsal(folder, generate_checkpoint(CONFIG, 0, folder / "checkpoint"), CONFIG, backend)


def steps(start: str, update: str) -> list[Step]:
    """As the experiment's: to the new weights, and back."""
    loads = [("update", "new", update), ("update", "old", update)]
    return observed([Step("start", "old", start), *(Step(*load) for load in loads)])


@pytest.mark.parametrize(("start", "update"), WAYS)
def test_clean_scenarios_have_no_finding(rehearsal: Rehearsal, start: str, update: str) -> None:
    result = rehearsal.judge(steps(start, update))
    assert (result["findings"], result["verdict"]) == ([], "PASS")


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_its_list_is_caught_and_named(rehearsal: Rehearsal, fault: str) -> None:
    via = way(fault)
    assert via is not None
    result = rehearsal.judge(steps(*via), [fault])
    assert result["verdict"] == ("ERROR" if result["findings"][0]["code"] == CRASH else "FAIL")
    expected = faults.about(fault).expected(via, FEATURES)
    assert result["findings"][0]["code"] == OTHERWISE.get(fault, expected)
