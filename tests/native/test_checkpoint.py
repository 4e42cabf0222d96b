"""Every way in which a checkpoint folder can be wrong, and that a right one reads back as it was written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from workloads.loading import shards
from workloads.loading.checkpoint import (
    CheckpointError,
    check_finite,
    open_checkpoint,
    raw_bytes,
    validate,
)
from workloads.loading.tensor_table import REPLICATED, TensorSpec

torch.set_num_threads(1)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
OTHER = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _two_shards(folder: Path) -> dict[str, torch.Tensor]:
    """a and b in the first file, c in the second."""
    folder.mkdir(exist_ok=True)
    tensors = {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.ones(5).bfloat16(),
        "c": torch.arange(6, dtype=torch.uint8),
    }
    files = {"model-00001-of-00002.safetensors": "ab", "model-00002-of-00002.safetensors": "c"}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    _index(folder, {name: file for file, names in files.items() for name in names})
    return tensors


def _index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _craft(folder: Path, header: dict[str, Any] | str, data: bytes) -> None:
    """A single-file checkpoint with any header, right or wrong."""
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def _entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


# Reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *OTHER], ids=str)
def test_reads_what_safetensors_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2 if dtype is torch.bool else 100, (3, 4), dtype=torch.uint8)
    tensor = source.to(torch.float32).to(dtype) if dtype in FLOAT8 else source.to(dtype)
    save_file(
        {"x": tensor, "scalar": tensor[0, 0].clone(), "empty": tensor[:0].clone()},
        tmp_path / "model.safetensors",
    )
    reader = open_checkpoint(tmp_path)
    assert reader.get("x").dtype == dtype
    assert _bytes(reader.get("x")) == _bytes(tensor)
    assert reader.meta("x").shape == (3, 4)
    assert reader.get("scalar").shape == ()
    assert reader.get("empty").shape == (0, 4)
    assert reader.nbytes == 13 * dtype.itemsize


def test_reads_all_shards_in_file_order(tmp_path: Path) -> None:
    tensors = _two_shards(tmp_path)
    reader = open_checkpoint(str(tmp_path))
    assert sorted(reader.names()) == ["a", "b", "c"]
    assert next(reversed(list(reader.names()))) == "c"
    for name, tensor in tensors.items():
        assert torch.equal(reader.get(name), tensor)


def test_reads_a_tensor_that_is_not_aligned_to_its_dtype(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.0])
    header = {"byte": _entry(0, 1), "x": _entry(1, 9, "F32", [2])}
    _craft(tmp_path, header, b"\7" + _bytes(values))
    assert torch.equal(open_checkpoint(tmp_path).get("x"), values)


def test_slice_is_the_region_of_the_whole(tmp_path: Path) -> None:
    tensors = _two_shards(tmp_path)
    assert torch.equal(open_checkpoint(tmp_path).slice("a", ((1, 2), (1, 3))), tensors["a"][1:3, 1:4])


@pytest.mark.parametrize(
    "region", [((0, 3),), ((0, 4), (0, 4)), ((-1, 2), (0, 4)), ((0, 3), (3, 2)), ((0, 3), (0, -1))]
)
def test_region_outside_the_tensor_is_refused(tmp_path: Path, region: tuple[tuple[int, int], ...]) -> None:
    _two_shards(tmp_path)
    with pytest.raises(CheckpointError, match=r"'a': region .* is not inside its shape \(3, 4\)"):
        open_checkpoint(tmp_path).slice("a", region)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.d' among the 3"):
        open_checkpoint(tmp_path).get("model.d")


def test_writing_into_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    tensors = _two_shards(tmp_path)
    open_checkpoint(tmp_path).get("a").zero_()
    assert torch.equal(open_checkpoint(tmp_path).get("a"), tensors["a"])


def test_file_overwritten_after_opening_is_noticed(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    reader = open_checkpoint(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"00002-of-00002.*Do not overwrite a checkpoint that is in use"
    ):
        reader.get("c")


# Broken folders and indexes -------------------------------------------------------------------------------------


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_folder_without_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "weights-1.safetensors")
    with pytest.raises(
        CheckpointError, match=r"neither model.safetensors.index.json nor .* \(found weights-1"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "broken JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "'weight_map' is missing or empty"),
        ('{"weight_map": {}}', "'weight_map' is missing or empty"),
        (
            '{"weight_map": {"a": "../secret.safetensors"}}',
            "'../secret.safetensors', which is not a plain file name",
        ),
        ('{"weight_map": {"a": 3}}', "placed in 3, which is not a plain file name"),
        ('{"weight_map": {"a": ["m"]}}', "placed in ['m'], which is not a plain file name"),
    ],
)
def test_broken_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert message in str(raised.value)


def test_index_names_a_missing_file(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"00002-of-00002.safetensors: the file is missing, but the index"
    ):
        open_checkpoint(tmp_path)


def test_index_and_file_disagree_on_tensors(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    file = "model-00001-of-00002.safetensors"
    _index(tmp_path, {"a": file, "d": file, "c": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert len(raised.value.problems) == 2
    assert "tensor 'd' is missing" in raised.value.problems[0]
    assert "holds tensor 'b'" in raised.value.problems[1]


def test_tensor_in_two_files(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    save_file({"c": torch.zeros(1), "a": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'a' is in both model-00001-of-00002\.safetensors and model-00002"
    ):
        open_checkpoint(tmp_path)


def test_problems_of_all_files_are_reported_at_once(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert [problem.count("truncated") for problem in raised.value.problems] == [1, 1]


# Broken files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 70])
def test_truncated_file_is_found_from_its_size(tmp_path: Path, cut: int) -> None:
    _two_shards(tmp_path)
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: the .* truncated"):
        open_checkpoint(tmp_path)


def test_bytes_behind_the_last_tensor(tmp_path: Path) -> None:
    _craft(tmp_path, {"x": _entry(0, 4)}, bytes(6))
    with pytest.raises(CheckpointError, match="has 6 bytes of data, its header describes 4"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\0", (10**9).to_bytes(8, "little") + b"{}", b"not a checkpoint at all"]
)
def test_file_without_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"x": ', "broken JSON"),
        ("3", "expected a JSON object, found int"),
        (
            f'{{"x": {json.dumps(_entry(0, 2))}, "x": {json.dumps(_entry(2, 4))}}}',
            "'x' leaves a hole before it",
        ),
        ({"x": {"dtype": "U8"}}, "entry of 'x' lacks dtype, shape or data_offsets"),
        ({"__metadata__": [], "x": _entry(0, 4)}, "'__metadata__' is a list, expected a JSON object"),
        ({"x": {**_entry(0, 4), "data_offsets": [4]}}, "entry of 'x' lacks dtype, shape or data_offsets"),
        ({"x": {**_entry(0, 4), "dtype": ["U8"]}}, "entry of 'x' lacks dtype, shape or data_offsets"),
        ({"x": {**_entry(0, 4), "shape": 4}}, "entry of 'x' lacks dtype, shape or data_offsets"),
        ({"x": 7}, "entry of 'x' lacks dtype, shape or data_offsets"),
        ({"x": _entry(0, 4, "Q3")}, "dtype 'Q3', which is not read here"),
        ({"x": _entry(0, 4, "U8", [-4])}, "has shape [-4] at [0, 4], expected non-negative integers"),
        ({"x": _entry(0, 4, "U8", [True, 4])}, "expected non-negative integers"),
        ({"x": _entry(0, 4, "F32", [2])}, "needs 8 bytes, its data_offsets [0, 4] give 4"),
        ({"x": _entry(-2, 2)}, "has shape [4] at [-2, 2], expected non-negative integers"),
        (
            {"x": _entry(0, 3), "y": _entry(2, 4)},
            "'y' overlaps the tensor before it: its data starts at 2, expected 3",
        ),
        (
            {"x": _entry(0, 2), "y": _entry(3, 4)},
            "'y' leaves a hole before it: its data starts at 3, expected 2",
        ),
    ],
)
def test_broken_header(tmp_path: Path, header: dict[str, Any] | str, message: str) -> None:
    _craft(tmp_path, header, bytes(4))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert message in str(raised.value)
    assert "model.safetensors" in str(raised.value)


def test_header_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"\xff\xfe")
    with pytest.raises(CheckpointError, match="broken JSON"):
        open_checkpoint(tmp_path)


def test_long_lists_of_problems_are_cut_in_the_message_only() -> None:
    error = CheckpointError([f"Problem {number}." for number in range(30)])
    assert len(error.problems) == 30
    assert str(error).endswith("Problem 19.\n… and 10 more problems like these.")


# Identity -------------------------------------------------------------------------------------------------------


def test_identity_follows_the_content_not_the_place(tmp_path: Path) -> None:
    _two_shards(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (open_checkpoint(tmp_path / name).identity() for name in ("one", "two"))
    assert one == two
    assert len(one) == 32


def _flip_last_byte(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _rename_tensor(folder: Path) -> None:
    save_file({"d": torch.arange(6, dtype=torch.uint8)}, folder / "model-00002-of-00002.safetensors")
    first = "model-00001-of-00002.safetensors"
    _index(folder, {"a": first, "b": first, "d": "model-00002-of-00002.safetensors"})


@pytest.mark.parametrize("change", [_flip_last_byte, _rename_tensor])
@pytest.mark.parametrize("whole", [True, False])
def test_identity_sees_changed_values_and_names(
    tmp_path: Path, change: Callable[[Path], None], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _two_shards(tmp_path)
    if not whole:  # as for a large file: samples, of which the last ends with the file
        monkeypatch.setattr(shards, "_WHOLE", 16)
        monkeypatch.setattr(shards, "_SAMPLE", 4)
    before = open_checkpoint(tmp_path).identity()
    change(tmp_path)
    assert open_checkpoint(tmp_path).identity() != before


# Against a model ------------------------------------------------------------------------------------------------


def _spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape, REPLICATED, "norms")


def test_validate_accepts_what_fits(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    specs = [_spec("a", "F32", 3, 4), _spec("b", "BF16", 5), _spec("c", "U8", 6)]
    validate(open_checkpoint(tmp_path), specs)
    validate(open_checkpoint(tmp_path), specs[:2], ignore=("c", "vision_tower."))


def test_validate_reports_every_kind_of_difference_at_once(tmp_path: Path) -> None:
    _two_shards(tmp_path)
    specs = [_spec("a", "F32", 4, 3), _spec("b", "F32", 5), _spec("d", "U8", 6)]
    with pytest.raises(CheckpointError) as raised:
        validate(open_checkpoint(tmp_path), specs)
    shape, dtype, missing, unexpected = raised.value.problems
    assert "'a' has shape (3, 4), expected (4, 3)" in shape
    assert "'b' has dtype BF16, expected F32" in dtype
    assert "'d' is missing, expected U8 (6,)" in missing
    assert "'c' is unexpected" in unexpected


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", torch.tensor([1, torch.nan]).bfloat16(), r"\(BF16\) holds 1 NaN or infinite values of 2"),
        ("x", torch.tensor([torch.inf, -torch.inf]), r"\(F32\) holds 2 NaN or infinite"),
        (
            "x",
            torch.tensor([0x7F, 0xFF, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn),
            r"holds 2 NaN codes",
        ),
        (
            "x",
            torch.tensor([0x7C, 0x7E, 0x7B], dtype=torch.uint8).view(torch.float8_e5m2),
            r"holds 2 NaN or infinite",
        ),
        ("x", torch.tensor([255, 254], dtype=torch.uint8).view(torch.float8_e8m0fnu), r"holds 1 NaN scales"),
        (
            "experts.0.w1.weight_scale",
            torch.tensor([255, 1], dtype=torch.uint8),
            r"\(U8\) holds 1 NaN scales",
        ),
    ],
)
def test_check_finite_finds_values_that_are_no_numbers(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    save_file({name: tensor, "fine": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_finite(open_checkpoint(tmp_path))
    check_finite(open_checkpoint(tmp_path), ["fine"])


def test_check_finite_accepts_every_packed_byte(tmp_path: Path) -> None:
    save_file({"w1.weight_packed": torch.arange(256, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    check_finite(open_checkpoint(tmp_path))


def test_raw_bytes_are_the_stored_exponents() -> None:
    scales = torch.tensor([0.0078125, 1.0, 2.0]).to(torch.float8_e8m0fnu)
    assert raw_bytes(scales).tolist() == [120, 127, 128]
    assert raw_bytes(raw_bytes(scales)).tolist() == [120, 127, 128]
    with pytest.raises(TypeError, match=r"not torch.float32"):
        raw_bytes(torch.zeros(1))
