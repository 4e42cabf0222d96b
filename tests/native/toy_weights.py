"""A model of a few weights with every feature of the loading core, and a reader over plain tensors."""

from collections.abc import Mapping

import torch

from workloads.loading.weights import (
    ModelRoot,
    Placement,
    Region,
    Weight,
    WeightModule,
    narrow,
    whole,
)

ROWS, COLUMNS, EXPERTS = 3, 4, 2


class ToyReader:
    """A checkpoint held in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def slice(self, name: str, region: Region) -> torch.Tensor:
        return narrow(self.tensors[name], region)


class ToyLinear(WeightModule):
    """`weight` BF16 [4, 4]: rows of `a` (3), padded to 4 with zeros; derived `transposed`, `row_sums` (a buffer)."""

    def __init__(self) -> None:
        super().__init__()
        source = ((0, ROWS), (0, COLUMNS))
        placement = Placement("a", source, target=source, slot=((0, 4), (0, COLUMNS)))
        self.add_weight("weight", Weight((4, COLUMNS), torch.bfloat16, (placement,), creation_value=0.0))
        bias = whole((2,))
        pieces = (Placement("b0", bias, ((0, 2),), ((0, 2),)), Placement("b1", bias, ((2, 2),), ((2, 2),)))
        self.add_weight("bias", Weight((4,), torch.float32, pieces))
        self.transposed: torch.Tensor | None = None
        self.register_buffer("row_sums", None, persistent=False)

    def post_process(self) -> None:
        weight = self.get_parameter("weight").detach()
        self.set_derived("transposed", weight.t().clone())
        self.set_derived("row_sums", weight.float().sum(1))


class ToyExperts(WeightModule):
    """Experts of 3x2 bytes in slots of 4x4, stacked; consumed into `fused`, their transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: torch.Tensor | None = None
        for name, creation in (("packed", 0.0), ("scale", 127.0)):
            placements = []
            for e in range(EXPERTS):
                target = ((e, 1), (0, ROWS), (0, 2))
                slot = ((e, 1), (0, 4), (0, 4))
                placements.append(Placement(f"{e}.{name}", whole((ROWS, 2)), target, slot, stacked=True))
            self.add_weight(name, Weight((EXPERTS, 4, 4), torch.uint8, tuple(placements), creation))

    def finalize(self) -> None:
        packed, scale = self.live("packed"), self.live("scale")
        if packed is None or scale is None:
            return
        fused = torch.stack([packed, scale]).transpose(2, 3).contiguous()
        self.set_derived("fused", fused)
        self.consume("packed")
        self.consume("scale")

    def consumed_weights(self) -> Mapping[str, tuple[str, torch.Tensor]]:
        assert self.fused is not None
        packed, scale = self.fused.transpose(2, 3)
        return {"packed": ("fused", packed), "scale": ("fused", scale)}


class ToyModel(ModelRoot):
    def __init__(self) -> None:
        super().__init__()
        self.linear = ToyLinear()
        self.experts = ToyExperts()


def toy_checkpoint(seed: int) -> ToyReader:
    generator = torch.Generator().manual_seed(seed)

    def byte(*shape: int) -> torch.Tensor:
        return torch.randint(1, 250, shape, generator=generator, dtype=torch.uint8)

    tensors = {
        "a": torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16),
        "b0": torch.randn(2, generator=generator),
        "b1": torch.randn(2, generator=generator),
    }
    for e in range(EXPERTS):
        tensors[f"{e}.packed"] = byte(ROWS, 2)
        tensors[f"{e}.scale"] = byte(ROWS, 2)
    return ToyReader(tensors)


def state(model: ModelRoot) -> dict[str, torch.Tensor]:
    """Bytes of everything a toy model holds, plain attributes included."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        plain = {
            f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)
        }
        held |= plain
    return {name: tensor.detach().contiguous().view(torch.uint8).clone() for name, tensor in held.items()}


def addresses(model: ModelRoot) -> dict[str, int]:
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                held[f"{path}.{name}"] = value
    return {name: tensor.data_ptr() for name, tensor in held.items()}
