"""The perturbed view: every promised change happens, stays valid for its dtype, and slices agree with the whole."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workloads.loading import perturb
from workloads.loading.checkpoint import (
    CheckpointError,
    CheckpointReader,
    check_finite,
    open_checkpoint,
    validate,
)
from workloads.loading.generate import generate_checkpoint
from workloads.loading.perturb import TAG_DIGITS, TAG_SCALE, PerturbedCheckpoint, open_view, write_perturbed
from workloads.loading.tensor_table import every_tensor
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.kimi_k3.tensors import sections
from workloads.spec import Checkpoint

torch.set_num_threads(1)

TINY = KimiK3Config(vocab_size=128, num_experts=4, dense_intermediate_size=64, shared_intermediate_size=64)
LAYER = "language_model.model.layers.1."
PACKED = LAYER + "block_sparse_moe.experts.3.w1.weight_packed"
SCALE = LAYER + "block_sparse_moe.experts.3.w1.weight_scale"
ELEMENTWISE = ("every_tensor", "one_tensor", "scales_only")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_checkpoint(TINY, 0, tmp_path_factory.mktemp("store") / "proxy", shard_bytes=500_000)


def _view(folder: Path, kind: str, seed: int = 1, target: str = "") -> PerturbedCheckpoint:
    return PerturbedCheckpoint(
        open_checkpoint(folder), kind, seed, target or (SCALE if kind == "one_tensor" else "")
    )


def _single(
    folder: Path, tensor: torch.Tensor, name: str = "x", kind: str = "every_tensor"
) -> PerturbedCheckpoint:
    save_file({name: tensor}, folder / "model.safetensors")
    return PerturbedCheckpoint(open_checkpoint(folder), kind, 1)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as integers, comparable whatever they mean."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


# What changes ---------------------------------------------------------------------------------------------------


def test_every_element_of_every_tensor_changes_and_stays_valid(folder: Path) -> None:
    base, view = open_checkpoint(folder), _view(folder, "every_tensor")
    for name in base.names():
        assert (_elements(view.get(name)) != _elements(base.get(name))).all(), name
        assert view.meta(name) == base.meta(name)
    validate(view, every_tensor(sections(TINY)))
    check_finite(view)
    assert view.nbytes == base.nbytes


def test_changes_are_small(folder: Path) -> None:
    base, view = open_checkpoint(folder), _view(folder, "every_tensor")
    for name in (
        LAYER + "self_attn.q_proj.weight",
        LAYER + "self_attn.dt_bias",
        LAYER + "input_layernorm.weight",
    ):
        before, after = base.get(name).double(), view.get(name).double()
        assert ((after - before).abs() <= before.abs() * 7 / 128 + 1e-38).all()  # zeros too
    steps = view.get(SCALE).int() - base.get(SCALE).int()
    assert set(steps.flatten().tolist()) == {-1, 1}
    flips = set((view.get(PACKED) ^ base.get(PACKED)).flatten().tolist())
    assert flips == {0x11, 0x13, 0x31, 0x33}


def test_every_tensor_differs_between_seeds(folder: Path) -> None:
    one, two = _view(folder, "every_tensor", 1), _view(folder, "every_tensor", 2)
    for name in one.names():
        assert not torch.equal(_elements(one.get(name)), _elements(two.get(name))), name


def test_same_seed_gives_the_same_bytes(folder: Path) -> None:
    one, two = _view(folder, "every_tensor"), _view(folder, "every_tensor")
    assert all(torch.equal(one.get(name), two.get(name)) for name in one.names())


def test_one_tensor_changes_its_target_only(folder: Path) -> None:
    base, view = open_checkpoint(folder), _view(folder, "one_tensor", target=LAYER + "self_attn.A_log")
    changed = [name for name in base.names() if not torch.equal(base.get(name), view.get(name))]
    assert changed == [LAYER + "self_attn.A_log"]


def test_scales_only_changes_exactly_the_scales(folder: Path) -> None:
    base, view = open_checkpoint(folder), _view(folder, "scales_only")
    changed = {name for name in base.names() if not torch.equal(base.get(name), view.get(name))}
    assert changed == {name for name in base.names() if name.endswith("weight_scale")}
    assert changed


def test_tagged_experts_spell_their_id_in_every_row(folder: Path) -> None:
    base, view = open_checkpoint(folder), _view(folder, "expert_tagged")
    for name in base.names():
        if ".experts." not in name:
            assert torch.equal(base.get(name), view.get(name)), name
            continue
        expert = int(name.split(".experts.")[1].split(".")[0])
        tensor = view.get(name).int()
        if name.endswith("weight_packed"):
            assert (tensor[:, 0] + 256 * tensor[:, 1] == expert).all()
        else:
            assert (tensor[[0, TAG_DIGITS], 0] - TAG_SCALE).tolist() == [expert, expert]
    validate(view, every_tensor(sections(TINY)))
    check_finite(view)


def test_large_expert_ids_are_spelled_in_octal_digits(tmp_path: Path) -> None:
    names = {
        f"m.experts.895.w1.{leaf}": torch.zeros(5, 4, dtype=torch.uint8)
        for leaf in ("weight_packed", "weight_scale")
    }
    save_file(names, tmp_path / "model.safetensors")
    view = PerturbedCheckpoint(open_checkpoint(tmp_path), "expert_tagged", 1)
    assert view.get("m.experts.895.w1.weight_packed")[:, :2].tolist() == [[0x7F, 0x03]] * 5
    digits = view.get("m.experts.895.w1.weight_scale").int() - TAG_SCALE
    assert digits[0].tolist() == [0o1577 >> 3 * place & 7 for place in range(4)]
    assert all(torch.equal(after, before.roll(-1)) for before, after in pairwise(digits))


# Slices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["every_tensor", "expert_tagged", "scales_only", "one_tensor"])
def test_slices_of_the_view_are_slices_of_the_whole(folder: Path, kind: str) -> None:
    view = _view(folder, kind)
    for name in [
        PACKED,
        SCALE,
        LAYER + "self_attn.q_conv1d.weight",
        LAYER + "self_attn.A_log",
        "language_model.lm_head.weight",
    ]:
        shape = view.meta(name).shape
        region = tuple((size // 3, size - size // 3 - size // 4) for size in shape)
        index = tuple(slice(start, start + length) for start, length in region)
        assert torch.equal(view.slice(name, region), view.get(name)[index]), name


def test_region_outside_the_tensor_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is not inside its shape"):
        _view(folder, "every_tensor").slice(SCALE, ((0, 9999), (0, 1)))


def test_blocks_do_not_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {
        name: _view(folder, "every_tensor").get(name) for name in (PACKED, SCALE, LAYER + "self_attn.A_log")
    }
    monkeypatch.setattr(perturb, "BLOCK", 100)
    for name, tensor in whole.items():
        assert torch.equal(_view(folder, "every_tensor").get(name), tensor)


def test_empty_slice_is_empty(folder: Path) -> None:
    assert _view(folder, "every_tensor").slice(SCALE, ((3, 0), (0, 4))).shape == (0, 4)


# Dtypes at their edges ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_never_become_nan(tmp_path: Path, stored: torch.dtype) -> None:
    exponents = torch.arange(255, dtype=torch.uint8).repeat(4, 1)
    view = _single(tmp_path, exponents.view(stored), "w1.weight_scale", "scales_only")
    after = view.get("w1.weight_scale")
    assert after.dtype == stored
    steps = after.view(torch.uint8).int() - exponents.int()
    assert set(steps.flatten().tolist()) == {-1, 1}
    assert int(after.view(torch.uint8).max()) <= 254


@pytest.mark.parametrize(("dtype", "finite"), [(torch.float8_e4m3fn, 0x7F), (torch.float8_e5m2, 0x7C)])
def test_fp8_codes_change_and_never_become_nan(tmp_path: Path, dtype: torch.dtype, finite: int) -> None:
    codes = torch.cat([torch.arange(finite), torch.arange(128, 128 + finite)]).to(torch.uint8).repeat(8, 1)
    after = _single(tmp_path, codes.view(dtype)).get("x")
    assert after.dtype == dtype
    assert after.float().isfinite().all()
    assert (after.view(torch.uint8) != codes).all()
    assert (after.view(torch.uint8) >> 7 == codes >> 7).all()


def test_block_scales_in_e4m3_never_become_zero_or_nan(tmp_path: Path) -> None:
    codes = torch.arange(1, 0x7F, dtype=torch.uint8).repeat(8, 1)
    after = _single(tmp_path, codes.view(torch.float8_e4m3fn), "w1.weight_scale").get("w1.weight_scale")
    assert (after.float() > 0).all()
    assert after.float().isfinite().all()
    assert (after.view(torch.uint8) != codes).all()


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale"])
def test_scales_that_are_numbers_are_scales_too(tmp_path: Path, leaf: str) -> None:
    names = {f"w1.{leaf}": torch.tensor(0.5), "w1.weight": torch.ones(2)}
    save_file(names, tmp_path / "model.safetensors")
    view = PerturbedCheckpoint(open_checkpoint(tmp_path), "scales_only", 1)
    assert view.get(f"w1.{leaf}") not in (0.0, 0.5)
    assert torch.equal(view.get("w1.weight"), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_stay_finite_and_zeros_change_too(tmp_path: Path, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    values = torch.tensor([0.0, 1.0, -1.0, top, -top, torch.finfo(dtype).tiny], dtype=dtype)
    after = _single(tmp_path, values).get("x")
    assert after.isfinite().all()
    assert (_elements(after) != _elements(values)).all()
    assert (
        (after - values).abs().double() <= values.abs().double() * 7 / 128 + torch.finfo(dtype).tiny
    ).all()


def test_scalar_changes(tmp_path: Path) -> None:
    assert _single(tmp_path, torch.tensor(1.0)).get("x") != 1.0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x", torch.tensor([1.0, torch.nan])),
        ("x", torch.tensor([torch.inf]).bfloat16()),
        ("x", torch.tensor([0x7C], dtype=torch.uint8).view(torch.float8_e5m2)),
        ("w1.weight_scale", torch.tensor([255, 3], dtype=torch.uint8)),
    ],
)
def test_base_that_is_not_finite_is_refused(tmp_path: Path, name: str, values: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="1 values of the base that are no finite numbers"):
        _single(tmp_path, values, name).get(name)


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.uint8)])
def test_dtype_without_a_defined_change_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"'x' has dtype .*, for which no perturbation is defined"):
        _single(tmp_path, tensor).get("x")


# Refusals -------------------------------------------------------------------------------------------------------


def test_unknown_kind(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no perturbation 'sideways'\. Use one of every_tensor"):
        _view(folder, "sideways")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one_tensor", r"needs a tensor named 'y' \(perturbation_target\), and this checkpoint has none"),
        ("scales_only", "needs scales of quantised weights, and this checkpoint has none"),
        ("expert_tagged", "needs packed MXFP4 experts, and this checkpoint has none"),
    ],
)
def test_view_that_would_change_nothing_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        PerturbedCheckpoint(open_checkpoint(tmp_path), kind, 1, "y")


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_change_that_leaves_an_element_is_noticed(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = perturb._changed

    def forgets_the_last_row(
        name: str, dtype: str, before: torch.Tensor, noise: list[torch.Tensor]
    ) -> torch.Tensor:
        return torch.cat([right(name, dtype, before, noise)[:-1], before[-1:]])

    monkeypatch.setattr(perturb, "_changed", forgets_the_last_row)
    with pytest.raises(CheckpointError, match=r"weight_scale' left 4 of 384 elements as they were"):
        _view(folder, kind).get(SCALE)


def test_tagging_a_tagged_checkpoint_is_noticed(folder: Path) -> None:
    tagged = PerturbedCheckpoint(_view(folder, "expert_tagged"), "expert_tagged", 1)
    with pytest.raises(CheckpointError, match="a base that is not itself tagged"):
        tagged.get(SCALE)


# Identity and files ---------------------------------------------------------------------------------------------


def test_identity_covers_base_kind_seed_and_target(folder: Path, tmp_path: Path) -> None:
    other = generate_checkpoint(TINY, 5, tmp_path / "other")
    views: list[CheckpointReader] = [
        open_checkpoint(folder),
        _view(folder, "every_tensor"),
        _view(folder, "every_tensor", seed=2),
        _view(folder, "scales_only"),
        _view(folder, "one_tensor", target=SCALE),
        _view(folder, "one_tensor", target=PACKED),
        _view(other, "every_tensor"),
    ]
    assert len({view.identity() for view in views}) == len(views)
    assert _view(folder, "every_tensor").identity() == views[1].identity()


def test_written_view_reads_as_the_view(folder: Path, tmp_path: Path) -> None:
    view = _view(folder, "every_tensor")
    written = write_perturbed(view, tmp_path / "perturbed", shard_bytes=300_000)
    reader = open_checkpoint(written)
    assert set(reader.names()) == set(view.names())
    assert all(torch.equal(reader.get(name), view.get(name)) for name in view.names())
    assert (written / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert write_perturbed(view, tmp_path / "perturbed") == written
    with pytest.raises(CheckpointError, match="was made from"):
        write_perturbed(_view(folder, "every_tensor", seed=2), tmp_path / "perturbed")


def test_open_view_builds_what_the_spec_asks_for(folder: Path) -> None:
    plain = open_view(Checkpoint(), str(folder))
    assert plain.identity() == open_checkpoint(folder).identity()
    spec = Checkpoint(perturbation="one_tensor", perturbation_seed=3, perturbation_target=SCALE)
    assert open_view(spec, folder).identity() == _view(folder, "one_tensor", 3, SCALE).identity()
