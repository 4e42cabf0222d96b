"""Gives every audited tensor its class, from the engine's rules, with the reason that people are shown."""

import re
from collections.abc import Callable, Container, Sequence
from fnmatch import translate

from collectors.walk import Found
from workloads.engines.protocol import Rule

RUNTIME = "runtime"

Classifier = Callable[[Found], tuple[str, str]]


def classifier(rules: Sequence[Rule], runtime_storages: Container[int]) -> Classifier:
    """Maps a tensor to (class, reason). The first rule that matches its path, or another of its paths, wins;
    then storages that the engine declares as runtime state; then registered parameters are weights."""
    compiled = [(re.compile(translate(rule.pattern)).match, rule) for rule in rules]

    def classify(found: Found) -> tuple[str, str]:
        paths = (found.path, *found.aliases)
        for match, rule in compiled:
            if any(map(match, paths)):
                return rule.tensor_class, rule.reason
        if found.storage and found.storage in runtime_storages:
            return RUNTIME, "the engine declares its storage as runtime state"
        if found.origin == "parameter":
            return "weight", "registered parameter"
        return "unclassified", "no rule of the engine names it"

    return classify
