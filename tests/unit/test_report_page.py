"""The HTML report: one file, nothing from outside, nothing unescaped, plots with the right geometry."""

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import judge_fixtures as fx
import pytest
from judge_fixtures import World

from orchestrator.judge.policy import combine
from orchestrator.report.html import html
from orchestrator.report.plots import LABEL_END, WIDTH, coverage_bar, heat_strip, load_bars

EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "link", "br", "img", "input", "hr", "wbr", "rect", "line"}


class Page(HTMLParser):
    """Checks nesting, and gathers tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def stale(world: World) -> None:
    for audit, old in zip(world.candidate.each("updated"), world.candidate.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)


@pytest.fixture(name="verdict")
def verdict_fixture(tmp_path: Path) -> fx.Record:
    clean, bad, cut = World(), World(base=True), World()
    stale(bad)
    for name, world in (("none", clean), ("stale", bad), ("cut", cut)):
        world.cell["labels"]["fault"] = name
    results = [
        clean.judge(tmp_path / "a") | {"cell": "a" * 64},
        bad.judge(tmp_path / "b") | {"cell": "b" * 64},
        cut.judge(tmp_path / "c", lambda a: (a / "candidate/back/tensors-00002.jsonl").unlink())
        | {"cell": "c" * 64},
    ]
    return combine(results, "refit")


def test_it_tells_what_happened(verdict: fx.Record) -> None:
    words = Page(html(verdict)).words
    assert "1 PASS, 1 FAIL, 1 ERROR" in words
    assert "still holds its value from before the update" in words
    assert "records_rank_count rank 2" in words
    assert "log of rank 2" in words
    assert "Before and after" in words
    assert "a proxy with random weights cannot answer" in words


def test_nothing_comes_from_outside(verdict: fx.Record) -> None:
    page = Page(html(verdict))
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "base"}
        assert not {"src", "onload", "onclick", "style"} & attributes.keys()
        address = attributes.get("href")
        assert address is None or address.startswith(("#", "../../cells/"))
    assert "url(" not in html(verdict)
    assert "@import" not in html(verdict)


def test_links_are_relative_to_the_store(verdict: fx.Record) -> None:
    hrefs = {attributes.get("href") for _, attributes in Page(html(verdict)).tags}
    assert f"../../cells/{'b' * 64}/attempt-001/candidate/rank-00003.log" in hrefs
    assert f"../../cells/{'b' * 64}/attempt-001/base/rank-00000.log" in hrefs
    assert f"../../cells/{'c' * 64}/attempt-001/driver.log" in hrefs


def test_ranks_of_every_pipeline_stage_have_their_logs(verdict: fx.Record) -> None:
    cell = verdict["cells"][1]
    ranks = cell["layout"]["tp"] * cell["layout"]["dp"]
    cell["layout"] |= {"pp": 2}
    hrefs = {attributes.get("href") for _, attributes in Page(html(verdict)).tags}
    logs = {f"../../cells/{'b' * 64}/attempt-001/candidate/rank-{rank:05d}.log" for rank in range(2 * ranks)}
    assert logs <= hrefs


def test_many_ranks_link_only_those_that_matter(verdict: fx.Record) -> None:
    cell = verdict["cells"][2]
    cell["layout"] |= {"tp": 4, "dp": 64}
    hrefs = {str(attributes.get("href")) for _, attributes in Page(html(verdict)).tags}
    ours = [href for href in hrefs if "c" * 64 in href and "rank-" in href]
    assert [href[-14:] for href in ours] == ["rank-00002.log"]


def test_everything_is_escaped(verdict: fx.Record) -> None:
    for cell in verdict["cells"]:
        cell["labels"]["fault"] = EVIL
        cell["attempt"] = EVIL
        for check in cell["checks"]:
            check |= {"name": EVIL, "observed": f"`{EVIL}`", "expected": EVIL, "caveat": EVIL}
        for finding in cell["findings"]:
            finding |= {"detail": f"`{EVIL}` {EVIL} `", "paths": [EVIL, EVIL], "parts": [EVIL, EVIL]}
        for entry in cell["evidence"]["differing"]:
            entry["check"] = EVIL
        for load in cell["evidence"]["loads"]:
            load["via"] = EVIL
        cell["coverage"] |= {"missing": [EVIL], "observation": EVIL}
        if cell["error"]:
            cell["error"] |= {"type": EVIL, "message": EVIL, "log_tail": EVIL, "stack": EVIL}
    verdict["experiment"] = EVIL
    page = Page(html(verdict))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert EVIL in page.words


def test_code_spans_are_marked(verdict: fx.Record) -> None:
    assert "<code>target:model.layers.*.input_layernorm</code>" in html(verdict)


def test_load_bars_are_to_scale() -> None:
    phases = {"read_s": 1.0, "install_s": 2.0, "post_process_s": 0.0, "finish_s": 0.5}
    load = {
        "arm": "candidate",
        "do": "update",
        "name": "new",
        "via": "direct",
        "phases": phases,
        "nbytes": 8e9,
    }
    plot = load_bars([load | {"seconds": 4.0}, load | {"seconds": 8.0}])
    assert plot is not None
    first, second = (row["segments"] for row in plot["rows"])
    assert [segment["phase"] for segment in first] == ["read_s", "install_s", "finish_s", "other"]
    unit = first[0]["width"]
    assert [s["width"] / unit for s in first] == pytest.approx([1, 2, 0.5, 0.5])
    assert sum(s["width"] for s in second) == pytest.approx(8 * unit)
    assert all(a["x"] + a["width"] == pytest.approx(b["x"]) for a, b in itertools.pairwise(first))
    assert second[-1]["x"] + second[-1]["width"] <= WIDTH
    assert plot["rows"][0]["text"] == "4.00 s, 2.00 GB/s"
    assert [phase for phase, _ in plot["legend"]] == ["read_s", "install_s", "finish_s", "other"]


def test_slow_loads_have_a_rate_too() -> None:
    load = {
        "arm": "candidate",
        "do": "update",
        "name": "new",
        "via": "direct",
        "phases": {},
        "nbytes": 3_000_000,
    }
    phases = dict.fromkeys(("read_s", "install_s", "post_process_s", "finish_s"), 0.0)
    plot = load_bars([load | {"seconds": 2.0, "phases": phases}])
    assert plot is not None
    assert plot["rows"][0]["text"] == "2.00 s, 1.5 MB/s"


def test_phases_longer_than_the_step_stay_inside() -> None:
    """Phases are maxima over ranks, so their sum may exceed the slowest rank's seconds."""
    phases = {"read_s": 3.0, "install_s": 3.0, "post_process_s": 3.0, "finish_s": 3.0}
    load = {
        "arm": "candidate",
        "do": "start",
        "name": "old",
        "via": "x",
        "phases": phases,
        "nbytes": 0,
        "seconds": 4.0,
    }
    plot = load_bars([load])
    assert plot is not None
    assert max(s["x"] + s["width"] for s in plot["rows"][0]["segments"]) <= WIDTH - 100


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (16, 4), (64, 8), (512, 8)])
def test_heat_strip_fits_any_layout(ranks: int, tp: int) -> None:
    entry = {"arm": "candidate", "check": "equal", "ranks": [0] * (ranks - 1) + [5]}
    plot = heat_strip([entry, entry | {"ranks": [0] * ranks}], {"tp": tp})
    assert plot is not None
    assert len(plot["rows"]) == 1, "a check that nothing violates has no row"
    squares = plot["rows"][0]["squares"]
    assert len(squares) == ranks
    assert squares[0]["x"] > LABEL_END
    assert squares[-1]["x"] + plot["side"] <= WIDTH + 0.01
    assert squares[-1]["strength"] == 1.0
    assert len(plot["ticks"]) <= 64
    gaps = [b["x"] - a["x"] - plot["side"] for a, b in itertools.pairwise(squares)]
    assert [i % tp == tp - 1 for i, gap in enumerate(gaps) if gap > 0.5] == [True] * (ranks // tp - 1)


def test_strength_orders_counts() -> None:
    plot = heat_strip([{"arm": "candidate", "check": "equal", "ranks": [0, 1, 10, 1000]}], {"tp": 4})
    assert plot is not None
    strengths = [square["strength"] for square in plot["rows"][0]["squares"]]
    assert strengths == sorted(strengths)
    assert strengths[0] == 0.0
    assert strengths[1] >= 0.2
    assert strengths[3] == 1.0


def test_nothing_to_plot_draws_nothing() -> None:
    assert load_bars([]) is None
    assert heat_strip([], {"tp": 1}) is None
    assert heat_strip([{"arm": "candidate", "check": "equal", "ranks": [0]}], {"tp": 1}) is None
    assert coverage_bar({"expected": 0, "fraction": 0.0}, None) is None


def test_coverage_bar_shows_the_shortfall() -> None:
    coverage = {"bytes": 989, "expected": 1000, "fraction": 0.98999999}
    bar = coverage_bar(coverage, 0.999)
    assert bar is not None
    assert not bar["holds"]
    assert bar["filled"] < bar["threshold_x"] - bar["x"] < bar["room"]
    assert bar["text"] == "98.9999%"


def test_page_is_small_and_has_a_policy(verdict: fx.Record) -> None:
    text = html(verdict)
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'", text)
    assert len(text) < 300_000
