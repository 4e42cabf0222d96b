"""The kernels of routed experts by name, and what this process has to run them on."""

from collections.abc import Callable

import torch

from workloads.kernels import mega_moe_deep_gemm as deep_gemm
from workloads.kernels.mega_moe_build import find_nvcc
from workloads.kernels.mega_moe_hopper_kernel import HopperMegaMoE
from workloads.kernels.moe import LoadedLayoutReference, MegaMoEReference, MoEKernel
from workloads.kernels.moe_choice import (
    DEEP_GEMM_SM100,
    HOPPER,
    MEGA_MOE_REFERENCE,
    REFERENCE,
    SM90_ENTRY_POINTS,
    SM100_ENTRY_POINTS,
    Machine,
)


def machine(device: torch.device) -> Machine:
    """What `device` and the installed packages offer. DeepGEMM is looked for where a GPU could use it."""
    if device.type != "cuda":
        return Machine()
    capability = torch.cuda.get_device_capability(device)
    wanted = {9: SM90_ENTRY_POINTS, 10: SM100_ENTRY_POINTS}.get(capability[0], ())
    there, why_not = deep_gemm.entry_points(wanted) if wanted else ({}, "")
    return Machine(capability, there, why_not, nvcc=find_nvcc() is not None)


def make_moe_kernel(name: str, tokens: int = 0) -> MoEKernel:
    """The kernel of this name (`moe_choice`), for MXFP4 experts. tokens: most of one call on one rank.

    Raises ValueError for another name, `deep_gemm_sm90` among them: it reads FP8 experts (`Fp8MegaMoE`), which no
    family here hands to a kernel.
    """
    kernels: dict[str, Callable[[], MoEKernel]] = {
        REFERENCE: LoadedLayoutReference,
        MEGA_MOE_REFERENCE: MegaMoEReference,
        HOPPER: HopperMegaMoE,
        DEEP_GEMM_SM100: lambda: deep_gemm.Sm100MegaMoE(tokens),
    }
    if name not in kernels:
        raise ValueError(f"{name!r} is no kernel of MXFP4 experts: choose one of {', '.join(kernels)}.")
    return kernels[name]()
