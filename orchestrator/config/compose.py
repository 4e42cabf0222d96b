"""From a command line to composed configs: Hydra's grammar, groups and basic sweeper, nothing run or written.

Hydra's own multirun composes every job twice, creates folders and stops at the first bad job. Here each
distinct choice of groups is composed once by Hydra's loader, and every job's values are applied to a copy by
the same function that Hydra uses, so all problems of all jobs come back together.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.messages import explain
from orchestrator.config.overlay import Base
from orchestrator.config.schema import Root

CONFIG_NAME = "config"
GROUPS = ("row", "model", "parallelism", "backend", "load_path", "cluster")  # whose choices label a cell


@dataclass
class Composed:
    """One cell's config, or what is wrong with it. `labels` tell it from its neighbours in a table."""

    overrides: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)
    root: Root | None = None
    problems: list[str] = field(default_factory=list)


class ConfigError(Exception):
    """The command line or a file of conf/ is wrong, before single cells can be told apart."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def conf_dir() -> Path:
    """conf/ lies inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def group_options() -> dict[str, list[str]]:
    """Options by group, for `--help` and messages."""
    root = conf_dir()
    return {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(root.iterdir())
        if group.is_dir() and not group.name.startswith(("_", "."))
    }


def parse_override(text: str) -> Override:
    """One word of a command line, by Hydra's grammar. Raises ConfigError."""
    try:
        return _parse(text)
    except HydraException as error:
        raise ConfigError([explain(error, text)]) from error


def _parse(text: str) -> Override:
    return OverridesParser.create().parse_overrides([text])[0]


def compose(
    arguments: Sequence[str], multirun: bool = False, config_dir: str | None = None
) -> list[Composed]:
    """Every cell that the overrides `arguments` describe.

    Raises ConfigError with all problems of the command line itself; problems of single cells are in them.
    """
    return _composer(config_dir).compose(arguments, multirun)


class Composer:
    """Composes any number of command lines, each choice of groups once.

    config_dir: a folder of one's own, searched beside conf/.
    """

    def __init__(self, config_dir: str | None = None) -> None:
        version.setbase("1.3")
        setup_globals()
        JobRuntime.instance().set("name", "orchestrator")
        path = create_config_search_path(f"file://{conf_dir()}")
        if config_dir is not None:
            own = Path(config_dir).resolve()
            if not own.is_dir():
                raise ConfigError([f"--config-dir {config_dir} is not a folder."])
            path.prepend("command-line", f"file://{own}", SearchPathQuery(provider="schema"))
        self._loader = ConfigLoaderImpl(path)
        self._is_group = functools.cache(self._loader.repository.group_exists)
        self._options = functools.cache(self._loader.get_group_options)
        self._parse = functools.cache(_parse)
        self._hydra = functools.cache(self._hydra_node)
        self._base = functools.cache(self._compose_groups)

    def compose(self, arguments: Sequence[str], multirun: bool = False) -> list[Composed]:
        overrides = self._parse_all(arguments)
        if hydra_lines := [o.input_line for o in overrides if o.is_hydra_override()]:
            raise ConfigError(
                [f"{line}: set Hydra's own keys in an experiment file." for line in hydra_lines]
            )
        fixed = [o for o in overrides if not o.is_sweep_override() and self._is_group(o.key_or_group)]
        hydra = self._hydra(tuple(o.input_line or "" for o in fixed))
        if multirun or hydra.mode == RunMode.MULTIRUN:
            overrides = [*self._parse_all(_sweeper_params(hydra)), *overrides]
        elif swept := [o.input_line for o in overrides if o.is_sweep_override()]:
            raise ConfigError(
                [
                    f"{line} names several values: add -m for one cell per value, or quote it."
                    for line in swept
                ]
            )
        [jobs] = BasicSweeper.split_arguments(overrides, None)
        swept_keys = {o.key_or_group for o in overrides if o.is_sweep_override()}
        return [self._cell(tuple(job), swept_keys) for job in jobs]

    def _parse_all(self, arguments: Sequence[str]) -> list[Override]:
        """Parsed, and every group option known."""
        parsed, problems = [], []
        for text in arguments:
            try:
                override = self._parse(text)
            except HydraException as error:
                problems.append(explain(error, text))
                continue
            parsed.append(override)
            problems += self._unknown_options(override)
        if problems:
            raise ConfigError(problems)
        return parsed

    def _unknown_options(self, override: Override) -> list[str]:
        group = override.key_or_group
        if override.is_delete() or not self._is_group(group):
            return []
        options = self._options(group)
        chosen = (
            list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
        )
        known = ", ".join(options)
        return [
            f"{group}={value} is not an option; {group} is one of: {known}."
            for value in chosen
            if isinstance(value, str) and value.strip("'\"") not in options
        ]

    def _hydra_node(self, choices: tuple[str, ...]) -> Any:
        """Hydra's own part of the config, with what an experiment file sets in it."""
        try:
            return self._load(choices, RunMode.MULTIRUN).hydra
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError([explain(error)]) from error

    def _load(self, overrides: Sequence[str], mode: RunMode) -> DictConfig:
        return self._loader.load_configuration(CONFIG_NAME, list(overrides), mode)

    def _compose_groups(self, choices: tuple[str, ...]) -> Base:
        config = self._load(choices, RunMode.RUN)
        made = {name: str(option) for name, option in config.hydra.runtime.choices.items()}
        with open_dict(config):
            del config["hydra"]
        return Base(config, made)

    def _cell(self, job: tuple[str, ...], swept_keys: set[str]) -> Composed:
        cell = Composed(job)
        overrides = [self._parse(text) for text in job]
        values = [override for override in overrides if not self._selects(override)]
        try:
            base = self._base(tuple(t for t, o in zip(job, overrides, strict=True) if self._selects(o)))
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            cell.problems.append(explain(error))
            return cell
        cell.labels = {group: base.choices[group] for group in GROUPS if group in base.choices}
        cell.labels |= {
            o.key_or_group: o.get_value_element_as_str() for o in values if o.key_or_group in swept_keys
        }
        made = base.with_values(values)
        if isinstance(made, Root):
            cell.root = made
        else:
            cell.problems += made
        return cell

    def _selects(self, override: Override) -> bool:
        """Whether it selects an option of a group, and does not set a value."""
        return self._is_group(override.key_or_group) and not isinstance(override.value(), dict)


_composer = functools.cache(Composer)  # files of conf/ do not change while a process plans


def _sweeper_params(hydra: Any) -> list[str]:
    if not str(hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper"):
        raise ConfigError(
            [
                f"hydra.sweeper is {hydra.sweeper.get('_target_')}; cells are planned by Hydra's basic sweeper only."
            ]
        )
    return [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
