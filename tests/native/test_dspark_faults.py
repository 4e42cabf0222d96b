"""What goes wrong with a drafter is found and named, and a drafter that does not fit its target is refused."""

from dataclasses import asdict

import pytest
from dspark_engine import GIVEN, NEW, OLD, TOYS, checkpoint, start
from family_engine import make_spec
from k3_engine import generate
from rehearsal import Rehearsal, observed

from workloads import faults
from workloads.engines.native import NativeEngine
from workloads.loading.checkpoint import CheckpointError
from workloads.loading.loader import ReloadError
from workloads.spec import Step

OWN = [
    "context_copies_built_once",
    "drafter_apart_from_its_target",
    "drafter_of_another_target",
    "taps_of_a_default",
]
APART = [
    Step("start", OLD, "safetensors"),
    Step("update", NEW, "layerwise", roots=["target"]),
    Step("update", NEW, "direct", roots=["draft"]),
]
WHOLE = [Step("start", OLD, "safetensors"), Step("update", NEW, "direct")]


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rehearsal]:
    return {
        name: Rehearsal(tmp_path_factory.mktemp(name), checkpoint(name), config)
        for name, config in TOYS.items()
    }


def _has_it(name: str, fault: str) -> bool:
    """DeepSeek's drafters join nothing that could be stale."""
    return name == "kimi_k3" or "context_copies" not in faults.about(fault).needs


@pytest.mark.parametrize("name", TOYS)
def test_a_drafter_updated_apart_passes(name: str, rehearsals: dict[str, Rehearsal]) -> None:
    steps = [*APART[:1], *APART[1:], Step("observe", name="updated", collect=["tensors", "generations"])]
    result = rehearsals[name].judge(steps)
    assert (result["verdict"], result["findings"]) == ("PASS", [])
    assert result["coverage"]["fraction"] >= 0.999
    told = [check["observed"] for check in result["checks"] if "draft tokens" in check["observed"]]
    assert told, "the draft tokens of the generations are told"


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in TOYS for fault in OWN if _has_it(name, fault)]
)
def test_each_fault_is_caught_and_named(name: str, fault: str, rehearsals: dict[str, Rehearsal]) -> None:
    result = rehearsals[name].judge(observed(WHOLE), [fault])
    assert result["verdict"] in ("FAIL", "ERROR")
    assert result["findings"][0]["code"] == faults.about(fault).finding, result["findings"]


@pytest.mark.parametrize("name", TOYS)
def test_a_drafter_of_another_target_leaves_an_engine_that_must_not_serve(name: str) -> None:
    engine = start(name)
    engine.loaders["draft"].__class__ = faults.loader_class(["drafter_of_another_target"])
    with pytest.raises(ReloadError, match=r"_proj.weight' came as .*, takes .*|came as"):
        engine.update(NEW, "layerwise")
    with pytest.raises(ReloadError, match="must not serve"):
        generate(engine, GIVEN[:1], 1)


@pytest.mark.parametrize("name", TOYS)
def test_files_of_a_drafter_for_another_target_are_refused_untouched(name: str) -> None:
    """Its context projection has another width: the engine says so before it loads anything."""
    other = type(TOYS[name])(**{**asdict(TOYS[name]), "dspark_target_layer_ids": [0, 1, 2]})
    engine = NativeEngine(make_spec(checkpoint(name), other), 0)
    with pytest.raises(
        CheckpointError, match=r"(context|main)_proj.weight' has shape \(\d+, \d+\), expected"
    ):
        engine.start(OLD, "safetensors")
    assert engine.lifecycle.events == []
