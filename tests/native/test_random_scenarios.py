"""Any legal sequence of steps leaves the engine as a fresh start would; with a fault in it, it never passes.

The sequences are drawn by hypothesis, the same ones each time.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from k3_engine import NEW, OLD
from rehearsal import CONFIG, Rehearsal, observed

from workloads import faults
from workloads.faults._about import features
from workloads.spec import Step

UPDATES = ("layerwise", "direct", "per_expert")
NAMES = (OLD, NEW)
EXAMPLES = 8
REPRODUCIBLE = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # every example takes seconds: a failure is shown as it came
    suppress_health_check=list(HealthCheck),
)
#: On one rank. The layout of the kernel is there: the engine, unlike a config, takes it on a single rank.
FEATURES = features("kimi_k3_tiny", tp=1, ep=1, moe_kernel="mega_moe")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """Its checkpoint is written by another process: what a generator keeps in memory is none of the engine's."""
    folder = tmp_path_factory.mktemp("rehearsal")
    checkpoint, described = folder / "checkpoint", folder / "config.json"
    described.write_text(json.dumps({"kimi_k3": asdict(CONFIG)}))
    command = [sys.executable, "-m", "workloads.loading.generate", str(described), "0", str(checkpoint)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=120)
    return Rehearsal(folder, checkpoint)


def test_a_decay_that_is_applied_twice_is_named(rehearsal: Rehearsal) -> None:
    steps = observed([Step("start", OLD, "safetensors"), Step("update", NEW, "layerwise")])
    finding = rehearsal.judge(steps, ["decay_applied_twice"])["findings"][0]
    assert finding["code"] == faults.about("decay_applied_twice").finding
    assert finding["path"].endswith(".A_log")


def update(draw: st.DrawFn, checkpoint: str, via: str | None = None) -> Step:
    """A whole update, its tensors in any order through a buffer of any size that holds the largest of them."""
    return Step(
        "update",
        checkpoint,
        via or draw(st.sampled_from(UPDATES)),
        order=draw(st.sampled_from(("natural", "reversed", "shuffled"))),
        order_seed=draw(st.integers(0, 9)),
        bucket_bytes=draw(st.sampled_from((0, 1 << 19, 1 << 21))),
    )


def after(draw: st.DrawFn, held: str) -> list[Step]:
    """What may happen to an engine that holds `held`, up to its next whole state."""
    other = draw(st.sampled_from(NAMES))
    match draw(st.sampled_from(("update", "nap", "sleep", "part"))):
        case "update":
            return [update(draw, other)]
        case "nap":
            return [Step("sleep", level=1), Step("wake"), update(draw, other)]
        case "sleep":
            return [Step("sleep", level=2), Step("wake"), update(draw, other)]
    return [Step("update", held, draw(st.sampled_from(UPDATES)), tensors=["*layers.1.*"])]


@st.composite
def scenarios(draw: st.DrawFn) -> list[Step]:
    """A start and up to three further states, each observed."""
    held = draw(st.sampled_from(NAMES))
    steps = [Step("start", held, draw(st.sampled_from(("safetensors", "dummy"))))]
    if steps[0].via == "dummy":
        steps.append(update(draw, held))
    for _ in range(draw(st.integers(0, 2))):
        steps += after(draw, held)
        held = steps[-1].checkpoint
    return observed(steps)


@REPRODUCIBLE
@given(steps=scenarios())
def test_a_clean_sequence_always_equals_a_fresh_start(rehearsal: Rehearsal, steps: Sequence[Step]) -> None:
    result = rehearsal.judge(steps)
    assert result["findings"] == []
    assert result["verdict"] == "PASS"


@st.composite
def faulty_scenarios(draw: st.DrawFn) -> tuple[str, list[Step]]:
    """A fault, and a sequence in which it can do something: a load its way, which changes every weight."""
    able = [name for name in faults.names() if set(faults.about(name).needs) <= FEATURES]
    name = draw(st.sampled_from(able))
    about = faults.about(name)
    held = draw(st.sampled_from(NAMES))
    starts = [via for via in ("safetensors", "dummy") if via in about.via]
    steps = [Step("start", held, draw(st.sampled_from(starts or ["safetensors"])))]
    for _ in range(draw(st.integers(0, 1))):
        steps.append(update(draw, held))
    held = OLD if held == NEW else NEW
    if "sleep2" in about.via:
        steps += [Step("sleep", level=2), Step("wake")]
    ways = [via for via in UPDATES if via in about.via]
    steps.append(update(draw, held, draw(st.sampled_from(ways)) if ways else None))
    return name, observed(steps)


@settings(REPRODUCIBLE, max_examples=2 * EXAMPLES)
@given(drawn=faulty_scenarios())
def test_a_faulty_sequence_never_passes(rehearsal: Rehearsal, drawn: tuple[str, list[Step]]) -> None:
    name, steps = drawn
    result = rehearsal.judge(steps, [name])
    assert result["verdict"] in ("FAIL", "ERROR"), (name, steps)
    assert result["findings"], (name, steps)


@pytest.mark.parametrize("via", UPDATES)
def test_a_kernel_object_built_anew_has_moved(via: str, rehearsal: Rehearsal) -> None:
    steps = observed([Step("start", OLD, "safetensors"), Step("update", NEW, via)])
    finding, *_ = rehearsal.judge(steps, ["kernel_object_rebuilt"])["findings"]
    assert finding["code"] == "moved"
