"""The fingerprint of a tensor on a GPU is the one of the same tensor on the CPU, and fast."""

import time

import pytest
import torch

from collectors.fingerprint import fingerprint, fingerprints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(), (0,), (1,), (7,), (2048,), (100_003,), (600, 256), (33, 5, 77), (8, 1024, 512), (5, 3 << 20)]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.complex64]
)
def test_equals_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.empty(0, dtype=dtype).element_size()
    tensors = []
    for shape in SHAPES:
        count = size * int(torch.tensor(shape, dtype=torch.int64).prod())
        tensors.append(
            torch.randint(0, 256, (count,), generator=generator).to(torch.uint8).view(dtype).view(shape)
        )
    tensors += [t.transpose(-1, -2) for t in tensors if t.ndim > 1]
    tensors += [
        torch.zeros(9001, dtype=torch.uint8).view(torch.uint8),
        torch.full((5000,), 255, dtype=torch.uint8),
    ]
    on_gpu = [tensor.cuda() for tensor in tensors]
    assert fingerprints(on_gpu) == fingerprints(tensors)
    assert fingerprints(on_gpu, whole=True) == fingerprints(tensors, whole=True)


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = torch.randint(-(1 << 62), 1 << 62, (512 << 20,), device="cuda").view(torch.bfloat16)  # 4 GiB
    target = torch.empty_like(tensor)
    seconds = {}
    for name, action in (
        ("fingerprint", lambda: fingerprint(tensor)),
        ("with NaN and constants", lambda: fingerprints([tensor])),
        ("memory copy", lambda: target.copy_(tensor)),
    ):
        action()
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
    with capsys.disabled():
        for name, value in seconds.items():
            print(f"\n  {name:24} {tensor.nbytes / value / 1e9:8.1f} GB/s", end="")
    assert seconds["fingerprint"] < 20 * seconds["memory copy"]
