"""Rules of what happens in a cell: steps, checks, checkpoints, what is collected."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from orchestrator.plan import FRESH
from orchestrator.schema import COLLECTORS, Check, Root
from orchestrator.schema import RULES as CHECK_RULES
from workloads.models.kimi_k3.tensors import checkpoint_tensors
from workloads.spec import Step

Problems = Iterator[str]
VIA = {"start": ("safetensors", "dummy"), "update": ("layerwise", "direct")}
PERTURBATIONS = ("none", "every_tensor", "one_tensor", "scales_only", "expert_tagged")
NEEDED_COLLECTOR = {"same_generations": "generations", "gsm8k": "gsm8k", "throughput": "throughput"}
NEEDED_SIDES = {
    "equal": 2,
    "same_generations": 2,
    "all_changed": 2,
    "checkpoint": 1,
    "gsm8k": 1,
    "throughput": 1,
}
FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


def _steps(root: Root) -> Problems:
    steps, known = root.load_path.steps, ", ".join(root.checkpoints)
    if not steps or steps[0].do != "start":
        yield "load_path.steps must begin with `do: start`: there is no engine to act on before it."
    for number, step in enumerate(steps):
        key = f"load_path.steps[{number}]"
        if step.do not in ("start", "update", "observe"):
            yield f"{key}.do is {step.do!r}; a step is one of: start, update, observe."
        elif step.do == "observe":
            yield from _observe(key, step)
        else:
            if step.checkpoint not in root.checkpoints:
                yield f"{key}.checkpoint is {step.checkpoint!r}; the checkpoints of this config are: {known}."
            if step.via not in VIA[step.do]:
                yield f"{key}.via is {step.via!r}; a step `{step.do}` goes via one of: {', '.join(VIA[step.do])}."
        if step.do == "start" and number > 0:
            yield f"{key} starts the engine again; a scenario starts once, first."
    names = [step.name for step in steps if step.do == "observe"]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"load_path.steps has {names.count(name)} observations named {name!r}; each needs its own folder."


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
    sides = (("left", check.left), ("right", check.right))
    for number, (side, name) in enumerate(sides):
        if number < NEEDED_SIDES.get(check.rule, 0):
            yield from _side(root, f"{key}.{side}", check.rule, name)
        elif name:
            yield f"{key}.{side} is {name!r}, but the rule {check.rule} does not look at it: leave it out."
    if check.left and check.left == check.right:
        yield f"{key} compares {check.left} with itself, which cannot fail."


def _side(root: Root, key: str, rule: str, name: str) -> Problems:
    collector = NEEDED_COLLECTOR.get(rule, "tensors")
    prefix, dot, checkpoint = name.partition(".")
    if dot and prefix == FRESH and rule in ("equal", "same_generations"):
        if checkpoint not in root.checkpoints:
            yield f"{key} is {name!r}; the references are: {', '.join(f'{FRESH}.{c}' for c in root.checkpoints)}."
        return
    observed = {step.name: step.collect for step in root.load_path.steps if step.do == "observe"}
    if name not in observed:
        yield f"{key} is {name!r}; the observations of this scenario are: {', '.join(observed)}."
    elif collector not in observed[name]:
        yield f"{key} is {name!r}, which does not collect {collector}: the rule {rule} needs it."


def _checkpoints(root: Root) -> Problems:
    for name, checkpoint in root.checkpoints.items():
        key = f"checkpoints.{name}"
        if checkpoint.perturbation not in PERTURBATIONS:
            yield f"{key}.perturbation is {checkpoint.perturbation!r}; it is one of: {', '.join(PERTURBATIONS)}."
        if checkpoint.perturbation == "one_tensor":
            known = {tensor.name for tensor in checkpoint_tensors(root.model.kimi_k3)}
            if checkpoint.perturbation_target not in known:
                yield (
                    f"{key}.perturbation_target is {checkpoint.perturbation_target!r}, which is not one of the "
                    f"{len(known)} tensors of {root.model.name}, such as {min(known)}."
                )
        if checkpoint.path is not None and root.cluster.kind == "local":
            folder = Path(checkpoint.path).expanduser()
            if not any(folder.glob("*.safetensors")):
                yield f"{key}.path is {checkpoint.path}, where no *.safetensors file lies."
    yield from _same_weights(root)


def _same_weights(root: Root) -> Problems:
    """An every-tensor-changed rule between loads of equal weights could only fail."""
    loaded: str | None = None
    dummy = False
    at: dict[str, tuple[str | None, bool]] = {}
    for step in root.load_path.steps:
        if step.do == "observe":
            at[step.name] = (loaded, dummy)
        else:
            loaded, dummy = step.checkpoint, step.via == "dummy"
    for check in root.load_path.checks:
        if check.rule != "all_changed" or check.left not in at or check.right not in at:
            continue
        (left, left_dummy), (right, right_dummy) = at[check.left], at[check.right]
        equal = left == right or root.checkpoints.get(left or "") == root.checkpoints.get(right or "")
        if equal and left_dummy == right_dummy:
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
    if root.policy.retries < 0:
        yield f"policy.retries is {root.policy.retries}; it must be at least 0."


RULES: tuple[Callable[[Root], Problems], ...] = (_steps, _checks, _checkpoints, _collect, _policy)
