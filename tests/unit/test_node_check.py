"""Every fault of a node trips its check, which names node, value, bound and what to do; sound nodes pass."""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from orchestrator.config.compose import ConfigError
from orchestrator.config.planning import plan
from orchestrator.nodes.node_check import problems, summary
from orchestrator.nodes.node_records import Expected, Problem, read_events

NAMES = ["g0", "g1", "g2", "g3"]
NO_BOUNDS: dict[str, Any] = {}
Reports = list[dict[str, Any]]  # by node, what it found at each stage; pairs by partner


def gpu(index: int) -> dict[str, Any]:
    return {
        "index": str(index),
        "uuid": f"GPU-{index}",
        "name": "NVIDIA GB200",
        "driver_version": "580.95.05",
        "vbios_version": "97.00.82.00.2B",
        "memory.total": "189471",
        "ecc.mode.current": "Enabled",
        "ecc.errors.uncorrected.volatile.total": "0",
        "clocks.max.sm": "2062",
        "clocks_event_reasons.active": "0x0000000000000001",
        "remapped_rows.pending": "No",
        "remapped_rows.failure": "0",
        "fabric": {"state": "Completed", "status": "Success", "clusteruuid": "rack-1", "cliqueid": "7"},
    }


def sound(nodes: int = 4) -> Reports:
    speed = {"all_reduce": 300.0, "all_to_all": 250.0}

    def pair(node: int, other: int) -> dict[str, Any]:
        clock = {"offset_s": 0.0001, "round_trip_s": 0.0002} if node == 0 else None
        return {"clock": clock, "bandwidth": {"cuda:0": dict(speed), "cuda:1": dict(speed)}}

    return [
        {
            "machine": {
                "host": NAMES[node],
                "slurm_node": NAMES[node],
                "ranks": f"{node * 4}:{node * 4 + 4}",
                "python": "3.12.3",
                "packages": {"torch": "2.11.0"},
                "sources": {"/tree": "abc"},
            },
            "gpus": {"gpus": [gpu(index) for index in range(4)], "processes": []},
            "meet": [],
            "versions": {"torch": "2.11.0", "cuda": "13.0", "nccl": "(2, 28, 9)"},
            "files": {"write_s": 0.002, "visible_s": [0.01] * nodes},
            "pairs": {other: pair(node, other) for other in range(nodes) if other != node},
            "whole": {"bandwidth": {"cuda:0": dict(speed)}},
            "done": {"seconds": 3.0},
        }
        for node in range(nodes)
    ]


def judged(reports: Reports, bounds: dict[str, Any] = NO_BOUNDS, segment: int = 0) -> list[Problem]:
    """A found value that is an exception is reported as the error of its stage."""
    events: list[dict[str, Any]] = [{"kind": "node_started", "node": 0}]

    def tell(node: int, stage: str, found: Any, **about: Any) -> None:
        error = repr(found) if isinstance(found, Exception) else None
        found = None if error else found
        events.append(
            {"kind": "node_check", "node": node, "stage": stage, "found": found, "error": error, **about}
        )

    for node, report in enumerate(reports):
        for stage, found in report.items():
            if stage == "pairs":
                for other, value in found.items():
                    tell(node, "pair", value, peer=other)
            else:
                tell(node, stage, found)
    expected = Expected(NAMES[: len(reports)], 4, bounds, segment)
    return problems(expected, read_events(expected, events))


def bound(
    key: str, low: float | None = None, high: float | None = None, unit: str = "GB/s"
) -> dict[str, Any]:
    return {key: {"low": low, "high": high, "unit": unit}}


def test_sound_nodes_have_no_problem_within_their_bounds() -> None:
    bounds = (
        bound("pair_all_reduce", 100, 900) | bound("all_to_all", 100) | bound("clock_skew", high=1, unit="s")
    )
    bounds |= bound("write_latency", high=0.1, unit="s") | bound("max_sm_clock", 2000, unit="MHz")
    assert judged(sound(), bounds, segment=4) == []


def each(change: Callable[[dict[str, Any]], Any]) -> Callable[[Reports], None]:
    """The change of the third node."""
    return lambda reports: change(reports[2])


def of_gpu(key: str, value: Any) -> Callable[[Reports], None]:
    return each(lambda node: node["gpus"]["gpus"][1].update({key: value}))


def of_pairs(node: int, kind: str, value: float) -> Callable[[Reports], None]:
    def change(reports: Reports) -> None:
        for other in range(len(reports)):
            if other != node:
                reports[node]["pairs"][other]["bandwidth"]["cuda:1"][kind] = value

    return change


def unseen(reports: Reports) -> None:
    """The third node writes into a folder of its own."""
    for node, report in enumerate(reports):
        for other in range(len(reports)):
            if node != other and 2 in (node, other):
                report["files"]["visible_s"][other] = None


def absent(reports: Reports) -> None:
    """The third node died at once, so the others waited for it."""
    reports[2].clear()
    for node in (0, 1, 3):
        for stage in ("versions", "files", "pairs", "whole"):
            del reports[node][stage]
        reports[node]["meet"] = [2]


def killed_in_pairs(reports: Reports) -> None:
    """The others lose it, and the step ends them before they come to their end."""
    for node, report in enumerate(reports):
        del report["whole"], report["done"]
        report["pairs"] = {0: report["pairs"][0]} if node == 2 else report["pairs"] | {2: OSError("reset")}


def out_of_reach(reports: Reports) -> None:
    """It stops after two partners. The last one cannot know that it would have failed, too."""
    for node, report in enumerate(reports):
        del report["whole"]
        report["pairs"] = {o: OSError("timed out") for o in (0, 1)} if node == 2 else report["pairs"]
        if node in (0, 1):
            report["pairs"][2] = OSError("timed out")


FAULTS: dict[str, tuple[Callable[[Reports], Any], str]] = {
    "it never began": (absent, "g2 did not begin its check"),
    "it died": (killed_in_pairs, "g2 ended in its check after 6 reports"),
    "other ranks": (each(lambda n: n["machine"].update(ranks="4:8")), "to run ranks 8:12, Slurm's step gave it 4:8"),
    "other place": (each(lambda n: n["machine"].update(slurm_node="g9")), "to run on g2, Slurm placed it on g9"),
    "one host twice": (each(lambda n: n["machine"].update(host="g1")), "g1 and g2 are the same host, g1"),
    "interpreter": (each(lambda n: n["machine"].update(python="3.11.0")), "g2 has Python 3.11.0, 3 of 4"),
    "package": (each(lambda n: n["machine"].update(packages={"torch": "2.10"})), "g2 has torch 2.10, 3 of 4 nodes"),
    "code": (each(lambda n: n["machine"].update(sources={"/tree": "x"})), "the source tree /tree x, 3 of 4 nodes"),
    "library": (each(lambda n: n["versions"].update(nccl="2.20")), "the loaded library nccl 2.20"),
    "driver": (each(lambda n: [g.update(driver_version="535") for g in n["gpus"]["gpus"]]), "the NVIDIA driver 535"),
    "nvidia-smi": (each(lambda n: n.update(gpus=RuntimeError("no devices"))), "failed in its stage 'gpus'"),
    "gpu lost": (each(lambda n: n["gpus"]["gpus"].pop()), "g2 shows 3 GPUs, the layout needs 4"),
    "model": (of_gpu("name", "NVIDIA H200"), "GPUs of the model NVIDIA GB200, NVIDIA H200, 3 of 4 nodes"),
    "ecc": (of_gpu("ecc.errors.uncorrected.volatile.total", "2"), "GPU 1 .GPU-1.: 2 uncorrected ECC errors"),
    "ecc off": (of_gpu("ecc.mode.current", "Disabled"), "g2 has ECC Disabled, Enabled"),
    "rows pending": (of_gpu("remapped_rows.pending", "Yes"), "remapped rows wait for a reset: reset the GPU"),
    "rows failed": (of_gpu("remapped_rows.failure", "1"), "remapping of a row failed: replace the GPU"),
    "in need": (of_gpu("ecc.errors.uncorrected.volatile.total", "[GPU requires reset]"), "has .GPU requires reset."),
    "hot": (of_gpu("clocks_event_reasons.active", "0x0000000000000041"), "held down by hardware thermal slowdown"),
    "clock limit": (of_gpu("clocks.max.sm", "1200"), "1.2e.03 MHz, less than cluster.preflight.max_sm_clock.low=2000"),
    "foreign": (
        each(lambda n: n["gpus"]["processes"].append({"gpu_uuid": "GPU-1", "pid": "77", "process_name": "miner"})),
        "process 77 .miner. uses GPU GPU-1 and is not ours",
    ),
    "other rack": (each(lambda n: [g["fabric"].update(clusteruuid="rack-2") for g in n["gpus"]["gpus"]]),
                   "g2 is in NVLink domain rack-2 clique 7, 3 others of its segment of 4 nodes are in rack-1"),
    "no domain": (of_gpu("fabric", {"state": "In Progress"}), "GPU 1 is in no NVLink domain"),
    "store": (unseen, "which node g2 explains: mount its file system"),
    "store refused": (each(lambda n: n.update(files=OSError("read-only"))), "failed in its stage 'files': OSError"),
    "slow store": (each(lambda n: n["files"].update(write_s=9.0)), "9 s, more than cluster.preflight.write_latency"),
    "late store": (each(lambda n: n["files"]["visible_s"].__setitem__(0, 8.0)), "visible after 8 s, more than"),
    "clock": (lambda r: r[0]["pairs"][2]["clock"].update(offset_s=-120.0), "g2: its distance from that of g0 120 s"),
    "slow": (of_pairs(2, "all_reduce", 4.0), "3 of 6 pairs are out of bounds, which node g2 explains: the all_r"),
    "unit": (of_pairs(2, "all_to_all", 4e4), "4e.04 GB/s, more than cluster.preflight.pair_all_to_all.high=900"),
    "unreachable": (out_of_reach, "do not reach one another over the network, which node g2 explains"),
}  # fmt: skip
BOUNDS = {
    **bound("pair_all_reduce", 100),
    **bound("pair_all_to_all", None, 900),
    **bound("max_sm_clock", 2000, unit="MHz"),
    **bound("write_latency", high=1, unit="s"),
    **bound("visible_after", high=5, unit="s"),
    **bound("clock_skew", high=1, unit="s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_node_names_it(fault: str) -> None:
    change, said = FAULTS[fault]
    reports = sound()
    change(reports)
    found = judged(reports, BOUNDS, segment=4)
    assert {name for problem in found for name in problem.nodes} == {"g2"}
    assert len(found) <= 2, found
    text = " ".join(problem.text for problem in found)
    assert re.search(said, text), text
    assert all(problem.text.endswith(".") and not problem.text[0].islower() for problem in found)


def test_nothing_is_judged_without_bounds() -> None:
    reports = sound()
    for change in (of_pairs(2, "all_reduce", 0.001), FAULTS["clock"][0], FAULTS["slow store"][0]):
        change(reports)
    assert judged(reports) == []


def test_clocks_that_differ_are_a_warning_where_no_bound_is_set() -> None:
    reports = sound()
    FAULTS["clock"][0](reports)
    expected = Expected(NAMES, 4)
    events = [
        {"kind": "node_check", "node": 0, "stage": "pair", "peer": other, "found": pair, "error": None}
        for other, pair in reports[0]["pairs"].items()
    ]
    told = summary(read_events(expected, events))
    assert told["clock_offset_s"] == {"g1": 0.0001, "g2": -120.0, "g3": 0.0001}
    [warning] = told["warnings"]
    assert "clock of node g2 is -120.0 s from the one of node g0" in warning


def test_of_two_nodes_a_slow_pair_names_both_and_other_versions_the_second() -> None:
    reports = sound(2)
    of_pairs(0, "all_reduce", 4.0)(reports)
    [problem] = judged(reports, BOUNDS)
    assert problem.nodes == ("g0", "g1")
    assert "node g0 or node g1 explains" in problem.text
    reports = sound(2)
    reports[1]["machine"]["python"] = "3.11.0"
    [problem] = judged(reports)
    assert problem.nodes == ("g1",)


def test_what_all_share_names_no_node() -> None:
    reports = sound()
    for node in range(4):
        of_pairs(node, "all_reduce", 4.0)(reports)
    [problem] = judged(reports, BOUNDS)
    assert (problem.nodes, "6 of 6 pairs" in problem.text) == ((), True)
    reports = sound()
    for report in reports:
        report["files"]["visible_s"] = [None] * 4
    assert [problem.nodes for problem in judged(reports)] == [()]
    reports = sound()
    reports[0]["whole"]["bandwidth"]["cuda:0"]["all_reduce"] = 3.0
    [problem] = judged(reports, bound("all_reduce", 100))
    assert problem.text.startswith("The all_reduce of all 4 nodes over cuda:0 has 3 GB/s, less than")


def test_pairs_of_two_segments_have_the_bounds_of_neither() -> None:
    """Two domains, joined by a slower network."""
    reports = sound()
    for node in (0, 1):
        for other in (2, 3):
            for one, two in ((node, other), (other, node)):
                reports[one]["pairs"][two]["bandwidth"]["cuda:0"]["all_reduce"] = 40.0
    for report in reports[2:]:
        for one in report["gpus"]["gpus"]:
            one["fabric"]["clusteruuid"] = "rack-2"
    assert judged(deepcopy(reports), BOUNDS, segment=2) == []
    assert judged(reports, BOUNDS, segment=4) != []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("pair_all_reduce={low: 5, unit: Gbit/s}", "unit is 'Gbit/s', but it is measured in GB/s"),
        ("clock_skew={low: 5, high: 1}", "cluster.preflight.clock_skew.low is 5, above"),
        ("network=false", "cluster.preflight.all_reduce has a bound, but cluster.preflight.network is false"),
    ],
)
def test_bounds_that_cannot_hold_are_refused_before_submission(change: str, said: str) -> None:
    key, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan(["cluster.preflight.all_reduce.low=1", f"cluster.preflight.{key}={value}"])
