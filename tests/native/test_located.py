"""Coverage of an engine that does not say where its weights lie: by content, with the kernel's copies, in shards."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectors.located import LocatedPieces
from collectors.tensors import TensorAuditor
from collectors.walk import Found
from workloads.engines.protocol import Part, Rule
from workloads.loading.checkpoint import CheckpointReader, open_checkpoint
from workloads.loading.shards import TensorMeta
from workloads.loading.writer import write_checkpoint

TENSORS = {
    "model.embed.weight": (32, 16),
    "model.layers.0.q.weight": (16, 16),
    "model.layers.0.k.weight": (8, 16),
    "model.layers.0.down.weight": (16, 32),
    "model.layers.0.norm.weight": (16,),
    "model.rotary_emb.inv_freq": (8,),
}
NOT_LOADED = [Rule("*.inv_freq", "not_loaded", "computed from the configuration")]


def values(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + list(TENSORS).index(name))
    return torch.randn(TENSORS[name], generator=generator)


def write(folder: Path, tensors: dict[str, Tensor]) -> CheckpointReader:
    metas = [(name, TensorMeta("F32", tuple(tensor.shape))) for name, tensor in tensors.items()]
    return open_checkpoint(write_checkpoint(folder, str(folder), metas, tensors.__getitem__, 1 << 30, {}))


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[CheckpointReader]:
    return [write(tmp_path / str(seed), {name: values(name, seed) for name in TENSORS}) for seed in (0, 1)]


def live(seed: int, rank: int = 0, tp: int = 1) -> dict[str, Tensor]:
    """What an engine makes of the checkpoint: q and k merged by rows, down split by columns, embeddings by rows."""

    def rows(name: str) -> Tensor:
        return values(name, seed).chunk(tp, 0)[rank]

    return {
        "target:model.embed.weight": rows("model.embed.weight"),
        "target:model.layers.0.qk.weight": torch.cat(
            [rows("model.layers.0.q.weight"), rows("model.layers.0.k.weight")]
        ),
        "target:model.layers.0.down.weight": values("model.layers.0.down.weight", seed)
        .chunk(tp, 1)[rank]
        .contiguous(),
        "target:model.layers.0.norm.weight": values("model.layers.0.norm.weight", seed),
    }


def audit(
    pieces: LocatedPieces, tensors: dict[str, Tensor], reader: CheckpointReader, packed: tuple[str, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found = [
        Found(path, "target", "packed" if path in packed else "parameter", tensor, 1 + i)
        for i, (path, tensor) in enumerate(tensors.items())
    ]
    records = list(pieces.records("target", found, set(tensors), reader))
    [source] = [record for kind, record in records if kind == "source"]
    return [record for kind, record in records if kind == "part"], source


def wrong(parts: list[dict[str, Any]]) -> set[str]:
    return {part["source"] for part in parts if part["fp"] != part["expected"]}


def test_everything_that_is_owed_is_found_and_held_against_later_checkpoints(
    checkpoints: list[CheckpointReader],
) -> None:
    pieces = LocatedPieces(1, NOT_LOADED)
    parts, source = audit(pieces, live(0), checkpoints[0])
    assert source["shared"]
    assert source["excused"] == {"model.rotary_emb.inv_freq": "computed from the configuration"}
    assert source["bytes_audited"] == source["bytes_expected"] == 4 * (32 * 16 + 24 * 16 + 16 * 32 + 16)
    assert not source["missing"]
    assert not wrong(parts)
    parts, source = audit(pieces, live(1), checkpoints[1])
    assert len(parts) == 5
    assert not wrong(parts)
    assert source["bytes_audited"] == source["bytes_expected"]


def test_a_stale_tensor_is_a_wrong_part_and_not_covered(checkpoints: list[CheckpointReader]) -> None:
    pieces = LocatedPieces(1, NOT_LOADED)
    audit(pieces, live(0), checkpoints[0])
    stale = live(1) | {"target:model.layers.0.norm.weight": values("model.layers.0.norm.weight", 0)}
    parts, source = audit(pieces, stale, checkpoints[1])
    assert wrong(parts) == {"model.layers.0.norm.weight"}
    assert source["missing"] == ["model.layers.0.norm.weight"]


def test_swapped_rows_are_a_wrong_part(checkpoints: list[CheckpointReader]) -> None:
    pieces = LocatedPieces(1, NOT_LOADED)
    audit(pieces, live(0), checkpoints[0])
    swapped = live(0)
    swapped["target:model.embed.weight"][:2] = swapped["target:model.embed.weight"][:2].flip(0).clone()
    parts, _ = audit(pieces, swapped, checkpoints[0])
    assert wrong(parts) == {"model.embed.weight"}


def test_shards_of_two_ranks_cover_the_checkpoint_together(checkpoints: list[CheckpointReader]) -> None:
    sources = [audit(LocatedPieces(2, NOT_LOADED), live(0, rank, 2), checkpoints[0])[1] for rank in (0, 1)]
    halves = [source["regions"]["model.layers.0.down.weight"] for source in sources]
    assert halves == [[((0, 16), (0, 16))], [((0, 16), (16, 16))]]
    assert [source["regions"]["model.embed.weight"] for source in sources] == [
        [((0, 16), (0, 16))],
        [((16, 16), (0, 16))],
    ]


def test_random_weights_hold_nothing_until_the_real_ones_arrive(checkpoints: list[CheckpointReader]) -> None:
    pieces = LocatedPieces(1, NOT_LOADED)
    random = {path: torch.rand_like(tensor) for path, tensor in live(0).items()}
    parts, source = audit(pieces, random, checkpoints[0])
    assert not parts
    assert source["bytes_audited"] == 0
    assert "None of its 32 rows" in source["reasons"]["model.embed.weight"]
    parts, source = audit(pieces, live(0), checkpoints[0])
    assert source["bytes_audited"] == source["bytes_expected"]


def test_a_kernel_that_loses_the_sign_of_zero_still_holds_its_weight(tmp_path: Path) -> None:
    weight = torch.randn(8, 8)
    weight[0] = -0.0
    weight[3, 3] = -0.0
    path = "target:w.<packed>"
    reader = write(tmp_path / "zeros", {"w": weight})
    parts, source = audit(LocatedPieces(1, []), {path: weight + 0.0}, reader, (path,))
    assert not wrong(parts)
    assert source["bytes_audited"] == source["bytes_expected"] == 256


class Drafted:
    """A target and a draft of the same model, by seed of their weights."""

    def __init__(self, target: int, draft: int) -> None:
        self.models = {"target": nn.Module(), "draft": nn.Module()}
        self.load("target", target)
        self.load("draft", draft)

    def load(self, root: str, seed: int) -> None:
        for path, tensor in live(seed).items():
            name = path.removeprefix("target:").replace(".", "_")
            self.models[root].register_parameter(name, nn.Parameter(tensor))

    def roots(self) -> Mapping[str, nn.Module]:
        return self.models

    def parts(self, root: str) -> Sequence[Part]:
        return ()

    def rules(self) -> Sequence[Rule]:
        return ()

    def runtime_tensors(self) -> Mapping[str, Tensor]:
        return {}


def missing(folder: Path) -> dict[str, list[str]]:
    """What each root lacks of its checkpoint."""
    records = map(json.loads, (folder / "tensors-00000.jsonl").read_text().splitlines())
    return {record["root"]: record["missing"] for record in records if record["kind"] == "source"}


def test_a_draft_is_held_against_the_checkpoint_of_its_own(
    checkpoints: list[CheckpointReader], tmp_path: Path
) -> None:
    engine = Drafted(target=0, draft=1)
    auditor = TensorAuditor(engine, LocatedPieces(1, NOT_LOADED, whole=("target", "draft")))
    auditor.observe(tmp_path / "fresh", 0, "fresh", checkpoints[0], {"draft": checkpoints[1]})
    assert missing(tmp_path / "fresh") == {"target": [], "draft": []}
    engine.load("target", 1)
    auditor.observe(tmp_path / "stale", 0, "stale", checkpoints[1], {"draft": checkpoints[0]})
    assert missing(tmp_path / "stale") == {
        "target": [],
        "draft": sorted(TENSORS.keys() - {"model.rotary_emb.inv_freq"}),
    }


def test_what_a_draft_holds_of_its_target_s_checkpoint_counts_for_the_target(
    checkpoints: list[CheckpointReader], tmp_path: Path
) -> None:
    """As MTP layers, which the target leaves to its draft."""
    engine = Drafted(target=0, draft=0)
    norm = "model.layers.0.norm.weight"
    delattr(engine.models["target"], norm.replace(".", "_"))
    TensorAuditor(engine, LocatedPieces(1, NOT_LOADED)).observe(tmp_path, 0, tmp_path.name, checkpoints[0])
    assert missing(tmp_path) == {"target": [norm], "draft": []}
    records = map(json.loads, (tmp_path / "tensors-00000.jsonl").read_text().splitlines())
    [draft] = [r for r in records if r["kind"] == "source" and r["root"] == "draft"]
    assert draft["of"] == "target"
    assert draft["regions"][norm] == [[[0, 16]]]
    assert draft["reasons"] == {}
