"""What is particular to loading DSpark drafters: a transaction of their own, joined copies, modules of the target."""

import pytest
import torch
from dspark_engine import GIVEN, NEW, OLD, TOYS, fresh, start
from k3_engine import different, generate, held_bytes

from collectors.walk import walk
from workloads.loading.paths import UPDATES
from workloads.models.kimi_k3.dspark import KimiK3DSpark
from workloads.spec import Arrival

every_toy = pytest.mark.parametrize("name", TOYS)


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
    assert outside == [
        f"draft:context_proj.{name}" for name in ("_context_kv_norm_weights", "context_kv_proj")
    ]
    draft = engine.roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    joined = draft.context_proj.context_kv_proj
    assert joined is not None
    rows = [layer.self_attn.kv_rows() for layer in draft._layers()]
    assert torch.equal(joined, torch.cat(rows))


@every_toy
def test_embedding_and_head_are_those_of_the_target(name: str) -> None:
    found = walk(start(name).roots())
    shared = {alias for one in found if one.root == "target" for alias in one.aliases}
    assert {"draft:embed_tokens.weight", "draft:lm_head.weight"} <= shared


def test_a_random_start_joins_what_its_layers_hold() -> None:
    """Where the joined projection is a parameter, a random start gives it values that no layer has."""
    draft = start("kimi_k3", OLD, "dummy").roots()["draft"]
    assert isinstance(draft, KimiK3DSpark)
    joined = draft.context_proj.context_kv_proj
    assert joined is not None
    assert torch.equal(joined, torch.cat([layer.self_attn.kv_rows() for layer in draft._layers()]))
