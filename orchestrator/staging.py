"""Lays out what the gangs of a cell need: checkpoints, prompts, and each gang's specification."""

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectors.gsm8k import questions as gsm8k
from orchestrator.cell import (
    FRESH,
    FRESH_VIA,
    Cell,
    Reference,
    digest,
    own_backend,
    references,
    saved_state,
    second_run,
    served,
)
from orchestrator.engine_env import environment_python
from orchestrator.failure import AttemptError
from orchestrator.gangs.launch import Allocation, GangSet, free_port, master_address, ray_cluster
from orchestrator.gangs.signs import limits_of
from orchestrator.judge.attempt import again_folder
from orchestrator.provenance import checkout, folder_state
from orchestrator.store import Store
from orchestrator.trees import overlaid_package, source_tree
from workloads.spec import GangSpec, Sampling, Step

SAVED = "saved"  # folder below a reference's, of the files that it wrote for other starts
COLLECTIVE_MARGIN_S = 120  # a collective gives up later than the driver, who knows more about the hang
GENERATE_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Staged:
    """What all gangs of an attempt have in common. prompts: file by collector."""

    cell: Cell
    store: Store
    attempt: Path
    allocation: Allocation | None
    checkpoint_dirs: Mapping[str, str]
    prompts: Mapping[str, str]


@dataclass(frozen=True)
class ArmGangs:
    """One arm's gangs: the references that nobody has built yet, then the scenario.

    built: key to folder of a gang of its own. served: key to the folder of the observation in which the scenario's
    own start makes the reference. collect: what each reference gathers, by key.
    """

    gang_set: GangSet
    built: Mapping[str, Path]
    served: Mapping[str, Path]
    collect: Mapping[str, Sequence[str]]


def stage(cell: Cell, store: Store, attempt: Path, allocation: Allocation | None) -> Staged:
    """Generates checkpoints that are not there and writes the prompts. Raises AttemptError."""
    dirs = {name: str(_checkpoint_dir(cell, name, store)) for name in cell["checkpoints"]}
    return Staged(cell, store, attempt, allocation, dirs, _write_prompts(cell, attempt / "prompts"))


def arm_gangs(staged: Staged, arm: str) -> ArmGangs:
    """The gangs of one arm, in the order in which they run. Raises AttemptError."""
    cell, store = staged.cell, staged.store
    missing = {
        ref.key: ref
        for ref in references(cell)
        if ref.arm == arm and not (store.references / ref.key).exists()
    }
    prefix = "" if arm == "candidate" else f"{arm}-"
    own = {key: name for key, name in served(cell, arm).items() if key in missing}
    built = {key: staged.attempt / f"{prefix}{ref.name}" for key, ref in missing.items() if key not in own}
    own_engine = own_backend(cell, arm)
    state = saved_state(cell, arm)
    saving = []
    if state is not None and not store.holds(state.key):
        saving = [_spec(staged, arm, staged.attempt / f"{prefix}saved", state.steps)]
    specs = [
        _spec(staged, arm, folder, _reference_steps(missing[key]), own_engine, folder / SAVED)
        for key, folder in built.items()
    ]
    specs += saving
    steps = [Step(**step) for step in cell["load_path"]["steps"]]
    specs.append(_spec(staged, arm, staged.attempt / arm, steps, saved=_saved(staged, arm, built)))
    return ArmGangs(
        _gang_set(staged, arm, staged.attempt / arm, specs),
        built,
        {key: staged.attempt / arm / name for key, name in own.items()},
        {key: ref.collect for key, ref in missing.items()},
    )


def _saved(staged: Staged, arm: str, built: Mapping[str, Path]) -> Path | None:
    """Folder that the scenario's start reads: of a reference in the store, or one that is built before it."""
    saving = (ref for ref in references(staged.cell) if ref.arm == arm and ref.save)
    folders = (built.get(ref.key, staged.store.references / ref.key) / SAVED for ref in saving)
    return next(folders, None)


def second_gang(staged: Staged, arm: str) -> GangSet:
    """The gang of an arm's second run, of the steps that `plan.second_run` says. Raises AttemptError."""
    folder = again_folder(staged.attempt / arm)
    spec = _spec(staged, arm, folder, [Step(**step) for step in second_run(staged.cell)])
    return _gang_set(staged, arm, folder, [spec])


def _gang_set(staged: Staged, arm: str, folder: Path, specs: Sequence[GangSpec]) -> GangSet:
    cell, store, cluster = staged.cell, staged.store, staged.cell["cluster"]
    return GangSet(
        folder=folder,
        gangs=specs,
        tree=source_tree(cell["code"][arm], store),
        parents=1 if cluster["kind"] == "local" else cell["parallelism"]["nodes"],
        python=interpreter(cell, arm),
        environment=cluster["env"],
        image=cluster["image"],
        ray=ray_cluster(cluster),
        mounts=[f"{path}:{path}" for path in (store.root, *_given_checkpoints(cell))] + cluster["mounts"],
    )


def interpreter(cell: Cell, arm: str) -> str:
    """Python of an arm's ranks: of the engine's environment, the one that the config names, that of the container, or
    the one of this process. Raises EngineEnvironmentError when the environment is not installed."""
    environment = cell["code"][arm].get("environment")
    if environment is not None:
        return str(environment_python(environment["name"], environment["lock"]))
    return str(cell["backend"]["python"] or ("python3" if cell["cluster"]["image"] else sys.executable))


def _checkpoint_dir(cell: Cell, name: str, store: Store) -> Path:
    """Folder of a checkpoint's files. Where perturbations are views, checkpoints of one seed share their files."""
    checkpoint = cell["checkpoints"][name]
    base = Path(checkpoint["path"]) if checkpoint["path"] is not None else _generated(cell, checkpoint, store)
    return _materialized(cell, checkpoint, base, store) if _needs_files(cell, checkpoint) else base


def _needs_files(cell: Cell, checkpoint: Mapping[str, Any]) -> bool:
    """vLLM reads folders: what is a view elsewhere is written out for it."""
    return bool(cell["backend"]["engine"] == "vllm" and checkpoint["perturbation"] != "none")


def _generated(cell: Cell, checkpoint: Mapping[str, Any], store: Store) -> Path:
    """Base files of a checkpoint without a path, made when they are not there. transformers says what a checkpoint of
    one of its configurations holds, so the engine's interpreter makes that: the candidate's, for both arms."""
    architecture = cell["model"]["architecture"]
    config, foreign = cell["model"][architecture], architecture == "transformers"
    generator = "transformers_checkpoint" if foreign else "generate"
    sources = _sources(generator, "streams", "quantized")
    folder = store.checkpoints / digest([architecture, config, checkpoint["seed"], sources])[:32]
    if not folder.exists():
        python = interpreter(cell, "candidate") if foreign else sys.executable
        module = [python, "-m", f"workloads.loading.{generator}"]
        described = config if foreign else {architecture: config}
        _write_checkpoint(cell, lambda file: [*module, file, str(checkpoint["seed"])], described, folder)
    return folder


def _materialized(cell: Cell, checkpoint: Mapping[str, Any], base: Path, store: Store) -> Path:
    """Files of a perturbed checkpoint, written when they are not there."""
    change = {key: value for key, value in checkpoint.items() if key.startswith("perturbation")}
    of = [str(base), folder_state(base), change, _sources("materialize", "perturb")]
    folder = store.checkpoints / digest(of)[:32]
    if not folder.exists():
        module = [sys.executable, "-m", "workloads.loading.materialize"]
        _write_checkpoint(cell, lambda file: [*module, str(base), file], checkpoint, folder)
    return folder


def _sources(*modules: str) -> list[str]:
    """Digests of the modules of workloads/loading that decide which bytes are written."""
    folder = checkout() / "workloads" / "loading"
    return [hashlib.sha256((folder / f"{module}.py").read_bytes()).hexdigest() for module in modules]


def _write_checkpoint(
    cell: Cell, command: Callable[[str], list[str]], described: Mapping[str, Any], folder: Path
) -> None:
    """Runs `command(file of described) + [folder]` in a process of its own: the driver imports no torch. Safe when
    several drivers do it at once. Raises AttemptError."""
    file = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.json")
    file.write_text(json.dumps(described))
    environment = {**os.environ, **cell["backend"]["env"]}
    try:
        done = subprocess.run(
            [*command(str(file)), str(folder)],
            cwd=checkout(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=GENERATE_TIMEOUT_S,
        )
    finally:
        file.unlink()
    if done.returncode != 0:
        kind = "disk_full" if "No space left on device" in done.stderr else "checkpoint"
        last = done.stderr.strip().splitlines()[-1:]
        message = f"Writing {folder} failed with code {done.returncode}: {' '.join(last)}"
        raise AttemptError(kind, message, log_tail=done.stderr[-8000:])


def _given_checkpoints(cell: Cell) -> list[str]:
    return [c["path"] for c in cell["checkpoints"].values() if c["path"] is not None]


def _write_prompts(cell: Cell, folder: Path) -> dict[str, str]:
    """One file of {"id", "text"} lines for each collector that the scenario uses; GSM8K's also hold the solution
    ("answer"), so that the judge needs nothing but the attempt."""
    makers = {"generations": _plain_prompts, "gsm8k": _gsm8k_prompts}
    used = {name for step in cell["load_path"]["steps"] for name in step["collect"]}
    used |= {name for ref in references(cell) for name in ref.collect}
    folder.mkdir(mode=0o700)
    written = {}
    for name in sorted(used & makers.keys()):
        lines = (json.dumps({"id": f"{name}-{i}", **row}) for i, row in enumerate(makers[name](cell)))
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        written[name] = str(path)
    return written


def _plain_prompts(cell: Cell) -> Iterable[dict[str, str]]:
    return ({"text": text} for text in cell["collect"]["prompts"])


def _gsm8k_prompts(cell: Cell) -> Iterable[dict[str, str]]:
    wanted = cell["collect"]["gsm8k"]
    try:
        test, train = gsm8k.load(wanted["path"])
    except gsm8k.Gsm8kError as error:
        raise AttemptError("preflight", str(error)) from error
    texts = gsm8k.prompts(test, train, wanted["shots"], wanted["limit"])
    return ({"text": text, "answer": q.answer} for text, q in zip(texts, test, strict=False))


def _reference_steps(reference: Reference) -> list[Step]:
    """The save comes last: what is saved may leave traces in the engine."""
    observed = [
        Step("start", reference.checkpoint, FRESH_VIA),
        Step("observe", name=FRESH, collect=list(reference.collect)),
    ]
    return [*observed, Step("save", reference.checkpoint, reference.save)] if reference.save else observed


def _spec(
    staged: Staged,
    arm: str,
    output: Path,
    steps: Sequence[Step],
    backend: Mapping[str, Any] | None = None,
    saved: Path | None = None,
) -> GangSpec:
    """backend: instead of the cell's. saved: folder of files that the gang writes for other starts, or reads."""
    cell, collect = staged.cell, staged.cell["collect"]
    saved = staged.store.saved / state.key if (state := saved_state(cell, arm)) is not None else saved
    gsm8k_sampling = Sampling(max_new_tokens=collect["gsm8k"]["max_new_tokens"], top_logprobs=1)
    return GangSpec.from_dict(
        {
            "name": output.name,
            "output": str(output),
            **{key: cell[key] for key in ("model", "parallelism")},
            "backend": backend or cell["backend"],
            "checkpoints": {
                name: {**checkpoint, "perturbation": "none"} if _needs_files(cell, checkpoint) else checkpoint
                for name, checkpoint in cell["checkpoints"].items()  # files that are written out are no views
            },
            "checkpoint_dirs": dict(staged.checkpoint_dirs),
            "steps": [asdict(step) for step in steps],
            "sampling": {"generations": collect["sampling"], "gsm8k": asdict(gsm8k_sampling)},
            "prompts": dict(staged.prompts),
            "throughput": collect["throughput"],
            "faults": cell["code"][arm]["faults"],
            "package_dir": str(
                overlaid_package(cell["code"][arm], interpreter(cell, arm), staged.store) or ""
            ),
            "saved_dir": "" if saved is None else str(saved),
            "trace": output.name == arm and any("tensors" in step.collect for step in steps),
            "master_addr": master_address(staged.allocation),
            "master_port": free_port(),
            "collective_timeout_s": int(limits_of(cell["policy"]).longest) + COLLECTIVE_MARGIN_S,
        }
    )
