"""Records what memory one rank holds, and how high it went."""

from pathlib import Path

import torch

from collectors.records import RecordWriter
from workloads.engines.protocol import Audited


def gather_memory(engine: Audited, path: Path, rank: int) -> None:
    """Write one `memory` record: resident and peak bytes of the process, bytes of parameters and buffers
    by root, and of runtime tensors; on a GPU also the allocator's current and peak bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    record: dict[str, object] = {
        "rank": rank,
        "rss": _kib(status["VmRSS"]),
        "peak_rss": _kib(status["VmHWM"]),
        "weights_bytes": {
            name: sum(tensor.nbytes for tensor in root.parameters()) for name, root in engine.roots().items()
        },
        "buffers_bytes": {
            name: sum(tensor.nbytes for tensor in root.buffers()) for name, root in engine.roots().items()
        },
        "runtime_bytes": sum(tensor.nbytes for tensor in engine.runtime_tensors().values()),
    }
    if torch.cuda.is_available():
        record["device"] = torch.cuda.memory_allocated()
        record["peak_device"] = torch.cuda.max_memory_allocated()
    with RecordWriter(path) as writer:
        writer.write("memory", record)


def _kib(field: str) -> int:
    return int(field.split()[0]) * 1024
