"""Fused matrices in the formats of a Qwen3 checkpoint: what is loaded, and what the kernels read instead.

A linear layer has one weight of several checkpoint matrices row under row; the experts of a layer have one such weight
each, stacked. Post-processing brings scales into the kernel's layout, and the two halves of gate and up into the order
(up, gate) in which the experts' kernels take them; the parameters that it does this to are consumed. It acts on what
has been loaded since the last time and on nothing else, so that running twice changes nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from workloads.kernels.linear import linear_partial
from workloads.kernels.scale_layout import swizzle, to_mn_major, unswizzle
from workloads.kernels.scaled_linear import fp8_tiles_linear_partial, nvfp4_linear_partial
from workloads.loading.checkpoint import TORCH_DTYPES
from workloads.loading.weights import Placement, Region, Weight, WeightModule
from workloads.models.qwen3.formats import FORMATS, SCALAR, Stored


@dataclass(frozen=True)
class Piece:
    """What this rank takes of the checkpoint matrix `stem`: (start, length) of rows and columns. slot: rows and columns
    of the fused weight set aside for it, of which it takes the first."""

    stem: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    slot: tuple[int, int]


class FusedMatrices(WeightModule):
    """Matrices [N, K] in BF16: `weight` BF16 [N, K], or [E, N, K] for experts.

    experts: the pieces of each; a linear layer gives one list. All lists have the same slots. swapped: two pieces of
    equal slots, whose order the kernel wants reversed: `weight` is consumed into `kernel_weight`, which is the loaded
    storage itself, changed in place.
    """

    QUANTIZATION = "bf16"
    CONSUMED: Mapping[str, str] = {}  # parameter -> attribute that the kernel reads instead
    weight: torch.Tensor

    def __init__(
        self, experts: Sequence[Sequence[Piece]], stacked: bool = False, swapped: bool = False
    ) -> None:
        super().__init__()
        self.swapped, self.slots = swapped, [piece.slot[0] for piece in experts[0]]
        self.stacked, self.in_features = stacked, experts[0][0].slot[1]
        self.consumed = {**self.CONSUMED, **({"weight": "kernel_weight"} if swapped else {})}
        for holder in self.consumed.values():
            setattr(self, holder, None)
        for stored in FORMATS[self.QUANTIZATION].stored:
            self.add_weight(stored.name, _weight(stored, experts, stacked))

    def packed(self, name: str, loaded: torch.Tensor) -> torch.Tensor:
        """What the kernel reads of a parameter that is consumed, or of one expert's part of it."""
        return self.reordered(loaded)

    def unpacked(self, name: str, served: torch.Tensor) -> torch.Tensor:
        """The inverse of `packed`, contiguous."""
        return self.reordered(served)

    def post_process(self) -> None:
        for name, holder in self.consumed.items():
            loaded = self.live(name)
            if loaded is None:  # nothing has been loaded since the last time
                continue
            loaded = loaded.detach()
            served = _exchange_halves(loaded) if name == "weight" else self.packed(name, loaded)
            self.set_derived(holder, served)
            self.consume(name)
        self.derive()

    def install_expert(self, expert: int, one: WeightModule) -> None:
        for name in self.weights:
            loaded = one.get_parameter(name).detach()[0]
            if name in self.consumed:
                self.served(self.consumed[name])[expert].copy_(self.packed(name, loaded))
            else:
                self.get_parameter(name)[expert].copy_(loaded)

    def restore(self, name: str) -> torch.Tensor:
        """The storage of a weight that serves is where it is loaded, too."""
        if name == "weight":
            return self.served("kernel_weight")
        return super().restore(name)

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        held = {name: (holder, getattr(self, holder)) for name, holder in self.consumed.items()}
        return {n: (holder, self.unpacked(n, t)) for n, (holder, t) in held.items() if t is not None}

    def reordered(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy [..., N', C] with its halves of rows in the other order, which is its own inverse; the tensor itself
        where they are not swapped."""
        return torch.roll(tensor, tensor.shape[-2] // 2, -2) if self.swapped else tensor

    def served(self, name: str) -> torch.Tensor:
        """A tensor that post-processing makes. Raises RuntimeError while it is missing."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            raise self.unprocessed(name)
        return tensor

    def unprocessed(self, name: str) -> RuntimeError:
        source = next(p.source for weight in self.weights.values() for p in weight.placements)
        return RuntimeError(
            f"What was loaded of {source!r} and its like is as the checkpoint lays it out, and the kernel reads "
            f"{name!r}, which post-processing makes of it: the load path did not post-process."
        )

    def matrix(self, expert: int | None) -> torch.Tensor:
        """The stored values that the kernel reads, of one expert if there are several."""
        return _of(self.served("kernel_weight") if self.swapped else self.weight, expert)

    def scales(self, raw: str, expert: int | None) -> torch.Tensor:
        """What was made of the scales `raw`. Raises RuntimeError where they have been loaded and not packed, which a
        kernel finds from their layout."""
        if self.live(raw) is not None:
            raise self.unprocessed(self.consumed[raw])
        return _of(self.served(self.consumed[raw]), expert)

    def product(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """x BF16 [T, K] times the matrices transposed, in the kernel's order of rows -> float64 [T, N]. expert: which
        of the stacked ones."""
        return linear_partial(x, self.matrix(expert))


class Fp8Matrices(FusedMatrices):
    """Matrices in FP8 tiles of 128 x 128: `weight` E4M3, `weight_scale_inv` FP32 [.., N/128, K/128].

    The scales are consumed into `weight_scale`, the same values MN-major.
    """

    QUANTIZATION = "fp8"
    CONSUMED: Mapping[str, str] = {"weight_scale_inv": "weight_scale"}

    def packed(self, name: str, loaded: torch.Tensor) -> torch.Tensor:
        ordered = self.reordered(loaded)
        return ordered if name == "weight" else to_mn_major(ordered)

    def unpacked(self, name: str, served: torch.Tensor) -> torch.Tensor:
        return self.reordered(served).clone(memory_format=torch.contiguous_format)

    def product(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        return fp8_tiles_linear_partial(x, self.matrix(expert), self.scales("weight_scale_inv", expert))


class Nvfp4Matrices(FusedMatrices):
    """Matrices in NVFP4: `weight` U8 [.., N, K/2], `weight_scale` E4M3 [.., N, K/16], and for each fused matrix a
    `weight_scale_2` and an `input_scale`, FP32 [.., pieces].

    The block scales are consumed into `weight_scale_swizzled`. Derived: `input_scale_max` FP32 [..], under which the
    common input of the pieces is quantised, and `alphas` FP32 [.., pieces] in the kernel's order, its products with
    weight_scale_2. (A kernel has one alpha for gate and up, whose global scales are equal where ModelOpt wrote them;
    one for each is right for any checkpoint.)
    """

    QUANTIZATION = "nvfp4"
    CONSUMED: Mapping[str, str] = {"weight_scale": "weight_scale_swizzled"}

    def __init__(
        self, experts: Sequence[Sequence[Piece]], stacked: bool = False, swapped: bool = False
    ) -> None:
        super().__init__(experts, stacked, swapped)
        self.input_scale_max: torch.Tensor | None = None
        self.alphas: torch.Tensor | None = None

    def packed(self, name: str, loaded: torch.Tensor) -> torch.Tensor:
        ordered = self.reordered(loaded)
        return ordered if name == "weight" else swizzle(ordered)

    def unpacked(self, name: str, served: torch.Tensor) -> torch.Tensor:
        if name == "weight":
            return self.reordered(served)
        return self.reordered(unswizzle(served, *self.weights[name].shape[-2:]))

    def derivations(self) -> Mapping[str, torch.Tensor]:
        largest = self.get_parameter("input_scale").detach().amax(dim=-1)
        alphas = largest.unsqueeze(-1) * self.get_parameter("weight_scale_2").detach()
        return {"input_scale_max": largest, "alphas": alphas.flip(-1) if self.swapped else alphas}

    def product(self, x: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        scales, slots = self.scales("weight_scale", expert), torch.tensor(self.slots, device=x.device)
        alphas = _of(self.served("alphas"), expert).repeat_interleave(slots)
        largest = _of(self.served("input_scale_max"), expert)
        return nvfp4_linear_partial(x, self.matrix(expert), scales, alphas, largest)


MATRICES: dict[str, type[FusedMatrices]] = {
    kind.QUANTIZATION: kind for kind in (FusedMatrices, Fp8Matrices, Nvfp4Matrices)
}


def _of(tensor: torch.Tensor, expert: int | None) -> torch.Tensor:
    return tensor if expert is None else tensor[expert]


def _exchange_halves(weight: torch.Tensor) -> torch.Tensor:
    """The halves of the rows of [..., N, C] in each other's place, in place."""
    first, second = weight.chunk(2, dim=-2)
    held_back = first.clone()
    first.copy_(second)
    second.copy_(held_back)
    return weight


def _weight(stored: Stored, experts: Sequence[Sequence[Piece]], stacked: bool) -> Weight:
    """The parameter that holds one tensor of every piece."""
    placements: list[Placement] = []
    for number, pieces in enumerate(experts):
        expert: Region = ((number, 1),) if stacked else ()
        place = _scalars if stored.rows == SCALAR else _blocks
        placements += place(stored, pieces, expert)
    if stored.rows == SCALAR:
        shape: tuple[int, ...] = (len(experts[0]),)
    else:
        shape = stored.shape(sum(piece.slot[0] for piece in experts[0]), experts[0][0].slot[1])
    shape = ((len(experts),) if stacked else ()) + shape
    padded = any(placement.padding(torch.Size(shape)) for placement in placements)
    dtype = TORCH_DTYPES[stored.held or stored.dtype]
    return Weight(shape, dtype, tuple(placements), stored.creation if padded else None)


def _scalars(stored: Stored, pieces: Sequence[Piece], expert: Region) -> Iterator[Placement]:
    for number, piece in enumerate(pieces):
        target = (*expert, (number, 1))
        yield Placement(f"{piece.stem}.{stored.name}", (), target, target, stacked=bool(expert))


def _blocks(stored: Stored, pieces: Sequence[Piece], expert: Region) -> Iterator[Placement]:
    """Raises ValueError when a piece is not made of whole blocks."""
    start = 0
    for piece in pieces:
        rows, columns = (
            _counted(stored, piece, span, each)
            for span, each in ((piece.rows, stored.rows), (piece.columns, stored.columns))
        )
        slot_rows, slot_columns = stored.shape(*piece.slot)
        yield Placement(
            f"{piece.stem}.{stored.name}",
            source_region=(rows, columns),
            target=(*expert, (start, rows[1]), (0, columns[1])),
            slot=(*expert, (start, slot_rows), (0, slot_columns)),
            source_dtype=TORCH_DTYPES[stored.dtype] if stored.held else None,
            stacked=bool(expert),
        )
        start += slot_rows


def _counted(stored: Stored, piece: Piece, span: tuple[int, int], each: int) -> tuple[int, int]:
    """A span of the matrix in blocks of `each`."""
    if span[0] % each or span[1] % each:
        raise ValueError(
            f"This rank's share of {piece.stem!r}, {span[1]} from {span[0]}, is not made of whole blocks of {each}, "
            f"which share an entry of {stored.name!r}: lower parallelism.tp."
        )
    return span[0] // each, span[1] // each
