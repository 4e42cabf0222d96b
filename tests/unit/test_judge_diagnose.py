"""Every failure's signature in the records gets its own diagnosis as the primary finding; a clean cell none."""

from collections.abc import Callable
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, codes, primary


def test_a_clean_attempt_passes(tmp_path: Path) -> None:
    result = World().judge(tmp_path)
    assert result["verdict"] == "PASS"
    assert result["findings"] == []
    assert result["error"] is None


def test_stale_tensor(tmp_path: Path) -> None:
    world = World()
    for audit, old in zip(world.candidate.audits["updated"], world.candidate.audits["started"], strict=True):
        audit.copy_from(old, fx.NORM)
    finding = primary(world, tmp_path, "stale")
    assert finding["observation"] == "updated"
    assert finding["ranks"] == [0, 1, 2, 3]
    assert finding["path"] == fx.NORM
    assert "still holds its value from before the update" in finding["detail"]
    old_print = world.candidate.audits["started"][0].part(fx.NORM, "weight")["fp"]
    assert f"now {old_print[:8]}, before {old_print[:8]}, expected " in finding["detail"]


def test_stale_derived_tensor(tmp_path: Path) -> None:
    world = World()
    for observation in ("updated", "repeated"):
        for audit, old in zip(
            world.candidate.each(observation), world.candidate.each("started"), strict=True
        ):
            audit.copy_from(old, fx.W_UV)
    finding = primary(world, tmp_path, "stale")
    assert finding["path"] == fx.W_UV


def test_stale_draft_without_a_load(tmp_path: Path) -> None:
    world = World()
    for observation in ("updated", "repeated"):
        for audit, old in zip(
            world.candidate.each(observation), world.candidate.each("started"), strict=True
        ):
            audit.copy_from(old, fx.DRAFT)
    for events in world.candidate.events.values():
        events[:] = [e for e in events if e["root"] == "target" or e["load"] == 0]
    finding = primary(world, tmp_path, "stale")
    assert "`draft`" in finding["detail"]
    assert "took no part in the load" in finding["detail"]
    assert [c["code"] for c in finding["consequences"]].count("stale") >= 1


def test_stale_padding_is_told_from_stale_weights(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated", "repeated"):
        audit.parts[fx.EXPERTS]["padding"] |= {"fp": fx.fp("left over", audit.rank), "const": None}
        audit.refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "stale_padding")
    assert "left-over bytes where 0 belongs" in finding["detail"]


def test_poisoned_padding_was_never_filled(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.parts[fx.SCALES]["padding"] |= {"fp": fx.fp("poison"), "const": 255}
        audit.refresh(fx.SCALES)
    finding = primary(world, tmp_path, "stale_padding")
    assert "poison of fresh memory, where 127 belongs" in finding["detail"]


def test_wrong_padding_value_in_candidate_and_reference(tmp_path: Path) -> None:
    world = World()
    gangs = [world.candidate, *world.fresh.values()]
    for audit in (a for gang in gangs for audits in gang.audits.values() for a in audits):
        audit.parts[fx.SCALES]["padding"] |= {"fp": fx.fp("padding", 0), "const": 0}
        audit.refresh(fx.SCALES)
    finding = primary(world, tmp_path, "wrong_padding_value")
    assert "0 where 127 belongs" in finding["detail"]
    assert finding["checks"] == ["updated_is_checkpoint"]


def test_numeric_cast_of_exponents(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for part in audit.parts[fx.SCALES].values():
            part["fp"] = part["cast"] or part["fp"]
        audit.refresh(fx.SCALES)
    finding = primary(world, tmp_path, "numeric_cast")
    assert "E8M0" in finding["detail"]
    assert any(part.endswith("weight_scale") for part in finding["parts"])


def test_weights_under_padding_of_an_earlier_load(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        name = next(name for name, part in audit.parts[fx.SCALES].items() if part["source"] is not None)
        audit.parts[fx.SCALES][name] |= {"fp": fx.fp("partly overwritten"), "patch": 127}
        audit.refresh(fx.SCALES)
    finding = primary(world, tmp_path, "overwritten_by_padding")
    assert "all its wrong bytes are 127, the value of the padding" in finding["detail"]


def test_derived_tensor_that_does_not_follow_from_right_weights(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated", "repeated", "back"):
        audit.tensors[fx.W_UV]["fp"] = fx.fp("half of it", audit.checkpoint, audit.rank % 2)
    finding = primary(world, tmp_path, "wrong_derived")
    assert finding["path"] == fx.W_UV
    assert "rebuilt with another setting" in finding["detail"]


def test_swapped_gate_and_up(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for name, part in audit.parts[fx.EXPERTS].items():
            other = name.replace(".w1.", ".w#.").replace(".w3.", ".w1.").replace(".w#.", ".w3.")
            part["fp"] = audit.parts[fx.EXPERTS][other]["expected"] or part["fp"]
        audit.refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "found_elsewhere")
    assert "experts.0.w1.weight_weight]" in finding["detail"]
    assert "it holds layers.1.mlp.experts.0.w3.weight_weight: gate and up are swapped" in finding["detail"]


def test_experts_of_another_rank(tmp_path: Path) -> None:
    world = World()
    audits = world.candidate.audits["updated"]
    for part, theirs in zip(
        audits[0].parts[fx.EXPERTS].values(), audits[1].parts[fx.EXPERTS].values(), strict=True
    ):
        part["fp"] = theirs["expected"] or part["fp"]
    audits[0].refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "found_elsewhere")
    assert "which belongs on rank 1: another expert's weights" in finding["detail"]
    assert finding["ranks"] == [0]


def test_a_reference_with_the_same_fault_is_no_place(tmp_path: Path) -> None:
    """The swap happens on every load, so a fresh start holds the same wrong bytes at the same wrong place."""
    world = World()
    for gang in (world.candidate, *world.fresh.values()):
        for audits in gang.audits.values():
            theirs = [part["expected"] for part in audits[1].parts[fx.EXPERTS].values()]
            for part, expected in zip(audits[0].parts[fx.EXPERTS].values(), theirs, strict=True):
                part["fp"] = expected or part["fp"]
            audits[0].refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "found_elsewhere")
    assert "which belongs on rank 1: another expert's weights" in finding["detail"]


def test_every_rank_keeps_the_first_shard(tmp_path: Path) -> None:
    world = World()
    first = world.candidate.audits["updated"][0]
    for audit in world.candidate.each("updated"):
        audit.copy_from(first, fx.O_PROJ)
    finding = primary(world, tmp_path, "found_elsewhere")
    assert "it holds the shard of rank 0" in finding["detail"]
    assert finding["ranks"] == [1, 3]


def test_permuted_slices_without_parts(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.tensors[fx.W_UV] |= {"slices": ["b" * 32, "a" * 32], "fp": fx.fp("swapped")}
    for audit in world.fresh["new"].each("fresh"):
        audit.tensors[fx.W_UV]["slices"] = ["a" * 32, "b" * 32]
    finding = primary(world, tmp_path, "found_elsewhere")
    assert "slice 0 holds what belongs in slice 1" in finding["detail"]


def test_parts_whose_bytes_are_permuted(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for part in audit.parts[fx.EXPERTS].values():
            if part["source"] is not None:
                part |= {"fp": fx.fp("permuted", part["expected"]), "permuted": True}
        audit.refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "wrong_layout")
    assert "right bytes in the wrong order" in finding["detail"]


def test_parts_that_are_converted_once_too_often(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        for part in audit.parts[fx.EXPERTS].values():
            if part["source"] is not None:
                part |= {"fp": fx.fp("decayed", part["expected"]), "decayed": True}
        audit.refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "processed_twice")
    assert "converted once more than the kernel expects" in finding["detail"]
    assert "it is -exp of what the checkpoint holds" in finding["detail"]


def test_a_part_that_was_permuted_once_too_often_is_nowhere_else(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        right = world.fresh["new"].audits["fresh"][audit.rank].tensors[fx.O_PROJ]
        audit.part(fx.O_PROJ, "weight")["fp"] = right["fp"]
        audit.refresh(fx.O_PROJ)
    finding = primary(world, tmp_path, "wrong_layout")
    assert "in the checkpoint's order it reads as the right tensor does in the kernel's" in finding["detail"]


def test_right_parts_in_the_wrong_order(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.tensors[fx.O_PROJ]["fp"] = fx.fp("another order")
    finding = primary(world, tmp_path, "wrong_layout")
    assert "right bytes in the wrong order" in finding["detail"]


def test_moved_storage_with_right_values(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated", "repeated", "back"):
        audit.tensors[fx.W_UV]["storage"] += 512
    finding = primary(world, tmp_path, "moved")
    assert finding["checks"] == ["nothing_moved"]
    assert [c["observation"] for c in finding["consequences"]] == ["repeated", "back"]


def test_storage_that_a_graph_still_reads_follows_from_the_move(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated", "repeated", "back"):
        audit.tensors[fx.W_UV]["storage"] += 512
        storage = {
            "kind": "unreachable",
            "storage": 7,
            "nbytes": 64,
            "dtype": "bfloat16",
            "shape": [2],
            "op": "mm",
        }
        audit.unreachable.append(storage)
    finding = primary(world, tmp_path, "moved")
    assert ("unclassified", "updated") in [(c["code"], c["observation"]) for c in finding["consequences"]]


def test_storage_out_of_reach_alone_is_a_finding(tmp_path: Path) -> None:
    world = World()
    world.candidate.audits["back"][1].unreachable.append(
        {"kind": "unreachable", "storage": 7, "nbytes": 64, "dtype": "bfloat16", "shape": [2], "op": "mm"}
    )
    finding = primary(world, tmp_path, "unclassified")
    assert "read memory that no walk of the modules reaches (rank 1)" in finding["detail"]
    assert "read by mm" in finding["detail"]


def test_moved_is_not_asked_of_runtime_state(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.tensors[fx.KV]["storage"] += 512
        audit.tensors[fx.HANDLE] |= {"storage": 1, "fp": fx.fp("another pointer")}
    assert world.judge(tmp_path)["verdict"] == "PASS"


def test_replica_that_disagrees(tmp_path: Path) -> None:
    world = World(tp=1, dp=4, ep=4)
    world.candidate.audits["updated"][2].tensors[fx.W_UV]["fp"] = fx.fp("bit flip")
    finding = primary(world, tmp_path, "replicas_differ")
    assert finding["ranks"] == [2]
    assert [c["code"] for c in finding["consequences"]] == [
        "wrong_derived",
        "differs",
    ]  # from fresh, and repeated from updated


def test_experts_differ_between_expert_ranks_and_are_no_replicas(tmp_path: Path) -> None:
    world = World(tp=1, dp=4, ep=2)
    audits = world.candidate.audits["updated"]
    assert audits[0].tensors[fx.EXPERTS]["fp"] != audits[1].tensors[fx.EXPERTS]["fp"]
    assert world.judge(tmp_path / "clean")["verdict"] == "PASS"
    audits[3].part(fx.EXPERTS, "experts.4.w1.weight_weight")["fp"] = fx.fp("bit flip")
    audits[3].refresh(fx.EXPERTS)
    finding = primary(world, tmp_path / "flipped", "replicas_differ")
    assert finding["ranks"] == [3]


def test_checkpoint_mismatch_is_what_remains(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.part(fx.NORM, "weight")["fp"] = fx.fp("noise")
        audit.refresh(fx.NORM)
    finding = primary(world, tmp_path, "checkpoint_mismatch")
    assert set(finding["checks"]) == {"updated_equals_fresh", "updated_is_checkpoint"}


def test_what_is_built_from_wrong_weights_is_a_consequence(tmp_path: Path) -> None:
    world = World()
    for audit in world.candidate.each("updated"):
        audit.part(fx.O_PROJ, "weight")["fp"] = fx.fp("noise")
        audit.refresh(fx.O_PROJ)
        audit.tensors[fx.W_UV]["fp"] = fx.fp("from noise")
    result = world.judge(tmp_path / "same")
    assert codes(result) == ["checkpoint_mismatch"]
    for audit in world.candidate.each("updated"):
        audit.tensors[fx.ROPE]["fp"] = fx.fp("elsewhere, for another reason")
    assert codes(world.judge(tmp_path / "other")) == ["checkpoint_mismatch", "differs"]


@pytest.mark.parametrize(
    ("code", "damage"),
    [
        ("missing", lambda a: a.remove(fx.ROPE)),
        ("missing", lambda a: a.remove(fx.HANDLE)),
        ("extra", lambda a: a.tensor("target:model.layers.0.raw_weight", "weight", fx.fp("raw"))),
        ("dtype", lambda a: a.tensors[fx.W_UV].update(dtype="float32")),
        ("layout", lambda a: a.tensors[fx.W_UV].update(stride=[1, 8])),
        ("vacuous", lambda a: a.tensors[fx.W_UV].update(nbytes=0, fp=None)),
        ("alias_broken", lambda a: a.tensors[fx.EMBED].update(aliases=[])),
        ("unclassified", lambda a: a.tensors[fx.W_UV].update({"class": "unclassified", "fp": fx.fp("x")})),
        ("wrong_derived", lambda a: a.tensors[fx.W_UV].update(fp=fx.fp("x"))),
    ],
)
def test_differences_in_form(tmp_path: Path, code: str, damage: Callable[[fx.Audit], None]) -> None:
    world = World()
    world.cell["load_path"]["checks"] = [
        c for c in world.cell["load_path"]["checks"] if c["rule"] == "equal"
    ][:1]
    for audit in world.candidate.each("updated"):
        damage(audit)
    primary(world, tmp_path, code)


def test_tied_name_recorded_under_the_other_name_is_equal(tmp_path: Path) -> None:
    world = World()
    for observation in world.candidate.audits:
        for audit in world.candidate.each(observation):
            held = audit.tensors.pop(fx.EMBED)
            parts = audit.parts.pop(fx.EMBED)
            audit.tensors[fx.LM_HEAD] = held | {"path": fx.LM_HEAD, "aliases": [fx.EMBED]}
            audit.parts[fx.LM_HEAD] = {name: part | {"tensor": fx.LM_HEAD} for name, part in parts.items()}
    assert world.judge(tmp_path)["verdict"] == "PASS"


def test_unchanged_expert_inside_a_changed_tensor(tmp_path: Path) -> None:
    world = World()
    checks = world.cell["load_path"]["checks"]
    world.cell["load_path"]["checks"] = [c for c in checks if c["rule"] == "all_changed"]
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        name = next(iter(audit.parts[fx.EXPERTS]))
        audit.parts[fx.EXPERTS][name]["fp"] = old.parts[fx.EXPERTS][name]["fp"]
        audit.refresh(fx.EXPERTS)
    finding = primary(world, tmp_path, "stale")
    assert finding["parts"][0].startswith("layers.1.mlp.experts.")


def test_unchanged_weight_without_parts(tmp_path: Path) -> None:
    world = World()
    checks = world.cell["load_path"]["checks"]
    world.cell["load_path"]["checks"] = [c for c in checks if c["rule"] == "all_changed"]
    for audit in world.candidate.each("started", "updated"):
        audit.tensor("target:model.sinks", "weight", fx.fp("the same"))
    primary(world, tmp_path, "not_changed")


def test_other_side_at_fault_is_said(tmp_path: Path) -> None:
    """The second update repairs what the first left: `repeated` is right, so `updated` is to blame."""
    world = World()
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.W_UV)
    finding = primary(world, tmp_path, "stale")
    assert finding["observation"] == "updated"
    assert {"code": "differs", "observation": "repeated"}.items() <= finding["consequences"][-1].items()


def test_generations_alone(tmp_path: Path) -> None:
    """Where every tensor was found equal, something beside the weights made them."""
    world = World()
    world.candidate.generations["updated"][2]["token_ids"][1] = 999
    finding = primary(world, tmp_path / "equal", "stale_cache")
    assert "Request `p2`: token 1 is 999, expected 2" in finding["detail"]
    assert "Every tensor of `updated` is that of `fresh.new`" in finding["detail"]
    checks = world.cell["load_path"]["checks"]
    checks[:] = [check for check in checks if check["name"] != "updated_equals_fresh"]
    primary(world, tmp_path / "not compared", "generation_differs")


def test_logprobs_and_drafts_count(tmp_path: Path) -> None:
    world = World()
    world.candidate.generations["updated"][0]["top_logprobs"] = [
        [[7, 0.0], [9, -1.5]],
        [[7, 1e-9], [9, -1.5]],
        [],
    ]
    assert (
        "log-probabilities part at token 1 (by up to 1e-09)"
        in primary(world, tmp_path / "a", "stale_cache")["detail"]
    )
    world = World()
    world.candidate.generations["updated"][0]["draft_token_ids"] = [-1, 3, 5]
    detail = primary(world, tmp_path / "b", "generation_differs")["detail"]
    assert "draft's proposals part at token 1" in detail
    assert "the target answers alike" in detail


def test_generations_fold_under_the_tensors_that_explain_them(tmp_path: Path) -> None:
    world = World()
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)
    world.candidate.generations["updated"][2]["token_ids"][1] = 999
    result = world.judge(tmp_path)
    assert codes(result) == ["stale"]
    assert "generation_differs" in [c["code"] for c in result["findings"][0]["consequences"]]


def test_a_wholly_stale_model_is_a_handful_of_findings(tmp_path: Path) -> None:
    world = World()
    world.layers = 2
    for observation in ("updated", "repeated"):
        for audit, old in zip(
            world.candidate.each(observation), world.candidate.each("started"), strict=True
        ):
            for path, tensor in audit.tensors.items():
                if tensor["class"] in ("weight", "derived"):
                    audit.copy_from(old, path)
    result = world.judge(tmp_path)
    assert codes(result) == ["stale"]
    assert "other module groups" in result["findings"][0]["detail"]
    assert result["findings"][0]["count"] == 4 * 12


@pytest.mark.parametrize(
    ("dtype", "value", "const", "verdict"),
    [
        ("int32", 127, 127, "PASS"),  # four exponents in one word
        ("int32", 127, 0, "FAIL"),
        ("int32", 127, None, "FAIL"),
        ("float32", 0.0, 0, "PASS"),
        ("float32", 0.0, None, "FAIL"),
        ("float32", 1.0, 0, "FAIL"),
        ("float32", 1.0, 1.0, "PASS"),  # 00 00 80 3f is no repeated byte, so the number is recorded
        ("float32", 1.0, None, "FAIL"),
        ("float32", "-inf", "-inf", "PASS"),
        ("float32", "-inf", 0, "FAIL"),
        ("uint8", None, 5, "INCONCLUSIVE"),
    ],
)
def test_padding_value_by_type(
    tmp_path: Path, dtype: str, value: float | str | None, const: float | str | None, verdict: str
) -> None:
    world = World()
    checks = world.cell["load_path"]["checks"]
    world.cell["load_path"]["checks"] = [c for c in checks if c["name"] == "updated_is_checkpoint"]
    for audit in world.candidate.each("updated"):
        audit.tensors[fx.SCALES]["dtype"] = dtype
        audit.parts[fx.SCALES]["padding"] |= {"padding_value": value, "const": const}
    assert world.judge(tmp_path)["verdict"] == verdict


def test_answers_of_the_old_weights_come_from_a_cache(tmp_path: Path) -> None:
    world = World()
    world.candidate.generations["updated"] = world.candidate.generations["started"]
    finding = primary(world, tmp_path, "stale_cache")
    assert "those of `started`, from before the update: a cache keeps" in finding["detail"]


def test_stale_answers_of_stale_weights_are_a_consequence(tmp_path: Path) -> None:
    world = World()
    world.candidate.generations["updated"] = world.candidate.generations["started"]
    for audit, old in zip(world.candidate.audits["updated"], world.candidate.audits["started"], strict=True):
        audit.copy_from(old, fx.NORM)
    finding = primary(world, tmp_path, "stale")
    assert "stale_cache" in [consequence["code"] for consequence in finding["consequences"]]
