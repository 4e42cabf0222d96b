"""Modules that own weights: what each parameter holds, where it comes from, and what is left over as padding."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Region = tuple[tuple[int, int], ...]  # (start, length) per dimension

POISON = 0xFF  # NaN in BF16, FP32 and E8M0: memory that no loader wrote can never pass for right


@dataclass(frozen=True)
class Placement:
    """One piece of one checkpoint tensor and the region of a parameter that it fills.

    source, source_region: checkpoint tensor, and the part that this rank takes of it.
    target: where it goes in the parameter; as many elements as source_region, same order of dimensions.
    slot: the region set aside for it, target included; what the piece leaves of it is padding.
    source_dtype: dtype in the checkpoint where it is not the parameter's (BF16 kept as FP32).
    stacked: dimension 0 of the parameter stacks experts, and every one of them is padded alike.
    """

    source: str
    source_region: Region
    target: Region
    slot: Region
    source_dtype: torch.dtype | None = None
    stacked: bool = False

    def padding(self, shape: torch.Size) -> list[Region]:
        """Regions of the slot that the piece does not cover: boxes, one per padded dimension.

        A region of one expert is given once for all experts, so that one strided fill serves them.
        """
        boxes: list[Region] = []
        for dim, ((start, length), (slot_start, slot_length)) in enumerate(
            zip(self.target, self.slot, strict=True)
        ):
            rest = slot_start + slot_length - (start + length)
            if rest:
                box = (*self.target[:dim], (start + length, rest), *self.slot[dim + 1 :])
                boxes.append(((0, shape[0]), *box[1:]) if self.stacked else box)
        return boxes


@dataclass(frozen=True)
class Part:
    """One logical piece of a live tensor, brought back to checkpoint layout, for localisation and for comparison
    with the checkpoint itself.

    tensor: audit path of the live tensor that holds it. name: e.g. `experts.5.w1` or `padding`.
    value: the bytes, contiguous, checkpoint layout (may be a fresh copy).
    source, region: checkpoint tensor and the (start, length) per dimension that it must equal; None for padding.
    padding_value: the byte or number the parameter was created with; only for padding parts.
    read_as: dtype to which the checkpoint's values are cast before they are compared, or what is made of them;
    None: they are compared as stored.
    """

    tensor: str
    name: str
    value: torch.Tensor
    source: str | None = None
    region: Region = ()
    padding_value: float | None = None
    read_as: torch.dtype | Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Rule:
    """Class of the tensors whose audit path matches `pattern` (fnmatch), with the reason shown to people.

    may_move: no captured graph or kernel can hold their address, so that they may lie elsewhere after an update.
    """

    pattern: str
    tensor_class: str  # weight | derived | constant | handle | runtime
    reason: str
    may_move: bool = False


@dataclass(frozen=True)
class Weight:
    """Declaration of one parameter. creation_value fills it when it is created, and its padding on every
    load; a parameter without padding needs none and is created poisoned. below: of a table of indices, what they
    are less than."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    creation_value: float | None = None
    below: int | None = None


def whole(shape: tuple[int, ...] | torch.Size) -> Region:
    return tuple((0, length) for length in shape)


def narrow(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """View of `tensor` on `region`."""
    return tensor[tuple(slice(start, start + length) for start, length in region)]


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    tensor.reshape(-1).view(torch.uint8).fill_(POISON)
    return tensor


class WeightModule(nn.Module):
    """A module whose parameters are declared with `add_weight`.

    Subclasses override `post_process` (what is derived from this layer alone), and, where parameters
    are consumed into a kernel's layout, `finalize` (called by the model's hook), `restore` and
    `consumed_weights`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Weight] = {}
        self.padding_regions: dict[str, dict[Region, float]] = {}  # recorded by the latest load
        self.padding_filled = True
        self.derived: set[str] = set()

    def add_weight(self, name: str, weight: Weight) -> None:
        self.weights[name] = weight
        if weight.creation_value is None and any(
            p.padding(torch.Size(weight.shape)) for p in weight.placements
        ):
            raise ValueError(
                f"Parameter {name!r} of shape {weight.shape} has padding but no creation_value: give the value "
                "that its padding must hold."
            )
        data = torch.empty(weight.shape, dtype=weight.dtype)
        if weight.creation_value is None:
            poison_(data)
        else:
            data.fill_(weight.creation_value)
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))

    def live(self, name: str) -> torch.Tensor | None:
        """The registered parameter, or None when post-processing has consumed it."""
        return self._parameters[name]

    def consume(self, name: str) -> None:
        """Forget a raw parameter whose bytes now live in the kernel's layout."""
        self.register_parameter(name, None)

    def release(self) -> None:
        """Give the memory of all parameters back, and keep the parameters: tied modules and kernels refer to them."""
        for name in self.weights:
            self.get_parameter(name).data = torch.empty(0, dtype=self.weights[name].dtype)

    def allocate(self) -> None:
        """Memory again for parameters that were released, uninitialised by contract and therefore poisoned."""
        for name in self.weights:
            self.get_parameter(name).data = self.rematerialize(name)

    def rematerialize(self, name: str) -> torch.Tensor:
        """New memory for a parameter, uninitialised by contract and therefore poisoned."""
        weight = self.weights[name]
        return poison_(torch.empty(weight.shape, dtype=weight.dtype))

    def restore(self, name: str) -> torch.Tensor:
        """Storage for a consumed parameter that is about to be loaded in place, in checkpoint layout.
        Subclasses return a view where the old storage still has that layout."""
        return self.rematerialize(name)

    def set_derived(self, name: str, value: torch.Tensor) -> None:
        """Store a tensor made from weights. A refresh is copied into the storage that exists, because a
        captured graph holds its address."""
        self.derived.add(name)
        held = getattr(self, name, None)
        if held is None:
            setattr(self, name, value)
        elif held.shape != value.shape or held.dtype != value.dtype:
            raise RuntimeError(
                f"Derived tensor {name!r} changes from {tuple(held.shape)} {held.dtype} to {tuple(value.shape)} "
                f"{value.dtype}; it cannot be refreshed in place, start the engine again."
            )
        else:
            held.copy_(value)

    def derivations(self) -> Mapping[str, torch.Tensor]:
        """Attribute -> what it must hold, made anew from weights that serve. Post-processing stores it, and audits hold
        what serves against it. Derived tensors that are not here are held against the checkpoint (`parts`)."""
        return {}

    def post_process(self) -> None:
        """Build what is derived from this layer's weights. Runs once per load, after fill_padding."""
        self.derive()

    def derive(self) -> None:
        """Build every derived tensor whose statement there is."""
        for name, value in self.derivations().items():
            self.set_derived(name, value)

    def finalize(self) -> None:
        """Bring weights into the kernel's layout. Runs once per load, from the model's hook."""

    def install_expert(self, expert: int, one: "WeightModule") -> None:
        """Take over one expert, loaded and padded. one: the same parameters with this expert alone in dimension 0.
        A module that consumes its parameters overrides this, or is loaded as a whole."""
        for name in self.weights:
            self.get_parameter(name)[expert : expert + 1].copy_(one.get_parameter(name))

    def rebalance(self, seed: int) -> None:
        """Shuffle the experts of a module that deals them out over ranks, in place, and declare its weights anew.
        Collective."""

    def loaded_weights(self) -> Mapping[str, torch.Tensor]:
        """Every parameter in the layout in which it is loaded, padding included; of consumed ones, a copy."""
        consumed = self.consumed_weights()
        held = {name: self.live(name) for name in self.weights}
        return {
            name: consumed[name][1] if live is None else self.as_loaded(name, live.detach())
            for name, live in held.items()
        }

    def as_loaded(self, name: str, live: torch.Tensor) -> torch.Tensor:
        """Parameter `live`, which serves, in the layout in which it is loaded. Overridden where post-processing changes
        parameters in place."""
        return live

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        """Consumed parameter -> (attribute path of the live tensor, bytes brought back to its layout)."""
        return {}

    def parts(self, path: str) -> Iterator[Part]:
        """Every piece this module holds, in checkpoint layout, and its padding. `path` is the audit path of
        the module. Padding follows from the declaration, not from the loader's records: a missed record shows."""
        consumed = self.consumed_weights()
        for name, weight in self.weights.items():
            live = self.live(name)
            holder, value = consumed.get(name, (name, None))
            if live is not None:
                holder, value = name, self.as_loaded(name, live)
            if value is None:
                continue
            tensor = f"{path}.{holder}"
            boxes: set[Region] = set()
            for placement in weight.placements:
                piece = narrow(value, placement.target)
                lengths = [length for _, length in placement.source_region]
                yield Part(
                    tensor=tensor,
                    name=placement.source,
                    value=piece.to(placement.source_dtype or piece.dtype).reshape(lengths),
                    source=placement.source,
                    region=placement.source_region,
                )
                boxes.update(placement.padding(value.shape))
            for box in sorted(boxes):
                yield Part(
                    tensor=tensor,
                    name="padding",
                    value=narrow(value, box),
                    padding_value=weight.creation_value,
                )


class ModelRoot(nn.Module):
    """A model that is loaded as a unit: the target, or a drafter beside it."""

    def weight_modules(self) -> Iterator[tuple[str, WeightModule]]:
        for path, module in self.named_modules():
            if isinstance(module, WeightModule):
                yield path, module

    def process_weights_after_loading(self) -> None:
        """The model-level hook: every load path reaches it exactly once, after all weights are in place."""
        for _, module in self.weight_modules():
            module.finalize()
