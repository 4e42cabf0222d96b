"""Rules of draft models: checkpoints that a drafter loads beside those of its target."""

from orchestrator.config.schema import Root
from orchestrator.rules.rule_parts import Problems
from workloads.engines.vllm.drafts import APART, OPTION, draft_method, drafts_inside
from workloads.loading.paths import SAVED


def problems(root: Root) -> Problems:
    given = {name: c.draft for name, c in root.checkpoints.items() if c.draft}
    for name, draft in given.items():
        yield from _pair(root, f"checkpoints.{name}.draft", name, draft)
    if given:
        yield from _engine(root, given)
        yield from _everywhere(root, given)
    else:
        yield from _none(root)
    yield from _saved(root, given)


def _pair(root: Root, key: str, name: str, draft: str) -> Problems:
    known = root.checkpoints
    if draft not in known or draft == name:
        others = ", ".join(other for other in known if other != name)
        yield f"{key} is {draft!r}; the other checkpoints of this config are: {others}."
    elif known[draft].draft:
        yield f"{key} is {draft!r}, which names a draft of its own, {known[draft].draft!r}: a draft has none."


def _engine(root: Root, given: dict[str, str]) -> Problems:
    name, draft = next(iter(given.items()))
    if root.backend.engine != "vllm":
        yield (
            f"checkpoints.{name}.draft is {draft!r}, and backend.engine {root.backend.engine} takes its draft from the "
            "checkpoint itself: leave the key out."
        )
        return
    speculative = root.backend.options.get(OPTION)
    if root.backend.url is not None:
        yield (
            f"checkpoints.{name}.draft is {draft!r}, and backend.url names a server, which was started with a draft of "
            "its own choice: leave one of the two out."
        )
    elif not isinstance(speculative, dict) or "method" not in speculative:
        yield (
            f"checkpoints.{name}.draft is {draft!r}, and nothing says how drafts are made: set backend.options."
            f"{OPTION}={{method: draft_model, num_speculative_tokens: 2}} or another method of vLLM."
        )
    elif "model" in speculative:
        yield f"backend.options.{OPTION}.model follows from another key: set checkpoints.{name}.draft instead."


def _none(root: Root) -> Problems:
    """A drafter that no checkpoint names is not held against any."""
    method = draft_method(root.backend)
    if root.backend.engine == "vllm" and root.backend.url is None and method in APART:
        yield (
            f"backend.options.{OPTION}.method is {method!r}, whose drafter has weights of its own, and no checkpoint "
            "names them: set checkpoints.old.draft and checkpoints.new.draft, as conf/exp/vllm_draft.yaml does."
        )


def _everywhere(root: Root, given: dict[str, str]) -> Problems:
    """An engine has a drafter or has none: every load is of both models, or of the target alone."""
    loaded = {step.checkpoint for step in root.load_path.steps if step.do in ("start", "update")}
    bare = sorted(name for name in loaded & root.checkpoints.keys() if name not in given)
    if bare and loaded & given.keys():
        yield (
            f"checkpoints.{bare[0]}.draft is not set, but that of {min(loaded & given.keys())} is, and load_path.steps "
            "load both: an engine with a drafter needs a draft for each."
        )


def _saved(root: Root, given: dict[str, str]) -> Problems:
    """What an engine writes for a later start is its target alone."""
    inside = root.backend.engine == "vllm" and drafts_inside(root.backend)
    for index, step in enumerate(root.load_path.steps):
        if step.do != "start" or step.via not in SAVED or not (inside or step.checkpoint in given):
            continue
        named = f"checkpoints.{step.checkpoint}.draft is {given.get(step.checkpoint)!r}"
        if inside:
            named = f"backend.options.{OPTION}.method is one whose draft lies in its target's checkpoint"
        yield (
            f"load_path.steps[{index}] starts via {step.via}, from files that vLLM writes of its target alone, and "
            f"{named}: start via safetensors, or leave the draft and backend.options.{OPTION} out."
        )
