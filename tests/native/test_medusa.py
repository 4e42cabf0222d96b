"""Medusa heads against plain float64 formulas, and the map from their vocabulary to the target's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_families import VARIANTS, relative, whole_prompt, widened
from family_engine import make_spec, roots_of_rank, start_engine
from forked_ranks import RanksRunner
from k3_engine import NEW, OLD, generate, held, prompts

from workloads.engines.native import NativeEngine
from workloads.loading.generate import generate_checkpoint
from workloads.models.medusa.config import MedusaConfig
from workloads.models.medusa.heads import MedusaHeads
from workloads.spec import Parallelism

REDUCED = VARIANTS["medusa"]
TIED = replace(REDUCED, tie_draft_heads=True)
WHOLE = replace(REDUCED, draft_vocab_size=REDUCED.vocab_size)
KINDS = {"reduced": REDUCED, "tied": TIED, "whole": WHOLE}
IDS = [256, 3, 77, 301, 12, 12, 250]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("medusa")


def checkpoint(folder: Path, kind: str) -> Path:
    torch.set_num_threads(1)
    return generate_checkpoint(KINDS[kind], 0, folder / kind)


def heads_of(engine: NativeEngine) -> MedusaHeads:
    draft = engine.roots()["draft"]
    assert isinstance(draft, MedusaHeads)
    return draft


@every_kind
def test_every_head_is_the_formula(folder: Path, kind: str) -> None:
    config: MedusaConfig = KINDS[kind]
    where = checkpoint(folder, kind)
    w = {name.removeprefix("medusa_heads."): t for name, t in widened(where).items()}
    draft, batch = heads_of(start_engine(where, config)), whole_prompt(IDS)
    hidden = torch.randn(len(IDS), config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.tensor([1, 4])
    with torch.no_grad():
        drafted = draft(batch, hidden, [])
        said = [draft.head_logits(head, drafted, rows, batch) for head in range(config.num_draft_heads)]
        assert torch.equal(draft.logits(drafted, rows, batch), said[0])
    for head, logits in enumerate(said):
        x = hidden[rows].double()
        for layer in range(config.num_draft_layers):
            inner = x @ w[f"blocks.{head}.layers.{layer}.weight"].t()
            x = x + inner / (1 + torch.exp(-inner))
        expected = x @ w[f"lm_heads.{0 if kind == 'tied' else head}.weight"].t()
        assert logits.shape == (2, config.vocab_size)
        if kind == "whole":
            assert relative(logits, expected) < 0.02
            continue
        tokens = w["token_map"].long().tolist()
        assert relative(torch.stack([logits[:, token] for token in tokens], dim=1), expected) < 0.02
        others = [token for token in range(config.vocab_size) if token not in tokens]
        assert (logits[:, others] == -torch.inf).all()


@every_kind
@pytest.mark.parametrize("start", ["safetensors", "streamed", "dummy"])
def test_the_map_is_the_checkpoint_s_and_stays_valid(folder: Path, kind: str, start: str) -> None:
    config, where = KINDS[kind], checkpoint(folder, kind)
    engine = start_engine(where, config, OLD, start)
    maps = {path: t for path, t in held(engine).items() if "token_map" in path}
    assert list(maps) == ([] if kind == "whole" else ["draft:token_map.token_map"])
    for path, token_map in maps.items():
        assert token_map.dtype == torch.int64
        assert ((token_map >= 0) & (token_map < config.vocab_size)).all()
        old, place = widened(where)["medusa_heads.token_map"].long(), token_map.data_ptr()
        for update in ("layerwise", "direct"):
            engine.update(NEW, update)
            assert torch.equal(held(engine)[path], old ^ 1)  # every id changed, all different and in range
            engine.update(OLD, update)
            assert torch.equal(held(engine)[path], old)
            assert held(engine)[path].data_ptr() == place
        assert len(set(old.tolist())) == config.draft_vocab_size
        proposed = {token for one in generate(engine, prompts(9, 4), 6) for token in one[4][1:]}
        assert proposed <= set(old.tolist())


@pytest.mark.parametrize("kind", ["tied", "whole"])
def test_ranks_together_equal_one(folder: Path, kind: str, run_ranks: RanksRunner) -> None:
    where, config = checkpoint(folder, kind), KINDS[kind]
    spec = make_spec(where, config, Parallelism(tp=2))

    def serve(rank: int) -> object:
        engine = NativeEngine(spec, rank)
        engine.start(OLD, "safetensors")
        return generate(engine, prompts(7, 3), 4)

    assert run_ranks(2, serve)[0] == generate(start_engine(where, config), prompts(7, 3), 4)


def test_every_rank_holds_the_whole_map_and_its_share_of_the_heads() -> None:
    for rank in range(4):
        draft = roots_of_rank(REDUCED, tp=4, rank=rank)["draft"]
        assert draft.get_parameter("token_map.token_map").shape == (128,)
        assert draft.get_parameter("lm_heads.2.weight").shape == (32, 128)
