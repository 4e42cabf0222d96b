"""How a quantised matrix is stored, and how ranks divide what lies between two of them. Imports no torch.

Names and shapes are those of the published checkpoints: FP8 in 128 x 128 tiles with BF16 scales (`weight_scale_inv`,
which multiply, for all their name), and ModelOpt's NVFP4.
"""

from dataclasses import dataclass

SCALAR = 0


@dataclass(frozen=True)
class Stored:
    """One checkpoint tensor of a matrix; a parameter of the same name holds it.

    dtype: in the checkpoint, by its safetensors name. rows, columns: of the matrix, that one row and one column of the
    tensor stand for; SCALAR: one value for the whole matrix. creation: value of padding.
    piece: name in `workloads.loading.quantized`; empty where the matrix is not quantised. held: dtype of the parameter,
    where it is wider than the checkpoint's.
    """

    name: str
    dtype: str
    rows: int
    columns: int
    creation: float
    piece: str = ""
    held: str = ""

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Of the tensor of a matrix [rows, columns] of whole blocks."""
        return () if self.rows == SCALAR else (rows // self.rows, columns // self.columns)


@dataclass(frozen=True)
class Format:
    """generator: name in `workloads.loading.quantized.FORMATS`. unit: width that ranks cannot divide, since a scale
    belongs to it. alignment: what the experts' kernel needs the share of a rank to be a multiple of."""

    stored: tuple[Stored, ...]
    generator: str
    unit: int
    alignment: int

    def share(self, width: int, rank: int, ranks: int, aligned: bool = True) -> tuple[int, int, int]:
        """(start, length, padded length) of what one rank has of a width; padded is equal on all ranks.

        Ranks share whole units as equally as they can. Raises ValueError when one would have none.
        """
        units = width // self.unit
        if units < ranks or width % self.unit:
            raise ValueError(
                f"A width of {width} is not {ranks} or more whole units of {self.unit}, which tensor-parallel ranks "
                "could share: use fewer ranks, or expert parallelism."
            )
        each, more = divmod(units, ranks)
        start = (rank * each + min(rank, more)) * self.unit
        largest = (each + (more > 0)) * self.unit
        alignment = self.alignment if aligned else self.unit
        return start, (each + (rank < more)) * self.unit, -(-largest // alignment) * alignment


FORMATS = {
    "bf16": Format((Stored("weight", "BF16", 1, 1, 0.0),), generator="", unit=1, alignment=128),
    "fp8": Format(
        (
            Stored("weight", "F8_E4M3", 1, 1, 0.0, "weight"),
            Stored("weight_scale_inv", "BF16", 128, 128, 1.0, "scale", held="F32"),
        ),
        generator="fp8_block128",
        unit=128,
        alignment=128,
    ),
    "nvfp4": Format(
        (
            Stored("weight", "U8", 1, 2, 0.0, "weight"),
            Stored("weight_scale", "F8_E4M3", 1, 16, 1.0, "scale"),
            Stored("weight_scale_2", "F32", SCALAR, SCALAR, 1.0, "scale_2"),
            Stored("input_scale", "F32", SCALAR, SCALAR, 1.0, "input_scale"),
        ),
        generator="nvfp4",
        unit=16,
        alignment=16,
    ),
}
