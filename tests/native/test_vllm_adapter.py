"""What the leader of a vLLM replica asks of its workers and of vLLM, without either: who answers, and with what."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workloads.engines.protocol import UnsupportedError
from workloads.engines.vllm import adapter, offline, saved, sources
from workloads.engines.vllm.adapter import EngineError, Workers
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Step

WORKER = str(Path(adapter.__file__).with_name("worker.py"))


def spec(tmp_path: Path, *steps: Step, **parallelism: int) -> GangSpec:
    return GangSpec(
        name="candidate",
        output=str(tmp_path),
        model=Model(),
        parallelism=Parallelism(**parallelism),
        backend=Backend(engine="vllm", options={"speculative_config": {"method": "draft_model"}}),
        checkpoints={"old": Checkpoint(draft="small"), "small": Checkpoint(seed=7)},
        checkpoint_dirs={"old": "/weights/old", "small": "/weights/small"},
        steps=list(steps),
        saved_dir=str(tmp_path / "saved"),
    )


def answer(rank: int, source: str = WORKER, imported: str = adapter.IMPORTED) -> dict[str, Any]:
    return {"rank": rank, "source": source, "imported": imported}


def prepare(tmp_path: Path, *answers: dict[str, Any]) -> None:
    engine = SimpleNamespace(
        spec=spec(tmp_path, tp=2),
        rank=2,
        connection=SimpleNamespace(rpc=lambda method, **arguments: list(answers)),
    )
    Workers(engine).prepare()  # type: ignore[arg-type]  # as much of an engine as it looks at


def test_workers_of_the_same_code_and_of_all_ranks_are_taken(tmp_path: Path) -> None:
    prepare(tmp_path, answer(3), answer(2))


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([answer(2), answer(3, imported="0" * 64)], "Workers run another version of the files below"),
        (
            [answer(2), answer(3, source="/other/worker.py")],
            "import the audit extension from /other/worker.py",
        ),
        ([answer(2)], r"ranks \[2\] answered, the layout has \[2, 3\]"),
        ([answer(0), answer(1)], r"ranks \[0, 1\] answered, the layout has \[2, 3\]"),
    ],
    ids=["earlier", "elsewhere", "missing", "others"],
)
def test_other_workers_are_refused(tmp_path: Path, answers: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        prepare(tmp_path, *answers)


def test_the_digest_follows_every_module_of_the_rank_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TREE", tmp_path)
    for package in sources.PACKAGES:
        (tmp_path / package / "inner").mkdir(parents=True)
        (tmp_path / package / "inner" / "module.py").write_text("A = 1\n")
    seen = {sources.digest()}
    for package in sources.PACKAGES:
        module = tmp_path / package / "inner" / "module.py"
        module.write_text("A = 2\n")
        seen.add(sources.digest())
        module.rename(module.with_name("renamed.py"))
        seen.add(sources.digest())
    assert len(seen) == 5
    (tmp_path / "workloads" / "notes.txt").write_text("not imported")
    assert sources.digest() in seen


def test_experts_are_dealt_out_only_where_the_layout_says_so(tmp_path: Path) -> None:
    folder = Path("/weights/old")
    for ep, expected in ((1, False), (2, True)):
        given = offline.arguments(spec(tmp_path, tp=2, ep=ep), folder, "safetensors", None)
        assert given.get("enable_expert_parallel", False) is expected


def test_a_draft_is_given_with_the_options_of_the_config(tmp_path: Path) -> None:
    given = offline.arguments(spec(tmp_path), Path("/weights/old"), "dummy", Path("/weights/small"))
    assert given["speculative_config"] == {"method": "draft_model", "model": "/weights/small"}
    assert given["load_format"] == "dummy"


def test_each_start_from_saved_files_is_told_where_they_are(tmp_path: Path) -> None:
    def given(via: str, tp: int = 1) -> dict[str, Any]:
        return offline.arguments(spec(tmp_path, tp=tp), Path("/weights/old"), via, None)

    assert given("sharded_state")["model"] == str(tmp_path / "saved")
    assert given("sharded_state")["load_format"] == "sharded_state"
    for via in ("tensorizer", "tensorizer_raw"):
        for tp, name in ((1, "model.tensors"), (2, "model-%04d.tensors")):
            start = given(via, tp)
            assert (start["model"], start["load_format"]) == ("/weights/old", "tensorizer")
            config = {"tensorizer_uri": str(tmp_path / "saved" / name)}
            assert start["model_loader_extra_config"] == config


def test_the_folder_of_saved_files_has_the_configuration_and_no_weights(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "old.bin",
    ):
        (folder / name).write_text("{}")
    saved.make_folder(spec(tmp_path), folder)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["config.json", "tokenizer.json"]


def test_an_environment_without_tensorizer_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "find_spec", lambda name: None)
    saved.check(spec(tmp_path, Step("start", "old", "sharded_state")))
    for step in (Step("start", "old", "tensorizer"), Step("save", "old", "tensorizer_raw")):
        with pytest.raises(UnsupportedError, match="pip install tensorizer"):
            saved.check(spec(tmp_path, step))
