"""Every key of a config, typed. Hydra rejects keys and types that are not here; `orchestrator.rules` add the rest.

Fields annotated `Any` hold text that YAML reads as something else when it is not quoted (a time as base-60
seconds, a commit as a number); they arrive as written and `orchestrator.config.text` refuses the mangled form.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from workloads.spec import Backend, Checkpoint, Model, Parallelism, Sampling, Step

RULES = {
    "equal": "{left} == {right}: every tensor, bit for bit",
    "same_generations": "{left} and {right} generate the same tokens with the same log-probabilities",
    "all_changed": "every weight differs between {left} and {right}",
    "stable_storage": "no weight or derived tensor moved between observations",
    "replicas": "data-parallel replicas hold equal tensors",
    "checkpoint": "{left} reassembles to the checkpoint, padding holds its creation value",
    "derived": "what is derived from weights follows from those that serve beside it",
    "lifecycle": "post-processing and the finalise hook ran once per load, never while generating",
    "coverage": "the audited bytes cover what the checkpoint put on each rank",
    "gsm8k": "GSM8K accuracy of {left}",
    "throughput": "tokens per second of {left}",
}
COLLECTORS = ("tensors", "generations", "gsm8k", "throughput", "memory")


@dataclass
class Check:
    """One rule over observations. `left`, `right`: names of `observe` steps, or `fresh.NAME`, the reference:
    a fresh start on checkpoint NAME. Only required checks enter a verdict."""

    name: str
    rule: str
    left: str = ""
    right: str = ""
    required: bool = True


@dataclass
class LoadPath:
    """A scenario and what must hold of it. `start`, `update`, `order`, `order_seed` and `bucket_bytes` only fill in
    the fields of shared steps."""

    name: str = ""
    start: str = "safetensors"
    update: str = ""
    order: str = "natural"
    order_seed: int = 0
    bucket_bytes: int = 0
    steps: list[Step] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


@dataclass
class Overlaid:
    """A file that takes the place of one in an arm's tree, or of one in the engine's package."""

    at: str = ""  # the place: below workloads/ or collectors/, or below the engine's package, vllm/
    file: str = ""  # what is put there
    replaces: Any = None  # SHA-256 of the file that it was made from; null: there is none at this place


@dataclass
class Arm:
    """One version of the code under test: a source tree, at a commit if given, with files laid over it and faults
    injected."""

    path: str | None = None  # of the tree; null, or `this`: this checkout
    commit: Any = None  # any git revision of `path`; null: the files as they are
    overlay: list[Overlaid] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # modules of workloads/faults
    environment: Any = None  # of the engine, instead of backend.environment: compares two releases of it


@dataclass
class Code:
    candidate: Arm = field(default_factory=Arm)
    base: Arm = field(default_factory=Arm)  # compared with when its path or commit is set


@dataclass
class Gsm8k:
    path: str | None = None  # folder of test.jsonl and train.jsonl; null: $GSM8K_DIR or one nearby
    limit: int = 1319
    shots: int = 5
    max_new_tokens: int = 256


@dataclass
class Throughput:
    prompt_tokens: int = 64
    new_tokens: int = 16
    requests: int = 16


@dataclass
class Collect:
    prompts: list[str] = field(default_factory=list)
    sampling: Sampling = field(default_factory=Sampling)  # of `prompts`
    gsm8k: Gsm8k = field(default_factory=Gsm8k)
    throughput: Throughput = field(default_factory=Throughput)


@dataclass
class StepTimeouts:
    """Seconds by what a step does. Null: policy.step_timeout_s."""

    start: int | None = None
    update: int | None = None
    sleep: int | None = None
    wake: int | None = None
    save: int | None = None
    observe: int | None = None


@dataclass
class Retries:
    """Fresh jobs of one cell after failures of one type. Failures of the program have no key: they are results. A hang
    may be a node's or the program's: a second one, on other nodes, tells."""

    node_lost: int = 2
    node_failed: int = 2
    boot_failed: int = 2
    bad_node: int = 2
    gpu_failed: int = 2
    connection_lost: int = 1
    launch_failed: int = 1
    lost: int = 1
    hang: int = 1
    preempted: int = 3
    requeued: int = 2
    out_of_memory: int = 0
    time_limit: int = 0


@dataclass
class Policy:
    coverage: float = 0.999
    step_timeout_s: int = 1800
    step_timeouts_s: StepTimeouts = field(default_factory=StepTimeouts)
    retries: Retries = field(default_factory=Retries)
    max_attempts: int = 4  # of one cell in one experiment, whatever their failures were
    quarantine_s: int = 14400  # how long a node that failed is avoided


@dataclass
class Bound:
    """What a measurement must lie in. Null: it is recorded and not judged."""

    low: float | None = None
    high: float | None = None
    unit: str = ""  # of both; the one that the measurement has


@dataclass
class Preflight:
    """Reference values of this cluster for what preflight measures of its nodes. Of two nodes, over each of their GPUs
    (pair_*, and where `segment` is on, within one), or of all nodes together: bus bandwidth, as nccl-tests has it."""

    network: bool = True  # nodes meet, too: false saves the time in which each imports torch, and finds less
    clock_skew: Bound = field(default_factory=lambda: Bound(unit="s"))  # from the clock of the first node
    write_latency: Bound = field(
        default_factory=lambda: Bound(unit="s")
    )  # of a small file in the store, with fsync
    visible_after: Bound = field(default_factory=lambda: Bound(unit="s"))  # until other nodes see such a file
    max_sm_clock: Bound = field(default_factory=lambda: Bound(unit="MHz"))
    pair_all_reduce: Bound = field(default_factory=lambda: Bound(unit="GB/s"))
    pair_all_to_all: Bound = field(default_factory=lambda: Bound(unit="GB/s"))
    all_reduce: Bound = field(default_factory=lambda: Bound(unit="GB/s"))
    all_to_all: Bound = field(default_factory=lambda: Bound(unit="GB/s"))


@dataclass
class Ray:
    """The Ray cluster of which gangs are actors: one that is there where `kind` is ray, else one in the Slurm job."""

    start: bool = False  # on the nodes of the Slurm job, for each set of gangs
    address: str = "auto"  # of one that is there: HOST:PORT of its head, or auto, as Ray finds it
    wait_s: float = 60.0  # for its other jobs to make room, and for nodes that are started to join


@dataclass
class Cluster:
    """Where gangs run. Only `image` and `image_digest` say what runs, and so enter a cell's identity."""

    kind: str = "local"  # local | slurm | ray
    ray: Ray = field(default_factory=Ray)
    device: str = "cpu"  # of its nodes: cpu | cuda
    arch: str = "cpu"  # cpu | sm90 | sm100
    memory_gb: float | None = (
        None  # 10^9 bytes a rank may use; null on local: this machine's, shared by its ranks
    )
    gpus_per_node: int | None = None
    max_nodes: int | None = None
    partition: Any = None
    account: Any = None
    qos: Any = None
    time: Any = None  # "HH:MM:SS" or "D-HH:MM:SS"
    partition_limit: Any = None  # its MaxTime; null: asked of sinfo where there is one
    nodelist: Any = None
    exclude: Any = None
    constraint: Any = None
    exclusive: bool = True
    array_limit: int | None = None  # tasks in one job array; null: MaxArraySize, asked of scontrol
    max_jobs: int | None = None  # of one experiment that run at once; null: as many as the cluster takes
    segment: bool = False  # place each EP group inside one NVLink domain; needs Slurm 23.11
    image: Any = None  # container of the ranks (pyxis); null: the node's own environment
    image_digest: Any = None  # "sha256:..." that the image must have
    mounts: list[str] = field(default_factory=list)  # "/host:/container[:flags]"
    env: dict[str, Any] = field(default_factory=dict)  # of the ranks
    preflight: Preflight = field(default_factory=Preflight)
    setup: list[str] = field(
        default_factory=list
    )  # shell lines before the driver; a failing one ends the job
    python: str | None = None  # interpreter of the driver on the nodes; null: this one
    poll_s: float = 10.0  # between looks at a job
    lost_after_s: float = 60.0  # without job and result: LOST


@dataclass
class Wandb:
    """The mirror of results; online when WANDB_API_KEY is set, else offline files in the store."""

    enabled: bool = True
    project: str = "refit-orchestrator"


@dataclass
class Root:
    name: str = "adhoc"
    store: str = "runs"
    rerun: bool = False
    needs: str = ""  # what a cell needs that is not here, as a sentence: it is NOT_RUN for that reason
    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    backend: Backend = field(default_factory=Backend)
    load_path: LoadPath = field(default_factory=LoadPath)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    code: Code = field(default_factory=Code)
    collect: Collect = field(default_factory=Collect)
    policy: Policy = field(default_factory=Policy)
    cluster: Cluster = field(default_factory=Cluster)
    wandb: Wandb = field(default_factory=Wandb)


ConfigStore.instance().store(name="schema", node=Root)
