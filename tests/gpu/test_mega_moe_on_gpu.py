"""MegaMoE on Hopper: its recipe, whatever the batch, and what bad input leads to."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.gangs.launch import free_port
from workloads.engines import native
from workloads.engines.native import NativeEngine
from workloads.engines.protocol import Prompt
from workloads.kernels import mega_moe_hopper as hopper
from workloads.kernels.activations import GatedActivation, SituParameters, SwigluParameters
from workloads.kernels.mega_moe_hopper_kernel import HopperMegaMoE, HopperReference
from workloads.kernels.moe import ExpertWeights, LoadedLayoutReference
from workloads.kernels.quantization import quantize_mxfp4
from workloads.loading.generate import generate_checkpoint
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.spec import Backend, Checkpoint, GangSpec, Model, Parallelism, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
GPU = torch.device("cuda", 0)
Raw = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SITU = SituParameters()
SMALL = (8, 512, 256)  # experts, hidden, intermediate


def raw_experts(sizes: tuple[int, int, int] = SMALL, seed: int = 0) -> Raw:
    experts, hidden, inner = sizes
    generator = torch.Generator(GPU).manual_seed(seed)
    w13 = torch.randn(experts, 2 * inner, hidden, device=GPU, generator=generator) * hidden**-0.5 * 2
    w2 = torch.randn(experts, hidden, inner, device=GPU, generator=generator) * inner**-0.5 * 2
    return (*quantize_mxfp4(w13), *quantize_mxfp4(w2))


def inputs(tokens: int, slots: int, experts: int, hidden: int) -> hopper.Tokens:
    generator = torch.Generator(GPU).manual_seed(1)
    x = torch.randn(tokens, hidden, device=GPU, generator=generator).to(torch.bfloat16)
    idx = torch.rand(tokens, experts, device=GPU, generator=generator).topk(slots).indices
    return hopper.Tokens(x, None, idx, torch.rand(tokens, slots, device=GPU, generator=generator))


def run(tokens: hopper.Tokens, weights: ExpertWeights, activation: GatedActivation = SITU) -> torch.Tensor:
    kernel = HopperMegaMoE()
    given = (tokens.x, tokens.topk_idx, tokens.topk_weights)
    return kernel.forward(*given, weights, None, len(weights.l1_weight), activation)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize(
    ("sizes", "tokens", "slots"),
    [
        ((4, 128, 128), 1, 1),
        ((4, 384, 128), 5, 2),
        (SMALL, 40, 4),
        (SMALL, 160, 3),
        (SMALL, 600, 4),
        ((2, 256, 256), 1000, 1),
        ((16, 4096, 2048), 32, 6),
        ((16, 4096, 2048), 300, 6),
    ],
)
def test_the_recipe(sizes: tuple[int, int, int], tokens: int, slots: int) -> None:
    raw, given = raw_experts(sizes), inputs(tokens, slots, sizes[0], sizes[1])
    given.topk_idx[1:2, 0] = -1
    weights, reference = HopperMegaMoE().prepare(*raw), HopperReference()
    for activation in (SituParameters(), SwigluParameters(1.5)):
        got = run(given, weights, activation)
        arguments = (given.x, given.topk_idx, given.topk_weights, raw_as_weights(raw), None, sizes[0])
        wanted = reference.forward(*arguments, activation)
        sm100 = LoadedLayoutReference().forward(*arguments, activation)
        assert distance(got, wanted) < 0.025
        assert distance(got, sm100) < 0.09
        assert all(torch.equal(run(given, weights, activation), got) for _ in range(5))


def raw_as_weights(raw: Raw) -> ExpertWeights:
    return HopperReference().prepare(*raw)


def test_a_token_does_not_depend_on_those_beside_it() -> None:
    weights = HopperMegaMoE().prepare(*raw_experts())
    given = inputs(700, 2, SMALL[0], SMALL[1])
    together = run(given, weights)
    for count in (1, 3, 33, 200):
        part = hopper.Tokens(given.x[:count], None, given.topk_idx[:count], given.topk_weights[:count])
        assert torch.equal(run(part, weights), together[:count])


def test_no_token_and_all_tokens_for_one_expert() -> None:
    raw = raw_experts()
    weights, given = HopperMegaMoE().prepare(*raw), inputs(300, 1, SMALL[0], SMALL[1])
    given.topk_idx.fill_(5)
    want = HopperReference().forward(
        given.x, given.topk_idx, given.topk_weights, raw_as_weights(raw), None, SMALL[0], SituParameters()
    )
    assert distance(run(given, weights), want) < 0.025
    given.topk_idx.fill_(-1)
    assert torch.equal(run(given, weights), torch.zeros_like(given.x))
    assert run(inputs(0, 1, SMALL[0], SMALL[1]), weights).shape == (0, SMALL[1])


def test_ids_out_of_range_are_refused_and_never_written() -> None:
    weights, given = HopperMegaMoE().prepare(*raw_experts()), inputs(64, 2, SMALL[0], SMALL[1])
    wanted = run(given._replace(topk_idx=given.topk_idx.clone().fill_(-1)), weights)
    given.topk_idx.fill_(1 << 40)
    given.topk_idx[::2] = -(1 << 40)
    with pytest.raises(ValueError, match="topk_idx holds expert 1099511627776"):
        run(given, weights)
    got = hopper.run(given, hopper.Experts(*weights), SituParameters())  # as within a captured graph
    assert torch.equal(got, wanted)


def test_a_captured_graph_repeats_the_result_for_new_tokens() -> None:
    weights, given = HopperMegaMoE().prepare(*raw_experts()), inputs(16, 2, SMALL[0], SMALL[1])
    run(given, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(given, weights)
    for seed in range(3):
        given.x.normal_(generator=torch.Generator(GPU).manual_seed(seed))
        graph.replay()
        assert torch.equal(replayed, run(given, weights))


def test_nan_reaches_its_own_token_only() -> None:
    weights, given = HopperMegaMoE().prepare(*raw_experts()), inputs(64, 2, SMALL[0], SMALL[1])
    clean = run(given, weights)
    given.x[7, 3] = torch.nan
    got = run(given, weights)
    others = torch.arange(64, device=GPU) != 7
    assert torch.equal(got[others], clean[others])
    assert got[7].isnan().all()


def expert_parallel(rank: int, ranks: int, port: int) -> None:
    """One rank with its share of the experts says what one GPU with all of them does, for tokens of its own."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, device_id=device
    )
    raw = tuple(part.to(device) for part in raw_experts())
    share = slice(rank * SMALL[0] // ranks, (rank + 1) * SMALL[0] // ranks)
    whole, mine = (HopperMegaMoE().prepare(*raw), HopperMegaMoE().prepare(*(part[share] for part in raw)))
    for tokens in (3, 500):
        given = inputs(tokens + rank, 2, SMALL[0], SMALL[1])
        x, idx, weights = (part.to(device) for part in (given.x, given.topk_idx, given.topk_weights))
        alone = HopperMegaMoE().forward(x, idx, weights, whole, None, SMALL[0], SITU)
        together = HopperMegaMoE().forward(x, idx, weights, mine, dist.group.WORLD, SMALL[0], SITU)
        assert torch.equal(alone, together)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_expert_parallel_ranks_equal_one(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    torch.multiprocessing.spawn(expert_parallel, (ranks, free_port()), nprocs=ranks)


def served(folder: Path, **backend: str) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens that the small Kimi-K3 says after each load, and the log-probabilities of its first choices."""
    spec = GangSpec(
        name="candidate",
        output="",
        model=Model(),
        parallelism=Parallelism(),
        backend=Backend(max_model_len=128, max_requests=4, **backend),
        checkpoints={"old": Checkpoint(), "new": Checkpoint(perturbation="every_tensor")},
        checkpoint_dirs={"old": str(folder), "new": str(folder)},
        steps=[],
    )
    engine, said, choices = NativeEngine(spec, 0), [], []
    prompts = [Prompt(str(n), tuple((7 * n + 13 * j) % 251 for j in range(n))) for n in (1, 5, 70)]
    for load, checkpoint in ((engine.start, "old"), (engine.update, "new"), (engine.update, "old")):
        load(checkpoint, "safetensors" if load == engine.start else "layerwise")
        answers = engine.generate(prompts, Sampling(max_new_tokens=1))
        said += [list(answer.token_ids) for answer in answers]
        choices += [max(value for _, value in answer.top_logprobs[0]) for answer in answers]
    return said, torch.tensor(choices)


def test_kimi_k3_on_it_is_near_the_reference_and_returns_after_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = generate_checkpoint(KimiK3Config(), 0, tmp_path / "checkpoint")
    with monkeypatch.context() as context:
        context.setattr(native, "make_moe_kernel", lambda *_: HopperReference())
        _, wanted = served(folder, device="cpu", moe_kernel="reference")
    said, got = served(folder, device="cuda", arch="sm90", moe_kernel="mega_moe", communication="nccl")
    assert said[:3] == said[6:]  # back on the old weights
    assert torch.equal(got[:3], got[6:])
    assert not torch.equal(got[:3], got[3:6])
    assert float((got - wanted).abs().max()) < 0.1
