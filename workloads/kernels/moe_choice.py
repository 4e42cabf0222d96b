"""Which kernel computes the routed experts of a model on one rank, and why. Pure; standard library only.

`mega_moe` in a config asks for the fused kernel of the GPU at hand. Where there is none for it, its reference in plain
torch computes the same on any device: right, and slower by orders of magnitude, so that it is always told.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

REFERENCE = "reference"  # plain torch, on experts as the checkpoint lays them out
MEGA_MOE_REFERENCE = "mega_moe_reference"  # plain torch, on experts in MegaMoE's layout
DEEP_GEMM_SM100 = "deep_gemm_sm100"  # DeepGEMM's fp8_fp4_mega_moe
DEEP_GEMM_SM90 = "deep_gemm_sm90"  # DeepGEMM's fp8_mega_moe
HOPPER = "hopper_mega_moe"  # our own, of `mega_moe_hopper`
FAST = (DEEP_GEMM_SM100, DEEP_GEMM_SM90, HOPPER)
ASKED = ("mega_moe", "reference")  # values of backend.moe_kernel

SM100_ENTRY_POINTS = ("get_symm_buffer_for_mega_moe", "fp8_fp4_mega_moe")
SM90_ENTRY_POINTS = (
    "get_symm_buffer_for_sm90_mega_moe",
    "transform_weights_for_mega_moe_sm90",
    "fp8_mega_moe",
)
SM100_MULTIPLE = 512  # of hidden and intermediate: rows of scales in multiples of 16 bytes
SM90_MULTIPLE = 128  # of both: the tiles of either kernel
MOST_SLOTS = 32  # experts of a token
MOST_EXPERTS = 1024  # of one rank, in our own kernel: threads of the block that routes
MOST_SM90_RANKS = 32  # among which fp8_mega_moe exchanges tokens
SITU_PARAMETERS = ("activation_beta", "activation_linear_beta")
SHARED_PARAMETERS = ("shared_l1_weights", "shared_l2_weights")


@dataclass(frozen=True)
class Machine:
    """What one rank runs on.

    capability: of its GPU, None on a CPU. deep_gemm: entry points that the installed one has, with the names of their
    parameters; why_not: why it has none of those that were looked for. nvcc: whether our kernels can be compiled.
    """

    capability: tuple[int, int] | None = None
    deep_gemm: Mapping[str, Sequence[str]] = field(default_factory=dict)
    why_not: str = ""
    nvcc: bool = False


@dataclass(frozen=True)
class ExpertShape:
    """The routed experts of a layer as its kernel sees them. weights: mxfp4 | fp8 (blocks of 128 x 128) | nvfp4 | bf16
    | ... count: of the whole layer, second copies included. situ: SiTU is between the matrices, else SwiGLU. shared:
    the kernel is to compute a shared expert, too."""

    weights: str
    count: int
    per_token: int
    hidden: int
    situ: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Choice:
    """kernel: one of the constants above. reason: why this one, half a sentence. fallback: a fast one was asked for,
    and this is none."""

    kernel: str
    reason: str
    fallback: bool = False

    @property
    def has_layout(self) -> bool:
        """Whether the kernel consumes the loaded experts into a layout of its own."""
        return self.kernel != REFERENCE


def choose(asked: str, machine: Machine, experts: ExpertShape | None, ranks: int) -> Choice:
    """The kernel for these experts. asked: backend.moe_kernel. experts: None where a model has none. ranks: of one
    expert-parallel group. Raises ValueError for another value of `asked`."""
    if asked not in ASKED:
        raise ValueError(
            f"backend.moe_kernel is {asked!r}, which is no known kernel: choose one of {', '.join(ASKED)}."
        )
    if asked == "reference":
        return Choice(REFERENCE, "backend.moe_kernel asks for it")
    if machine.capability is None:
        return Choice(MEGA_MOE_REFERENCE, "on a CPU it is what backend.moe_kernel=mega_moe means")
    if experts is None:
        return Choice(MEGA_MOE_REFERENCE, "the model has no routed experts")
    name = f"{machine.capability[0]}.{machine.capability[1]}"
    kernel = _of_architecture(machine.capability, experts.weights)
    if kernel is None:
        why = f"there is no MegaMoE for {experts.weights} experts on compute capability {name}"
        return Choice(MEGA_MOE_REFERENCE, why, fallback=True)
    obstacles = list(_OBSTACLES[kernel](machine, experts, ranks))
    if obstacles:
        return Choice(MEGA_MOE_REFERENCE, f"{kernel} cannot serve: {'; '.join(obstacles)}", fallback=True)
    return Choice(kernel, f"compute capability {name}, {experts.weights} experts")


def _of_architecture(capability: tuple[int, int], weights: str) -> str | None:
    if capability[0] == 10 and weights == "mxfp4":
        return DEEP_GEMM_SM100
    if capability == (9, 0):
        return {"mxfp4": HOPPER, "fp8": DEEP_GEMM_SM90}.get(weights)
    return None


def _sm100(machine: Machine, experts: ExpertShape, ranks: int) -> Iterator[str]:
    yield from _sizes(experts, SM100_MULTIPLE)
    yield from _entry_points(machine, SM100_ENTRY_POINTS)
    if ranks < 2:
        yield "it exchanges tokens through a process group, and parallelism.ep is 1"
    takes = machine.deep_gemm.get("fp8_fp4_mega_moe", ())
    for what, wanted in (
        ("SiTU", SITU_PARAMETERS if experts.situ else ()),
        ("a shared expert", SHARED_PARAMETERS if experts.shared else ()),
    ):
        missing = [name for name in wanted if takes and name not in takes]
        if missing:
            yield f"the installed fp8_fp4_mega_moe does not compute {what}: it takes no {', '.join(missing)}"


def _sm90(machine: Machine, experts: ExpertShape, ranks: int) -> Iterator[str]:
    yield from _sizes(experts, SM90_MULTIPLE)
    yield from _entry_points(machine, SM90_ENTRY_POINTS)
    if experts.situ:
        yield "fp8_mega_moe computes SwiGLU only"
    if experts.shared:
        yield "fp8_mega_moe computes no shared expert"
    if ranks > MOST_SM90_RANKS:
        yield f"fp8_mega_moe exchanges tokens among {MOST_SM90_RANKS} ranks, and parallelism.ep is {ranks}"


def _hopper(machine: Machine, experts: ExpertShape, ranks: int) -> Iterator[str]:
    yield from _sizes(experts, SM90_MULTIPLE)
    local = -(-experts.count // ranks)
    if local > MOST_EXPERTS:
        yield f"a rank holds {local} experts, and it takes {MOST_EXPERTS}: raise parallelism.ep"
    if not machine.nvcc:
        yield "no nvcc is on the PATH, which compiles it at its first use"


_OBSTACLES = {DEEP_GEMM_SM100: _sm100, DEEP_GEMM_SM90: _sm90, HOPPER: _hopper}


def _sizes(experts: ExpertShape, multiple: int) -> Iterator[str]:
    """The intermediate size is padded to whatever the kernel wants."""
    if experts.hidden <= 0 or experts.hidden % multiple:
        yield f"the hidden size {experts.hidden} is no multiple of {multiple}"
    if experts.per_token > MOST_SLOTS:
        yield f"a token has {experts.per_token} experts, and it takes {MOST_SLOTS}"


def _entry_points(machine: Machine, wanted: Sequence[str]) -> Iterator[str]:
    missing = [name for name in wanted if name not in machine.deep_gemm]
    if missing:
        yield machine.why_not or f"the installed DeepGEMM has no {', '.join(missing)}"
