"""Tensor tables and plans of the families built on the ordinary decoder, against published sizes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import memory
from orchestrator.config.compose import compose
from orchestrator.config.schema import Root
from orchestrator.rules.cell_rules import problems
from workloads.loading.tensor_table import TensorSpec, every_tensor, local_bytes
from workloads.models.architectures import model_plan, tensor_table

LLAMA_3_8B = 8_030_261_248  # published parameters
LLAMA_7B = 6_738_415_616  # the same of Vicuna, which is tuned from it
PROXIES = ("openpangu_tiny", "openpangu_vl_tiny", "minicpm_tiny", "minicpm_v_tiny", "medusa_tiny")


def root(model: str, *overrides: str) -> Root:
    backend = (
        ["backend=native_hopper", "cluster=slurm", "cluster.device=cuda"] if "_tiny" not in model else []
    )
    [cell] = compose(
        [f"model={model}", "parallelism=tp2", *(backend or ["backend=native_reference"]), *overrides]
    )
    assert cell.root is not None, cell.problems
    return cell.root


def tensors(model: str) -> Iterator[TensorSpec]:
    composed = root(model)
    return every_tensor(tensor_table(composed.model.architecture).sections(memory.dimensions_of(composed)))


def parameters(model: str) -> dict[str, int]:
    """By part of the model."""
    total: dict[str, int] = {}
    for spec in tensors(model):
        total[spec.component] = total.get(spec.component, 0) + spec.parameters
    return total


def test_minicpm_is_llama_3_and_a_resampler() -> None:
    total = parameters("minicpm_llama3_v_2_5")
    resampler = 4096 * (
        1152 + 5 * 4096 + 4 + 6 + 96
    )  # kv_proj, in, out and proj, their biases, norms, queries
    assert total.pop("resampler") == resampler
    assert sum(total.values()) == LLAMA_3_8B


def test_medusa_is_vicuna_and_five_heads() -> None:
    total = parameters("medusa_vicuna_7b")
    assert total.pop("draft") == 5 * (4096**2 + 32000 * 4096)
    assert sum(total.values()) == LLAMA_7B


@pytest.mark.parametrize("model", PROXIES)
def test_names_are_different_and_ranks_divide_what_they_share(model: str) -> None:
    specs = list(tensors(model))
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        assert local_bytes(spec, 1, tp=2, ep=2) == spec.nbytes // (
            1 if spec.shard.kind == "replicated" else 2
        )


def test_sinks_are_divided_by_their_heads() -> None:
    specs = {spec.name: spec for spec in tensors("openpangu_tiny")}
    for layer in range(4):  # the last one is the drafter's
        sink = specs[f"model.layers.{layer}.self_attn.param_sink_key"]
        assert (sink.shape, sink.dtype, sink.shard.dim) == ((6, 4, 16), "BF16", 1)


def test_only_a_reduced_vocabulary_has_a_map() -> None:
    assert any(spec.name == "medusa_heads.token_map" for spec in tensors("medusa_tiny"))
    assert not any("token_map" in spec.name for spec in tensors("medusa_vicuna_7b"))


def shown(model: str, *overrides: str) -> list[tuple[str, str, float, str]]:
    """The lines of a plan's memory table, in GB, without those of parts too small to show."""
    parts = memory.memory_parts(root(model, *overrides))
    lines = [(p.name, p.kind, round(p.nbytes / 1e9, 2), p.basis) for p in parts]
    return [line for line in lines if line[2]]


def test_memory_of_minicpm_on_two_gpus() -> None:
    assert shown("minicpm_llama3_v_2_5") == [
        ("dense MLP", "weights", 5.64, "split over TP2"),
        ("attention", "weights", 1.34, "split over TP2"),
        ("embedding", "weights", 0.53, "split over TP2"),
        ("output head", "weights", 0.53, "split over TP2"),
        ("resampler", "weights", 0.18, "replicated"),
        ("derived weights", "derived", 0.08, "positions of 70x70 patches"),
        ("KV cache", "cache", 17.18, "262,144 tokens x 65,536 B"),
        ("reserve", "reserve", 6.0, "cuda runtime, activations"),
    ]


def test_memory_of_medusa_on_two_gpus() -> None:
    assert shown("medusa_vicuna_7b", "backend.max_requests=4") == [
        ("dense MLP", "weights", 4.33, "split over TP2"),
        ("attention", "weights", 2.15, "split over TP2"),
        ("Medusa heads", "weights", 0.82, "partly split over TP2"),
        ("embedding", "weights", 0.13, "split over TP2"),
        ("output head", "weights", 0.13, "split over TP2"),
        ("KV cache", "cache", 8.59, "32,768 tokens x 262,144 B"),
        ("reserve", "reserve", 6.0, "cuda runtime, activations"),
    ]


def test_sink_keys_are_held_a_second_time() -> None:
    parts = {part.name: part.nbytes for part in memory.memory_parts(root("openpangu_tiny"))}
    assert parts["derived weights"] == 4 * 6 * 2 * 16 * 2  # layers, sinks, heads of a rank, channels, BF16


@pytest.mark.parametrize(
    ("model", "overrides", "sentence"),
    [
        ("openpangu_tiny", ["num_kv_heads=6"], r"num_heads is 8, which the num_kv_heads 6 do not divide"),
        ("openpangu_tiny", ["head_dim=15"], r"head_dim is 15; rotation takes its channels in pairs"),
        ("openpangu_tiny", ["num_mtp_layers=2"], r"num_mtp_layers is 2; the drafter has one block"),
        (
            "openpangu_vl_tiny",
            ["image_lengths=[300]"],
            r"take the token ids from 258 to 557, and vocab_size is 512",
        ),
        ("openpangu_vl_tiny", ["image_lengths=[3,0]"], r"image_lengths give \[3, 0\] embeddings"),
        ("minicpm_tiny", ["image_heights=[1,2]"], r"image_heights has 2 entries and image_widths 4"),
        (
            "minicpm_tiny",
            ["image_widths=[1,2,3,71]"],
            r"image_widths holds \[71\]; .* sides of 1 to 70 patches",
        ),
        ("minicpm_tiny", ["num_queries=90"], r"take the token ids from 258 to 627, and vocab_size is 512"),
        ("minicpm_tiny", ["audio_frames=[1]"], r"each must be 1 or more"),
        (
            "minicpm_tiny",
            ["resampler_heads=3"],
            r"resampler_heads is 3, which does not divide the hidden_size 128",
        ),
        ("minicpm_tiny", ["hidden_size=126"], r"hidden_size is 126; .* must be a multiple of 4"),
        ("medusa_tiny", ["draft_vocab_size=514"], r"draft_vocab_size is 514, more than the vocab_size 512"),
        ("medusa_tiny", ["vocab_size=511"], r"vocab_size is 511; .* so it must be even"),
        ("medusa_tiny", ["draft_vocab_size=127"], r"tp is 2, which does not divide .*draft_vocab_size 127"),
        ("openpangu_tiny", ["num_sinks=0"], r"num_sinks is 0; it must be at least 1"),
    ],
)
def test_contradictions_are_named_with_their_values(model: str, overrides: list[str], sentence: str) -> None:
    changed = [f"model.{model.split('_')[0]}.{override}" for override in overrides]
    found = list(problems(root(model, *changed)))
    assert any(re.search(sentence, problem) for problem in found), found
    assert all(problem.endswith(".") for problem in found), "each is a full sentence"


@pytest.mark.parametrize("family", ["openpangu", "minicpm", "medusa"])
def test_tables_and_plans_import_no_torch(family: str) -> None:
    modules = [f"workloads.models.{family}.{name}" for name in ("config", "tensors", "plan")]
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    where = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=where).stdout
    assert not {"torch", "numpy"} & set(json.loads(output))


@pytest.mark.parametrize("model", PROXIES)
def test_shipped_proxies_have_no_problem(model: str) -> None:
    assert list(problems(root(model))) == []


def test_every_component_has_a_name_in_plans() -> None:
    for model in (*PROXIES, "minicpm_llama3_v_2_5", "medusa_vicuna_7b"):
        plan: Any = model_plan(root(model).model.architecture)
        assert {spec.component for spec in tensors(model)} <= plan.COMPONENTS.keys()
