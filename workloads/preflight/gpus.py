"""What nvidia-smi says of the GPUs of this node: state, health, foreign processes, NVLink domain. Standard library."""

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

TIMEOUT_S = 60  # of one call: a driver that loads its GPUs anew, without persistence mode, takes many seconds
GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "vbios_version",
    "memory.total",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.max.sm",
    "clocks_event_reasons.active",
)
ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # before driver 535
_UNKNOWN_FIELD = re.compile(r'Field "(?P<name>[^"]+)" is not a valid field to query')
_ABSENT = re.compile(r"\[?(N/A|Not Supported|Not Found|Insufficient Permissions)\]?", re.IGNORECASE)


def look() -> dict[str, Any] | None:
    """{"gpus": a mapping of GPU_FIELDS, of "remapped_rows.*" and of "fabric" for each of this job, "processes": of
    PROCESS_FIELDS, on those}; None where there is no nvidia-smi. Values are text, None where a GPU has none.

    Raises RuntimeError when nvidia-smi fails, and subprocess.TimeoutExpired when it hangs.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    gpus = query("gpu", GPU_FIELDS)
    rows = {row["gpu_uuid"]: row for row in query("remapped-rows", ROW_FIELDS)}
    fabric = parse_fabric(_smi("-q"))
    for gpu, place in zip(gpus, fabric or [{}] * len(gpus), strict=True):
        gpu |= {name: rows.get(gpu["uuid"], {}).get(name) for name in ROW_FIELDS[1:]}
        gpu["fabric"] = place
    own = [gpu for gpu in gpus if _is_ours(gpu, os.environ.get("CUDA_VISIBLE_DEVICES", ""))]
    uuids = {gpu["uuid"] for gpu in own}
    processes = [process for process in query("compute-apps", PROCESS_FIELDS) if process["gpu_uuid"] in uuids]
    return {"gpus": own, "processes": processes}


def _is_ours(gpu: Mapping[str, Any], visible: str) -> bool:
    """Where a scheduler only says which GPUs are ours, nvidia-smi shows those of other jobs, too."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return not names or gpu["index"] in names or any(gpu["uuid"].startswith(name) for name in names)


def query(what: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """One mapping for each line of `nvidia-smi --query-WHAT`. A field that this driver does not know is None."""
    asked = {name: name for name in fields}  # our name -> the driver's
    while True:
        try:
            table = _smi(f"--query-{what}={','.join(asked.values())}", "--format=csv,noheader,nounits")
        except RuntimeError as error:
            unknown = _UNKNOWN_FIELD.search(str(error))
            if unknown is None:
                raise
            ours = next(name for name, theirs in asked.items() if theirs == unknown["name"])
            if asked[ours] == OLD_NAMES.get(ours, ours):
                del asked[ours]
            else:
                asked[ours] = OLD_NAMES[ours]
            continue
        return [dict.fromkeys(fields) | line for line in parse_table(table, list(asked))]


def parse_table(text: str, fields: Sequence[str]) -> list[dict[str, str | None]]:
    """CSV without a header. Raises RuntimeError when a line has another number of columns."""
    lines = []
    for columns in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(columns) != len(fields):
            raise RuntimeError(
                f"nvidia-smi answered {','.join(columns)!r} where {','.join(fields)} was asked for."
            )
        cells = (column.strip() for column in columns)
        lines.append({f: None if _ABSENT.fullmatch(c) else c for f, c in zip(fields, cells, strict=True)})
    return lines


def parse_fabric(text: str) -> list[dict[str, str | None]]:
    """The section `Fabric` of each GPU in the output of `nvidia-smi -q`, by lower-case keys without spaces: state,
    status, cliqueid, clusteruuid. Empty where the driver has no such section."""
    found: list[dict[str, str | None]] = []
    depth: int | None = None
    for line in text.splitlines():
        indent, (key, separator, value) = len(line) - len(line.lstrip()), line.partition(":")
        name = key.strip().lower().replace(" ", "")
        if name == "fabric" and not separator:
            depth = indent
            found.append({})
        elif depth is not None and indent <= depth:
            depth = None
        elif depth is not None and separator and name in ("state", "status", "cliqueid", "clusteruuid"):
            found[-1].setdefault(name, None if _ABSENT.fullmatch(value.strip()) else value.strip())
    return found


def _smi(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise RuntimeError(f"nvidia-smi {arguments[0]} ended with code {done.returncode}: {said}")
    return done.stdout
