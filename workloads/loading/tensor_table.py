"""What a checkpoint of a model holds: every tensor by name, dtype, shape, how ranks divide it, which part it is.

Imports no torch: the planner sums memory from such a table, the generator and the validator follow it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
    "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MXFP4_GROUP = 32  # values that share one E8M0 scale byte, along the input dimension


@dataclass(frozen=True)
class Shard:
    """How ranks divide a tensor: `replicated`, `tensor` and `vocab` (dimension `dim` over the TP group), or
    `expert` (whole tensors, contiguous expert ids over the EP group; of a tensor that stacks all experts, dimension
    `dim`). tensor_dim: dimension of an expert's tensor that the TP group divides where there is no expert parallelism;
    None: every rank then holds it whole."""

    kind: str
    dim: int = 0
    tensor_dim: int | None = None


REPLICATED = Shard("replicated")
COLUMN = Shard("tensor", 0)
ROW = Shard("tensor", 1)
EXPERT = Shard("expert")
VOCAB = Shard("vocab", 0)


@dataclass(frozen=True)
class Quantized:
    """A tensor that is one piece of a quantised matrix. All pieces of a matrix have the same stem and shape.

    format: key of `workloads.loading.quantized.FORMATS`. piece: which of the tensors of that format, e.g. `weight`,
    `scale`. stem: name of the matrix. shape: of the values, [rows, columns], or [experts, rows, columns].
    """

    format: str
    piece: str
    stem: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One checkpoint tensor. dtype: safetensors name. component: the part of the model that memory plans print.
    read: leading entries of dimension 0 that a model reads, where the stored tensor is longer.
    quantized: None for a tensor of plain numbers. below: of a table of indices, what they are less than."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Shard
    component: str
    read: int | None = None
    quantized: Quantized | None = None
    below: int | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Logical parameters: the values of a quantised matrix count with its weight, and no scale does."""
        if self.quantized is None:
            return prod(self.shape)
        return prod(self.quantized.shape) if self.quantized.piece == "weight" else 0

    def of_expert(self, number: int) -> "TensorSpec":
        """The spec of one expert, from a template whose names have `*` in the place of the expert's number."""
        name = self.name.replace(".*.", f".{number}.")
        if self.quantized is None:
            return replace(self, name=name)
        stem = self.quantized.stem.replace(".*.", f".{number}.")
        return replace(self, name=name, quantized=replace(self.quantized, stem=stem))


@dataclass(frozen=True)
class Row:
    """A line of a table: name below its layer, shape, split, dtype. quantized: with a stem below the layer, too. read,
    below: see `TensorSpec`."""

    suffix: str
    shape: tuple[int, ...]
    shard: Shard = REPLICATED
    dtype: str = "BF16"
    read: int | None = None
    quantized: Quantized | None = None
    below: int | None = None

    def spec(self, prefix: str, component: str) -> TensorSpec:
        quantized = self.quantized and replace(self.quantized, stem=prefix + self.quantized.stem)
        return TensorSpec(
            prefix + self.suffix,
            self.dtype,
            self.shape,
            self.shard,
            component,
            self.read,
            quantized,
            self.below,
        )


def specs(prefix: str, component: str, rows: Iterable[Row]) -> list[TensorSpec]:
    return [row.spec(prefix, component) for row in rows]


@dataclass(frozen=True)
class Section:
    """Neighbours in a checkpoint: tensors of their own, then `experts` times the templates of expert tensors."""

    plain: list[TensorSpec]
    templates: list[TensorSpec]
    experts: int = 0


def every_tensor(sections: Iterable[Section]) -> Iterator[TensorSpec]:
    """Every tensor by its real name: section by section, the experts one after another."""
    for section in sections:
        yield from section.plain
        for number in range(section.experts):
            yield from (template.of_expert(number) for template in section.templates)


def counted(sections: Iterable[Section]) -> Iterator[tuple[TensorSpec, int]]:
    """The same with the experts of a section collapsed into their templates and their number, so that a model of
    half a million tensors is summed in milliseconds."""
    for section in sections:
        yield from ((spec, 1) for spec in section.plain)
        yield from ((template, section.experts) for template in section.templates if section.experts)


def local_bytes(spec: TensorSpec, copies: int, tp: int, ep: int) -> int:
    """Bytes of `copies` such tensors that one rank holds. Uneven splits count as the largest share."""
    shard = spec.shard
    if shard.kind == "replicated":
        return spec.nbytes * copies
    dim, ranks = shard.dim, tp
    if shard.kind == "expert":
        if ep == 1 and shard.tensor_dim is not None:
            dim = shard.tensor_dim
        elif copies > 1:
            return spec.nbytes * -(-copies // ep)
        else:
            ranks = ep
    stored = spec.shape[dim]
    read = stored if spec.read is None else spec.read
    return spec.nbytes // stored * -(-read // ranks) * copies


def bytes_by_component(sections: Iterable[Section], tp: int = 1, ep: int = 1) -> dict[str, int]:
    """Bytes that one rank holds, by part of the model."""
    total: dict[str, int] = {}
    for spec, copies in counted(sections):
        total[spec.component] = total.get(spec.component, 0) + local_bytes(spec, copies, tp, ep)
    return total
