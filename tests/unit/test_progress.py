"""The display tells what people need: one line per step and not per rank, and who failed."""

import io
from pathlib import Path

from rich.console import Console

from collectors.records import RecordWriter
from orchestrator.driver import Recorder
from orchestrator.gangs.signs import STANDING
from orchestrator.progress import Board, Display, display
from orchestrator.store import read_json
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step


def spec(name: str = "candidate", ranks: int = 4) -> GangSpec:
    steps = [Step("start", "old", "safetensors"), Step("observe", name="started", collect=["tensors"])]
    layout = Parallelism(tp=ranks, gpus_per_node=ranks)
    return GangSpec(name, str(Path("out") / name), Model(), layout, Backend(), {}, {}, steps)


def step(rank: int, index: int, state: str, time: float) -> dict:
    return {"kind": "step", "gang": "candidate", "rank": rank, "index": index, "state": state, "time": time}


def exited(rank: int, stopped: bool) -> dict:
    ended = {"kind": "rank_exited", "gang": "candidate", "rank": rank, "node": 1, "stopped": stopped}
    return ended | {"code": None, "signal": "SIGKILL"}


def test_one_line_when_a_step_starts_and_one_when_its_last_rank_is_done() -> None:
    board = Board()
    board.expect([spec()])
    lines = [board.take(step(rank, 0, "start", 100.0 + rank)) for rank in range(4)]
    lines += [board.take(step(rank, 0, "end", 110.5 - rank)) for rank in range(4)]
    assert lines == [
        "candidate 1/2 start old: started",
        *[None] * 6,
        "candidate 1/2 start old: done by 4 ranks in 10.5 s",
    ]


def test_a_rank_that_dies_gets_a_line_and_one_that_was_stopped_does_not() -> None:
    board = Board()
    board.expect([spec()])
    assert board.take(exited(2, stopped=False)) == "candidate: rank 2 on node 1 ended with SIGKILL"
    assert board.take(exited(3, stopped=True)) is None
    assert board.gangs["candidate"].failed == "rank 2: SIGKILL"


def test_without_a_terminal_there_are_plain_lines_only() -> None:
    out = io.StringIO()
    with display(Console(file=out, width=20)) as shown:
        shown.board.expect([spec()])
        shown.note("preflight [ok]")
        shown.take(step(0, 0, "start", 1.0))
        shown.take(step(1, 0, "start", 1.0))
    lines = [line.split(" ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == ["preflight [ok]", "candidate 1/2 start old: started"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_table_shows_every_gang_with_its_ranks() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, legacy_windows=False)
    with display(console) as shown:
        shown.board.expect([spec("fresh.new"), spec()])
        for rank in range(3):
            shown.take(step(rank, 0, "start", 1.0))
            shown.take(step(rank, 0, "end", 2.0))
        standing = {"kind": "standing", "gang": "candidate", "rank": 3, "node": "gb200-1", "silent_s": 41.2}
        assert shown.board.take(standing) is None
    last = out.getvalue()
    assert "rank 3 on gb200-1, silent for 41 s" in last
    assert "fresh.new" in last
    assert "waiting" in last
    assert "1/2 start old" in last
    assert "3/4" in last


def test_where_a_gang_is_takes_the_place_of_what_was_said_before_and_no_file_grows(tmp_path: Path) -> None:
    board = Board()
    board.expect([spec()])
    with RecordWriter(tmp_path / "events.jsonl") as events:
        recorder = Recorder(events, Display(board, lambda line: None))
        for rank in (1, 2):
            standing = {"gang": "candidate", "rank": rank, "node": "gb200-1", "silent_s": 20.0}
            recorder.take({"kind": "standing", **standing})
    assert (read_json(tmp_path / STANDING) or {})["rank"] == 2
    assert (tmp_path / "events.jsonl").read_text() == '{"kind":"end"}\n'
