"""What a gang is told to do: plain data that crosses from the control side to the ranks as JSON.

Standard library only. `orchestrator.config.schema` builds the same classes from configuration and adds the
rules; nothing here validates.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads.models.architectures import ARCHITECTURES
from workloads.models.deepseek_v4.config import DeepseekV4Config
from workloads.models.deepseek_v41.config import DeepseekV41Config
from workloads.models.gpt_oss.config import GptOssConfig
from workloads.models.kimi_k3.config import KimiK3Config
from workloads.models.medusa.config import MedusaConfig
from workloads.models.minicpm.config import MiniCpmConfig
from workloads.models.openpangu.config import OpenPanguConfig
from workloads.models.qwen3.config import Qwen3Config


@dataclass
class Parallelism:
    """Rank = (pp_rank * dp + dp_rank) * tp + tp_rank: a pipeline stage is tp * dp contiguous ranks, the first stage
    first. The EP group of a rank is `rank // ep`, contiguous ranks of one stage.

    redundant_experts: slots for second copies of routed experts, in each layer. rebalance_seed: of the shuffle that
    moves experts to other slots once they are loaded, as load balancing does; 0: they stay where they are.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    redundant_experts: int = 0
    rebalance_seed: int = 0
    nodes: int = 1
    gpus_per_node: int = 1

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """Of one pipeline stage."""
        return self.tp * self.dp


@dataclass
class Model:
    """One architecture with dimensions, in the field of its name: for a family of `workloads.models` its own
    class; for `transformers` the configuration (with its `model_type`) that weights are generated for, empty where
    every checkpoint is given by path."""

    name: str = "kimi_k3_tiny"
    architecture: str = "kimi_k3"  # transformers, or one of workloads.models.architectures
    size: str = "proxy"  # proxy | full
    tokenizer: str = "byte"  # byte | checkpoint
    deepseek_v4: DeepseekV4Config = field(default_factory=DeepseekV4Config)
    deepseek_v41: DeepseekV41Config = field(default_factory=DeepseekV41Config)
    gpt_oss: GptOssConfig = field(default_factory=GptOssConfig)
    kimi_k3: KimiK3Config = field(default_factory=KimiK3Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    minicpm: MiniCpmConfig = field(default_factory=MiniCpmConfig)
    openpangu: OpenPanguConfig = field(default_factory=OpenPanguConfig)
    qwen3: Qwen3Config = field(default_factory=Qwen3Config)
    transformers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Backend:
    engine: str = "native"  # native | vllm
    device: str = "cpu"  # cpu | cuda
    arch: str = "cpu"  # cpu | sm90 | sm100
    moe_kernel: str = "mega_moe"  # mega_moe | reference
    moe_fallback: bool = True  # whether mega_moe may be its reference in torch on a GPU without such a kernel
    communication: str = "gloo"  # gloo | nccl
    max_model_len: int = 8192
    max_batch_tokens: int = 8192  # tokens of one forward pass per data-parallel rank; sizes MegaMoE's buffer
    max_requests: int = 64  # concurrent requests per data-parallel rank; sizes KV and states
    environment: str | None = (
        None  # the engine's own: name of a lock file, installed by `orchestrator engine`
    )
    python: str | None = None  # interpreter with the engine in it, instead of an environment; None: this one
    url: str | None = None  # of a running server to attach to, instead of starting an engine
    lora_rank: int = 0  # of adapters that linear layers are wrapped for; 0: they are not wrapped
    online_quantization: str = "none"  # none | fp8: of BF16 matrices as they are loaded, by output channel
    dtype: str = "auto"  # of weights and activations, in an engine that lets one choose
    options: dict[str, Any] = field(
        default_factory=dict
    )  # further arguments of a foreign engine, by its names
    env: dict[str, str] = field(default_factory=dict)  # variables of the engine's processes


@dataclass
class Checkpoint:
    """Weights to load: files at `path`, or (path None) generated from `seed`; optionally perturbed as a view."""

    path: str | None = None
    seed: int = 0
    perturbation: str = "none"  # none | every_tensor | one_tensor | scales_only | expert_tagged
    perturbation_seed: int = 1
    perturbation_target: str = ""  # tensor name, for one_tensor
    draft: str = (
        ""  # entry that a drafter loads beside this one; empty: there is no drafter, or it finds its own
    )


@dataclass(frozen=True)
class Arrival:
    """Which weights an update brings, and how they come in.

    roots: the models that take part; empty: all. tensors: patterns (fnmatch) of checkpoint names; empty: all.
    order: of the tensors: natural (as the model declares them) | reversed | shuffled (by order_seed).
    bucket_bytes: size of the buffer through which tensors come, used again and again; 0: each by itself.
    """

    roots: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    order: str = "natural"
    order_seed: int = 0
    bucket_bytes: int = 0


WHOLE = Arrival()  # all weights, one by one


@dataclass
class Step:
    """One step of a scenario.

    do: start | update | sleep | wake | save | observe. `checkpoint` names an entry of `GangSpec.checkpoints`.
    via: how weights arrive, for start and update, or which files are written, for save; what there is depends on the
    engine (`orchestrator.rules.scenario_rules.VIA`).
    level: for sleep, 1 keeps the weights on the host, 2 discards them.
    name, collect: for observe: the observation's folder and the collectors that run
    (`tensors`, `generations`, `gsm8k`, `throughput`, `memory`).
    roots, tensors, order, order_seed, bucket_bytes: for update, see `Arrival`.
    refused: for update, the engine must refuse it and stay as it was.
    """

    do: str
    checkpoint: str = ""
    via: str = ""
    name: str = ""
    collect: list[str] = field(default_factory=list)
    level: int = 1
    roots: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    order: str = "natural"
    order_seed: int = 0
    bucket_bytes: int = 0
    refused: bool = False

    @property
    def arrival(self) -> Arrival:
        return Arrival(tuple(self.roots), tuple(self.tensors), self.order, self.order_seed, self.bucket_bytes)


@dataclass
class Sampling:
    """temperature 0 is greedy. `top_logprobs` token/log-probability pairs are kept per generated token."""

    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    top_logprobs: int = 5


@dataclass
class GangSpec:
    """Everything a rank needs. Written by the driver as `<output>/gang.json`.

    output: folder of this gang; ranks write `rank-00003.log`, `progress-00003.jsonl`,
    `lifecycle-00003.jsonl`, and `<observation>/tensors-00003.jsonl` … below it.
    prompts: token-free prompt files by collector name, JSONL lines `{"id": str, "text": str}`.
    """

    name: str
    output: str
    model: Model
    parallelism: Parallelism
    backend: Backend
    checkpoints: dict[str, Checkpoint]
    checkpoint_dirs: dict[str, str]  # where each entry's base files lie (generated or given)
    steps: list[Step]
    sampling: dict[str, Sampling] = field(default_factory=dict)  # by collector name
    prompts: dict[str, str] = field(default_factory=dict)
    throughput: dict[str, int] = field(default_factory=dict)  # prompt_tokens, new_tokens, requests
    saved_dir: str = ""  # folder of the engine's own files: a step `save` writes them, some starts read them
    faults: list[str] = field(default_factory=list)
    package_dir: str = (
        ""  # folder of the engine's package with the arm's files laid over it, if there are any
    )
    trace: bool = False  # after the start, look which storages a forward reads; the audit must reach them
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    collective_timeout_s: int = 600

    @property
    def ranks_per_member(self) -> int:
        """Ranks that one process of ours leads. vLLM starts the tensor-parallel ranks of a replica itself, and a
        running server is one partner for all."""
        if self.backend.engine != "vllm":
            return 1
        return self.parallelism.tp if self.backend.url is None else self.parallelism.ranks

    @classmethod
    def read(cls, path: Path) -> "GangSpec":
        return cls.from_dict(json.loads(path.read_text()))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "GangSpec":
        model = dict(raw["model"])
        for name in ARCHITECTURES.keys() & model.keys():
            model[name] = ARCHITECTURES[name](**model[name])
        return cls(
            **{
                **raw,
                "model": Model(**model),
                "parallelism": Parallelism(**raw["parallelism"]),
                "backend": Backend(**raw["backend"]),
                "checkpoints": {k: Checkpoint(**v) for k, v in raw["checkpoints"].items()},
                "steps": [Step(**s) for s in raw["steps"]],
                "sampling": {k: Sampling(**v) for k, v in raw["sampling"].items()},
            }
        )
