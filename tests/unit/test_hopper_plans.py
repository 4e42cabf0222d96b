"""Plans for our own MegaMoE on Hopper: memory of its layout, its passes and its updates, and what cannot run here."""

from pathlib import Path

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.planning import plan
from orchestrator.config.schema import Root
from orchestrator.rules.cell_rules import problems
from workloads.kernels import mega_moe_hopper_sizes as sizes

H200 = ("cluster=slurm", "cluster.device=cuda", "cluster.arch=sm90", "cluster.memory_gb=141")
K3 = (
    "+exp=kimi_k3_refit",
    "model=kimi_k3",
    "parallelism=tp4_dp8_ep32",
    "backend=native_hopper_mega_moe",
    *H200,
)
EXPERTS, HIDDEN, INNER, LAYERS, PER_TOKEN, RANKS = 28, 3584, 3072, 92, 16, 32  # of one rank


def k3(*overrides: str) -> Root:
    [cell] = compose([*K3, "load_path=layerwise", *overrides])
    assert cell.root is not None, cell.problems
    return cell.root


def parts(root: Root) -> dict[str, int]:
    return {part.name: part.nbytes for part in memory.memory_parts(root)}


def test_experts_are_those_of_the_layout() -> None:
    """8192 bytes a tile of 128 x 128 weights, 512 of its scales, and 128 for each 128 rows."""
    found = parts(k3())
    tiles = 3 * HIDDEN * INNER // 128**2
    layout = EXPERTS * (tiles * (8192 + 512) + 2 * INNER + HIDDEN)
    assert found["routed experts"] + found["packed experts"] == LAYERS * layout
    assert found["finalise peak"] == layout + sizes.PACK_BYTES * 2 * INNER * HIDDEN


def test_a_pass_needs_room_for_all_tokens_of_its_group() -> None:
    """A rank cannot know how many tokens choose its experts; rows in FP8 with their scales, results in BF16."""
    one, two = parts(k3("backend.max_batch_tokens=512")), parts(k3("backend.max_batch_tokens=1024"))
    rows = 512 * RANKS * PER_TOKEN
    at_least = rows * (HIDDEN + INNER + HIDDEN // 128 * 4 + INNER // 64 * 4)
    assert at_least < one["MegaMoE workspace"] < 1.01 * at_least
    assert one["exchanged rows"] == rows * 6 * HIDDEN + 512 * PER_TOKEN * 4 * HIDDEN
    assert two["MegaMoE workspace"] == pytest.approx(2 * one["MegaMoE workspace"], rel=1e-3)
    assert "MegaMoE buffer" not in one  # DeepGEMM's


def test_one_rank_exchanges_nothing() -> None:
    [cell] = compose(["cluster=local_hopper", "parallelism=single", "backend.max_batch_tokens=256"])
    assert cell.root is not None
    found, model = parts(cell.root), cell.root.model.kimi_k3
    assert "exchanged rows" not in found
    pairs = 256 * model.num_experts_per_token
    shape = (model.num_experts, model.moe_latent_size, 128)
    assert found["MegaMoE workspace"] == sizes.workspace(pairs, *shape, combine=True)[1]


def test_an_update_in_place_packs_both_matrices() -> None:
    """Nothing that serves lies as it was loaded, so `direct` takes memory for w2, too; packing, for one expert more."""
    layer, packing = EXPERTS * 17_547_264, sizes.PACK_BYTES * 2 * INNER * HIDDEN
    assert memory.update_bytes(k3()) == layer + packing
    assert memory.update_bytes(k3("load_path=direct")) == layer + packing
    assert memory.update_bytes(k3("load_path=per_expert")) == layer // EXPERTS + packing
    assert memory.update_bytes(k3("backend=native_hopper")) == 0


def test_too_little_memory_is_said_with_its_parts() -> None:
    [problem] = problems(k3("backend.max_batch_tokens=8192"))
    assert "one sm90 GPU has 141.0 GB (exchanged rows 92.1 GB" in problem
    assert "lower backend.max_requests, max_model_len or max_batch_tokens" in problem


@pytest.mark.parametrize(
    ("gpus", "layout", "sentence"),
    [
        (0, "single", "the layout takes 1 GPU, and this machine has none"),
        (1, "tp2", "the layout takes 2 GPUs, and this machine has 1"),
        (
            16,
            "tp4_dp4_ep16",
            "parallelism.nodes is 4: on one machine the ranks of every node would take its first 4",
        ),
        (2, "tp2", ""),
        (8, "single", ""),
    ],
)
def test_a_cell_that_this_machine_cannot_hold_is_planned_and_not_run(
    gpus: int, layout: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "machine_gpus", lambda: gpus)
    [one] = plan(["cluster=local_hopper", f"parallelism={layout}", "load_path=layerwise"]).cells
    assert one.cell["backend"]["moe_kernel"] == "mega_moe"
    assert sentence in one.cell.get("needs", "")
    assert bool(sentence) == ("needs" in one.cell)


def test_gpus_are_those_that_the_machine_shows_and_the_variable_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: a)'; echo 'GPU 1: NVIDIA H200 (UUID: b)'\n")
    tool.chmod(0o700)
    monkeypatch.setattr(
        memory, "Path", lambda name: tmp_path / "none"
    )  # of the driver's files, nothing is there
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert memory.machine_gpus() == 2
    for visible, count in (("1", 1), ("0,1,2", 2), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert memory.machine_gpus() == count


def test_a_backend_alone_does_not_say_where_its_gpus_are() -> None:
    [cell] = compose(["backend=native_hopper_mega_moe"])
    assert cell.root is not None
    assert any("such as cluster=local_hopper" in problem for problem in problems(cell.root))


def test_a_fallback_is_planned_where_it_is_allowed_and_refused_where_it_is_not() -> None:
    odd = "model.kimi_k3.moe_latent_size=3616"
    found = problems(k3(odd))
    sentence = "no fast kernel serves these experts on sm90: hopper_mega_moe cannot serve: the hidden size 3616 is no"
    assert any(sentence in problem for problem in found)
    assert not any("fast kernel" in problem for problem in problems(k3(odd, "backend.moe_fallback=true")))


@pytest.mark.parametrize(
    ("overrides", "kernel", "fallback"),
    [
        ((), "hopper_mega_moe", False),
        (("backend=native_hopper",), "reference", False),
        (("model.kimi_k3.moe_latent_size=3600",), "mega_moe_reference", True),
    ],
)
def test_the_kernel_is_known_before(overrides: tuple[str, ...], kernel: str, fallback: bool) -> None:
    choice = memory.planned_kernel(k3(*overrides))
    assert choice is not None
    assert (choice.kernel, choice.fallback) == (kernel, fallback)
