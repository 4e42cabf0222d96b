"""MegaMoE's fused expert layout (DeepGEMM, FP8xFP4) as strided views of the fused storage.

The transform permutes bytes and computes nothing. Each `*_view` exposes fused storage in the order of the
checkpoint: copying into the view is the transform, reading it is the inverse. Two permutations are involved:

- gate and up rows of the first layer (L1) alternate in runs of 8, so one MMA tile holds matching gate and up columns;
- scale rows: source row i of a 128-row block lands at (i % 32) * 4 + i // 32, the order UTCCP copies to tensor memory.

Scales pack four UE8M0 bytes along K into one little-endian int32 and are MN-major: the row stride is 1.
"""

import torch
from torch import Tensor

from workloads.kernels.regions import Regions, write

GATE_UP_RUN = 8
SCALE_ROWS = 128  # rows of one UTCCP block, and columns that one packed int32 of scales covers
LAYOUT_MULTIPLE = 128  # of hidden and intermediate: what the layout itself needs; the SM100 kernel needs 512


def check_alignment(hidden: int, intermediate: int, multiple: int) -> None:
    """Raise ValueError when the kernel cannot take experts of this shape.

    multiple: 128 for the layout, 512 for the SM100 kernel (its TMA rows of scales are multiples of 16 bytes).
    """
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size <= 0 or size % multiple:
            padded = max(-(-size // multiple), 1) * multiple
            raise ValueError(
                f"MegaMoE needs the {name} size of an expert to be a positive multiple of {multiple}, but it is "
                f"{size}: pad it to {padded} with zero weights and unit scales (byte 127)."
            )


def empty_l1_weight(experts: int, hidden: int, intermediate: int, device: torch.device) -> Tensor:
    """Fused storage of the gate and up weights: int8 [E, 2I, H/2], two E2M1 per byte, contiguous."""
    return torch.empty((experts, 2 * intermediate, hidden // 2), dtype=torch.int8, device=device)


def empty_scale(experts: int, mn: int, k: int, device: torch.device) -> Tensor:
    """Fused storage of scales: int32 [E, mn, k/128] with strides (mn*k/128, 1, mn).

    TMA wants stride(-1) to be a multiple of four int32; mn is a multiple of 128, so mn itself is one.
    """
    packed = torch.empty((experts, k // SCALE_ROWS, mn), dtype=torch.int32, device=device)
    return packed.transpose(1, 2)


def l1_weight_view(fused: Tensor) -> Tensor:
    """Fused int8 [E, 2I, H/2] -> uint8 view [E, 2 (gate, up), I/8, 8, H/2] in checkpoint order."""
    runs = torch.unflatten(fused.view(torch.uint8), 1, (-1, 2, GATE_UP_RUN))  # [E, I/8, 2, 8, H/2]
    return runs.transpose(1, 2)


def l1_scale_view(fused: Tensor) -> Tensor:
    """Fused int32 [E, 2I, H/128] -> uint8 view [E, 2 (gate, up), I/64, 4, 2, 8, H/128, 4] in checkpoint order.

    Interleaved row 128*block + 32*a + 16*b + 8*half + w is stored at row 128*block + 4*(16*b + 8*half + w) + a and
    came from row 64*block + 16*a + 8*b + w of gate (half 0) or up (half 1).
    """
    split = (-1, 2, 2, GATE_UP_RUN, 4)
    rows = torch.unflatten(_scale_bytes(fused), 2, split)  # [E, H/128, block, b, half, w, a, byte]
    return rows.permute(0, 4, 2, 6, 3, 5, 1, 7)


def l2_scale_view(fused: Tensor) -> Tensor:
    """Fused int32 [E, H, I/128] -> uint8 view [E, H/128, 4, 32, I/128, 4] in checkpoint order."""
    rows = torch.unflatten(_scale_bytes(fused), 2, (-1, 32, 4))  # [E, I/128, block, i % 32, i // 32, byte]
    return rows.permute(0, 2, 4, 3, 1, 5)


def fuse_l1_weight(raw: Tensor, fused: Tensor) -> None:
    """Copy checkpoint rows uint8 [E, 2I, H/2] (gate above up) into the fused storage int8 [E, 2I, H/2]."""
    _copy_into(l1_weight_view(fused), raw, fused.shape, "l1 weight")


def fuse_l1_scale(raw: Tensor, fused: Tensor) -> None:
    """Copy checkpoint scales uint8 [E, 2I, H/32] (gate above up) into the fused storage int32 [E, 2I, H/128]."""
    _copy_into(l1_scale_view(fused), raw, _raw_scale_shape(fused), "l1 scale")


def fuse_l2_scale(raw: Tensor, fused: Tensor) -> None:
    """Copy checkpoint scales uint8 [E, H, I/32] into the fused storage int32 [E, H, I/128]."""
    _copy_into(l2_scale_view(fused), raw, _raw_scale_shape(fused), "l2 scale")


def unfuse_l1_weight(fused: Tensor) -> Tensor:
    """Fused int8 [E, 2I, H/2] -> fresh uint8 [E, 2I, H/2]: gate rows 0..I-1, then up rows."""
    return l1_weight_view(fused).flatten(1, 3)


def unfuse_l1_scale(fused: Tensor) -> Tensor:
    """Fused int32 [E, 2I, H/128] -> fresh uint8 [E, 2I, H/32]: gate rows 0..I-1, then up rows."""
    return l1_scale_view(fused).flatten(6, 7).flatten(1, 5)


def unfuse_l2_scale(fused: Tensor) -> Tensor:
    """Fused int32 [E, H, I/128] -> fresh uint8 [E, H, I/32]."""
    return l2_scale_view(fused).flatten(4, 5).flatten(1, 3)


def fuse_l2_weight(raw: Tensor) -> Tensor:
    """uint8 [E, H, I/2] -> int8 alias of the same storage: the second layer's weight keeps its loaded layout."""
    return raw.view(torch.int8)


def unfuse_l2_weight(fused: Tensor) -> Tensor:
    """int8 [E, H, I/2] -> uint8 alias of the same storage."""
    return fused.view(torch.uint8)


def _scale_bytes(fused: Tensor) -> Tensor:
    """MN-major int32 [E, mn, words] -> uint8 view [E, words, mn, 4]; byte j of a word is K block 4*word + j."""
    return fused.transpose(1, 2).unsqueeze(-1).view(torch.uint8)


def _raw_scale_shape(fused: Tensor) -> tuple[int, ...]:
    """Shape of the checkpoint scales that a fused int32 [E, mn, words] holds: [E, mn, 4*words]."""
    return (*fused.shape[:2], 4 * fused.shape[2])


def _copy_into(view: Tensor, raw: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Copy `raw` into a view that splits its dimensions, after comparing dtype and shape.

    copy_ alone would broadcast one expert over all, and would turn the exponent bytes of a float8_e8m0fnu tensor
    into the numbers they stand for; equal sizes alone would let an expert with H and I swapped through.
    """
    if raw.dtype != torch.uint8:
        raise ValueError(
            f"The {name} must arrive as raw uint8 bytes, but it is {raw.dtype}: view it as uint8."
        )
    if raw.shape != shape:
        raise ValueError(
            f"The {name} has shape {tuple(raw.shape)}, but the fused storage holds {tuple(shape)}: "
            "load the tensor of the same model and the same expert-parallel share."
        )
    if view.is_cuda and raw.device == view.device:  # a third of the time of copy_
        regions = Regions(view.device)
        regions.copy(view, raw.reshape(view.shape))
        write(regions.plan())
    else:
        view.copy_(raw.reshape(view.shape))
