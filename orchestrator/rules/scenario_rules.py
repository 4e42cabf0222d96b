"""Rules of what happens in a cell: steps, checks, checkpoints, what is collected."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.cell import FRESH
from orchestrator.config.freeze import cell_arms
from orchestrator.config.schema import COLLECTORS, Check, Root
from orchestrator.config.schema import RULES as CHECK_RULES
from orchestrator.judge.attempt import BASE, WITHOUT_LIFECYCLE, is_load
from orchestrator.rules.rule_parts import Problems
from workloads.loading.paths import ORDERS, SAVED, STARTS, UPDATES
from workloads.spec import WHOLE, Step

VIA: dict[str, dict[str, tuple[str, ...]]] = {  # how weights arrive, by engine and step
    "native": {"start": tuple(STARTS), "update": tuple(UPDATES)},
    "vllm": {
        "start": ("safetensors", "dummy", *SAVED, "attach"),
        "update": ("reload", "iterator", "transfer"),
    },
}
STEPS = ("start", "update", "sleep", "wake", "observe")
ROOTS = ("target", "draft")
SLEEP_LEVELS = (1, 2)  # weights stay on the host; weights are discarded
PERTURBATIONS = ("none", "every_tensor", "one_tensor", "scales_only", "expert_tagged", "some_tensors")
NEEDED_COLLECTOR = {"same_generations": "generations", "gsm8k": "gsm8k", "throughput": "throughput"}
NEEDED_SIDES = {
    "equal": 2,
    "same_generations": 2,
    "all_changed": 2,
    "checkpoint": 1,
    "gsm8k": 1,
    "throughput": 1,
}
COMPARING = ("equal", "same_generations")  # rules whose sides may be a reference or the base's observation
FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


def _steps(root: Root) -> Problems:
    steps = root.load_path.steps
    if not steps or steps[0].do != "start":
        yield "load_path.steps must begin with `do: start`: there is no engine to act on before it."
    for number, step in enumerate(steps):
        key = f"load_path.steps[{number}]"
        if step.do not in STEPS:
            yield f"{key}.do is {step.do!r}; a step is one of: {', '.join(STEPS)}."
        elif step.do == "observe":
            yield from _observe(key, step)
        elif step.do in ("start", "update"):
            yield from _load(root, key, step)
        if step.do == "start" and number > 0:
            yield f"{key} starts the engine again; a scenario starts once, first."
    yield from _asleep(steps)
    names = [step.name for step in steps if step.do == "observe"]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"load_path.steps has {names.count(name)} observations named {name!r}; each needs its own folder."


def _load(root: Root, key: str, step: Step) -> Problems:
    if step.checkpoint not in root.checkpoints:
        known = ", ".join(root.checkpoints)
        yield f"{key}.checkpoint is {step.checkpoint!r}; the checkpoints of this config are: {known}."
    ways = VIA.get(root.backend.engine, VIA["native"])[step.do]  # an engine of one's own is driven as ours is
    if step.via not in ways:
        yield (
            f"{key}.via is {step.via!r}; with backend.engine={root.backend.engine} a step `{step.do}` goes via one "
            f"of: {', '.join(ways)}."
        )
    if step.arrival != WHOLE or step.refused:
        yield from _arrival(root, key, step)


def _arrival(root: Root, key: str, step: Step) -> Problems:
    """Which weights an update brings, and how."""
    if step.do != "update" or root.backend.engine in WITHOUT_LIFECYCLE:
        yield (
            f"{key} sets one of roots, tensors, order, order_seed, bucket_bytes, refused: only updates of the native "
            "engine take them; leave them out."
        )
        return
    for name in step.roots:
        if name not in ROOTS:
            yield f"{key}.roots names {name!r}; the models of an engine are: {', '.join(ROOTS)}."
    if step.order not in ORDERS:
        yield f"{key}.order is {step.order!r}; tensors come in one of these orders: {', '.join(ORDERS)}."
    elif step.order_seed and step.order != "shuffled":
        yield f"{key}.order_seed is {step.order_seed}, which only order=shuffled reads: leave it out."
    if "" in step.tensors:
        yield (
            f"{key}.tensors has an empty pattern, which matches nothing: name tensors of the checkpoint, or leave "
            "tensors out to update all of them (load_path=partial takes them from "
            "checkpoints.new.perturbation_target)."
        )
    if step.bucket_bytes < 0:
        yield f"{key}.bucket_bytes is {step.bucket_bytes}; it is a size, or 0 for tensors one by one."


def _asleep(steps: Sequence[Step]) -> Problems:
    """Between sleep and wake there are no weights to look at, to write or to generate with."""
    since: int | None = None
    for number, step in enumerate(steps):
        key = f"load_path.steps[{number}]"
        if step.do == "sleep" and step.level not in SLEEP_LEVELS:
            yield f"{key}.level is {step.level}; 1 keeps the weights on the host, 2 discards them."
        if step.do == "wake" and since is None:
            yield f"{key} wakes an engine that does not sleep: put a step `sleep` before it."
        elif step.do in ("sleep", "update") and since is not None:
            yield f"{key} is `{step.do}`, but the engine sleeps since step {since}: put a step `wake` before it."
        elif step.do == "observe" and since is not None and set(step.collect) - {"memory"}:
            collected = ", ".join(name for name in step.collect if name != "memory")
            yield (
                f"{key} collects {collected}, but the engine sleeps since step {since}, where only memory can be "
                "observed: put a step `wake` before it."
            )
        since = {"sleep": number, "wake": None}.get(step.do, since)


def _observe(key: str, step: Step) -> Problems:
    if not FOLDER_NAME.fullmatch(step.name) or step.name == FRESH:
        yield (
            f"{key}.name is {step.name!r}; an observation names its folder: lower-case letters, digits and _, not "
            f"`{FRESH}`, which is the reference's."
        )
    if not step.collect:
        yield f"{key}.collect is empty; an observation gathers at least one of: {', '.join(COLLECTORS)}."
    for name in step.collect:
        if name not in COLLECTORS:
            yield f"{key}.collect names {name!r}; the collectors are: {', '.join(COLLECTORS)}."


def _checks(root: Root) -> Problems:
    checks = root.load_path.checks
    if not any(check.required for check in checks):
        yield "load_path.checks has no required check, so nothing could fail: require at least one."
    names = [check.name for check in checks]
    for name in sorted({name for name in names if names.count(name) > 1 or not name}):
        yield f"load_path.checks has {names.count(name)} checks named {name!r}; each needs its own name."
    for check in checks:
        yield from _check(root, check)


def _check(root: Root, check: Check) -> Problems:
    key = f"load_path.checks.{check.name}"
    if check.rule not in CHECK_RULES:
        yield f"{key}.rule is {check.rule!r}; the rules are: {', '.join(CHECK_RULES)}."
        return
    if check.rule == "lifecycle" and root.backend.engine in WITHOUT_LIFECYCLE:
        yield (
            f"{key}.rule is lifecycle, but backend.engine {root.backend.engine} reports no lifecycle events, so "
            "nothing could be checked: leave this check out."
        )
    sides = (("left", check.left), ("right", check.right))
    for number, (side, name) in enumerate(sides):
        if number < NEEDED_SIDES.get(check.rule, 0):
            yield from _side(root, f"{key}.{side}", check.rule, name)
        elif name:
            yield f"{key}.{side} is {name!r}, but the rule {check.rule} does not look at it: leave it out."
    if check.right.startswith(BASE) and _is_reference(check.left):
        yield f"{key}.left is {check.left!r}; with the base on the right side it names an observation of this scenario."
    if check.left and check.left == check.right:
        yield f"{key} compares {check.left} with itself, which cannot fail."


def _side(root: Root, key: str, rule: str, name: str) -> Problems:
    collector = NEEDED_COLLECTOR.get(rule, "tensors")
    if name.startswith(BASE):
        yield from _base_side(root, key, rule)
        name = name.removeprefix(BASE)
    elif _is_reference(name) and rule in COMPARING:
        if name.partition(".")[2] not in root.checkpoints:
            yield f"{key} is {name!r}; the references are: {', '.join(f'{FRESH}.{c}' for c in root.checkpoints)}."
        return
    observed = {step.name: step.collect for step in root.load_path.steps if step.do == "observe"}
    if name not in observed:
        yield f"{key} is {name!r}; the observations of this scenario are: {', '.join(observed)}."
    elif collector not in observed[name]:
        yield f"{key} is {name!r}, which does not collect {collector}: the rule {rule} needs it."


def _is_reference(name: str) -> bool:
    return name.startswith(f"{FRESH}.")


def _base_side(root: Root, key: str, rule: str) -> Problems:
    """`base/NAME`: what the base arm observed at NAME, which the candidate must equal."""
    if rule not in COMPARING:
        yield f"{key} names an observation of the base, which only these rules compare with: {', '.join(COMPARING)}."
    if key.endswith(".left"):
        yield f"{key} names an observation of the base, which is always what is expected: put it on the right side."
    if "base" not in cell_arms(root):
        yield (
            f"{key} names an observation of the base, but there is no base: set code.base.environment, code.base.path "
            "or code.base.commit."
        )


def _checkpoints(root: Root) -> Problems:
    for name, checkpoint in root.checkpoints.items():
        key = f"checkpoints.{name}"
        if checkpoint.perturbation not in PERTURBATIONS:
            yield f"{key}.perturbation is {checkpoint.perturbation!r}; it is one of: {', '.join(PERTURBATIONS)}."
        if checkpoint.path is not None and root.cluster.kind == "local":
            folder = Path(checkpoint.path).expanduser()
            if not any(folder.glob("*.safetensors")):
                yield f"{key}.path is {checkpoint.path}, where no *.safetensors file lies."
    yield from _same_weights(root)


def _same_weights(root: Root) -> Problems:
    """An every-tensor-changed rule between loads of equal weights could only fail."""
    held: tuple[str, str] = (
        "",
        "",
    )  # checkpoint, and where values come from instead where it is not the files
    at: dict[str, tuple[str, str]] = {}
    for number, step in enumerate(root.load_path.steps):
        if step.do == "observe":
            at[step.name] = held
        elif is_load(asdict(step)):
            held = (step.checkpoint, "dummy" if step.via == "dummy" else "")
        elif step.do == "sleep" and step.level == 2:
            held = (held[0], f"discarded by step {number}")
    for check in root.load_path.checks:
        if check.rule != "all_changed" or check.left not in at or check.right not in at:
            continue
        (left, left_instead), (right, right_instead) = at[check.left], at[check.right]
        equal = left == right or root.checkpoints.get(left) == root.checkpoints.get(right)
        if equal and left_instead == right_instead:
            yield (
                f"load_path.checks.{check.name} wants every weight changed between {check.left} and {check.right}, "
                f"but both hold the same weights ({left}, {right}): set checkpoints.{right}.perturbation=every_tensor "
                "or another seed."
            )


def _collect(root: Root) -> Problems:
    c, longest = root.collect, root.backend.max_model_len
    for key, value, least in (
        ("gsm8k.limit", c.gsm8k.limit, 0),
        ("gsm8k.shots", c.gsm8k.shots, 0),
        ("gsm8k.max_new_tokens", c.gsm8k.max_new_tokens, 1),
        ("throughput.requests", c.throughput.requests, 0),
        ("throughput.prompt_tokens", c.throughput.prompt_tokens, 1),
        ("throughput.new_tokens", c.throughput.new_tokens, 1),
        ("sampling.max_new_tokens", c.sampling.max_new_tokens, 1),
        ("sampling.top_logprobs", c.sampling.top_logprobs, 0),
    ):
        if value < least:
            yield f"collect.{key} is {value}; it must be at least {least}."
    if c.sampling.temperature < 0:
        yield f"collect.sampling.temperature is {c.sampling.temperature}; 0 is greedy, negative means nothing."
    tokens = c.throughput.prompt_tokens + c.throughput.new_tokens
    if tokens > longest:
        yield (
            f"collect.throughput asks for {c.throughput.prompt_tokens} + {c.throughput.new_tokens} = {tokens} tokens, "
            f"more than backend.max_model_len {longest}."
        )
    asked = any("generations" in step.collect for step in root.load_path.steps)
    if asked and not c.prompts:
        yield "collect.prompts is empty, but load_path.steps collect generations: give at least one prompt."


def _policy(root: Root) -> Problems:
    if not 0 < root.policy.coverage <= 1:
        yield f"policy.coverage is {root.policy.coverage}; it is a fraction, above 0 and at most 1."
    if root.policy.step_timeout_s < 1:
        yield f"policy.step_timeout_s is {root.policy.step_timeout_s}; it must be at least 1 second."
    for do, limit in asdict(root.policy.step_timeouts_s).items():
        if limit is not None and limit < 1:
            yield f"policy.step_timeouts_s.{do} is {limit}; it must be at least 1 second."
    for kind, count in asdict(root.policy.retries).items():
        if count < 0:
            yield f"policy.retries.{kind} is {count}; it must be at least 0."
    if root.policy.max_attempts < 1:
        yield f"policy.max_attempts is {root.policy.max_attempts}; it must be at least 1."
    if root.policy.quarantine_s < 0:
        yield f"policy.quarantine_s is {root.policy.quarantine_s}; it must be at least 0."


RULES: tuple[Callable[[Root], Problems], ...] = (_steps, _checks, _checkpoints, _collect, _policy)
