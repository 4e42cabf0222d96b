"""DeepGEMM's Mega MoE: what it needs is looked at before it is called, since its versions differ.

- SM100 takes MXFP4 experts in `mega_moe_layout` (`fp8_fp4_mega_moe`); its numerics are those of `MegaMoEReference`.
- SM90 takes FP8 experts (`fp8_mega_moe`): E4M3 with one float32 scale for 128 x 128 values; activations E4M3 with one
  for 128 columns, before both matrices.

Both exchange tokens between the ranks of a group through a buffer of symmetric memory, which all of them must make at
once. The SM100 side has never run here for want of the GPU; its calls are tested against a stand-in.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.kernels.activations import GatedActivation, SituParameters, SwigluParameters
from workloads.kernels.mega_moe_layout import check_alignment
from workloads.kernels.moe import ExpertWeights, MegaMoEReference, check_local_experts, check_scale
from workloads.kernels.moe_choice import SM90_ENTRY_POINTS, SM100_ENTRY_POINTS, SM100_MULTIPLE
from workloads.kernels.quantization import quantize_fp8_rows
from workloads.kernels.shared_expert import SharedWeights

MODULES = ("vllm.third_party.deep_gemm", "deep_gemm")
TILE = 128  # rows and columns of FP8 weights that share a scale


def find(names: Sequence[str]) -> Any:
    """The installed DeepGEMM that has these entry points. RuntimeError that says what is there instead."""
    seen = []
    for name, found in _installed():
        if isinstance(found, str):
            seen.append(found)
            continue
        missing = [entry for entry in names if not callable(getattr(found, entry, None))]
        if not missing:
            return found
        version = getattr(found, "__version__", "of unknown version")
        seen.append(f"{name} {version} has no {', '.join(missing)}")
    raise RuntimeError(
        f"DeepGEMM's Mega MoE needs {', '.join(names)}: {'; '.join(seen)}. Install a DeepGEMM built for torch "
        f"{torch.__version__} that has it, or set backend.moe_kernel=reference."
    )


def entry_points(names: Sequence[str]) -> tuple[Mapping[str, tuple[str, ...]], str]:
    """The parameters of these entry points by their name, none where no installed DeepGEMM has all of them, and then
    why."""
    try:
        module = find(names)
    except RuntimeError as error:
        return {}, str(error).partition(". Install")[0]
    return {name: tuple(inspect.signature(getattr(module, name)).parameters) for name in names}, ""


def _installed() -> Iterator[tuple[str, Any]]:
    """(name, the module, or a half-sentence that says why it is none)."""
    for name in MODULES:
        try:
            yield name, import_module(name)
        except ModuleNotFoundError as error:
            yield name, f"{name} is not installed ({error})"
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            yield name, f"{name} does not load here, as it was built for another torch or CUDA ({error})"


def check_capability(device: torch.device, major: int) -> None:
    """RuntimeError unless `device` is a GPU of this generation."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found[0] != major:
        raise RuntimeError(
            f"This Mega MoE of DeepGEMM runs on compute capability {major}.x and {device} "
            f"{'is no GPU' if found is None else f'has {found[0]}.{found[1]}'}: set backend.arch to what is there."
        )


def supported(function: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """`wanted`, if the function takes all of these keywords. RuntimeError that names those it does not take."""
    parameters = inspect.signature(function).parameters
    missing = [name for name in wanted if name not in parameters]
    if missing:
        raise RuntimeError(
            f"The installed DeepGEMM's {function.__name__} takes no {', '.join(missing)}; it takes "
            f"{', '.join(parameters)}: install a version that computes this model's activation."
        )
    return wanted


def activation_keywords(activation: GatedActivation) -> dict[str, Any]:
    """How MegaMoE is told an activation. ValueError for one that it does not have."""
    if isinstance(activation, SituParameters):
        return {
            "activation": "situ",
            "activation_beta": activation.beta,
            "activation_linear_beta": activation.linear_beta,
        }
    if isinstance(activation, SwigluParameters):
        limit = None if activation.limit == float("inf") else activation.limit
        return {"activation": "swiglu", "activation_clamp": limit}
    raise ValueError(
        f"MegaMoE computes SwiGLU and SiTU, and the model's experts have {type(activation).__name__}: set "
        "backend.moe_kernel=reference."
    )


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """ValueError, with the tensor's name, for another shape, dtype or layout than a contiguous one."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} at address "
            f"{tensor.data_ptr():#x}, but MegaMoE takes {dtype} {shape}, contiguous, at a multiple of 16 bytes."
        )


def check_tokens(tokens: int, capacity: int) -> None:
    if tokens > capacity:
        raise ValueError(
            f"{tokens} tokens are more than MegaMoE's buffer was made for, {capacity}: raise backend.max_batch_tokens "
            "or send fewer at once."
        )


class Fp8Experts(NamedTuple):
    """float8_e4m3fn [E, 2I, H] (gates above ups), float32 [E, 2I/128, H/128], float8_e4m3fn [E, H, I], float32
    [E, H/128, I/128]."""

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor


class Fp8MegaMoE:
    """`fp8_mega_moe` on Hopper for one layer's local experts; making one is collective over `group`.

    RuntimeError without the entry points or on another GPU; ValueError, naming the tensor, for experts that do not fit.
    """

    def __init__(
        self,
        experts: Fp8Experts,
        group: dist.ProcessGroup,
        num_experts: int,
        slots: int,
        tokens: int,
        limit: float,
    ) -> None:
        check_capability(experts.w13.device, 9)
        self._module = find(SM90_ENTRY_POINTS)
        check_fp8_experts(experts)
        _, rows, hidden = experts.w13.shape
        self._num_experts, self._slots, self._hidden, self._capacity = num_experts, slots, hidden, tokens
        self._weights = self._module.transform_weights_for_mega_moe_sm90(
            (experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale)
        )
        self._buffer = self._module.get_symm_buffer_for_sm90_mega_moe(
            group, num_experts, tokens, slots, hidden, rows // 2
        )
        self._limit = limit

    def fill(self, q: Tensor, scales: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Tokens of the next `run`: float8_e4m3fn [T, H], float32 [T, H/128], int64 [T, K], float32 [T, K]."""
        count = len(q)
        check_tokens(count, self._capacity)
        check_tensor("x", q, (count, self._hidden), torch.float8_e4m3fn)
        check_tensor("x_scale", scales, (count, self._hidden // TILE), torch.float32)
        check_tensor("topk_idx", topk_idx, (count, self._slots), torch.int64)
        check_tensor("topk_weights", topk_weights, (count, self._slots), torch.float32)
        targets = (self._buffer.x, self._buffer.x_sf, self._buffer.topk_idx, self._buffer.topk_weights)
        for target, source in zip(targets, (q, scales, topk_idx, topk_weights), strict=True):
            target[:count].copy_(source)

    def run(self, count: int) -> Tensor:
        """BF16 [count, H] of the tokens in the buffer; collective over the group."""
        y = torch.empty((count, self._hidden), dtype=torch.bfloat16, device=self._weights[0][0].device)
        self._module.fp8_mega_moe(y, *self._weights, self._buffer, activation_clamp=self._limit)
        return y


def check_fp8_experts(experts: Fp8Experts) -> None:
    """ValueError, naming the tensor, for sizes, dtypes and layouts that `fp8_mega_moe` does not take."""
    local, rows, hidden = experts.w13.shape
    inner = rows // 2
    check_alignment(hidden, inner, TILE)
    check_tensor("w13", experts.w13, (local, 2 * inner, hidden), torch.float8_e4m3fn)
    check_tensor("w13_scale", experts.w13_scale, (local, 2 * inner // TILE, hidden // TILE), torch.float32)
    check_tensor("w2", experts.w2, (local, hidden, inner), torch.float8_e4m3fn)
    check_tensor("w2_scale", experts.w2_scale, (local, hidden // TILE, inner // TILE), torch.float32)
    for name, scale in (("w13_scale", experts.w13_scale), ("w2_scale", experts.w2_scale)):
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(f"{name} holds a NaN or an infinity: the checkpoint is damaged.")


class Sm100MegaMoE(MegaMoEReference):
    """`fp8_fp4_mega_moe` on Blackwell; layouts and numerics are those of the reference.

    tokens: most of one call on one rank. The buffer is made at the first call, by all ranks of the group, and kept.
    """

    multiple = SM100_MULTIPLE

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._module = find(SM100_ENTRY_POINTS)
        self._buffer: Any = None

    def prepare(
        self, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, into: ExpertWeights | None = None
    ) -> ExpertWeights:
        check_alignment(2 * w13.shape[-1], w13.shape[1] // 2, SM100_MULTIPLE)
        for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
            check_scale(name, scale)
        return super().prepare(w13, w13_scale, w2, w2_scale, into)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        group: dist.ProcessGroup | None,
        num_experts: int,
        activation: GatedActivation,
        shared: SharedWeights | None = None,
    ) -> Tensor:
        """As of `MoEKernel`; `group` is needed even with one rank, for its symmetric memory."""
        check_capability(x.device, 10)
        check_local_experts(weights, group, num_experts)
        if group is None:
            raise ValueError(
                "DeepGEMM's Mega MoE needs a process group: start with parallelism.ep of 2 or more."
            )
        count, hidden = x.shape
        check_tokens(count, self._tokens)
        check_tensor("topk_idx", topk_idx, (count, topk_idx.shape[1]), torch.int64)
        check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), torch.float32)
        call = self._module.fp8_fp4_mega_moe
        told = activation_keywords(activation)
        if shared is not None:
            told["shared_l1_weights"] = (shared.l1_weight, shared.l1_scale)
            told["shared_l2_weights"] = (shared.l2_weight, shared.l2_scale)
        keywords = supported(call, told)
        buffer = self._made(group, num_experts, topk_idx.shape[1], weights, shared)
        q, scales = quantize_fp8_rows(x)
        for target, source in (
            (buffer.x, q),
            (buffer.x_sf, scales.view(torch.int32)),
            (buffer.topk_idx, topk_idx),
            (buffer.topk_weights, topk_weights),
        ):
            target[:count].copy_(source)
        y = x.new_empty((count, hidden), dtype=torch.bfloat16)
        first, second = (weights.l1_weight, weights.l1_scale), (weights.l2_weight, weights.l2_scale)
        call(y, first, second, buffer, **keywords)
        return y

    def _made(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        slots: int,
        weights: ExpertWeights,
        shared: SharedWeights | None,
    ) -> Any:
        if self._buffer is None:
            make = self._module.get_symm_buffer_for_mega_moe
            inner, hidden = weights.l1_weight.shape[1] // 2, 2 * weights.l1_weight.shape[2]
            told = {}
            if shared is not None:
                told = supported(make, {"num_shared_experts": shared.l1_weight.shape[0] // 2 // inner})
            self._buffer = make(group, num_experts, self._tokens, slots, hidden, inner, **told)
        return self._buffer
