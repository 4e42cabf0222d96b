"""What is looked at before DeepGEMM is called. `Stand` is a stand-in for its module, with its signatures: the SM100
kernels need a GPU that was not at hand, and say nothing here about numbers."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workloads.kernels import mega_moe_deep_gemm as deep_gemm
from workloads.kernels import moe_kernels
from workloads.kernels.activations import SituParameters, SwigluParameters
from workloads.kernels.moe_choice import Machine
from workloads.kernels.quantization import (
    quantize_fp8_groups,
    quantize_fp8_rows,
    quantize_fp8_tiles,
    quantize_mxfp4,
)

EXPERTS, HIDDEN, INNER = 2, 512, 512
GROUP: Any = SimpleNamespace(size=lambda: 1)


class Stand(ModuleType):
    """Records the one call that `fp8_fp4_mega_moe` would be."""

    calls: list[dict[str, Any]]

    def __init__(self, situ: bool) -> None:
        super().__init__("deep_gemm")
        self.calls = []

        def plain(
            y: Any, l1: Any, l2: Any, buffer: Any, activation: str = "swiglu", activation_clamp: Any = None
        ) -> None:
            self.calls.append(
                {"activation": activation, "activation_clamp": activation_clamp, "l1": l1, "l2": l2}
            )

        def with_situ(
            y: Any,
            l1: Any,
            l2: Any,
            buffer: Any,
            activation: str,
            activation_beta: float,
            activation_linear_beta: float,
        ) -> None:
            self.calls.append({"activation": activation, "betas": (activation_beta, activation_linear_beta)})

        self.fp8_fp4_mega_moe = with_situ if situ else plain
        self.buffer = SimpleNamespace(
            x=torch.zeros(384, HIDDEN, dtype=torch.float8_e4m3fn),
            x_sf=torch.zeros(384, HIDDEN // 128, dtype=torch.int32),
            topk_idx=torch.zeros(384, 2, dtype=torch.int64),
            topk_weights=torch.zeros(384, 2),
        )

    def get_symm_buffer_for_mega_moe(self, group: Any, *sizes: int) -> Any:
        self.sizes = sizes
        return self.buffer


@pytest.fixture
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand(situ=getattr(request, "param", False))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", stand)
    monkeypatch.setattr(deep_gemm, "check_capability", lambda device, major: None)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    return stand


def inputs(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return x, torch.tensor([[0, 1]] * tokens), torch.ones(tokens, 2)


def prepared(kernel: deep_gemm.Sm100MegaMoE) -> Any:
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    return kernel.prepare(*quantize_mxfp4(w13), *quantize_mxfp4(w2))


def test_sm100_fills_the_buffer_and_passes_what_the_installed_version_takes(installed: Stand) -> None:
    kernel = deep_gemm.Sm100MegaMoE(tokens=384)
    weights, (x, idx, topk) = prepared(kernel), inputs()
    y = kernel.forward(x, idx, topk, weights, GROUP, EXPERTS, SwigluParameters(7.0))
    assert (y.shape, y.dtype) == ((3, HIDDEN), torch.bfloat16)
    assert installed.sizes == (EXPERTS, 384, 2, HIDDEN, INNER)
    [call] = installed.calls
    assert (call["activation"], call["activation_clamp"]) == ("swiglu", 7.0)
    assert call["l1"] == (weights.l1_weight, weights.l1_scale)
    q, scales = quantize_fp8_rows(x)
    assert torch.equal(installed.buffer.x[:3].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(installed.buffer.x_sf[:3].view(torch.uint8), scales)
    assert torch.equal(installed.buffer.topk_idx[:3], idx)


@pytest.mark.parametrize("installed", [True], indirect=True)
def test_situ_is_passed_where_the_version_has_it(installed: Stand) -> None:
    kernel = deep_gemm.Sm100MegaMoE(tokens=384)
    kernel.forward(*inputs(), prepared(kernel), GROUP, EXPERTS, SituParameters())
    assert installed.calls == [{"activation": "situ", "betas": (4.0, 25.0)}]


def test_sm100_refuses_before_a_call(installed: Stand) -> None:
    kernel = deep_gemm.Sm100MegaMoE(tokens=4)
    weights, (x, idx, topk) = prepared(kernel), inputs()
    with pytest.raises(
        RuntimeError, match=r"takes no activation_beta, activation_linear_beta; it takes y, l1"
    ):
        kernel.forward(x, idx, topk, weights, GROUP, EXPERTS, SituParameters())
    with pytest.raises(ValueError, match="9 tokens are more than MegaMoE's buffer was made for, 4"):
        kernel.forward(*inputs(9), weights, GROUP, EXPERTS, SwigluParameters())
    with pytest.raises(ValueError, match=r"topk_idx is torch\.int32"):
        kernel.forward(x, idx.int(), topk, weights, GROUP, EXPERTS, SwigluParameters())
    with pytest.raises(ValueError, match="needs a process group"):
        kernel.forward(x, idx, topk, weights, None, EXPERTS, SwigluParameters())
    with pytest.raises(ValueError, match="multiple of 512"):
        kernel.prepare(*quantize_mxfp4(torch.ones(1, 512, 128)), *quantize_mxfp4(torch.ones(1, 128, 256)))
    assert installed.calls == []


def test_what_is_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(RuntimeError, match=r"needs fp8_mega_moe: .*deep_gemm is not installed"):
        deep_gemm.find(["fp8_mega_moe"])
    monkeypatch.setitem(sys.modules, "deep_gemm", Stand(situ=False))
    with pytest.raises(RuntimeError, match=r"deep_gemm of unknown version has no fp8_mega_moe"):
        deep_gemm.find(["fp8_mega_moe"])

    def broken(name: str) -> Any:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(deep_gemm, "import_module", broken)
    with pytest.raises(RuntimeError, match=r"built for another torch or CUDA \(undefined symbol"):
        deep_gemm.find(["fp8_mega_moe"])


def test_a_machine_tells_what_its_deep_gemm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent, built for another torch, without the entry points, and with them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    absent = moe_kernels.machine(gpu)
    assert absent.deep_gemm == {}
    assert "deep_gemm is not installed" in absent.why_not
    assert "Install" not in absent.why_not
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    assert "has no get_symm_buffer_for_mega_moe, fp8_fp4_mega_moe" in moe_kernels.machine(gpu).why_not
    monkeypatch.setitem(sys.modules, "deep_gemm", Stand(situ=True))
    complete = moe_kernels.machine(gpu)
    assert complete.capability == (10, 0)
    assert "activation_beta" in complete.deep_gemm["fp8_fp4_mega_moe"]
    assert complete.why_not == ""
    monkeypatch.setattr(deep_gemm, "import_module", lambda name: (_ for _ in ()).throw(OSError("libc10.so")))
    assert "built for another torch or CUDA (libc10.so)" in moe_kernels.machine(gpu).why_not
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert moe_kernels.machine(gpu).why_not == ""  # no DeepGEMM would help
    assert moe_kernels.machine(torch.device("cpu")) == Machine()


def test_experts_with_a_nan_are_refused_by_the_kernel_of_sm100(installed: Stand) -> None:
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    raw = [*quantize_mxfp4(w13), *quantize_mxfp4(w2)]
    raw[1][1, 7, 0] = 255
    with pytest.raises(ValueError, match="w13_scale holds the byte 255, a NaN, first for local expert 1"):
        deep_gemm.Sm100MegaMoE(tokens=4).prepare(*raw)


class Sm90Stand(ModuleType):
    """The three entry points of `fp8_mega_moe`, which only record; a buffer of 384 tokens."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[Any] = []
        self.buffer = SimpleNamespace(
            x=torch.zeros(384, HIDDEN, dtype=torch.float8_e4m3fn),
            x_sf=torch.zeros(384, HIDDEN // 128),
            topk_idx=torch.zeros(384, 2, dtype=torch.int64),
            topk_weights=torch.zeros(384, 2),
        )

    def get_symm_buffer_for_sm90_mega_moe(self, group: Any, *sizes: int) -> Any:
        return self.buffer

    def transform_weights_for_mega_moe_sm90(self, l1: Any, l2: Any) -> Any:
        return l1, l2

    def fp8_mega_moe(self, y: torch.Tensor, l1: Any, l2: Any, buffer: Any, activation_clamp: Any) -> None:
        self.calls.append((y.shape, activation_clamp))


def test_tokens_over_the_capacity_and_of_another_kind_never_reach_fp8_mega_moe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Sm90Stand()
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "deep_gemm", stand)
    monkeypatch.setattr(deep_gemm, "check_capability", lambda device, major: None)
    w13 = quantize_fp8_tiles(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
    w2 = quantize_fp8_tiles(torch.randn(EXPERTS, HIDDEN, INNER))
    moe = deep_gemm.Fp8MegaMoE(deep_gemm.Fp8Experts(*w13, *w2), GROUP, EXPERTS, 2, 4, 10.0)

    def given(tokens: int) -> list[torch.Tensor]:
        x, idx, weights = inputs(tokens)
        return [*(part.contiguous() for part in quantize_fp8_groups(x)), idx, weights]

    with pytest.raises(ValueError, match="5 tokens are more than MegaMoE's buffer was made for, 4"):
        moe.fill(*given(5))
    q, scales, idx, weights = given(3)
    with pytest.raises(ValueError, match=r"x_scale is torch.float64"):
        moe.fill(q, scales.double(), idx, weights)
    moe.fill(q, scales, idx, weights)
    assert torch.equal(stand.buffer.x[:3].view(torch.uint8), q.view(torch.uint8))
    assert stand.calls == []
    assert moe.run(3).shape == (3, HIDDEN)
    assert stand.calls == [((3, HIDDEN), 10.0)]


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"capability 9.x and cpu is no GPU"):
        deep_gemm.check_capability(torch.device("cpu"), 9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(RuntimeError, match=r"capability 10.x and cuda:0 has 9.0"):
        deep_gemm.check_capability(torch.device("cuda", 0), 10)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w13", lambda t: t.to(torch.bfloat16), "w13 is torch.bfloat16"),
        ("w13_scale", lambda t: t.double(), "w13_scale is torch.float64"),
        ("w2", lambda t: t.view(torch.uint8).transpose(1, 2).view(t.dtype), "w2 is torch.float8_e4m3fn"),
        ("w2_scale", lambda t: t[:, :1], "w2_scale is torch.float32"),
        ("w2_scale", lambda t: t.clone().fill_(torch.nan), "w2_scale holds a NaN or an infinity"),
    ],
)
def test_fp8_experts_that_do_not_fit_are_named(name: str, change: Any, message: str) -> None:
    w13 = quantize_fp8_tiles(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
    w2 = quantize_fp8_tiles(torch.randn(EXPERTS, HIDDEN, INNER))
    experts = deep_gemm.Fp8Experts(*w13, *w2)
    deep_gemm.check_fp8_experts(experts)
    with pytest.raises(ValueError, match=message):
        deep_gemm.check_fp8_experts(experts._replace(**{name: change(getattr(experts, name))}))
