"""What is particular to loading DSpark drafters: a transaction of their own, joined copies, modules of the target."""

from pathlib import Path

import pytest
import torch
from dspark_engine import GIVEN, NEW, OLD, TOYS, fresh, start
from k3_engine import different, generate, held, held_bytes

from collectors.derived import follows
from collectors.walk import walk
from workloads.engines.native import NativeEngine
from workloads.loading.paths import UPDATES
from workloads.models.kimi_k3.dspark import KimiK3DSpark
from workloads.spec import Arrival

every_toy = pytest.mark.parametrize("name", TOYS)
COPIES = ("_context_kv_norm_weights", "context_kv_proj")


def joined_rightly(engine: NativeEngine) -> bool:
    """Whether the copies hold what the layers hold: latent projections under one another, norms side by side."""
    weights = {name: weight.detach() for name, weight in engine.roots()["draft"].named_parameters()}
    layers = [f"layers.{layer}.self_attn." for layer in range(TOYS["kimi_k3"].num_dspark_layers)]
    rows = [weights[f"{at}fused_qkv_a_proj.weight"][TOYS["kimi_k3"].q_lora_rank :] for at in layers]
    norms = [weights[f"{at}kv_a_layernorm.weight"] for at in layers]
    found = held(engine)
    expected = dict(zip(COPIES, (torch.stack(norms), torch.cat(rows)), strict=True))
    return all(torch.equal(found[f"draft:context_proj.{name}"], value) for name, value in expected.items())


@every_toy
def test_the_drafter_is_updated_in_a_transaction_of_its_own(name: str) -> None:
    """Embedding and head are the target's: they come with it."""
    engine, old = start(name), fresh(name, OLD)[0]
    engine.update(NEW, "direct", Arrival(roots=("target",)))
    assert not any(path.startswith("draft:") for path in different(held_bytes(engine), old))
    said = generate(engine, GIVEN, 3)
    assert [one[:4] for one in said] == [one[:4] for one in fresh(name, NEW)[1]]
    assert said != fresh(name, NEW)[1]
    engine.update(NEW, "layerwise", Arrival(roots=("draft",)))
    assert different(held_bytes(engine), fresh(name, NEW)[0]) == []
    assert generate(engine, GIVEN, 3) == fresh(name, NEW)[1]


@pytest.mark.parametrize("via", UPDATES)
def test_an_update_of_one_layer_refreshes_what_is_joined_of_all(via: str) -> None:
    engine = start("kimi_k3")
    before = held_bytes(engine)
    engine.update(NEW, via, Arrival(tensors=("layers.1.*",)))
    changed = different(held_bytes(engine), before)
    outside = [path for path in changed if not path.startswith("draft:layers.1.")]
    assert outside == [f"draft:context_proj.{name}" for name in COPIES]
    assert joined_rightly(engine)


@every_toy
def test_embedding_and_head_are_those_of_the_target(name: str) -> None:
    found = walk(start(name).roots())
    shared = {alias for one in found if one.root == "target" for alias in one.aliases}
    assert {"draft:embed_tokens.weight", "draft:lm_head.weight"} <= shared


@every_toy
def test_a_start_from_processed_tensors_takes_no_module_of_the_target(name: str, tmp_path: Path) -> None:
    """Else the next update would owe them, and a clean engine have the finding that it left them out."""
    engine = start(name)
    engine.spec.saved_dir = str(tmp_path)
    engine.save(OLD, "tensorizer")
    again = NativeEngine(engine.spec, 0)
    again.start(OLD, "tensorizer")
    again.update(NEW, "layerwise")
    started, updated = (
        {e["module"] for e in again.lifecycle.events if (e["root"], e["load"]) == ("draft", load)}
        for load in (0, 1)
    )
    assert started == updated
    assert different(held_bytes(again), fresh(name, NEW)[0]) == []


def test_a_random_start_joins_what_its_layers_hold() -> None:
    """Where the joined projection is a parameter, a random start gives it values that no layer has."""
    assert joined_rightly(start("kimi_k3", OLD, "dummy"))


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_that_does_not_follow_from_its_layers_is_seen_without_a_reference(copy: str) -> None:
    engine = start("kimi_k3")
    told = follows(engine.roots())
    assert not any("deviation" in record for record in told.values())
    draft = engine.roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    getattr(draft.context_proj, copy)[1, 3] += 1
    wrong = {path for path, record in follows(engine.roots()).items() if "deviation" in record}
    assert wrong == {f"draft:context_proj.{copy}"}
