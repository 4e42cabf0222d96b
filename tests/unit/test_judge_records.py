"""Broken records never pass: every way in which a file can be incomplete is a typed problem and an ERROR."""

from collections.abc import Callable
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World, check

from orchestrator.judge.records import Reader

TENSORS = "candidate/updated/tensors-00002.jsonl"


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def cut_last_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def drop_end(path: Path) -> None:
    path.write_bytes(b"".join(lines(path)[:-1]))


def break_middle(path: Path) -> None:
    found = lines(path)
    found[5] = found[5][:20] + b"\n"
    path.write_bytes(b"".join(found))


def split_line(path: Path) -> None:
    """One record over two lines: as text the file would still parse if newlines were taken for commas."""
    found = lines(path)
    found[5] = found[5].replace(b',"root"', b'\n"root"')
    path.write_bytes(b"".join(found))


def no_object(path: Path) -> None:
    path.write_bytes(b"[1]\n" + path.read_bytes())


def lacks_keys(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"storage"', b'"other"', 1))


def unknown_kind(path: Path) -> None:
    path.write_bytes(b'{"kind":"surprise"}\n' + path.read_bytes())


def twice(path: Path) -> None:
    found = lines(path)
    path.write_bytes(b"".join([found[0], found[1], *found[1:]]))


def two_runs(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def other_observation(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"observation":"updated"', b'"observation":"back"'))


def other_rank(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"rank":2', b'"rank":1', 1))


def lost_root(path: Path) -> None:
    path.write_bytes(b"".join(line for line in lines(path) if b'"kind":"source","root":"draft"' not in line))


def unhashed(path: Path) -> None:
    digest = fx.fp("rope").encode()
    path.write_bytes(path.read_bytes().replace(b'"fp":"' + digest + b'"', b'"fp":null'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def extra_rank(path: Path) -> None:
    path.with_name("tensors-00004.jsonl").write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("damage", "type_"),
    [
        (Path.unlink, "rank_count"),
        (extra_rank, "rank_count"),
        (empty, "cut_short"),
        (cut_last_line, "cut_short"),
        (drop_end, "cut_short"),
        (break_middle, "bad_json"),
        (split_line, "bad_json"),
        (no_object, "bad_record"),
        (lacks_keys, "bad_record"),
        (unknown_kind, "bad_record"),
        (twice, "bad_record"),
        (two_runs, "bad_record"),
        (lost_root, "bad_record"),
        (other_observation, "other_run"),
        (other_rank, "other_run"),
        (unhashed, "unhashed"),
    ],
)
def test_damaged_tensor_records_are_an_error(
    tmp_path: Path, damage: Callable[[Path], None], type_: str
) -> None:
    result = World().judge(tmp_path, lambda attempt: damage(attempt / TENSORS))
    assert result["verdict"] == "ERROR"
    assert result["error"]["type"] == f"records_{type_}"
    assert check(result, "gate:records")["verdict"] == "ERROR"
    assert not [f for f in result["findings"] if f["code"] == "missing"], "a cut file is no missing tensor"


@pytest.mark.parametrize(
    "name",
    [
        "candidate/started/tensors-00000.jsonl", "candidate/updated/generations.jsonl",
        "candidate/updated/gsm8k.jsonl", "candidate/updated/throughput.jsonl",
        "candidate/updated/memory-00003.jsonl", "candidate/lifecycle-00001.jsonl",
        "candidate/progress-00002.jsonl",
    ],
)  # fmt: skip
def test_every_owed_file_is_missed(tmp_path: Path, name: str) -> None:
    result = World().judge(tmp_path, lambda attempt: (attempt / name).unlink())
    assert result["verdict"] == "ERROR"
    assert name in result["error"]["message"]


@pytest.mark.parametrize("damage", [Path.unlink, drop_end, break_middle])
def test_a_damaged_reference_is_an_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    def hurt(attempt: Path) -> None:
        damage(attempt.parents[2] / "references/key-new/fresh/tensors-00001.jsonl")

    assert World().judge(tmp_path, hurt)["verdict"] == "ERROR"


def test_a_step_that_never_ended_is_named(tmp_path: Path) -> None:
    def hurt(attempt: Path) -> None:
        path = attempt / "candidate/progress-00003.jsonl"
        path.write_bytes(b"".join(lines(path)[:5]) + b'{"kind":"end"}\n')

    error = World().judge(tmp_path, hurt)["error"]
    assert error["type"] == "records_unfinished"
    assert error["rank"] == 3
    assert error["log_tail"] == "log of rank 3"
    assert "never ended step 2 (update new)" in error["message"]


def test_records_of_other_steps_are_refused(tmp_path: Path) -> None:
    world = World()

    def hurt(_attempt: Path) -> None:
        world.cell["load_path"]["steps"][2]["checkpoint"] = "old"

    assert world.judge(tmp_path, hurt)["error"]["type"] == "records_other_run"


def test_whole_records_before_a_partial_line_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"}\n{"kin')
    reader = Reader(tmp_path)
    assert [r["kind"] for r in reader.records(path)] == ["a", "b"]
    assert [p.type for p in reader.problems] == ["cut_short"]


def test_one_problem_is_told_once(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for _ in range(2):
        reader.records(tmp_path / "none.jsonl", 3)
    assert [(p.type, p.rank) for p in reader.problems] == [("missing_file", 3)]
