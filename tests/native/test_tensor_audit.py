"""What the auditor writes, for an engine small enough to see every record of it."""

import gc
import json
import re
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectors.fingerprint import fingerprint
from collectors.parts import audit_parts, numeric_cast
from collectors.tensors import TensorAuditor
from collectors.trace import StorageTrace
from orchestrator.judge.records import Reader
from workloads.engines.protocol import Part, Rule

torch.set_num_threads(1)

Record = dict[str, Any]
EXPERTS, ROWS, COLUMNS, PADDED = 4, 6, 8, 7  # an expert's matrix is padded by one row


class Checkpoint:
    """Tensors in memory behind the reader's interface."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            f"experts.{i}.weight": torch.randint(0, 256, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
            for i in range(EXPERTS)
        }
        self.tensors["weight_scale"] = torch.randint(118, 132, (ROWS,), generator=generator).to(torch.uint8)
        self.tensors["norm.weight"] = torch.rand(16, generator=generator).bfloat16()

    def slice(self, name: str, region: tuple[tuple[int, int], ...]) -> torch.Tensor:
        return self.tensors[name][tuple(slice(start, start + length) for start, length in region)]


class Engine:
    """One root with a norm whose upper half this rank holds, padded experts, scales and a derived copy."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.model = nn.Module()
        self.model.norm = nn.Module()
        self.model.norm.register_parameter("weight", nn.Parameter(torch.empty(8, dtype=torch.bfloat16)))
        self.model.fused = torch.zeros(EXPERTS, PADDED, COLUMNS, dtype=torch.uint8)
        self.model.register_buffer("scale", torch.zeros(ROWS, dtype=torch.uint8))
        self.model.derived = {"fp32": torch.zeros(8)}
        self.cache = torch.zeros(3, 5)
        self.extra_rules: list[Rule] = []
        self.load(checkpoint)

    @torch.no_grad()
    def load(self, checkpoint: Checkpoint) -> None:
        self.model.norm.weight.copy_(checkpoint.tensors["norm.weight"][8:])
        self.model.derived["fp32"].copy_(self.model.norm.weight)
        self.model.scale.copy_(checkpoint.tensors["weight_scale"])
        for i in range(EXPERTS):
            self.model.fused[i, :ROWS] = checkpoint.tensors[f"experts.{i}.weight"]

    def roots(self) -> Mapping[str, nn.Module]:
        return {"target": self.model}

    def parts(self, root: str) -> Sequence[Part]:
        norm, scale = self.model.norm.weight, self.model.scale
        matrix = ((0, ROWS), (0, COLUMNS))
        return [
            Part("target:norm.weight", "norm.weight", norm.detach(), "norm.weight", ((8, 8),)),
            Part("target:scale", "weight_scale", scale, "weight_scale", ((0, ROWS),)),
            *(
                Part(
                    "target:fused", f"experts.{i}", self.model.fused[i, :ROWS], f"experts.{i}.weight", matrix
                )
                for i in range(EXPERTS)
            ),
            Part("target:fused", "padding", self.model.fused[:, ROWS:], padding_value=0.0),
        ]

    def rules(self) -> Sequence[Rule]:
        return [
            *self.extra_rules,
            Rule("target:fused", "weight", "experts in the kernel's layout"),
            Rule("*.scale", "constant", "never matches: the path has no dot before it"),
            Rule("target:scale", "weight", "their scales"),
            Rule("target:derived*", "derived", "FP32 copy of the norm"),
        ]

    def runtime_tensors(self) -> Mapping[str, torch.Tensor]:
        return {"target:cache": self.cache}


def read(folder: Path, rank: int = 0) -> list[Record]:
    return [json.loads(line) for line in (folder / f"tensors-{rank:05d}.jsonl").read_text().splitlines()]


def observe(
    engine: Engine, tmp_path: Path, name: str = "fresh", checkpoint: Checkpoint | None = None
) -> list[Record]:
    TensorAuditor(engine).observe(tmp_path / name, 0, name, checkpoint or Checkpoint())
    return read(tmp_path / name)


def tensors(records: list[Record]) -> dict[str, Record]:
    return {record["path"]: record for record in records if record["kind"] == "tensor"}


def parts(records: list[Record]) -> dict[str, Record]:
    return {record["part"]: record for record in records if record["kind"] == "part"}


def source(records: list[Record]) -> Record:
    (found,) = (record for record in records if record["kind"] == "source")
    return found


# The records -----------------------------------------------------------------------------------------


def test_the_file_in_order_and_as_the_judge_reads_it(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    TensorAuditor(engine).observe(tmp_path / "fresh", 3, "fresh", Checkpoint())
    records = read(tmp_path / "fresh", rank=3)
    kinds = [record["kind"] for record in records]
    assert kinds == ["header", *["tensor"] * 5, *["part"] * 7, "source", "end"]
    assert records[0].items() >= {"rank": 3, "observation": "fresh", "root_count": 1}.items()
    reader = Reader(tmp_path)
    audit = reader.audit(tmp_path / "fresh", 3)
    assert reader.problems == []
    assert len(audit.tensors) == 5


def test_a_tensor_record(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.tied = {"again": engine.model.norm.weight}
    record = tensors(observe(engine, tmp_path))["target:norm.weight"]
    weight = engine.model.norm.weight
    assert record == {
        "kind": "tensor",
        "path": "target:norm.weight",
        "root": "target",
        "origin": "parameter",
        "class": "weight",
        "reason": "registered parameter",
        "dtype": "bfloat16",
        "shape": [8],
        "stride": [1],
        "nbytes": 16,
        "storage": weight.untyped_storage().data_ptr(),
        "offset": 0,
        "fp": fingerprint(weight),
        "slices": [],
        "nan": False,
        "const": None,
        "aliases": ["target:tied{'again'}"],
    }


def test_classes_come_from_the_first_rule_that_matches(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.unknown = torch.ones(2)
    engine.extra_rules = [Rule("*.again", "handle", "by another of its names")]
    engine.model.shared = nn.Module()
    engine.model.shared.again = engine.model.norm.weight
    found = {path: (r["class"], r["reason"]) for path, r in tensors(observe(engine, tmp_path)).items()}
    assert found == {
        "target:norm.weight": ("handle", "by another of its names"),
        "target:scale": ("weight", "their scales"),
        "target:fused": ("weight", "experts in the kernel's layout"),
        "target:unknown": ("unclassified", "no rule of the engine names it"),
        "target:derived{'fp32'}": ("derived", "FP32 copy of the norm"),
        "target:cache": ("runtime", "the engine declares its storage as runtime state"),
    }


def test_runtime_tensors_are_listed_but_not_hashed(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.view_of_cache = engine.cache[1:]
    engine.extra_rules = [Rule("target:norm*", "runtime", "for this test")]
    engine.runtime_tensors = lambda: {"target:cache": engine.cache, "states": engine.cache.clone()}
    found = tensors(observe(engine, tmp_path))
    runtime = {path: r for path, r in found.items() if r["class"] == "runtime"}
    # The cache is reached through the model's view of it, and listed at that path only.
    assert runtime.keys() == {"target:view_of_cache", "target:norm.weight", "runtime:states"}
    assert all(r["fp"] is None and r["nbytes"] for r in runtime.values())
    assert found["runtime:states"]["origin"] == "seen"
    assert found["target:view_of_cache"]["offset"] == 5


def test_vacuous_tensors_have_no_bytes_and_say_why(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.empty = torch.empty(0)
    engine.model.meta = torch.empty(4, device="meta")
    engine.model.lazy = nn.UninitializedParameter()
    engine.model.released = torch.ones(4)
    engine.model.released.untyped_storage().resize_(0)
    found = tensors(observe(engine, tmp_path))
    assert [found[f"target:{name}"]["nbytes"] for name in ("empty", "lazy", "meta", "released")] == [
        0,
        0,
        0,
        0,
    ]
    assert found["target:lazy"]["class"] == "weight"
    assert found["target:empty"]["fp"] == fingerprint(torch.empty(0))
    assert found["target:meta"]["fp"] is found["target:released"]["fp"] is None
    assert found["target:meta"]["reason"].endswith("no bytes to audit: it is on the meta device")
    assert "its storage holds 0 bytes of the 16" in found["target:released"]["reason"]


def test_nan_and_constant_bytes_show(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.poisoned = torch.full((6,), 0xFF, dtype=torch.uint8).view(torch.bfloat16)
    found = tensors(observe(engine, tmp_path))
    assert (found["target:poisoned"]["nan"], found["target:poisoned"]["const"]) == (True, 255)
    assert (found["target:norm.weight"]["nan"], found["target:norm.weight"]["const"]) == (False, None)


# Parts and coverage ----------------------------------------------------------------------------------


def test_parts_equal_their_checkpoint_slices(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    found = parts(observe(Engine(checkpoint), tmp_path))
    with_source = [record for record in found.values() if record["source"]]
    assert len(with_source) == EXPERTS + 2
    assert all(record["fp"] == record["expected"] for record in with_source)
    assert found["norm.weight"]["region"] == [[8, 8]]
    assert found["norm.weight"]["expected"] == fingerprint(checkpoint.tensors["norm.weight"][8:])
    padding = found["padding"]
    assert (padding["expected"], padding["source"], padding["padding_value"]) == (None, None, 0.0)
    assert (padding["const"], padding["nbytes"], padding["tensor"]) == (0, EXPERTS * COLUMNS, "target:fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("held", [[1.0, 1.0], [1.0, 0.5], [0.5, 0.5], [0.0, 0.0], [torch.nan, torch.nan]])
def test_padding_of_floats_records_its_number_where_it_holds_it(
    dtype: torch.dtype, held: list[float]
) -> None:
    """1.0 is no repeated byte, or has another byte than 1."""
    part = Part("target:scale", "padding", torch.tensor(held).to(dtype), padding_value=1.0)
    (record,) = (r for kind, r in audit_parts("target", [part], set(), Checkpoint(), {}) if kind == "part")
    assert (record["const"] == 1.0) == (held == [1.0, 1.0])


@pytest.mark.parametrize("held", [[-torch.inf, -torch.inf], [-torch.inf, 0.0], [0.0, 0.0]])
def test_padding_of_minus_infinity_is_recorded_as_text(held: list[float]) -> None:
    """Sinks of heads that fill up a kernel's tile; JSON has no infinity."""
    part = Part("target:sink", "padding", torch.tensor(held), padding_value=-torch.inf)
    (record,) = (r for kind, r in audit_parts("target", [part], set(), Checkpoint(), {}) if kind == "part")
    assert record["padding_value"] == "-inf"
    assert (record["const"] == "-inf") == (held == [-torch.inf, -torch.inf])
    json.dumps(record, allow_nan=False)


def test_an_experts_digest_is_the_same_as_part_slice_and_checkpoint_tensor(tmp_path: Path) -> None:
    """So that bytes found under another expert, rank or name are recognised."""
    checkpoint = Checkpoint()
    engine = Engine(checkpoint)
    engine.model.fused = engine.model.fused[:, :ROWS].contiguous()
    engine.parts = lambda root: Engine.parts(engine, root)[:-1]
    records = observe(engine, tmp_path)
    for i in range(EXPERTS):
        digest = fingerprint(checkpoint.tensors[f"experts.{i}.weight"])
        assert tensors(records)["target:fused"]["slices"][i] == parts(records)[f"experts.{i}"]["fp"] == digest


def test_a_part_of_more_dimensions_has_one_digest(tmp_path: Path) -> None:
    """A convolution's [channels, 1, taps] equals the checkpoint's in whatever shape it is held."""
    engine, taps = Engine(Checkpoint()), torch.arange(24, dtype=torch.uint8)
    checkpoint = Checkpoint()
    checkpoint.tensors["conv"] = taps.view(6, 1, 4)
    region = ((0, 6), (0, 1), (0, 4))
    engine.parts = lambda root: [Part("target:scale", "conv", taps.view(6, 4), "conv", region)]
    found = parts(observe(engine, tmp_path, checkpoint=checkpoint))["conv"]
    assert found["fp"] == found["expected"] == fingerprint(taps)


def test_swapped_experts_and_rows_are_located(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    engine = Engine(checkpoint)
    before = observe(engine, tmp_path, "before")
    engine.model.fused[[1, 2]] = engine.model.fused[[2, 1]]
    engine.model.fused[3, [0, 5]] = engine.model.fused[3, [5, 0]]
    after = observe(engine, tmp_path, "after")
    old, new = (tensors(records)["target:fused"]["slices"] for records in (before, after))
    assert [i for i in range(EXPERTS) if old[i] != new[i]] == [1, 2, 3]
    assert (new[1], new[2]) == (old[2], old[1])
    wrong = [name for name, r in parts(after).items() if r["expected"] and r["fp"] != r["expected"]]
    assert wrong == ["experts.1", "experts.2", "experts.3"]
    # rows of expert 3 changed places: its own bytes in another order; experts 1 and 2 hold each other's
    assert [name for name, r in parts(after).items() if r["permuted"]] == ["experts.3"]
    assert not any(r["permuted"] for r in parts(before).values())


def test_wrong_bytes_of_one_value_are_told(tmp_path: Path) -> None:
    """As where padding was filled over real rows."""
    checkpoint = Checkpoint()
    engine = Engine(checkpoint)
    engine.model.fused[1, 2:4] = 0
    engine.model.fused[2] += 1
    found = parts(observe(engine, tmp_path, checkpoint=checkpoint))
    assert found["experts.1"]["patch"] == 0
    assert found["experts.2"]["patch"] is None
    assert found["experts.3"]["patch"] is None


def test_numeric_casts_of_scales_are_recognised(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    engine = Engine(checkpoint)
    target = torch.empty(ROWS, dtype=torch.uint8)
    target.copy_(checkpoint.tensors["weight_scale"].view(torch.float8_e8m0fnu))  # what a careless loader does
    engine.model.scale.copy_(target)
    found = parts(observe(engine, tmp_path))
    assert found["weight_scale"]["fp"] == found["weight_scale"]["cast"] != found["weight_scale"]["expected"]
    assert [r["cast"] for name, r in found.items() if name != "weight_scale"] == [None] * (EXPERTS + 2)
    scale = torch.full((2, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    checkpoint = Checkpoint()
    checkpoint.tensors["wq_a.scale"] = scale  # by its dtype, whatever its name
    part = Part("target:wq_a", "wq_a.scale", numeric_cast(scale), "wq_a.scale", ((0, 2), (0, 2)))
    (record,) = (r for kind, r in audit_parts("target", [part], set(), checkpoint, {}) if kind == "part")
    assert record["fp"] == record["cast"] != record["expected"]
    assert numeric_cast(torch.tensor([120, 127, 130], dtype=torch.uint8)).tolist() == [0, 1, 8]


def test_coverage_is_complete_when_every_source_lies_in_an_audited_tensor(tmp_path: Path) -> None:
    expected = EXPERTS * ROWS * COLUMNS + ROWS + 16
    assert source(observe(Engine(Checkpoint()), tmp_path)) == {
        "kind": "source",
        "root": "target",
        "bytes_expected": expected,
        "bytes_audited": expected,
        "missing": [],
    }


def test_sources_without_an_audited_tensor_are_missing(tmp_path: Path) -> None:
    """An emptied parameter, a tensor that no walk reaches, one that is not hashed, and a part without bytes."""
    engine = Engine(Checkpoint())
    values = [*engine.parts("target")]
    engine.model.norm.weight = nn.Parameter(torch.empty(0))
    engine.extra_rules = [Rule("target:scale", "runtime", "for this test")]
    first = values[2]
    values[2] = Part("target:elsewhere", first.name, first.value, first.source, first.region)
    values[3] = Part("target:fused", "experts.1", torch.empty(0), values[3].source, values[3].region)
    engine.parts = lambda root: values
    found = source(observe(engine, tmp_path))
    assert found["missing"] == ["experts.0.weight", "experts.1.weight", "norm.weight", "weight_scale"]
    assert found["bytes_expected"] == EXPERTS * ROWS * COLUMNS + ROWS + 16
    assert found["bytes_audited"] == 2 * ROWS * COLUMNS


def test_a_source_in_two_tensors_counts_once_and_an_alias_covers(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    engine.model.alias = engine.model.scale
    scale = engine.parts("target")[1]
    engine.parts = lambda root: [
        Part("target:alias", "a", scale.value, scale.source, scale.region),
        Part("target:nowhere", "b", scale.value, scale.source, scale.region),
    ]
    found = source(observe(engine, tmp_path))
    assert (found["bytes_expected"], found["bytes_audited"], found["missing"]) == (ROWS, ROWS, [])


def test_parts_are_hashed_in_bounded_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Checkpoint())
    want = observe(engine, tmp_path, "whole")[1:]
    monkeypatch.setattr("collectors.parts._PARTS_AT_ONCE", 100)
    assert observe(engine, tmp_path, "batches")[1:] == want


def test_slices_of_a_checkpoint_are_not_read_again_and_not_mixed_with_anothers(tmp_path: Path) -> None:
    old, new = Checkpoint(0), Checkpoint(1)
    engine = Engine(old)
    auditor, reads = TensorAuditor(engine), []
    for checkpoint in (old, new):
        checkpoint.slice = lambda *key, inner=checkpoint.slice: reads.append(key) or inner(*key)
    counts = []
    for name, checkpoint in (("a", old), ("b", new), ("c", old)):
        auditor.observe(tmp_path / name, 0, name, checkpoint)
        counts.append(len(reads))
    every = EXPERTS + 2
    assert counts == [every, 3 * every, 3 * every]  # in b nothing is right, and each is looked at once more
    a, b, c = ([(r["expected"], r["cast"]) for r in parts(read(tmp_path / name)).values()] for name in "abc")
    assert a == c
    assert all(x != y for x, y in zip(a, b, strict=True) if x != (None, None))
    assert source(read(tmp_path / "c")) == source(read(tmp_path / "a"))


# Storage ---------------------------------------------------------------------------------------------


def test_a_storage_that_was_seen_is_never_given_away(tmp_path: Path) -> None:
    """Freed and reallocated, a derived tensor of equal size would mostly get the address it had."""
    engine = Engine(Checkpoint())
    auditor = TensorAuditor(engine)
    seen = set()
    for i in range(8):
        auditor.observe(tmp_path / str(i), 0, str(i), Checkpoint())
        if i == 0:
            first = tensors(read(tmp_path / "0"))["target:derived{'fp32'}"]["storage"]
        else:
            seen.add(tensors(read(tmp_path / str(i)))["target:derived{'fp32'}"]["storage"])
        engine.model.derived["fp32"] = torch.zeros(8)
        engine.model.norm.weight.data = torch.ones(
            8, dtype=torch.bfloat16
        )  # keeps the tensor, drops its storage
    assert first not in seen
    assert auditor._held["target:norm.weight"].data_ptr() != engine.model.norm.weight.data_ptr()


def test_two_observations_of_an_engine_at_rest_are_equal(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    auditor = TensorAuditor(engine)
    for name in ("a", "b"):
        auditor.observe(tmp_path / name, 0, name, Checkpoint())
    assert read(tmp_path / "a")[1:] == read(tmp_path / "b")[1:]


# Traced forwards ---------------------------------------------------------------------------------------


class Forward(nn.Module):
    """Reads tensors that it holds by weak reference only, as a kernel holds workspaces by raw pointer."""

    def __init__(self, *hidden: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.hidden = [weakref.ref(tensor) for tensor in hidden]
        self.made: list[torch.Tensor] = []

    def forward(self, made: list[torch.Tensor]) -> None:
        x = torch.ones(2, 3) @ self.weight + torch.tensor([1.0, 2.0, 3.0])
        for ref in self.hidden:
            x = torch.cat([x, ref()[:1]])
        made.append(x + 1)


def test_storages_that_a_forward_reads_and_no_walk_reaches_are_recorded(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    workspace, released, made = torch.ones(4, 3), torch.ones(5, 3), []
    engine.cache = torch.ones(6, 3)
    engine.model.forward_pass = Forward(workspace, released, engine.cache)
    auditor = TensorAuditor(engine)
    with torch.no_grad(), auditor.trace():
        engine.model.forward_pass(made)
    del released
    auditor.observe(tmp_path / "fresh", 0, "fresh", Checkpoint())
    unreachable = [record for record in read(tmp_path / "fresh") if record["kind"] == "unreachable"]
    assert made
    assert unreachable == [
        {
            "kind": "unreachable",
            "storage": workspace.untyped_storage().data_ptr(),
            "nbytes": 48,
            "dtype": "float32",
            "shape": [4, 3],
            "op": "aten.slice.Tensor",
        }
    ]
    engine.model.found_now = workspace
    auditor.observe(tmp_path / "again", 0, "again", Checkpoint())
    assert not [record for record in read(tmp_path / "again") if record["kind"] == "unreachable"]


def test_a_trace_changes_no_result_and_sees_lists_and_keywords() -> None:
    a, b, out = torch.ones(3), torch.ones(3), torch.zeros(6)
    with StorageTrace() as trace:
        result = torch.cat([a, b], out=out)
    assert result is out
    assert out.tolist() == [1.0] * 6
    assert [seen.address for seen in trace.unreachable(set())] == [t.data_ptr() for t in (a, b, out)]


# Failures ----------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_with_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "fresh"
    folder.mkdir()
    (folder / "tensors-00000.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        TensorAuditor(Engine(Checkpoint())).observe(folder, 0, "fresh", Checkpoint())
    assert caught.value.filename == str(folder / "tensors-00000.jsonl")


def test_a_folder_that_cannot_be_made_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/fresh"):
        TensorAuditor(Engine(Checkpoint())).observe(tmp_path / "file" / "fresh", 0, "fresh", Checkpoint())


@pytest.mark.parametrize("enabled", [True, False])
def test_pythons_collector_is_left_as_it_was(tmp_path: Path, enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        observe(Engine(Checkpoint()), tmp_path)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_failed_audit_leaves_no_end_record(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())

    def broken(name: str, region: object) -> torch.Tensor:
        raise KeyError(name)

    checkpoint = Checkpoint()
    checkpoint.slice = broken
    with pytest.raises(KeyError, match=re.escape("norm.weight")):
        TensorAuditor(engine).observe(tmp_path / "fresh", 0, "fresh", checkpoint)
    assert gc.isenabled()
    assert "end" not in Counter(record["kind"] for record in read(tmp_path / "fresh"))


def test_a_part_whose_value_has_no_bytes_is_unhashed_not_skipped(tmp_path: Path) -> None:
    engine = Engine(Checkpoint())
    part = engine.parts("target")[1]
    engine.parts = lambda root: [Part("target:scale", "s", part.value.to("meta"), part.source, part.region)]
    records = observe(engine, tmp_path)
    assert (parts(records)["s"]["fp"], parts(records)["s"]["nbytes"]) == (None, 0)
    assert source(records)["missing"] == ["weight_scale"]
