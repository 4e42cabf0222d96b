"""What a family of models tells the planner, without torch."""

from collections.abc import Callable
from dataclasses import dataclass

from workloads.kernels.moe_choice import Choice, ExpertShape, Machine, choose


@dataclass(frozen=True)
class Part:
    """`kind`: weights | padding | derived | buffer | peak | cache | reserve. `basis`: what the bytes follow from."""

    name: str
    kind: str
    nbytes: int
    basis: str = ""


#: Dimensions, of whichever families have them, that are 0 without a drafter.
DRAFTERS = ("num_mtp_layers", "num_dspark_layers", "num_draft_heads")


def drafters_own(what: str, nbytes: int) -> Part:
    """The embedding or the head, which a drafter loads a second time."""
    return Part(f"drafter's {what}", "weights", nbytes, "a second copy, beside the target's")


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model. keys: of the model's dimensions, by field.

    count: in a layer. per_token: chosen for a token. layers: that have experts. hidden, intermediate: width of the
    expert's input and between its two matrices. quantization: of the weights: mxfp4 | nvfp4 | fp8 | bf16.
    blocks: into which TP ranks divide the intermediate size where there is no expert parallelism; None: they do not.
    padding: what the family's own kernel adds on one rank, by tp and ep; None: only MegaMoE pads.
    fused_shared: intermediate size of the shared experts, where the routed ones' kernel computes them. situ: SiTU is
    between the matrices, else a gated SiLU. drafter: those of the drafter's layers, where they are not as many as in
    the model's; None: they are.
    """

    count: int
    per_token: int
    layers: int
    hidden: int
    intermediate: int
    quantization: str
    keys: dict[str, str]
    blocks: int | None = None
    padding: Callable[[int, int], Part] | None = None
    fused_shared: int = 0
    situ: bool = False
    drafter: "Experts | None" = None


def chosen_kernel(
    experts: Experts | None, asked: str, redundant: int, ranks: int, machine: Machine
) -> Choice:
    """The kernel that serves all routed experts of a model, a drafter's own among them. asked: backend.moe_kernel.
    redundant: slots for second copies in each layer. ranks: of one expert-parallel group."""
    all_of = [one for one in (experts, experts and experts.drafter) if one is not None]
    shapes: list[ExpertShape | None] = [
        ExpertShape(
            weights=one.quantization,
            count=one.count + redundant,
            per_token=one.per_token,
            hidden=one.hidden,
            situ=one.situ,
            shared=bool(one.fused_shared),
        )
        for one in all_of
    ]
    choices = [choose(asked, machine, shape, ranks) for shape in shapes or [None]]
    return next((choice for choice in choices if choice.fallback), choices[0])


@dataclass(frozen=True)
class Load:
    """What serving makes room for on one data-parallel rank: requests, and tokens of all of them together."""

    requests: int
    tokens: int
