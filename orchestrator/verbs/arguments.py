"""The command line of verbs about runs that are there: their names, store=PATH, and flags of the verb's own."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import NoReturn

from orchestrator.config.compose import parse_override
from orchestrator.store import Store


class UsageError(Exception):
    """The command line is not one of ours. The message is a full sentence."""


class Parser(ArgumentParser):
    """Of one verb. Its mistakes are sentences."""

    def __init__(self, verb: str, words: str, description: str) -> None:
        super().__init__(
            prog=f"python -m orchestrator {verb}",
            usage=f"python -m orchestrator {verb} {words}".rstrip() + " [store=PATH]",
            description=description,
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.verb = verb

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ').rstrip('.')}; see {self.verb} --help.")

    def read(self, arguments: Sequence[str]) -> tuple[Namespace, Store, list[str]]:
        """Flags, the store, and the words beside them. Raises UsageError; ends the program after --help."""
        options, words = self.parse_known_args(arguments)
        unknown = [word for word in words if word.startswith("-")]
        if unknown:
            raise UsageError(f"{unknown[0]} is not an option of {self.verb}; see {self.verb} --help.")
        return options, *store_and_names(self.verb, words)


def store_and_names(verb: str, words: Sequence[str]) -> tuple[Store, list[str]]:
    """The store that store=PATH names (default `runs`), and the other words. Raises UsageError."""
    given = [parse_override(word) for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if unknown := sorted({override.key_or_group for override in given} - {"store"}):
        raise UsageError(
            f"{verb} knows only store=PATH, not {unknown[0]}=: a run keeps the config it was made with."
        )
    if not_paths := [o.input_line for o in given if o.is_sweep_override() or o.value() in (None, "")]:
        raise UsageError(f"{not_paths[0]} names no single folder: give one, in quotes where it has a comma.")
    store = Store(str(given[-1].value()) if given else "runs")
    if not store.experiments.is_dir():
        raise UsageError(f"There is no run store at {store.root}: set store=PATH.")
    return store, names


def one_name(verb: str, store: Store, names: Sequence[str]) -> str:
    """Raises UsageError where there is not exactly one."""
    if len(names) != 1:
        raise UsageError(
            f"{verb} needs the name of one run, such as the folder's in {store.experiments}; `runs` lists them."
        )
    return names[0]
