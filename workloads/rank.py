"""Entry of one rank: process group, engine, scenario; a failure is reported to the node parent before exit.

Runs in a process forked by `workloads.node`, or on its own where forking is not possible:
`python -m workloads.rank GANG.json --rank R --parent PID --report-fd FD`.
"""

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from collectors.records import RecordWriter, rank_file
from workloads import faults, heartbeat, scenario
from workloads.engines.protocol import InProcessEngine
from workloads.loading.lifecycle import EventSink
from workloads.observer import RankObserver
from workloads.processes import allow_debugger, die_with_parent
from workloads.spec import GangSpec

REPORT_LIMIT = (
    16_000  # characters of a traceback kept in a report; with the message it stays below a pipe's 64 KiB
)

log = logging.getLogger(__name__)


MakeEngine = Callable[[GangSpec, int, EventSink], InProcessEngine]


def engine_class(name: str, with_faults: Sequence[str] = ()) -> MakeEngine:
    """An engine whose ranks are our processes: `native`, or `package.module:Class` for one of one's own."""
    if name == "native":
        return cast(MakeEngine, faults.engine_class(with_faults))
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(
            f"backend.engine={name!r} is neither native, vllm nor a `package.module:Class` of your own."
        )
    return cast(MakeEngine, getattr(import_module(module), attribute))


def run(gang_file: Path, rank: int, report_fd: int) -> int:
    """Plays the scenario of the gang as its member `rank`; returns the exit code, 0 or 1.

    On failure the JSON of `failure_report` goes to `report_fd`, which is closed in any case. A pipe and not a
    file, since the failure may be a full disk.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    allow_debugger(os.getppid())
    # force: a forked rank inherits the node parent's handler.
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s", force=True
    )
    try:
        spec = GangSpec.read(gang_file)
        with heartbeat.beating(heartbeat.beat_file(Path(spec.output), rank)):
            _play(spec, rank)
    except BaseException as error:
        log.exception("rank %d of %s failed", rank, gang_file)
        os.write(report_fd, json.dumps(failure_report(error)).encode())
        return 1
    finally:
        os.close(report_fd)
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def failure_report(error: BaseException) -> dict[str, Any]:
    """What the driver needs to name the failure: {"type", "message", "traceback", "errno", "path", "time"}."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:REPORT_LIMIT],
        "traceback": "".join(traceback.format_exception(error))[-REPORT_LIMIT:],
        "errno": error.errno if isinstance(error, OSError) else None,
        "path": str(error.filename) if isinstance(error, OSError) and error.filename else None,
        "time": time.time(),
    }


def _play(spec: GangSpec, rank: int) -> None:
    if spec.backend.engine == "vllm":
        from workloads.engines.vllm.leader import lead  # only its own environment has vLLM

        lead(spec, rank)
        return
    _join(spec, rank)
    folder = Path(spec.output)
    with (
        RecordWriter(rank_file(folder, "progress", rank)) as progress,
        RecordWriter(rank_file(folder, "lifecycle", rank)) as lifecycle,
    ):
        engine = engine_class(spec.backend.engine, spec.faults)(spec, rank, lifecycle)
        scenario.play(engine, RankObserver(engine, spec, rank), spec, rank, [progress])
        engine.stop()
    # Rank 0 serves the rendezvous store: nobody leaves while another may still need it.
    dist.barrier()
    dist.destroy_process_group()


def _join(spec: GangSpec, rank: int) -> None:
    per_node = spec.parallelism.gpus_per_node
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % per_node),
        WORLD_SIZE=str(spec.parallelism.ranks),
        LOCAL_WORLD_SIZE=str(per_node),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(spec.master_port),
    )
    if spec.backend.device == "cuda":
        torch.cuda.set_device(rank % per_node)
    # Host tensors (counts, fingerprints, object gathers) travel over gloo beside NCCL.
    backend = "cpu:gloo,cuda:nccl" if spec.backend.communication == "nccl" else spec.backend.communication
    dist.init_process_group(backend, timeout=timedelta(seconds=spec.collective_timeout_s))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workloads.rank")
    parser.add_argument("gang_file", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid whose death ends this rank")
    parser.add_argument("--report-fd", type=int, required=True, help="descriptor that takes a failure report")
    options = parser.parse_args()
    die_with_parent(signal.SIGKILL, options.parent)
    return run(options.gang_file, options.rank, options.report_fd)


if __name__ == "__main__":
    sys.exit(main())
