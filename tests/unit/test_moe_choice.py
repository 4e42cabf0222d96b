"""Which kernel serves which experts on which machine: one pure function, over all of its inputs."""

from dataclasses import replace
from itertools import product

import pytest

from workloads.kernels.moe_choice import (
    DEEP_GEMM_SM90,
    DEEP_GEMM_SM100,
    FAST,
    HOPPER,
    MEGA_MOE_REFERENCE,
    REFERENCE,
    SM90_ENTRY_POINTS,
    SM100_ENTRY_POINTS,
    ExpertShape,
    Machine,
    choose,
)
from workloads.models.planning import Experts, chosen_kernel

PARAMETERS = (
    *("y", "l1_weights", "l2_weights", "sym_buffer", "activation", "activation_clamp"),
    *("activation_beta", "activation_linear_beta", "shared_l1_weights", "shared_l2_weights"),
)
K3 = ExpertShape("mxfp4", count=896, per_token=16, hidden=3584, situ=True)
V4 = ExpertShape("mxfp4", count=256, per_token=6, hidden=4096, shared=True)
FP8 = ExpertShape("fp8", count=128, per_token=8, hidden=2048)
GB200 = Machine((10, 0), dict.fromkeys(SM100_ENTRY_POINTS, PARAMETERS))
H200 = Machine((9, 0), dict.fromkeys(SM90_ENTRY_POINTS, ("y",)), nvcc=True)


@pytest.mark.parametrize(
    ("machine", "experts", "kernel", "reason"),
    [
        (GB200, K3, DEEP_GEMM_SM100, "compute capability 10.0, mxfp4 experts"),
        (replace(GB200, capability=(10, 3)), V4, DEEP_GEMM_SM100, "compute capability 10.3, mxfp4 experts"),
        (H200, K3, HOPPER, "compute capability 9.0, mxfp4 experts"),
        (H200, V4, HOPPER, "compute capability 9.0, mxfp4 experts"),
        (H200, FP8, DEEP_GEMM_SM90, "compute capability 9.0, fp8 experts"),
    ],
)
def test_each_architecture_and_format_has_its_kernel(
    machine: Machine, experts: ExpertShape, kernel: str, reason: str
) -> None:
    choice = choose("mega_moe", machine, experts, ranks=16)
    assert (choice.kernel, choice.reason, choice.fallback) == (kernel, reason, False)


ABSENT = "deep_gemm is not installed (No module named 'deep_gemm')"
WRONG_ABI = "deep_gemm does not load here, as it was built for another torch or CUDA (undefined symbol)"


@pytest.mark.parametrize(
    ("machine", "experts", "ranks", "reason"),
    [
        (Machine((8, 0)), K3, 16, "no MegaMoE for mxfp4 experts on compute capability 8.0"),
        (Machine((12, 0)), K3, 16, "no MegaMoE for mxfp4 experts on compute capability 12.0"),
        (GB200, FP8, 16, "no MegaMoE for fp8 experts on compute capability 10.0"),
        (H200, replace(K3, weights="nvfp4"), 16, "no MegaMoE for nvfp4 experts"),
        (Machine((10, 0), why_not=ABSENT), K3, 16, f"deep_gemm_sm100 cannot serve: {ABSENT}"),
        (Machine((9, 0), why_not=WRONG_ABI, nvcc=True), FP8, 16, f"deep_gemm_sm90 cannot serve: {WRONG_ABI}"),
        (Machine((10, 0)), K3, 16, "has no get_symm_buffer_for_mega_moe, fp8_fp4_mega_moe"),
        (GB200, replace(K3, hidden=3328), 16, "the hidden size 3328 is no multiple of 512"),
        (GB200, K3, 1, "parallelism.ep is 1"),
        (GB200, replace(K3, per_token=33), 16, "a token has 33 experts, and it takes 32"),
        (H200, replace(K3, hidden=3600), 16, "the hidden size 3600 is no multiple of 128"),
        (H200, replace(K3, count=2048), 1, "a rank holds 2048 experts, and it takes 1024"),
        (replace(H200, nvcc=False), K3, 16, "no nvcc is on the PATH"),
        (H200, replace(FP8, situ=True), 16, "fp8_mega_moe computes SwiGLU only"),
        (H200, replace(FP8, shared=True), 16, "fp8_mega_moe computes no shared expert"),
        (H200, FP8, 64, "among 32 ranks, and parallelism.ep is 64"),
    ],
)
def test_without_a_fast_kernel_the_reference_serves_and_says_why(
    machine: Machine, experts: ExpertShape, ranks: int, reason: str
) -> None:
    choice = choose("mega_moe", machine, experts, ranks)
    assert (choice.kernel, choice.fallback) == (MEGA_MOE_REFERENCE, True)
    assert reason in choice.reason


def test_an_installed_version_that_lacks_an_activation_or_the_shared_expert_is_no_kernel_for_it() -> None:
    old = Machine((10, 0), dict.fromkeys(SM100_ENTRY_POINTS, PARAMETERS[:6]))
    assert (
        "SiTU: it takes no activation_beta, activation_linear_beta" in choose("mega_moe", old, K3, 16).reason
    )
    assert "a shared expert: it takes no shared_l1_weights" in choose("mega_moe", old, V4, 16).reason
    assert choose("mega_moe", old, replace(V4, shared=False), 16).kernel == DEEP_GEMM_SM100


def test_what_was_asked_for_is_no_fallback() -> None:
    asked = choose("reference", H200, K3, 16)
    assert (asked.kernel, asked.fallback, asked.has_layout) == (REFERENCE, False, False)
    on_cpu = choose("mega_moe", Machine(), K3, 16)
    assert (on_cpu.kernel, on_cpu.fallback, on_cpu.has_layout) == (MEGA_MOE_REFERENCE, False, True)
    assert not choose("mega_moe", H200, None, 1).fallback
    with pytest.raises(ValueError, match=r"backend.moe_kernel is 'marlin', .* one of mega_moe, reference"):
        choose("marlin", H200, K3, 16)


def test_on_every_machine_something_serves_and_a_slow_kernel_is_never_silent() -> None:
    capabilities = [None, (7, 5), (8, 9), (9, 0), (9, 1), (10, 0), (10, 3), (11, 0), (12, 0)]
    entries = [{}, GB200.deep_gemm, H200.deep_gemm, {**GB200.deep_gemm, **H200.deep_gemm}]
    formats = ["mxfp4", "fp8", "nvfp4", "bf16", "mxfp4 with biases"]
    for capability, entry, weights, nvcc, hidden, ranks in product(
        capabilities, entries, formats, (True, False), (96, 128, 512, 4096), (1, 2, 64)
    ):
        choice = choose(
            "mega_moe",
            Machine(capability, entry, nvcc=nvcc),
            replace(V4, weights=weights, hidden=hidden),
            ranks,
        )
        assert choice.reason
        assert choice.fallback == (capability is not None and choice.kernel not in FAST)


def test_a_drafter_with_experts_of_its_own_has_its_say() -> None:
    """One kernel serves the whole model: that of the target, unless the drafter's experts do not fit it."""
    keys = {"count": "num_experts"}
    own = Experts(56, 4, 3, hidden=3584, intermediate=1024, quantization="mxfp4", keys=keys)
    model = replace(own, layers=10, drafter=own)
    assert chosen_kernel(model, "mega_moe", 0, 2, H200).kernel == HOPPER
    odd = replace(model, drafter=replace(own, hidden=3600))
    assert "hidden size 3600" in chosen_kernel(odd, "mega_moe", 0, 2, H200).reason
    assert chosen_kernel(None, "mega_moe", 0, 2, H200).kernel == MEGA_MOE_REFERENCE
    many = replace(own, count=1024)
    assert chosen_kernel(many, "mega_moe", 0, 1, H200).kernel == HOPPER
    assert chosen_kernel(many, "mega_moe", 8, 1, H200).fallback  # with second copies, too many for one rank
