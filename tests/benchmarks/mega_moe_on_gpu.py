"""MegaMoE with MXFP4 experts on one H200 beside DeepGEMM's on FP8 weights: 64 experts, top-6, H 4096, I 2048.

Floor: the larger of the touched experts' bytes over the rate of a plain read, and operations over FP8's rate on the
datasheet. Ours: all launches, from BF16 tokens to BF16 sums, replayed from a CUDA graph. DeepGEMM's: its one launch,
from tokens that lie quantised in its buffer. The caches are emptied before each. Without the wheel only ours is shown.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.device import kernels, report, require_gpu
from workloads.kernels import mega_moe_deep_gemm as deep_gemm
from workloads.kernels import mega_moe_hopper as hopper
from workloads.kernels.activations import SwigluParameters
from workloads.kernels.mega_moe_hopper_kernel import HopperMegaMoE
from workloads.kernels.quantization import quantize_fp8_groups

EXPERTS, SLOTS, HIDDEN, INNER = 64, 6, 4096, 2048
TOKENS = (8, 32, 128, 512, 2048)
AT_MOST = {8: 0.70, 128: 0.60, 2048: 1.0}  # of DeepGEMM's time
AT_LEAST = 0.75  # of the rate of a plain read, where weights are what takes time
FP8_RATE = 1979e12
BEFORE = {8: 245.0, 128: 452.0, 2048: 1160.0}  # DeepGEMM, in microseconds, where the wheel is not there
GPU = torch.device("cuda", 0)


def main() -> int:
    require_gpu()
    torch.manual_seed(0)
    weights = mxfp4_experts()
    read = read_rate()
    peer = make_peer()
    bars, figures = {}, {}
    print(f"plain read {read / 1e12:.2f} TB/s")
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device=GPU).to(torch.bfloat16)
        idx = torch.rand(tokens, EXPERTS, device=GPU).topk(SLOTS).indices
        weight = torch.rand(tokens, SLOTS, device=GPU)
        given = hopper.Tokens(x, None, idx, weight)
        ours = graph_microseconds(lambda given=given: hopper.run(given, weights, SwigluParameters(10.0)))
        touched = int(idx.unique().numel())
        nbytes = touched * 3 * HIDDEN * INNER * 0.53125
        operations = 6 * tokens * SLOTS * HIDDEN * INNER
        floor = 1e6 * max(nbytes / read, operations / FP8_RATE)
        theirs = peer(x, idx, weight) if peer else BEFORE.get(tokens)
        row = {"touched": touched, "floor us": floor, "ours us": ours, "deep_gemm us": theirs}
        row |= {"weights TB/s": nbytes / ours / 1e6, "TFLOP/s": operations / ours / 1e6}
        print(f"{tokens:5} tokens " + "  ".join(f"{k} {v:.4g}" for k, v in row.items() if v is not None))
        figures[str(tokens)] = row
        if tokens in AT_MOST and theirs:
            bars[f"{tokens} tokens, of DeepGEMM's time"] = (ours / theirs, -AT_MOST[tokens])
        if tokens in (8, 128):
            bars[f"{tokens} tokens, weights' rate of a plain read's"] = (nbytes / ours * 1e6 / read, AT_LEAST)
    if peer:
        dist.destroy_process_group()
    return report("mega_moe_on_gpu", bars, {"read TB/s": read / 1e12, "peer": bool(peer), "tokens": figures})


def mxfp4_experts() -> hopper.Experts:
    parts = []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        parts.append(torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device=GPU))
        parts.append(torch.randint(118, 123, (EXPERTS, rows, columns // 32), dtype=torch.uint8, device=GPU))
    w13, s13, w2, s2 = parts
    return hopper.Experts(*HopperMegaMoE().prepare(w13, s13, w2, s2))


def read_rate() -> float:
    """Bytes a second of a sum over 4 GiB."""
    big = torch.ones(1 << 30, dtype=torch.float32, device=GPU)
    return big.nbytes / kernels(lambda: big.sum())[0]


def graph_microseconds(action: Callable[[], object]) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        action()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        action()
    return cold_microseconds(graph.replay)


def cold_microseconds(action: Callable[[], object], rounds: int = 31) -> float:
    """Median, by events, with other bytes in the cache each time."""
    other, times = torch.empty(256 << 20, dtype=torch.uint8, device=GPU), []
    for i in range(rounds):
        other.fill_(i)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


def make_peer() -> Callable[[Any, Any, Any], float] | None:
    """DeepGEMM's microseconds for tokens, or None where it is not installed."""
    try:
        deep_gemm.find(deep_gemm.SM90_ENTRY_POINTS)
    except RuntimeError as error:
        print(f"no peer: {error}")
        return None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=GPU)
    parts = []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        parts.append(
            (0.02 * torch.randn(EXPERTS, rows, columns, device=GPU, dtype=torch.bfloat16)).to(
                torch.float8_e4m3fn
            )
        )
        parts.append(torch.rand(EXPERTS, rows // 128, columns // 128, device=GPU) + 0.5)
    moe = deep_gemm.Fp8MegaMoE(
        deep_gemm.Fp8Experts(*parts), dist.group.WORLD, EXPERTS, SLOTS, max(TOKENS), 10.0
    )

    def measured(x: Any, idx: Any, weight: Any) -> float:
        q, scales = quantize_fp8_groups(x)

        def fill_and_run() -> None:
            moe.fill(q, scales, idx, weight)
            moe.run(len(x))

        fill_and_run()
        return cold_microseconds(lambda: moe.run(len(x)))

    return measured
