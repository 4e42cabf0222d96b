"""MegaMoE on Hopper with MXFP4 weights: what surrounds the kernels of `mega_moe_sm90.cu`.

The numeric recipe, which `HopperReference` computes in float64:

1. x -> E4M3 for each token and 128 columns: s = max(amax, 1e-10) / 448 in float32, q = e4m3(x / s).
2. Weights are E2M1 times powers of two, exact in E5M2 but for groups further than 26 octaves below their row's largest
   exponent (`mega_moe_hopper_layout`), whose exponent is taken as 26 below.
3. gate and up: E5M2 x E4M3 products, summed by the tensor cores over 128 columns, times s, summed in float32; BF16.
4. h = activation(gate, up) * routing weight in float32.
5. h -> E4M3 for each token and 64 channels, as in 1.
6. The second matrix as in 3, over 64 columns at a time; BF16.
7. y = bf16(float32 sum over the valid slots, in slot order).

Tensor cores of Hopper keep about 13 bits below the largest term while they sum FP8 products, which is why sums leave
them after 128 or 64 columns. The recipe differs from that of SM100 (`MegaMoEReference`) in the scales of activations:
float32 for 128 or 64 columns here, powers of two for 32 there.

No result depends on the batch: a token's columns are summed alike wherever it stands. Nothing is kept between calls.
"""

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workloads.kernels import mega_moe_build
from workloads.kernels import mega_moe_hopper_sizes as sizes
from workloads.kernels.activations import GatedActivation, SituParameters, SwigluParameters
from workloads.kernels.mega_moe_hopper_sizes import TILE, WEIGHT_BYTES
from workloads.kernels.mega_moe_hopper_sizes import scale_bytes as _scale_bytes
from workloads.kernels.moe_choice import MOST_EXPERTS, MOST_SLOTS

MOST_PAIRS = 1 << 22  # (token, slot) pairs of one call


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in ("tokens", "slots", "experts", "hidden", "inner", "max_tile", "max_tiles")
    )


class _Activation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("beta", ctypes.c_float),
        ("linear", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class _Buffers(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("w13", "s13", "w2", "s2", "topk_idx", "topk_weights", "x", "x_scale", "xq", "hq", "xs", "hs"),
            *("place", "row_pair", "row_weight", "tiles", "done", "state", "out", "y"),
        )
    )


class Experts(NamedTuple):
    """A rank's experts as `mega_moe_hopper_layout.pack` lays them out: uint8 [E, 2I/128, H/128, 8192],
    [E, 2I/128, 4H + 128], [E, H/128, I/128, 8192], [E, H/128, 4I + 128]."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H, I."""
        return self.w13.shape[0], self.w13.shape[2] * TILE, self.w13.shape[1] * TILE // 2


class Tokens(NamedTuple):
    """x bf16 [T, H], or float8_e4m3fn [T, H] with scale float32 [T, H/128]; topk_idx int64 [T, K] of local experts
    (negative: none), topk_weights float32 [T, K]."""

    x: Tensor
    scale: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor


def run(tokens: Tokens, experts: Experts, activation: GatedActivation, combine: bool = True) -> Tensor:
    """Queues the kernels on the current stream: bf16 [T, H], or without `combine` the rows of all pairs bf16 [T*K, H],
    undefined for pairs without an expert.

    Every argument is checked before anything is launched but the values of topk_idx (`check_ids`), which need the
    device's answer; an id that is no expert's is left out, and never leads to an access out of bounds. Raises
    ValueError for what does not fit, naming the tensor, and RuntimeError on another GPU than Hopper's.
    """
    check_device(tokens.x.device)
    check_arguments(tokens, experts)
    count, slots = tokens.topk_idx.shape
    number, hidden, inner = experts.sizes
    rows = tokens.x.new_empty((count if combine else count * slots, hidden), dtype=torch.bfloat16)
    if count == 0:
        return rows
    largest, tiles = sizes.tasks(count * slots, number)
    shape = _Shape(count, slots, number, hidden, inner, largest, tiles)
    memory, buffers = _workspace(shape, tokens.x.device, combine)
    for name, tensor in _given(tokens, experts):
        setattr(buffers, name, tensor.data_ptr())
    setattr(buffers, "y" if combine else "out", rows.data_ptr())
    loaded = mega_moe_build.compiled(largest)
    with torch.cuda.device(tokens.x.device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = loaded.mega_moe_launch(
            ctypes.byref(buffers),
            ctypes.byref(shape),
            ctypes.byref(_parameters(activation)),
            int(combine),
            stream,
        )
    del memory  # the allocator hands it out again on this stream only
    if error:
        raise RuntimeError(f"MegaMoE could not be launched: {loaded.mega_moe_error(error).decode()}.")
    return rows


def check_ids(topk_idx: Tensor, experts: int) -> None:
    """ValueError for an id that is no expert's; waits for the device; looks at nothing while a graph is captured."""
    if not topk_idx.numel() or (topk_idx.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    largest = int(topk_idx.max())
    if largest >= experts:
        raise ValueError(
            f"topk_idx holds expert {largest}, but there are {experts}: ids run from 0 to {experts - 1}, and -1 masks "
            "a slot."
        )


def check_device(device: torch.device) -> None:
    """RuntimeError unless `device` is a Hopper GPU."""
    if device.type != "cuda":
        raise RuntimeError(
            f"This MegaMoE runs on a Hopper GPU and x is on {device}: set backend.moe_kernel=reference there."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise RuntimeError(
            f"This MegaMoE is compiled for compute capability 9.0 and {device} has {capability[0]}.{capability[1]}: "
            "set backend.arch to the GPU's, or backend.moe_kernel=reference."
        )


def check_arguments(tokens: Tokens, experts: Experts) -> None:
    """ValueError, naming the tensor, for a shape, dtype, layout or alignment that the kernels would misread."""
    number, hidden, inner = experts.sizes
    count, slots = tokens.topk_idx.shape if tokens.topk_idx.ndim == 2 else (-1, -1)
    wanted: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {
        "w13": (experts.w13, (number, 2 * inner // TILE, hidden // TILE, WEIGHT_BYTES), torch.uint8),
        "w13_scale": (experts.w13_scale, (number, 2 * inner // TILE, _scale_bytes(hidden)), torch.uint8),
        "w2": (experts.w2, (number, hidden // TILE, inner // TILE, WEIGHT_BYTES), torch.uint8),
        "w2_scale": (experts.w2_scale, (number, hidden // TILE, _scale_bytes(inner)), torch.uint8),
        "topk_idx": (tokens.topk_idx, (count, slots), torch.int64),
        "topk_weights": (tokens.topk_weights, (count, slots), torch.float32),
        "x": (tokens.x, (count, hidden), torch.bfloat16 if tokens.scale is None else torch.float8_e4m3fn),
    }
    if tokens.scale is not None:
        wanted["x_scale"] = (tokens.scale, (count, hidden // TILE), torch.float32)
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but MegaMoE on Hopper needs {dtype} {shape}: "
                "prepare the weights with the kernel and pass tokens of the same model."
            )
        if tensor.device != tokens.x.device or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} lies on {tensor.device} with strides {tensor.stride()} at address {tensor.data_ptr():#x}; "
                f"MegaMoE on Hopper reads contiguous tensors at multiples of 16 bytes on {tokens.x.device}: pass "
                f"{name}.contiguous() of that device."
            )
    for name, value, most in (
        ("experts of a rank", number, MOST_EXPERTS),
        ("slots of a token", slots, MOST_SLOTS),
        ("pairs of tokens and slots", count * slots, MOST_PAIRS),
    ):
        if value > most:
            raise ValueError(
                f"MegaMoE on Hopper takes at most {most} {name}, and got {value} with topk_idx {count} x {slots}: "
                "lower backend.max_batch_tokens or raise parallelism.ep."
            )


def _given(tokens: Tokens, experts: Experts) -> Iterator[tuple[str, Tensor]]:
    names = ("w13", "s13", "w2", "s2")
    yield from zip(names, experts, strict=True)
    yield from (("topk_idx", tokens.topk_idx), ("topk_weights", tokens.topk_weights), ("x", tokens.x))
    if tokens.scale is not None:
        yield "x_scale", tokens.scale


def _workspace(shape: _Shape, device: torch.device, combine: bool) -> tuple[Tensor, _Buffers]:
    """One allocation for everything between the launches, and pointers into it."""
    pairs = shape.tokens * shape.slots
    starts, size = sizes.workspace(pairs, shape.experts, shape.hidden, shape.inner, combine)
    try:
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"MegaMoE on Hopper needs {size / 1e9:,.2f} GB between its launches for {shape.tokens} tokens of "
            f"{shape.slots} slots, and {device} has no room for them: lower backend.max_batch_tokens, max_requests or "
            f"max_model_len. {error}"
        ) from error
    base = -(-memory.data_ptr() // sizes.ALIGNMENT) * sizes.ALIGNMENT
    return memory, _Buffers(**{name: base + start for name, start in starts.items()})


def _parameters(activation: GatedActivation) -> _Activation:
    if isinstance(activation, SituParameters):
        return _Activation(0, activation.beta, activation.linear_beta, 0.0)
    if isinstance(activation, SwigluParameters):
        return _Activation(1, 0.0, 0.0, activation.limit)
    raise ValueError(
        f"MegaMoE on Hopper computes SiTU and SwiGLU, and the model's experts have {type(activation).__name__}: set "
        "backend.moe_kernel=reference."
    )
