"""A checkpoint seen through a change: same names, shapes and dtypes, other values, no second copy on disk.

The changed value of an element follows from the element, its position and (seed, name) alone, so a slice of the
view is computed from that slice of the base. Changes keep a model running: signs, exponents of floats and the
finite range stay, and each change is checked as it is made.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch

from workloads.loading.checkpoint import (
    CheckpointReader,
    check_region,
    is_e8m0,
    is_packed_fp4,
    open_checkpoint,
    raw_bytes,
    whole,
)
from workloads.loading.shards import INDEX, CheckpointError, TensorMeta
from workloads.loading.weights import Region, narrow
from workloads.loading.writer import write_checkpoint
from workloads.spec import Checkpoint

KINDS = ("every_tensor", "one_tensor", "scales_only", "expert_tagged", "some_tensors")
TAG_SCALE = 117  # tagged scale bytes are this plus an octal digit of the expert id: 2^-10 to 2^-3
TAG_DIGITS = 4  # octal digits of an expert id in its scales
TAG_BYTES = 2  # leading bytes of each row of packed weights that hold the expert id, low byte first
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale")  # as numbers
INDICES = (".tid2eid", ".token_map")  # tables whose values are the numbers of experts or tokens
BLOCK = 1 << 20  # bytes changed at a time
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")  # without a number where a tensor stacks all experts
_MANTISSA = {
    torch.bfloat16: (torch.int16, 0),
    torch.float16: (torch.int16, 3),
    torch.float32: (torch.int32, 16),
}


class PerturbedCheckpoint:
    """View of `base` with the change `kind`.

    every_tensor: each element of each tensor changes: the low mantissa bits of floats (at most 6 %), the low one or
    two bits of FP4 codes, E8M0 scales by one step up or down, FP8 within its mantissa; of a table of numbers of
    experts or tokens the lowest bit: of an even number of them they stay in range, and different ones different.
    one_tensor: the same for tensor `target` only. scales_only: the same for scales of quantised weights only.
    some_tensors: the same for tensors whose name matches the pattern `target` (fnmatch) only.
    expert_tagged: scales and leading bytes of each routed expert spell its id, so that wrong routing shows;
    the rest of its packed weights changes as above.

    Raises CheckpointError when the kind is unknown or finds nothing to change.
    """

    def __init__(self, base: CheckpointReader, kind: str, seed: int, target: str = "") -> None:
        self._base, self._kind, self._seed, self._target = base, kind, seed, target
        if kind not in KINDS:
            raise CheckpointError(f"There is no perturbation {kind!r}. Use one of {', '.join(KINDS)}.")
        if not any(self.changes(name) for name in base.names()):
            wanted = {
                "some_tensors": f"tensors that match {target!r} (perturbation_target)",
                "one_tensor": f"a tensor named {target!r} (perturbation_target)",
                "scales_only": "scales of quantised weights",
                "expert_tagged": "packed MXFP4 experts",
            }
            raise CheckpointError(
                f"{base.folder}: perturbation {kind!r} needs {wanted.get(kind, 'tensors')}, and this checkpoint has "
                "none. Choose another perturbation or target."
            )

    @property
    def folder(self) -> Path:
        return self._base.folder

    @property
    def nbytes(self) -> int:
        return self._base.nbytes

    def names(self) -> Iterator[str]:
        return self._base.names()

    def meta(self, name: str) -> TensorMeta:
        return self._base.meta(name)

    def changes(self, name: str) -> bool:
        """Whether the view differs from the base in this tensor."""
        match self._kind:
            case "every_tensor":
                return True
            case "one_tensor":
                return name == self._target
            case "some_tensors":
                return fnmatchcase(name, self._target)
            case "scales_only":
                return is_e8m0(name, self.meta(name).dtype) or name.endswith(SCALES)
            case _:
                dtype = self.meta(name).dtype
                mxfp4 = is_packed_fp4(name, dtype) or is_e8m0(name, dtype)
                return mxfp4 and _EXPERT.search(name) is not None

    def get(self, name: str) -> torch.Tensor:
        return self.slice(name, whole(self.meta(name).shape))

    def slice(self, name: str, region: Region) -> torch.Tensor:
        meta = self.meta(name)
        check_region(name, meta, region)
        if not self.changes(name):
            return self._base.slice(name, region)
        if self._kind == "expert_tagged":  # checked as a whole: a few bytes of a tag may equal the base's
            return narrow(self._tagged(name, meta), region)
        return self._elementwise(name, meta, region)

    def identity(self) -> str:
        text = "\n".join([self._base.identity(), self._kind, str(self._seed), self._target])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def require_unchanged(self) -> None:
        self._base.require_unchanged()

    def _elementwise(self, name: str, meta: TensorMeta, region: Region) -> torch.Tensor:
        before = self._base.slice(name, region)
        after = torch.empty(before.shape, dtype=before.dtype)
        first, *others = self._noise(name, meta.shape, region) or [torch.zeros(1, dtype=torch.uint8)]
        old, new = (tensor if tensor.dim() else tensor.view(1) for tensor in (before, after))
        step = max(1, BLOCK // max(1, old[:1].nbytes))
        for start in range(
            0, len(old), step
        ):  # blocks that stay in the cache: a fresh page costs more than the change
            rows = slice(start, start + step)
            new[rows] = _changed(name, meta.dtype, old[rows], [first[rows], *others])
            _require_difference(name, meta.dtype, old[rows], new[rows], everywhere=True)
        return after

    def _noise(self, name: str, shape: tuple[int, ...], region: Region) -> list[torch.Tensor]:
        """One random uint8 vector per dimension, shaped to broadcast over the region. An element's noise is the XOR of
        its entries, so that any part is computed alone."""
        vectors = []
        for dim, (size, (start, length)) in enumerate(zip(shape, region, strict=True)):
            key = hashlib.sha256(f"{self._seed}/{name}/{dim}".encode()).digest()[:16]
            words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-size // 8))
            vector = torch.from_numpy(words.view(np.uint8)[start : start + length].copy())
            vectors.append(vector.view([-1 if d == dim else 1 for d in range(len(shape))]))
        return vectors

    def _tagged(self, name: str, meta: TensorMeta) -> torch.Tensor:
        """A tensor of a routed expert, [rows, columns], or of all, [experts, rows, columns], that spells their ids.
        Columns of packed weights may be divided into blocks."""
        found = _EXPERT.search(name)
        assert found is not None, "changes() admits experts only"
        before = self._base.get(name)
        count, rows = meta.shape[:2] if found[1] is None else (1, meta.shape[0])
        experts = torch.arange(count) if found[1] is None else torch.tensor([int(found[1])])
        if is_e8m0(name, meta.dtype):
            position = (torch.arange(rows)[:, None] + torch.arange(meta.shape[-1])) % TAG_DIGITS
            digits = experts[:, None, None] >> 3 * position & 7
            after = (TAG_SCALE + digits).to(torch.uint8).view(before.dtype).view(meta.shape)
        else:
            after = self._elementwise(name, meta, whole(meta.shape))
            data = after.view(torch.uint8).view(count, rows, -1)
            for byte in range(TAG_BYTES):
                data[:, :, byte] = (experts >> 8 * byte & 0xFF)[:, None]
        _require_difference(name, meta.dtype, before, after, everywhere=False)
        return after


def open_view(spec: Checkpoint, folder: str | Path) -> CheckpointReader:
    """Reader of the files in `folder` with the change that `spec` asks for."""
    base = open_checkpoint(folder)
    if spec.perturbation == "none":
        return base
    return PerturbedCheckpoint(base, spec.perturbation, spec.perturbation_seed, spec.perturbation_target)


def write_perturbed(view: PerturbedCheckpoint, folder: Path, shard_bytes: int = 4 << 30) -> Path:
    """Write the view's files to `folder`, for engines that read only files, with whatever lies beside the base's
    tensors (configuration, tokenizer), but for the same weights in other formats, which an engine might prefer.
    Atomic, and kept when already there, as `write_checkpoint`."""
    return write_checkpoint(
        folder,
        source=f"perturbed {view.identity()}",
        tensors=((name, view.meta(name)) for name in view.names()),
        make=view.get,
        shard_bytes=shard_bytes,
        extra_files={path.name: path.read_bytes() for path in files_beside(view.folder)},
    )


def files_beside(folder: Path) -> list[Path]:
    """What lies beside the weights of a checkpoint, such as configuration and tokenizer."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != INDEX)
    return [path for path in files if path.suffix not in WEIGHT_FILES]


def _changed(name: str, dtype: str, before: torch.Tensor, noise: Sequence[torch.Tensor]) -> torch.Tensor:
    """`before` with every element changed, valid for its dtype. noise: uint8 vectors that broadcast over it."""
    if is_e8m0(name, dtype):
        up = (_combined(noise, before) & 1).to(torch.int16) * 2 - 1
        stepped = raw_bytes(before).to(torch.int16) + up
        stepped = torch.where((stepped < 0) | (stepped > 254), stepped - 2 * up, stepped)  # 255 is NaN
        return stepped.to(torch.uint8).view(before.dtype)
    if dtype in ("F8_E4M3", "F8_E5M2"):
        keeps = name.endswith("weight_scale")  # a scale of zero would make its block vanish
        return _changed_fp8(dtype, before, _combined(noise, before), keeps)
    if is_packed_fp4(name, dtype):  # bit 0 of both nibbles, bit 1 of some: all codes are valid
        integers, fixed, free, shift = torch.uint8, 0x11, 0x22, 0
    elif before.dtype in _MANTISSA:
        fixed, free, (integers, shift) = 1, 6, _MANTISSA[before.dtype]
    elif dtype == "I64" and name.endswith(INDICES):
        integers, fixed, free, shift = torch.int64, 1, 0, 0
    else:
        raise CheckpointError(
            f"Tensor {name!r} has dtype {dtype}, for which no perturbation is defined. Use one_tensor or scales_only "
            "on a tensor of packed FP4, E8M0, FP8, BF16, F16 or F32, or a table of experts or tokens."
        )
    after = before.view(integers) ^ (fixed << shift)
    for vector in noise:
        after ^= (vector & free).to(integers) << shift
    return after.view(before.dtype)


def _combined(noise: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    combined = torch.zeros(like.shape, dtype=torch.uint8)
    for vector in noise:
        combined ^= vector
    return combined


def _changed_fp8(dtype: str, before: torch.Tensor, noise: torch.Tensor, nonzero: bool) -> torch.Tensor:
    """Flip one or both of the two low mantissa bits, avoiding E4M3's NaN codes 0x7F and 0xFF and, if asked, zero."""
    codes, mask = before.view(torch.uint8), noise % 3 + 1
    flipped = codes ^ mask
    refused = torch.zeros_like(flipped, dtype=torch.bool)
    if dtype == "F8_E4M3":
        refused |= flipped & 0x7F == 0x7F
    if nonzero:
        refused |= flipped & 0x7F == 0
    return torch.where(refused, codes ^ (mask % 3 + 1), flipped).view(before.dtype)


def _require_difference(
    name: str, dtype: str, before: torch.Tensor, after: torch.Tensor, everywhere: bool
) -> None:
    """Refuse a change that changed nothing (or, `everywhere`, not every element) or made an invalid value."""
    if not before.numel():
        return
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()]
    differs = before.view(width) != after.view(width)
    if not (differs.all() if everywhere else differs.any()):
        raise CheckpointError(
            f"Perturbing tensor {name!r} left {int((~differs).sum())} of {differs.numel()} elements as they were. "
            "Use another perturbation_seed, or a base that is not itself tagged."
        )
    if is_e8m0(name, dtype):
        valid = raw_bytes(before) != 0xFF
    elif not before.dtype.is_floating_point:
        return
    else:
        valid = after.isfinite() if after.element_size() > 1 else after.to(torch.float32).isfinite()
    if not valid.all():
        raise CheckpointError(
            f"Perturbing tensor {name!r} found {int((~valid).sum())} values of the base that are no finite numbers. "
            "Start from a checkpoint that passes check_finite."
        )
