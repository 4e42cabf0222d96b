"""Silence is told by what changes, by the reader's clock alone, and not while the reader was away."""

from pathlib import Path

import pytest

from orchestrator.gangs.signs import ABSENCE_S, LIFELESS_S, Attention, Limits, Signs
from workloads.heartbeat import beat_file, read, worker_file
from workloads.spec import Backend, GangSpec, Model, Parallelism, Step


class Gang:
    """Four ranks as files, and the clock of the process that follows them."""

    def __init__(self, folder: Path, limits: Limits, engine: str = "native") -> None:
        steps = [Step("start", "old"), Step("update", "new"), Step("observe", name="seen")]
        layout, backend = Parallelism(tp=2, dp=2, gpus_per_node=4), Backend(engine=engine)
        self.folder, self.seconds = folder, 100.0
        self.beats = dict.fromkeys(range(4), 0)
        spec = GangSpec("candidate", str(folder), Model(), layout, backend, {}, {}, steps)
        self.signs = Signs(spec, limits, Attention(lambda: self.seconds))

    def step(self, rank: int, index: int, state: str, time: float = 0.0) -> None:
        with (self.folder / f"progress-{rank:05d}.jsonl").open("a") as file:
            file.write(f'{{"kind":"step","index":{index},"state":"{state}","time":{time}}}\n')

    def beat(self, *ranks: int, units: int = 0) -> None:
        for rank in ranks:
            self.beats[rank] += 1
            beat_file(self.folder, rank).write_text(f"{self.beats[rank]:020d} {units:020d}\n")

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.seconds += 1.0
            self.signs.new()


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path, Limits(30.0, {"observe": 10.0}))


def test_records_are_read_once_with_gang_and_rank_and_a_line_in_the_making_waits(gang: Gang) -> None:
    gang.step(1, 0, "start", time=2.0)
    gang.step(0, 0, "start", time=1.0)
    with (gang.folder / "progress-00002.jsonl").open("w") as file:
        file.write('{"kind":"step"')
    assert [(r["gang"], r["rank"]) for r in gang.signs.new()] == [("candidate", 0), ("candidate", 1)]
    assert not gang.signs.new()


def test_nothing_for_longer_than_the_limit_is_a_stall_that_names_who_is_behind(gang: Gang) -> None:
    for rank in (0, 1, 3):
        gang.step(rank, 0, "start")
    gang.wait(30)
    assert gang.signs.stall() is None
    gang.wait(2)
    stall = gang.signs.stall()
    assert stall is not None
    assert stall.behind == [2]
    assert stall.lifeless == []
    assert 30 < stall.silent_s < 33


def test_each_kind_of_step_has_its_own_limit(gang: Gang) -> None:
    for rank in range(4):
        gang.step(rank, 2, "start")
    gang.wait(12)
    assert gang.signs.stall() is not None


def test_rank_that_works_is_not_hung_and_nor_are_those_that_wait_for_it(gang: Gang) -> None:
    for rank in range(4):
        gang.step(rank, 1, "start")
    for unit in range(10):
        gang.beat(0, 2, 3)
        gang.beat(1, units=unit)
        gang.wait(10)
        assert gang.signs.stall() is None
    for _ in range(4):
        gang.beat(*range(4), units=9)
        gang.wait(10)
    stall = gang.signs.stall()
    assert stall is not None
    assert stall.lifeless == []  # all beat: a deadlock


def test_work_of_ranks_that_are_ahead_does_not_excuse_the_one_behind(gang: Gang) -> None:
    for rank in range(4):
        gang.step(rank, 0 if rank == 3 else 1, "start")
    for unit in range(7):
        gang.beat(3)
        gang.beat(0, 1, 2, units=unit)
        gang.wait(5)
    stall = gang.signs.stall()
    assert stall is not None
    assert stall.behind == [3]


def test_lifeless_rank_is_a_stall_although_others_work(gang: Gang) -> None:
    gang.beat(*range(4))
    for unit in range(1, 8):
        gang.wait(5)
        gang.beat(0, 1, 3, units=unit)
    stall = gang.signs.stall()
    assert stall is not None
    assert stall.lifeless == [2]
    assert stall.silent_s > 30


def test_rank_that_never_beat_is_not_lifeless_and_one_that_has_ended_is_neither(gang: Gang) -> None:
    gang.beat(1)
    gang.signs.ended(1)
    for unit in range(8):
        gang.beat(0, 2, units=unit)
        gang.wait(5)
    assert gang.signs.stall() is None  # rank 3 is silent, but ranks as far as it work


def test_short_limits_still_need_several_beats_to_be_missing(tmp_path: Path) -> None:
    gang = Gang(tmp_path, Limits(1.0))
    gang.beat(*range(4))
    gang.wait(1)
    gang.wait(LIFELESS_S)
    assert gang.signs.lifeless(1) == []
    gang.wait(4)
    assert gang.signs.lifeless(1) == [0, 1, 2, 3]


def test_time_in_which_nobody_looked_is_nobodys_silence(gang: Gang) -> None:
    """The job was suspended, driver and ranks alike, or the file system stood still."""
    gang.beat(*range(4))
    gang.wait(1)
    gang.seconds += 86_400
    gang.signs.new()
    assert gang.signs.stall() is None
    assert gang.signs.silence(0) <= 2 + ABSENCE_S


def test_clocks_of_the_nodes_take_no_part(gang: Gang) -> None:
    for rank, time in enumerate((-1e9, 0.0, 1e9, 5e9)):
        gang.step(rank, 0, "start", time)
    gang.wait(20)
    assert gang.signs.stall() is None
    gang.wait(12)
    assert gang.signs.stall() is not None


def test_process_that_leads_several_ranks_beats_for_all_of_them(tmp_path: Path) -> None:
    gang = Gang(tmp_path, Limits(30.0), engine="vllm")
    for unit in range(8):
        gang.beat(0, 2, units=unit)
        gang.wait(5)
    assert gang.signs.stall() is None
    assert all(signs.beat is not None for signs in gang.signs.ranks.values())


def test_worker_of_a_rank_shows_whether_that_rank_lives_and_works(tmp_path: Path) -> None:
    """Its leader only waits for it, and beats all the while."""
    gang = Gang(tmp_path, Limits(30.0), engine="vllm")
    workers = {rank: worker_file(tmp_path, rank, 70 + rank) for rank in range(4)}

    def beat(*ranks: int, units: int) -> None:
        gang.beat(0, 2)
        for rank in ranks:
            workers[rank].write_text(f"{gang.beats[0]:020d} {units:020d}\n")
        gang.wait(5)

    for unit in range(10):
        beat(0, 1, 2, 3, units=unit)
        assert gang.signs.stall() is None
    for _ in range(6):
        beat(0, 1, 2, units=9)
    assert gang.signs.lifeless(0.5) == [3]
    beat(0, 1, 2, units=10)
    beat(0, 1, 2, units=11)
    stall = gang.signs.stall()
    assert stall is not None
    assert stall.lifeless == [3]


def test_worker_may_end_before_its_leader_has_ended(tmp_path: Path) -> None:
    gang = Gang(tmp_path, Limits(30.0), engine="vllm")
    worker_file(tmp_path, 1, 71).write_text(f"{1:020d} {1:020d}\n")
    gang.wait(2)
    for rank in range(4):
        gang.step(rank, 2, "end")
    for unit in range(9):
        gang.beat(0, 2, units=unit)
        gang.wait(5)
    assert gang.signs.stall() is None


def test_ranks_that_come_up_late_have_their_time_from_then_on(gang: Gang) -> None:
    gang.wait(29)
    gang.signs.started()
    gang.wait(29)
    assert gang.signs.stall() is None


def test_standing_is_that_of_the_slowest_rank(gang: Gang) -> None:
    for rank in range(4):
        gang.step(rank, 0, "start")
    gang.wait(3)
    for rank in (0, 1, 3):
        gang.step(rank, 0, "end")
    gang.wait(4)
    standing = gang.signs.standing()
    assert standing is not None
    assert (standing["index"], standing["rank"], standing["ranks_there"]) == (0, 2, 1)
    assert 6 <= standing["silent_s"] <= 7
    for rank in range(4):
        gang.signs.ended(rank)
    assert gang.signs.standing() is None


def test_rank_that_has_no_life_is_slower_than_those_that_wait_for_longer(gang: Gang) -> None:
    gang.beat(*range(4))
    gang.step(0, 0, "start")
    gang.wait(1)
    for rank in (1, 2, 3):
        gang.step(rank, 0, "start")
    for _ in range(6):
        gang.beat(0, 1, 3)
        gang.wait(2)
    standing = gang.signs.standing()
    assert standing is not None
    assert standing["rank"] == 2


@pytest.mark.parametrize("content", ["", "12", "1 x", "1 2 3"])
def test_heartbeat_that_is_half_written_is_no_news(tmp_path: Path, content: str) -> None:
    beat_file(tmp_path, 0).write_text(content)
    assert read(beat_file(tmp_path, 0)) is None
    assert read(beat_file(tmp_path, 1)) is None
