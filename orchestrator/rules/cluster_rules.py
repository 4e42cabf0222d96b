"""Rules of where a cell runs."""

from collections.abc import Callable

from orchestrator import memory
from orchestrator.cluster import slurm
from orchestrator.config import text
from orchestrator.config.schema import Bound, Cluster, Preflight, Root
from orchestrator.rules.rule_parts import Problems, one_of


def _cluster(root: Root) -> Problems:
    c, b, p = root.cluster, root.backend, root.parallelism
    yield from one_of("cluster.kind", c.kind, ["local", "slurm", "ray"])
    if b.device == "cuda" and c.device != "cuda":
        yield (
            f"backend.device is cuda, but cluster.device is {c.device}: choose a cluster with GPUs, such as "
            "cluster=local_hopper for those of this machine, or backend=native."
        )
    elif b.device == "cuda" and b.arch != c.arch:
        yield f"backend.arch is {b.arch}, but cluster.arch is {c.arch}; kernels are built for one of them."
    for key, wanted, there in (
        ("gpus_per_node", p.gpus_per_node, c.gpus_per_node),
        ("nodes", p.nodes, c.max_nodes),
    ):
        if there is not None and wanted > there:
            yield f"parallelism.{key} is {wanted}, but the cluster has {there}."
    for key, count in (("array_limit", c.array_limit), ("max_jobs", c.max_jobs)):
        if count is not None and count < 1:
            yield f"cluster.{key} is {count}; it must be at least 1, or null."
    if c.segment and c.kind == "slurm" and p.ep > p.gpus_per_node and p.ep % p.gpus_per_node:
        yield (
            f"cluster.segment is on, but an EP group of {p.ep} does not fill whole nodes of {p.gpus_per_node} GPUs: "
            "choose an ep that is a multiple of gpus_per_node."
        )


def gpus_needed(root: Root) -> str:
    """Why this machine's GPUs cannot hold a local cell; "" where they can, or it runs elsewhere or on CPUs."""
    c, p = root.cluster, root.parallelism
    if c.kind != "local" or root.backend.device != "cuda":
        return ""
    there = memory.machine_gpus()
    if there < p.ranks:
        return (
            f"cluster.kind is local, the layout takes {p.ranks} GPU{'s' if p.ranks > 1 else ''}, and this machine has "
            f"{there or 'none'}: run it where they are, or take a backend on CPUs, such as native."
        )
    if p.nodes > 1:
        return (
            f"cluster.kind is local and parallelism.nodes is {p.nodes}: on one machine the ranks of every node would "
            f"take its first {p.gpus_per_node} GPUs; set parallelism.nodes=1 and gpus_per_node={p.ranks}."
        )
    return ""


def _ray(root: Root) -> Problems:
    c, r = root.cluster, root.cluster.ray
    if r.start and c.kind != "slurm":
        yield f"cluster.ray.start is on, but cluster.kind is {c.kind}: Ray is started inside of Slurm jobs only."
    if problem := text.ray_address_problem("cluster.ray.address", r.address):
        yield problem
    if r.wait_s <= 0:
        yield f"cluster.ray.wait_s is {r.wait_s:g}; it must be more than 0 seconds."
    if c.image is not None and (c.kind == "ray" or r.start):
        yield "cluster.image is set, but Ray's actors run in the environment of its nodes: set cluster.image=null."
    executor = root.backend.options.get("distributed_executor_backend")
    if executor == "ray" and c.kind != "ray" and not r.start:
        yield (
            "backend.options.distributed_executor_backend is ray, but there is no Ray cluster to share: choose "
            "cluster=ray or cluster=slurm_ray."
        )


def _cluster_text(root: Root) -> Problems:
    c = root.cluster
    checks: list[tuple[str, Callable[[str, object], str | None]]] = [
        ("time", text.time_problem),
        ("partition_limit", text.time_problem),
        ("nodelist", text.node_list_problem),
        ("exclude", text.node_list_problem),
        ("image", text.image_problem),
        ("image_digest", text.digest_problem),
        *((key, text.word_problem) for key in ("partition", "account", "qos", "constraint")),
    ]
    found = [check(f"cluster.{key}", getattr(c, key)) for key, check in checks]
    found += [text.environment_problem("cluster.env", name, value) for name, value in c.env.items()]
    found += [text.setup_problem("cluster.setup", line) for line in c.setup]
    yield from (problem for problem in found if problem is not None)
    if c.kind == "slurm" and c.time is None:
        yield 'cluster.time is not set; a Slurm job needs a limit: set cluster.time="HH:MM:SS".'
    if c.kind == "slurm" and c.time is not None and not any(found):
        asked, limit = text.seconds(c.time), _partition_limit(c)
        if limit is not None and asked > limit:
            yield (
                f"cluster.time is {c.time} ({asked} s), but partition {c.partition or 'default'} allows {limit} s: "
                "shorten it or choose another partition."
            )


def _bounds(root: Root) -> Problems:
    for name, usual in vars(Preflight()).items():
        if not isinstance(usual, Bound):
            continue
        key, bound = f"cluster.preflight.{name}", getattr(root.cluster.preflight, name)
        if bound.unit != usual.unit:
            yield f"{key}.unit is {bound.unit!r}, but it is measured in {usual.unit}: give its bounds in that."
        if None not in (bound.low, bound.high) and bound.low > bound.high:
            yield f"{key}.low is {bound.low:g}, above {key}.high={bound.high:g}: nothing lies between them."
        if (
            (bound.low, bound.high) != (None, None)
            and name != "max_sm_clock"
            and not root.cluster.preflight.network
        ):
            yield f"{key} has a bound, but cluster.preflight.network is false, so that it is not measured: drop one."


def _partition_limit(cluster: Cluster) -> int | None:
    if cluster.partition_limit is not None:
        return text.seconds(cluster.partition_limit)
    return slurm.partition_limit(cluster.partition)


RULES: tuple[Callable[[Root], Problems], ...] = (_cluster, _ray, _cluster_text, _bounds)
