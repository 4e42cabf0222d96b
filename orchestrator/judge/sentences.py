"""Says a finding in words that a person who loads weights understands, with its evidence."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.judge.diagnose import Cause
    from orchestrator.judge.groups import Group


def sentence(group: "Group") -> str:
    """What is wrong, why, and one example with rank, path and fingerprints."""
    if group.violation is not None:
        v = group.violation
        how = f" ({v.via})" if v.via else ""
        places = sorted({path for _, path in group.members}, reverse=True)  # target before draft
        roots = " and ".join(f"`{root}`" for root in dict.fromkeys(path.split(":")[0] for path in places))
        text = f"Load {v.load}{how} of {roots}, {rank_list(group.ranks)}: {v.text}{_modules(places)}."
        return f"{text} {_MECHANISM[group.code]}"
    text = _WHAT[group.code](group)
    return f"{text} {example(group.examples[0])}" if group.code in _WITH_EXAMPLE else text


def rank_list(ranks: Iterable[int], limit: int = 6) -> str:
    """`rank 3`, `ranks 0, 4, 8`, `ranks 0-15`."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"ranks {numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:limit]))
    return f"ranks {shown}" + (f" and {len(numbers) - limit} more" if len(numbers) > limit else "")


def ranks_text(count: int) -> str:
    """`1 rank`, `16 ranks`."""
    return f"{count} rank{'s' if count > 1 else ''}"


def example(cause: "Cause") -> str:
    """`E.g. rank 3, target:….weight [experts.5.w1]: now 1a2b3c4d, before 1a2b3c4d, expected 9f8e7d6c; why.`"""
    is_whole = cause.part.endswith(cause.path.rpartition(":")[2])
    part = f" [{cause.part}]" if cause.part and not is_whole else ""
    prints = [("now", cause.now), ("before", cause.before), ("expected", cause.expected)]
    shown = ", ".join(f"{name} {fp[:8]}" for name, fp in prints if fp)
    facts = "; ".join(text for text in (shown, cause.note) if text)
    return f"E.g. rank {cause.rank}, `{cause.path}`{part}" + (f": {facts}." if facts else ".")


def _modules(places: Sequence[str]) -> str:
    modules = [place for place in places if not place.endswith(":")]
    if not modules:
        return ""
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return f": `{modules[0]}`{more}"


def _who(group: "Group") -> str:
    """`12 tensors in `target:model.layers.*.self_attn`, ranks 0-3`."""
    paths = len({path for _, path in group.members})
    noun = "tensor" if paths == 1 else "tensors"
    more = f" and {group.groups - 1} other module groups" if group.groups > 1 else ""
    return f"{paths} {noun} in `{group.name}`{more} ({rank_list(group.ranks)})"


def _verb(group: "Group", one: str, many: str) -> str:
    return one if len({path for _, path in group.members}) == 1 else many


def _moved(group: "Group") -> str:
    return (
        f"{_who(group)} moved to another address while the engine ran: a captured graph or a kernel object that "
        "holds the old address goes on reading memory that is no longer refreshed."
    )


def _stale(group: "Group") -> str:
    verb = _verb(group, "still holds its value", "still hold their values")
    return (
        f"{_who(group)} {verb} from before the update: the update did not reach {_verb(group, 'it', 'them')}."
    )


def _unclassified(group: "Group") -> str:
    if group.name.startswith("unreachable:"):
        return (
            f"A forward pass read memory that no walk of the modules reaches ({rank_list(group.ranks)}): a captured "
            "graph, a closure or a kernel object holds it, and what is in it is not audited."
        )
    which = _verb(
        group, "has no class, so nobody knows whether its", "have no class, so nobody knows whether their"
    )
    return f"{_who(group)} {which} bytes matter: add a rule that says what kind of state this is."


def _replicas(group: "Group") -> str:
    return (
        f"{_who(group)}: data-parallel replicas disagree. Ranks that hold the same shard must hold the same bytes, "
        "and this rank is not with the majority."
    )


def _invalid_ids(group: "Group") -> str:
    layers = len({path for _, path in group.members})
    return (
        f"Tokens chose what is no expert in {layers} layer{'s' if layers > 1 else ''} of `{group.name}` "
        f"({rank_list(group.ranks)}): such ids are left out like masked ones, so that tokens silently miss experts. "
        "What routes them, or numbers experts anew, is wrong."
    )


_WHAT: dict[str, Callable[["Group"], str]] = {
    "processed_twice": lambda g: (
        f"{_who(g)} {_verb(g, 'was', 'were')} converted once more than the kernel expects: post-processing changes in "
        "place what is in the kernel's form already, or what the kernel converts itself."
    ),
    "numeric_cast": lambda g: (
        f"Scales of {_who(g)} were converted as numbers instead of copied as bytes: the E8M0 exponent 2^k became "
        "the integer 2^k, which is 0 for every scale below one."
    ),
    "wrong_padding_value": lambda g: (
        f"The padding of {_who(g)} was filled with another value than the parameter was created with."
    ),
    "overwritten_by_padding": lambda g: (
        f"Parts of {_who(g)} were overwritten with the value of its padding: regions that an earlier load had recorded "
        "as padding hold weights now."
    ),
    "stale_padding": lambda g: (
        f"The padding of {_who(g)} was not filled before post-processing and keeps what the memory held; the "
        "kernel reads it as weights."
    ),
    "found_elsewhere": lambda g: f"{_who(g)} {_verb(g, 'holds', 'hold')} bytes that belong in another place.",
    "wrong_layout": lambda g: (
        f"{_who(g)} {_verb(g, 'holds', 'hold')} the right bytes in the wrong order: a layout transformation was "
        "skipped, applied twice, or is not the one that the kernel reads."
    ),
    "uninitialised": lambda g: (
        f"{_who(g)} {_verb(g, 'holds', 'hold')} bytes that the load did not write: what the memory held before, or "
        "the result of work in no fixed order."
    ),
    "stale": _stale,
    "moved": _moved,
    "alias_broken": lambda g: f"{_who(g)} no longer {_verb(g, 'shares', 'share')} memory with its other name.",
    "dtype": lambda g: f"{_who(g)} {_verb(g, 'has', 'have')} another element type than expected.",
    "layout": lambda g: f"{_who(g)} {_verb(g, 'has', 'have')} another shape or stride than expected.",
    "unheld": lambda g: (
        f"{_who(g)} {_verb(g, 'is', 'are')} on no rank: the pipeline stages leave out layers between them, or load not "
        "all of their own."
    ),
    "missing": lambda g: f"{_who(g)} {_verb(g, 'is', 'are')} not there, and should be.",
    "extra": lambda g: (
        f"{_who(g)} {_verb(g, 'is', 'are')} there, and {_verb(g, 'is', 'are')} not in the state compared with."
    ),
    "vacuous": lambda g: f"{_who(g)} {_verb(g, 'has', 'have')} no bytes that could be compared.",
    "unclassified": _unclassified,
    "invalid_ids": _invalid_ids,
    "replicas_differ": _replicas,
    "checkpoint_mismatch": lambda g: (
        f"{_who(g)} {_verb(g, 'is', 'are')} not what the checkpoint holds, and {_verb(g, 'matches', 'match')} no "
        "known failure: not the old value, not a cast, not another tensor's bytes."
    ),
    "wrong_derived": lambda g: (
        f"{_who(g)} {_verb(g, 'is', 'are')} not what a fresh start derives from the same weights, and those are right: "
        "it was rebuilt with another setting or another method."
    ),
    "differs": lambda g: f"{_who(g)} {_verb(g, 'differs', 'differ')}, for no reason that the records show.",
    "not_changed": lambda g: f"{_who(g)} did not change in an update that changes every weight.",
    "stale_cache": lambda g: g.examples[0].note,
    "generation_differs": lambda g: g.examples[0].note,
}  # fmt: skip

_WITH_EXAMPLE = frozenset(_WHAT) - {"stale_cache", "generation_differs"}

#: What a broken lifecycle rule means for the weights.
_MECHANISM = {
    "finalised_late": (
        "Until that forward the weights were not in the form that the kernel reads, and a graph captured earlier "
        "holds other storage."
    ),
    "read_foreign": (
        "Shards of other ranks are read, or copied, before they are dropped: every rank pays time and memory for the "
        "whole checkpoint, and no result shows it."
    ),
    "processed_twice": "Post-processing is not idempotent: what is already in the kernel's form is converted again.",
    "skipped_hook": "What only that step builds or refreshes is missing or is still that of the load before.",
    "stale_padding": "The kernel reads the padding as weights, and it holds what the memory held before.",
    "stale": "Its weights are those of the load before.",
}
