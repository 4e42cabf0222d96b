"""Geometry of the report's plots: what is drawn where, in the units of each SVG's view box."""

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.report.rows import Json

WIDTH = 720.0  # of every plot's view box
_LABEL = 250.0  # room for row labels at the left
LABEL_END = _LABEL - 8  # where they end
_VALUE = 120.0  # room for numbers at the right
_ROW = 26.0
_BAR = 16.0
#: Phase of a load -> what people call it. `other` is the rest of the measured seconds.
PHASES = {
    "read_s": "read",
    "install_s": "install",
    "post_process_s": "post-process",
    "finish_s": "finish",
    "other": "other",
}


def load_bars(loads: Sequence[Json]) -> dict[str, Any] | None:
    """Stacked bars of seconds by phase, one row a load, all on one scale; None without loads.

    {"width", "height", "rows": [{"label", "text", "y", "segments": [{"phase", "title", "x", "width"}]}]}
    """
    if not loads:
        return None
    longest = max(load["seconds"] for load in loads) or 1.0
    scale = (WIDTH - _LABEL - _VALUE) / longest
    several = len({load["arm"] for load in loads}) > 1
    drawn = [_load_row(load, place, scale, several) for place, load in enumerate(loads)]
    used = {segment["phase"] for row in drawn for segment in row["segments"]}
    legend = [(phase, name) for phase, name in PHASES.items() if phase in used]
    return {"width": WIDTH, "height": _ROW * len(loads), "bar": _BAR, "rows": drawn, "legend": legend}


def _load_row(load: Json, place: int, scale: float, several_arms: bool) -> dict[str, Any]:
    seconds = load["seconds"]
    phases = {**load["phases"], "other": max(0.0, seconds - sum(load["phases"].values()))}
    x = _LABEL
    segments = []
    for phase, name in PHASES.items():
        width = min(phases[phase] * scale, WIDTH - _VALUE - x)
        if width > 0.05:
            segments.append(
                {"phase": phase, "title": f"{name} {phases[phase]:.3f} s", "x": x, "width": width}
            )
            x += width
    arm = f"{load['arm']}: " if several_arms else ""
    rate = f", {_rate(load['nbytes'] / seconds)}" if seconds and load["nbytes"] else ""
    return {
        "label": f"{arm}{load['do']} {load['name']} ({load['via']})",
        "text": f"{seconds:.2f} s{rate}",
        "text_x": x + 6,
        "y": place * _ROW + (_ROW - _BAR) / 2,
        "segments": segments,
    }


def _rate(bytes_per_second: float) -> str:
    return (
        f"{bytes_per_second / 1e9:.2f} GB/s"
        if bytes_per_second >= 1e9
        else f"{bytes_per_second / 1e6:.1f} MB/s"
    )


def coverage_bar(coverage: Json | None, threshold: float | None) -> dict[str, Any] | None:
    """Bytes audited of bytes expected, and where the threshold lies; None when nothing was to be audited."""
    if not coverage or not coverage["expected"]:
        return None
    room = WIDTH - _LABEL - _VALUE
    fraction = min(1.0, coverage["fraction"])
    return {
        "width": WIDTH,
        "height": _ROW,
        "bar": _BAR,
        "x": _LABEL,
        "y": (_ROW - _BAR) / 2,
        "room": room,
        "filled": room * fraction,
        "threshold_x": None if threshold is None else _LABEL + room * threshold,
        "holds": threshold is None or coverage["fraction"] >= threshold,
        "label": f"{coverage['bytes']:,} of {coverage['expected']:,} bytes",
        "text": f"{math.floor(coverage['fraction'] * 1e6) / 1e4:.4f}%",
        "details": coverage,
    }


def heat_strip(differing: Sequence[Json], layout: Json | None) -> dict[str, Any] | None:
    """Violating tensors by check and rank; ranks of one data-parallel replica stand together. Only checks
    that something violates have a row; None where there are none.

    A square's `strength` is 0 for none and 0.2 to 1 by the logarithm of the count.
    """
    differing = [entry for entry in differing if any(entry["ranks"])]
    if not differing or not layout:
        return None
    ranks = len(differing[0]["ranks"])
    tp = max(1, layout["tp"])
    gap = 4.0 if ranks <= 64 else 1.0
    side = min(26.0, (WIDTH - _LABEL - gap * (ranks // tp)) / ranks)
    most = max((count for entry in differing for count in entry["ranks"]), default=0)
    several = len({entry["arm"] for entry in differing}) > 1
    columns = [_LABEL + rank * side + rank // tp * gap for rank in range(ranks)]
    drawn = []
    for place, entry in enumerate(differing):
        arm = f"{entry['arm']}: " if several else ""
        squares = [
            {"x": columns[rank], "count": count, "rank": rank, "strength": _strength(count, most)}
            for rank, count in enumerate(entry["ranks"])
        ]
        drawn.append({"label": f"{arm}{entry['check']}", "y": place * _ROW, "squares": squares})
    every = 1 if side >= 16 else tp if side * tp >= 16 else math.ceil(ranks / 16)
    return {
        "width": WIDTH,
        "height": _ROW * len(differing) + 18,
        "side": side,
        "bar": _ROW - 4,
        "axis_y": _ROW * len(differing) + 12,
        "ticks": [(columns[rank] + side / 2, rank) for rank in range(0, ranks, every)],
        "rows": drawn,
        "numbers": side >= 20,
        "most": most,
    }


def _strength(count: int, most: int) -> float:
    if not count:
        return 0.0
    return round(0.2 + 0.8 * math.log1p(count) / math.log1p(most), 3)
