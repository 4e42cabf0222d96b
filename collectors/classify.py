"""Gives every audited tensor its class, from the engine's rules, with the reason that people are shown."""

import re
from collections.abc import Callable, Container, Sequence
from fnmatch import translate
from typing import NamedTuple

from collectors.walk import Found
from workloads.engines.protocol import Rule

RUNTIME = "runtime"


class Class(NamedTuple):
    """One of weight, derived, constant, handle, runtime, unclassified; why; `Rule.may_move`."""

    name: str
    reason: str
    may_move: bool = False


Classifier = Callable[[Found], Class]


def classifier(rules: Sequence[Rule], runtime_storages: Container[int]) -> Classifier:
    """Maps a tensor to its class. The first rule that matches its path, or another of its paths, wins;
    then storages that the engine declares as runtime state; then registered parameters are weights."""
    compiled = [(re.compile(translate(rule.pattern)).match, rule) for rule in rules]

    def classify(found: Found) -> Class:
        paths = (found.path, *found.aliases)
        for match, rule in compiled:
            if any(map(match, paths)):
                return Class(rule.tensor_class, rule.reason, rule.may_move)
        if found.storage and found.storage in runtime_storages:
            return Class(RUNTIME, "the engine declares its storage as runtime state")
        if found.origin == "parameter":
            return Class("weight", "registered parameter")
        return Class("unclassified", "no rule of the engine names it")

    return classify
