"""The HTML report in Chromium: it lays out, nothing overflows or is cut, nothing runs or is fetched."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.judge.policy import combine
from orchestrator.report.html import html
from tests.unit import judge_fixtures as fx

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
EVIL = "\"'><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"

#: Measured in the page: what sticks out of the window, and texts of plots that leave their drawing.
MEASURE = """
<script>
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const cut = [];
for (const svg of document.querySelectorAll("svg")) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBBox();
    if (box.x < 0 || box.x + box.width > width || box.y < -1 || box.y + box.height > height + 4)
      cut.push(text.textContent);
  }
}
const ink = getComputedStyle(document.body).color, paper = getComputedStyle(document.body).backgroundColor;
const size = [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect().width);
document.body.dataset.measured = JSON.stringify({ wide, cut, ink, paper, size, title: document.title });
</script>
"""


def stale(gang: fx.Gang) -> None:
    for audit, old in zip(gang.each("updated"), gang.each("started"), strict=True):
        audit.copy_from(old, fx.NORM)


@pytest.fixture(name="verdict", scope="module")
def verdict_fixture(tmp_path_factory: pytest.TempPathFactory) -> fx.Record:
    root = tmp_path_factory.mktemp("records")
    results = []
    for name in ("none", "tensor_not_reloaded", "killed"):
        world = fx.World(4, 4, 16, base=name == "tensor_not_reloaded")
        world.cell["labels"]["fault"] = name
        if name == "tensor_not_reloaded":
            stale(world.candidate)
        damage = (lambda a: (a / "candidate/back/tensors-00007.jsonl").unlink()) if name == "killed" else None
        judged = world.judge(root / name, damage) if damage else world.judge(root / name)
        results.append(judged | {"cell": fx.fp(name) * 2})
    return combine(results, "kimi_k3_refit")


def chromium(page: Path, *options: str, width: int = 1200) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},2000", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def measured(verdict: fx.Record, folder: Path, *options: str, width: int = 1200) -> dict[str, Any]:
    """Opens the page with its policy lifted and a measuring script added."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html(verdict))
    page = folder / "report.html"
    page.write_text(text.replace("</body>", MEASURE + "</body>"))
    dom = chromium(page, "--dump-dom", *options, width=width).stdout
    found = re.search(r'data-measured="([^"]*)"', dom)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    return result


@pytest.mark.parametrize("width", [500, 800, 1200, 2000])
def test_nothing_overflows_or_is_cut(verdict: fx.Record, tmp_path: Path, width: int) -> None:
    found = measured(verdict, tmp_path, width=width)
    assert found["wide"] == 0
    assert found["cut"] == []
    assert len(found["size"]) == 7  # loads and coverage of three cells, ranks of the failed one
    assert found["title"] == "kimi_k3_refit: FAIL"


def test_a_measure_that_can_fail(verdict: fx.Record, tmp_path: Path) -> None:
    """The measuring script sees a label that is too long for its place, and a page that is too wide."""
    changed = json.loads(json.dumps(verdict))
    for load in changed["cells"][1]["evidence"]["loads"]:
        load["name"] = "a name that nobody would give to a checkpoint, since it is so very long"
    found = measured(changed, tmp_path)
    assert found["cut"]


def test_light_and_dark(verdict: fx.Record, tmp_path: Path) -> None:
    light = measured(verdict, tmp_path, "--blink-settings=preferredColorScheme=1")
    dark = measured(verdict, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert (light["paper"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(27, 32, 39)")
    assert (dark["paper"], dark["ink"]) == ("rgb(20, 23, 28)", "rgb(228, 231, 236)")


def test_nothing_from_records_runs(verdict: fx.Record, tmp_path: Path) -> None:
    evil = json.loads(json.dumps(verdict))
    for cell in evil["cells"]:
        cell["labels"] = dict.fromkeys(cell["labels"], EVIL)
        for entry in (*cell["checks"], *cell["findings"]):
            entry |= {"observed": EVIL, "detail": f"`{EVIL}`"}
        for entry in cell["evidence"]["differing"]:
            entry["check"] = EVIL
    assert measured(evil, tmp_path)["title"] == "kimi_k3_refit: FAIL"


def test_the_page_as_written_asks_for_nothing(verdict: fx.Record, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(verdict))
    shot = tmp_path / "shot.png"
    log = chromium(page, f"--screenshot={shot}").stderr
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 50_000
    for complaint in ("CONSOLE", "Refused to", "net::ERR"):
        assert complaint not in log
