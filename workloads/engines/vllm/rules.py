"""Rules for vLLM's tensors: data in `rules/<release>.toml`, one file for each release that needs its own."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from workloads.engines.protocol import Rule

FOLDER = Path(__file__).with_name("rules")


@dataclass(frozen=True)
class Rules:
    """version: of the release that the file was written for. not_loaded: checkpoint tensors that the engine leaves
    out by design, by pattern, with the reason."""

    version: str
    tensors: tuple[Rule, ...]
    not_loaded: tuple[Rule, ...]


def read_rules(version: str) -> Rules:
    """Of the newest file that is not newer than the engine; of the oldest for an engine before all of them."""
    files = {_numbers(file.stem): file for file in FOLDER.glob("*.toml")}
    known = [release for release in sorted(files) if release <= _numbers(version)]
    file = files[known[-1] if known else min(files)]
    data = tomllib.loads(file.read_text())
    return Rules(
        file.stem,
        tuple(
            Rule(entry["pattern"], entry["class"], entry["reason"], entry.get("may_move", False))
            for entry in data["tensor"]
        ),
        tuple(Rule(entry["pattern"], "not_loaded", entry["reason"]) for entry in data["checkpoint"]),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
