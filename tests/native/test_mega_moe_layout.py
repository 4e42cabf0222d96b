"""The fused layout against its index maps, written out row by row."""

import numpy as np
import pytest
import torch
from torch import Tensor

from workloads.kernels import mega_moe_layout as layout

torch.set_num_threads(1)

SHAPES = [(1, 128, 128), (2, 256, 128), (3, 128, 384)]  # experts, hidden, intermediate
CPU = torch.device("cpu")


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def interleave_source(row: int, intermediate: int) -> int:
    """Checkpoint row that ends up in interleaved row `row`."""
    block, within = divmod(row, 16)
    return 8 * block + within if within < 8 else intermediate + 8 * block + within - 8


def utccp_target(row: int) -> int:
    """Row that receives source row `row` when each 128-row block is read as 4x32 and written as 32x4."""
    block, i = divmod(row, 128)
    return 128 * block + (i % 32) * 4 + i // 32


def pack(scales: list[int]) -> int:
    """Four scale bytes as one signed little-endian int32."""
    return int.from_bytes(bytes(scales), "little", signed=True)


def naive_l1_weight(raw: Tensor) -> Tensor:
    intermediate = raw.shape[1] // 2
    out = torch.empty_like(raw)
    for row in range(2 * intermediate):
        out[:, row] = raw[:, interleave_source(row, intermediate)]
    return out


def naive_scale(raw: Tensor, interleaved: bool) -> Tensor:
    experts, rows, columns = raw.shape
    out = torch.empty(experts, rows, columns // 4, dtype=torch.int32)
    for e in range(experts):
        for row in range(rows):
            source = raw[e, interleave_source(row, rows // 2) if interleaved else row].tolist()
            for word in range(columns // 4):
                out[e, utccp_target(row), word] = pack(source[4 * word : 4 * word + 4])
    return out


def fused_l1(experts: int, hidden: int, intermediate: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(raw weight, raw scale, fused weight, fused scale) of the first layer."""
    weight = random_bytes(experts, 2 * intermediate, hidden // 2)
    scale = random_bytes(experts, 2 * intermediate, hidden // 32)
    fused_weight = layout.empty_l1_weight(experts, hidden, intermediate, CPU)
    fused_scale = layout.empty_scale(experts, 2 * intermediate, hidden, CPU)
    layout.fuse_l1_weight(weight, fused_weight)
    layout.fuse_l1_scale(scale, fused_scale)
    return weight, scale, fused_weight, fused_scale


def fused_l2(experts: int, hidden: int, intermediate: int) -> tuple[Tensor, Tensor]:
    """(raw scale, fused scale) of the second layer."""
    scale = random_bytes(experts, hidden, intermediate // 32)
    fused = layout.empty_scale(experts, hidden, intermediate, CPU)
    layout.fuse_l2_scale(scale, fused)
    return scale, fused


@pytest.mark.parametrize("shape", SHAPES)
def test_l1_follows_the_index_maps(shape: tuple[int, int, int]) -> None:
    weight, scale, fused_weight, fused_scale = fused_l1(*shape)
    assert torch.equal(fused_weight.view(torch.uint8), naive_l1_weight(weight))
    assert torch.equal(fused_scale, naive_scale(scale, interleaved=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_l2_scale_follows_the_index_maps(shape: tuple[int, int, int]) -> None:
    scale, fused = fused_l2(*shape)
    assert torch.equal(fused, naive_scale(scale, interleaved=False))


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip_is_bitwise(shape: tuple[int, int, int]) -> None:
    weight, scale, fused_weight, fused_scale = fused_l1(*shape)
    l2_scale, fused_l2_scale = fused_l2(*shape)
    assert torch.equal(layout.unfuse_l1_weight(fused_weight), weight)
    assert torch.equal(layout.unfuse_l1_scale(fused_scale), scale)
    assert torch.equal(layout.unfuse_l2_scale(fused_l2_scale), l2_scale)


def test_one_expert_is_restored_from_its_slice() -> None:
    weight, scale, fused_weight, fused_scale = fused_l1(3, 128, 384)
    assert torch.equal(layout.unfuse_l1_weight(fused_weight[2:3]), weight[2:3])
    assert torch.equal(layout.unfuse_l1_scale(fused_scale[1:2]), scale[1:2])


def test_inverse_maps_of_gate_and_up_rows() -> None:
    weight, _, fused, _ = fused_l1(2, 256, 128)
    stored = fused.view(torch.uint8)
    for i in range(128):
        assert torch.equal(stored[:, 16 * (i // 8) + i % 8], weight[:, i])
        assert torch.equal(stored[:, 16 * (i // 8) + 8 + i % 8], weight[:, 128 + i])


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_strides_are_the_kernel_s(shape: tuple[int, int, int]) -> None:
    experts, hidden, intermediate = shape
    _, _, weight, l1_scale = fused_l1(*shape)
    _, l2_scale = fused_l2(*shape)
    assert (weight.dtype, weight.shape) == (torch.int8, (experts, 2 * intermediate, hidden // 2))
    assert weight.is_contiguous()
    for scale, mn, k in ((l1_scale, 2 * intermediate, hidden), (l2_scale, hidden, intermediate)):
        assert (scale.dtype, scale.shape) == (torch.int32, (experts, mn, k // 128))
        assert scale.stride() == (mn * (k // 128), 1, mn)
        assert scale.stride(-1) * scale.element_size() % 16 == 0


def test_views_write_through_to_the_fused_storage() -> None:
    _, _, weight, l1_scale = fused_l1(2, 128, 128)
    _, l2_scale = fused_l2(2, 128, 128)
    for view, storage in (
        (layout.l1_weight_view(weight), weight),
        (layout.l1_scale_view(l1_scale), l1_scale),
        (layout.l2_scale_view(l2_scale), l2_scale),
    ):
        assert view.dtype == torch.uint8
        assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
        assert view.numel() == storage.numel() * storage.element_size()
        view.fill_(0x7F)
        assert set(bytes(storage.numpy().tobytes())) == {0x7F}


def test_fusing_keeps_addresses_and_strides() -> None:
    weight, scale, fused_weight, fused_scale = fused_l1(2, 128, 128)
    before = [(t.data_ptr(), t.stride()) for t in (fused_weight, fused_scale)]
    layout.fuse_l1_weight(255 - weight, fused_weight)
    layout.fuse_l1_scale(255 - scale, fused_scale)
    assert [(t.data_ptr(), t.stride()) for t in (fused_weight, fused_scale)] == before
    assert torch.equal(layout.unfuse_l1_scale(fused_scale), 255 - scale)


def test_l2_weight_is_an_alias() -> None:
    raw = random_bytes(2, 128, 64)
    fused = layout.fuse_l2_weight(raw)
    assert (fused.dtype, fused.data_ptr()) == (torch.int8, raw.data_ptr())
    raw[1, 3, 5] ^= 0xFF
    assert torch.equal(layout.unfuse_l2_weight(fused), raw)
    assert layout.unfuse_l2_weight(fused).data_ptr() == raw.data_ptr()


@pytest.mark.parametrize("shape", SHAPES)
def test_byte_histograms_are_kept_per_expert(shape: tuple[int, int, int]) -> None:
    weight, scale, fused_weight, fused_scale = fused_l1(*shape)
    for raw, fused in ((weight, fused_weight), (scale, fused_scale)):
        for e in range(shape[0]):
            before, after = (np.frombuffer(t[e].numpy().tobytes(), np.uint8) for t in (raw, fused))
            assert np.array_equal(np.bincount(before, minlength=256), np.bincount(after, minlength=256))


def test_numbers_instead_of_bytes_are_refused() -> None:
    fused = layout.empty_scale(2, 128, 128, CPU)
    numbers = random_bytes(2, 128, 4).view(torch.float8_e8m0fnu)
    with pytest.raises(
        ValueError, match=r"l2 scale must arrive as raw uint8 bytes, but it is torch.float8_e8m0fnu"
    ):
        layout.fuse_l2_scale(numbers, fused)


@pytest.mark.parametrize("shape", [(1, 256, 64), (2, 128, 128), (2, 256, 32)])
def test_a_tensor_that_only_broadcasts_or_has_the_same_size_is_refused(shape: tuple[int, ...]) -> None:
    fused = layout.empty_l1_weight(2, 128, 128, CPU)
    with pytest.raises(
        ValueError, match=r"l1 weight has shape .* but the fused storage holds \(2, 256, 64\)"
    ):
        layout.fuse_l1_weight(random_bytes(*shape), fused)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "multiple", "message"),
    [
        (
            3584,
            2304,
            512,
            "intermediate size of an expert to be a positive multiple of 512, but it is 2304: pad it to 2560",
        ),
        (
            96,
            128,
            128,
            "hidden size of an expert to be a positive multiple of 128, but it is 96: pad it to 128",
        ),
        (128, 0, 128, "intermediate size .* but it is 0: pad it to 128"),
    ],
)
def test_alignment_names_size_and_remedy(hidden: int, intermediate: int, multiple: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check_alignment(hidden, intermediate, multiple)


def test_alignment_accepts_the_published_shapes() -> None:
    layout.check_alignment(3584, 3072, 512)
    layout.check_alignment(5120, 2304, 128)
