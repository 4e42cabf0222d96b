"""Memory plans against the published sizes of Kimi-K3 and the published buffer sizes of DeepGEMM."""

import pytest

from orchestrator import mega_moe_memory, memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import Root
from workloads.models.kimi_k3 import plan

K3 = ["+exp=kimi_k3_refit", "model=kimi_k3", "cluster=gb200", "load_path=layerwise"]


def k3(*overrides: str) -> Root:
    [cell] = compose([*K3, *overrides])
    assert cell.root is not None, cell.problems
    return cell.root


def gigabytes(root: Root) -> dict[str, float]:
    return {part.name: part.nbytes / 1e9 for part in memory.memory_parts(root)}


def test_weights_of_kimi_k3_on_a_gb200_are_those_of_the_published_checkpoint() -> None:
    parts = gigabytes(k3())
    expected = {"routed experts": 90.4, "shared experts": 24.3, "latent projections": 9.5, "router": 1.2}
    assert {name: round(parts[name], 1) for name in expected} == expected
    assert memory.total(memory.memory_parts(k3()), "weights") / 1e9 == pytest.approx(147, abs=0.5)
    assert parts["finalise peak"] == pytest.approx(0.67, abs=0.01)


def test_caches_follow_layers_and_requests() -> None:
    one, two = k3("backend.max_requests=1", "backend.max_model_len=1000"), k3("backend.max_requests=2")
    assert gigabytes(one)["KV cache"] * 1e9 == 24 * 576 * 2 * 1000
    state, tails = 69 * 24 * 128 * 128 * 4, 69 * 3 * 24 * 128 * 3 * 2
    assert gigabytes(two)["KDA state"] * 1e9 == 2 * (state + tails)


@pytest.mark.parametrize(
    ("tokens", "ring", "gibibytes"), [(8192, 907_776, 9.9), (2048, 252_288, 2.7), (512, 89_088, 1.0)]
)
def test_symmetric_buffer_of_kimi_k3(tokens: int, ring: int, gibibytes: float) -> None:
    layout = {
        "ranks": 16,
        "topk": 16,
        "experts": 896,
        "hidden": 3584,
        "intermediate": 3072,
        "sms": 148,
    }
    rounded = -(-tokens // 384) * 384
    assert mega_moe_memory.mega_moe_ring_tokens(tokens=rounded, **layout) == ring
    assert mega_moe_memory.mega_moe_buffer_bytes(tokens=tokens, **layout) / 2**30 == pytest.approx(
        gibibytes, abs=0.06
    )


@pytest.mark.parametrize(
    ("ranks", "experts", "hidden", "intermediate", "ring"),
    [(8, 256, 4096, 2048, 3_072), (8, 384, 7168, 3072, 61_440), (16, 384, 7168, 3072, 118_656)],
)
def test_ring_of_the_deepseek_v4_shapes(
    ranks: int, experts: int, hidden: int, intermediate: int, ring: int
) -> None:
    assert mega_moe_memory.mega_moe_ring_tokens(8448, ranks, 6, experts, hidden, intermediate, 148) == ring


def test_only_the_gpu_kernel_has_a_symmetric_buffer() -> None:
    [cell] = compose([])
    assert cell.root is not None
    assert "MegaMoE buffer" not in gigabytes(cell.root)
    assert "MegaMoE buffer" in gigabytes(k3())


def test_padding_is_what_the_aligned_intermediate_size_adds() -> None:
    [cell] = compose(["parallelism=tp2"])
    assert cell.root is not None
    model = cell.root.model.kimi_k3
    assert memory.padded_intermediate(plan.experts(model), cell.root.backend) == 128
    layers = model.num_layers - model.num_dense_layers + model.num_mtp_layers
    extra = 3 * model.moe_latent_size * (128 - model.moe_intermediate_size)  # values of w1, w2 and w3
    expected = layers * model.num_experts // 2 * extra * 17 // 32  # half a byte and 1/32 byte of scale each
    padding = [part for part in memory.memory_parts(cell.root) if part.kind == "padding"]
    assert [part.nbytes for part in padding] == [expected]
    assert padding[0].basis == "intermediate 96 -> 128"


def test_experts_divide_over_ep_and_attention_over_tp() -> None:
    full, half = gigabytes(k3("parallelism.ep=16")), gigabytes(k3("parallelism.ep=8"))
    assert half["routed experts"] == pytest.approx(2 * full["routed experts"])
    assert gigabytes(k3("parallelism.tp=2"))["embedding"] == pytest.approx(2 * full["embedding"])


def test_updates_bring_consumed_experts_back() -> None:
    """One layer at a time; direct without w2, which still lies as loaded; expert by expert one of them."""
    layer = 56 * 17_547_264
    assert memory.update_bytes(k3()) == layer
    assert memory.update_bytes(k3("load_path=direct")) == layer - 56 * 3584 * 3072 // 2
    assert memory.update_bytes(k3("load_path=per_expert")) == layer // 56
    shuffled = k3("load_path=buckets")
    assert memory.update_bytes(shuffled) == 92 * layer
    assert memory.update_bytes(k3("load_path=cold")) == 0
    [reference] = compose(["parallelism=single", "backend=native_reference"])
    assert reference.root is not None
    assert memory.update_bytes(reference.root) == 0


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "ranks", "gibibytes"),
    [
        (256, 4096, 2048, 4, 0.6),
        (256, 4096, 2048, 8, 0.6),
        (384, 7168, 3072, 8, 1.9),
        (384, 7168, 3072, 16, 2.8),
    ],
)
def test_mega_moe_buffer_with_a_shared_expert(
    experts: int, hidden: int, intermediate: int, ranks: int, gibibytes: float
) -> None:
    """DeepSeek-V4-Flash and -Pro, top-6, 8192 tokens."""
    layout = {"ranks": ranks, "topk": 6, "experts": experts, "hidden": hidden, "intermediate": intermediate}
    with_it = mega_moe_memory.mega_moe_buffer_bytes(tokens=8192, **layout, sms=148, shared=intermediate)
    assert with_it / 2**30 == pytest.approx(gibibytes, abs=0.06)
    assert with_it > mega_moe_memory.mega_moe_buffer_bytes(tokens=8192, **layout, sms=148)
