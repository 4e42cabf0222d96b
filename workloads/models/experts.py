"""Routed MXFP4 experts of one layer, divided over expert-parallel ranks; families of models share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from workloads.kernels.activations import GatedActivation
from workloads.kernels.mega_moe_layout import unfuse_l2_weight
from workloads.kernels.moe import ExpertWeights, MoEKernel
from workloads.kernels.shared_expert import SharedWeights
from workloads.loading.tensor_table import MXFP4_GROUP
from workloads.loading.weights import Placement, Region, Weight, WeightModule
from workloads.models.expert_slots import chosen_slots, first_slots, move, shuffled, tables
from workloads.models.parallel import Group

E8M0_ONE = 127.0  # exponent byte of 1.0, which padding of scales is created with
RAW = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")

_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertTensors:
    """Experts of one layer in a checkpoint: expert 3's gate is `{prefix}3.w1.{weight}` with `{prefix}3.w1.{scale}`.

    count: of the layer. hidden: width of their input. intermediate: between their two matrices. stored: dtype of the
    packed weights in the checkpoint, of one byte.
    """

    prefix: str
    count: int
    hidden: int
    intermediate: int
    weight: str = "weight_packed"
    scale: str = "weight_scale"
    stored: torch.dtype = torch.uint8


class RoutedExperts(WeightModule):
    """MXFP4 experts of this rank of the EP group.

    Loaded as `w13_weight` U8 [E, 2I, H/2], `w13_weight_scale` U8 [E, 2I, H/32], `w2_weight` U8 [E, H, I/2] and
    `w2_weight_scale` U8 [E, H, I/32], where I is padded as the kernel wants it. A kernel with a layout of its own
    consumes them in `finalize` into two plain tuples; then the parameters are gone.

    redundant: slots beside one for each expert, which hold second copies; E counts all slots of this rank. Derived of
    where the experts are, if there are such slots: `slots_of_expert`, `slot_counts`, see `expert_slots.tables`.

    invalid_ids: int64 [], choices of this rank's tokens so far that are neither an expert nor -1; on the device, so
    that nothing waits for it and a captured graph counts too. folded: of each expert here, see `MoEKernel.folded`;
    empty where the kernel folds none, or where nobody knows.
    """

    def __init__(
        self,
        tensors: ExpertTensors,
        activation: GatedActivation,
        group: Group,
        kernel: MoEKernel,
        fused: bool,
        redundant: int = 0,
    ) -> None:
        super().__init__()
        self.kernel, self.fused, self.group = kernel, fused, group
        self.tensors = tensors
        self.activation = activation
        self.slots = first_slots(tensors.count, redundant)
        self._transformed_l1_weights: _Pair | None = None
        self._transformed_l2_weights: _Pair | None = None
        self.invalid_ids = torch.zeros((), dtype=torch.int64)
        self.folded: list[int] = []
        self.slots_of_expert: torch.Tensor | None = None
        self.slot_counts: torch.Tensor | None = None
        if redundant:
            self.slots_of_expert, self.slot_counts = tables(self.slots)
        for name, weight in self._declared().items():
            self.add_weight(name, weight)

    def _declared(self) -> dict[str, Weight]:
        """What lies in this rank's slots."""
        first, count = self.group.share(len(self.slots), "num_experts")
        held = self.slots[first : first + count]
        names = [f"{self.tensors.prefix}{expert}." for expert in held]
        return _expert_weights(self.tensors, names, self.kernel.multiple)

    def expert_weights(self) -> tuple[torch.Tensor, ...]:
        """What the kernel reads, each [slots of this rank, ...], to be moved in place. RuntimeError while the experts
        are not finalised: what is handed out then would go stale with the hook."""
        weights = self.transformed()
        if not self.fused:
            return tuple(self.get_parameter(name).detach() for name in RAW)
        if weights is None or any(self.live(name) is not None for name in RAW):
            raise RuntimeError(
                "The routed experts are not finalised and cannot be handed out to be rebalanced: the load path did not "
                "call the model's process_weights_after_loading."
            )
        return tuple(weights)

    def rebalance(self, seed: int) -> None:
        before, after = self.slots, shuffled(self.slots, f"{seed}/{self.tensors.prefix}")
        move(self.group, self.expert_weights(), before, after)
        self.slots, self.folded = after, []
        self.weights.update(self._declared())
        if self.slots_of_expert is not None and self.slot_counts is not None:
            for held, new in zip((self.slots_of_expert, self.slot_counts), tables(after), strict=True):
                held.copy_(new)

    def transformed(self) -> ExpertWeights | None:
        """The experts in the kernel's layout, if it has one and they have been finalised."""
        if self._transformed_l1_weights is None or self._transformed_l2_weights is None:
            return None
        return ExpertWeights(*self._transformed_l1_weights, *self._transformed_l2_weights)

    def finalize(self) -> None:
        raw = [tensor for name in RAW if (tensor := self.live(name)) is not None]
        if not self.fused or not raw:  # nothing has been loaded since the last time
            return
        if len(raw) < len(RAW):
            present = [name for name in RAW if self.live(name) is not None]
            raise RuntimeError(
                f"Only {', '.join(present)} of the experts' parameters are there to finalise; a load must restore "
                "all four of them."
            )
        w13, w13_scale, w2, w2_scale = (tensor.detach() for tensor in raw)
        weights = self.kernel.prepare(w13, w13_scale, w2, w2_scale, into=self.transformed())
        self.folded = list(self.kernel.folded)
        self._transformed_l1_weights = (weights.l1_weight, weights.l1_scale)
        self._transformed_l2_weights = (weights.l2_weight, weights.l2_scale)
        for name in RAW:
            self.consume(name)

    def restore(self, name: str) -> torch.Tensor:
        """w2_weight may still lie in its loaded layout, under the kernel's alias; the others need new memory."""
        if name == "w2_weight" and self.kernel.keeps_w2 and self._transformed_l2_weights is not None:
            return unfuse_l2_weight(self._transformed_l2_weights[0])
        return super().restore(name)

    def install_expert(self, expert: int, one: WeightModule) -> None:
        held = self.transformed()
        if held is None:
            super().install_expert(expert, one)
            return
        w13, w13_scale, w2, w2_scale = (one.get_parameter(name).detach() for name in RAW)
        self.kernel.prepare(
            w13,
            w13_scale,
            w2,
            w2_scale,
            into=ExpertWeights(*(tensor[expert : expert + 1] for tensor in held)),
        )
        if self.folded:
            [self.folded[expert]] = self.kernel.folded

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        weights = self.transformed()
        if weights is None:
            return {}
        holders = [f"_transformed_l{layer}_weights[{item}]" for layer in (1, 2) for item in (0, 1)]
        loaded = self.kernel.restore(weights)
        return {name: (holder, tensor) for name, holder, tensor in zip(RAW, holders, loaded, strict=True)}

    def forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        shared: SharedWeights | None = None,
    ) -> torch.Tensor:
        """x BF16 [T, H], topk_idx int64 [T, K] (-1: none), topk_weights FP32 [T, K] -> BF16 [T, H].

        shared: an expert that the kernel computes for every token and adds, see `MoEKernel.prepare_shared`.
        Collective over the EP group. Raises RuntimeError when the experts are not finalised: a forward pass
        never makes up for a hook that a load path forgot.
        """
        weights = self.transformed()
        if self.fused and weights is None:
            raise RuntimeError(
                "The routed experts are not finalised: the load path did not call the model's "
                "process_weights_after_loading."
            )
        if weights is None:
            weights = ExpertWeights(*(self.get_parameter(name) for name in RAW))
        self.invalid_ids += ((topk_idx < -1) | (topk_idx >= self.tensors.count)).sum()
        if self.slots_of_expert is not None and self.slot_counts is not None:
            topk_idx = chosen_slots(topk_idx, self.slots_of_expert, self.slot_counts)
        return self.kernel.forward(
            x, topk_idx, topk_weights, weights, self.group.handle, len(self.slots), self.activation, shared
        )


def _expert_weights(tensors: ExpertTensors, names: Sequence[str], multiple: int) -> dict[str, Weight]:
    """The four stacked parameters of the experts whose checkpoint tensors begin with `names`, the intermediate size
    padded to a multiple."""
    hidden, inner = tensors.hidden, tensors.intermediate
    padded = -(-inner // multiple) * multiple
    weights = {}
    for suffix, source, values, creation, stored in (
        ("", tensors.weight, 2, 0.0, tensors.stored),
        ("_scale", tensors.scale, MXFP4_GROUP, E8M0_ONE, None),
    ):
        columns, down_columns = hidden // values, inner // values
        gate_up, down = ((0, inner), (0, columns)), ((0, hidden), (0, down_columns))
        w13: list[Placement] = []
        w2: list[Placement] = []
        for e, name in enumerate(names):
            w13.append(_placement(f"{name}w1.{source}", e, gate_up, 0, (padded, columns), stored))
            w13.append(_placement(f"{name}w3.{source}", e, gate_up, padded, (padded, columns), stored))
            w2.append(_placement(f"{name}w2.{source}", e, down, 0, (hidden, padded // values), stored))
        w13_shape, w2_shape = (len(names), 2 * padded, columns), (len(names), hidden, padded // values)
        weights[f"w13_weight{suffix}"] = Weight(w13_shape, torch.uint8, tuple(w13), creation)
        weights[f"w2_weight{suffix}"] = Weight(w2_shape, torch.uint8, tuple(w2), creation)
    return weights


def _placement(
    source: str,
    expert: int,
    region: Region,
    start: int,
    slot: tuple[int, int],
    stored: torch.dtype | None,
) -> Placement:
    """One matrix of one expert at the top left of its slot, which begins at row `start`."""
    (_, rows), (_, columns) = region
    one = (expert, 1)
    return Placement(
        source,
        source_region=region,
        target=(one, (start, rows), (0, columns)),
        slot=(one, (start, slot[0]), (0, slot[1])),
        source_dtype=stored,
        stacked=True,
    )
