"""Reads tensors, whole or in part, from a folder of safetensors files, and checks them against a model."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from workloads import heartbeat
from workloads.loading.shards import CheckpointError, Layout, TensorMeta, mismatches, read_layout
from workloads.loading.tensor_table import TensorSpec
from workloads.loading.weights import Region, narrow, whole

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "Region",
    "SafetensorsCheckpoint",
    "TensorMeta",
    "check_finite",
    "check_region",
    "is_e8m0",
    "is_packed_fp4",
    "open_checkpoint",
    "raw_bytes",
    "validate",
    "whole",
]

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class CheckpointReader(Protocol):
    """Tensors by their checkpoint names. Every method raises CheckpointError."""

    @property
    def folder(self) -> Path:
        """Where the base files lie (configuration and tokenizer are beside them)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    def names(self) -> Iterator[str]:
        """All tensors in the order in which they lie in the files."""

    def meta(self, name: str) -> TensorMeta:
        """(dtype, shape) as stored."""

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, as stored. May share memory with the reader: do not write into it."""

    def slice(self, name: str, region: Region) -> torch.Tensor:
        """The part with (start, length) per dimension, of the tensor's own rank, possibly not contiguous."""

    def identity(self) -> str:
        """Stable name of the content: equal for copies of the same files."""

    def require_unchanged(self) -> None:
        """Refuse files that were written to since the checkpoint was opened."""


class SafetensorsCheckpoint:
    """Reader over mapped files. Pages are read when a tensor's values are used, not before."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._mapped: dict[str, torch.Tensor] = {}

    @property
    def folder(self) -> Path:
        return self._layout.folder

    @property
    def nbytes(self) -> int:
        return sum(location.meta.nbytes for location in self._layout.tensors.values())

    def names(self) -> Iterator[str]:
        return iter(self._layout.tensors)

    def meta(self, name: str) -> TensorMeta:
        location = self._layout.tensors.get(name)
        if location is None:
            raise CheckpointError(
                f"{self.folder}: there is no tensor {name!r} among the {len(self._layout.tensors)} of this "
                "checkpoint. Give the checkpoint of the configured model."
            )
        return location.meta

    def get(self, name: str) -> torch.Tensor:
        meta = self.meta(name)
        location = self._layout.tensors[name]
        data = self._map(location.file)[location.begin : location.begin + meta.nbytes]
        heartbeat.advance()
        dtype = TORCH_DTYPES[meta.dtype]
        if location.begin % dtype.itemsize:  # legal in the format, but not as a view
            data = data.clone()
        return data.view(dtype).view(meta.shape)

    def slice(self, name: str, region: Region) -> torch.Tensor:
        check_region(name, self.meta(name), region)
        return narrow(self.get(name), region)

    def identity(self) -> str:
        return self._layout.identity()

    def require_unchanged(self) -> None:
        for file in self._mapped:
            self._require_unchanged(file)

    def _map(self, file: str) -> torch.Tensor:
        """Bytes of one file, mapped privately: a stray write never reaches the file."""
        self._require_unchanged(file)
        if file not in self._mapped:
            path, size = self.folder / file, self._layout.files[file].size
            self._mapped[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return self._mapped[file]

    def _require_unchanged(self, file: str) -> None:
        """Asked before every read: the pages of a file that was cut short cannot be read without a signal."""
        path, opened = f"{self._layout.folder}/{file}", self._layout.files[file]
        try:
            found = os.stat(path)
        except FileNotFoundError:
            how = "has 0 now, it is gone"
        else:
            if (found.st_size, found.st_mtime_ns) == (opened.size, opened.modified):
                return
            how = f"has {found.st_size} now" if found.st_size != opened.size else "was written to since"
        raise CheckpointError(
            f"{path}: the file had {opened.size} bytes when the checkpoint was opened and {how}. Do not overwrite a "
            "checkpoint that is in use; write each version into a folder of its own."
        )


def open_checkpoint(path: str | Path) -> SafetensorsCheckpoint:
    """Reader of `path`, with `model.safetensors.index.json` or a single `model.safetensors`.

    Index, headers and sizes are all checked here. Raises CheckpointError with every problem.
    """
    return SafetensorsCheckpoint(read_layout(Path(path)))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """E8M0 scales as the bytes they are; a numeric conversion to integers would turn 2^-7 into 0."""
    if tensor.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise TypeError(f"raw_bytes takes E8M0 or uint8 scales, not {tensor.dtype}.")
    return tensor.view(torch.uint8)


def is_e8m0(name: str, dtype: str) -> bool:
    """Whether a tensor holds exponent bytes; MXFP4 checkpoints store them as plain U8 `weight_scale` or `_scales`."""
    return dtype == "F8_E8M0" or (dtype == "U8" and name.endswith(("weight_scale", "_scales")))


def is_packed_fp4(name: str, dtype: str) -> bool:
    """Whether a tensor holds two E2M1 codes a byte: `weight_packed` of compressed-tensors, `_blocks` of gpt-oss,
    `weight` of Quark and ModelOpt, and whatever is I8, as DeepSeek stores it."""
    return dtype == "I8" or (dtype == "U8" and name.endswith(("weight_packed", "_blocks", ".weight")))


def check_region(name: str, meta: TensorMeta, region: Region) -> None:
    """Refuse a region that is not inside the tensor."""
    inside = len(region) == len(meta.shape) and all(
        start >= 0 and length >= 0 and start + length <= size
        for (start, length), size in zip(region, meta.shape, strict=True)
    )
    if not inside:
        raise CheckpointError(
            f"Tensor {name!r}: region {region} is not inside its shape {meta.shape}. Give (start, length) for each "
            "of its dimensions; the parallel layout may not divide it."
        )


def validate(reader: CheckpointReader, specs: Iterable[TensorSpec], ignore: Sequence[str] = ()) -> None:
    """Compare names, shapes and dtypes with what a model needs. `ignore`: prefixes of tensors it does not load.

    Raises CheckpointError with all differences: missing, unexpected, wrong shape, wrong dtype.
    """
    stored = {name: TensorMeta(*reader.meta(name)) for name in reader.names()}
    problems = mismatches(reader.folder, stored, specs, ignore)
    if problems:
        raise CheckpointError(problems)


def check_finite(reader: CheckpointReader, names: Iterable[str] | None = None) -> None:
    """Read the values of `names` (default: all) and refuse NaN and infinity in float weights, NaN codes in FP8
    weights and byte 255 (NaN) in E8M0 scales.

    Raises CheckpointError with every tensor concerned.
    """
    problems: list[str] = []
    for name in reader.names() if names is None else names:
        dtype, _ = reader.meta(name)
        tensor = reader.get(name)
        bad, what = _not_finite(name, dtype, tensor)
        if bad:
            problems.append(
                f"{reader.folder}: tensor {name!r} ({dtype}) holds {bad} {what} of {tensor.numel()}, expected none. "
                "Write the checkpoint again from finite weights."
            )
    if problems:
        raise CheckpointError(problems)


def _not_finite(name: str, dtype: str, tensor: torch.Tensor) -> tuple[int, str]:
    """How many values are no numbers, and what to call them."""
    if is_e8m0(name, dtype):
        return int((raw_bytes(tensor) == 0xFF).sum()), "NaN scales (byte 255)"
    if dtype == "F8_E4M3":
        return int((tensor.view(torch.uint8) & 0x7F == 0x7F).sum()), "NaN codes (0x7F or 0xFF)"
    if dtype == "F8_E5M2":
        return int((tensor.view(torch.uint8) & 0x7C == 0x7C).sum()), "NaN or infinite codes"
    if tensor.is_floating_point():
        return math.prod(tensor.shape) - int(tensor.isfinite().sum()), "NaN or infinite values"
    return 0, ""


def main() -> int:
    """`python -m workloads.loading.checkpoint FOLDER`: prints what `check_finite` finds; exit code 1 if anything."""
    try:
        check_finite(open_checkpoint(sys.argv[1]))
    except CheckpointError as error:
        print("\n".join(error.problems))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
