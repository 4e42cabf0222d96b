"""One choice of groups, composed once; gives the config of every cell that differs from it in values only."""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from orchestrator.config.messages import explain, known_keys, unknown_key
from orchestrator.config.schema import Root


class Base:
    """config: typed by the schema, without Hydra's own node. choices: option by group."""

    def __init__(self, config: DictConfig, choices: dict[str, str]) -> None:
        self.choices = choices
        self._config = config
        self._linked = {name for name in map(str, config) if _looks_outside(config, name)}
        self._root = _complete(config)

    def with_values(self, overrides: Sequence[Override]) -> Root | list[str]:
        """The config with these values, or everything that is wrong with them."""
        sections = {override.key_or_group.partition(".")[0] for override in overrides}
        with _restored(self._config, sections):
            problems = [problem for override in overrides for problem in _apply(override, self._config)]
            if problems:
                return problems
            try:
                if self._root is None:
                    return _whole(self._config)
                # Sections that this cell leaves alone, and that look at no other, are shared between cells.
                changed = {name: _object(self._config, name) for name in sections | self._linked}
            except OmegaConfBaseException as error:
                return [explain(error)]
        return replace(self._root, **changed)


def _complete(config: DictConfig) -> Root | None:
    """None when the config alone lacks a value, which a cell may give."""
    try:
        return _whole(config)
    except OmegaConfBaseException:
        return None


def _whole(config: DictConfig) -> Root:
    made = OmegaConf.to_object(config)
    assert isinstance(made, Root), "the first entry of the defaults list of config.yaml is the schema"
    return made


def _looks_outside(config: DictConfig, section: str) -> bool:
    """Whether a value in the section is an interpolation of anything but the section itself."""
    node = config._get_node(section)
    raw = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    return re.search(rf"\$\{{(?!{re.escape(section)}\.)", repr(raw)) is not None


def _object(config: DictConfig, section: str) -> Any:
    value = config[section]
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


@contextmanager
def _restored(config: DictConfig, sections: Iterable[str]) -> Iterator[None]:
    """Puts the top-level `sections` back afterwards: copying only these is much cheaper than the whole."""
    saved = {name: copy.deepcopy(config._get_node(name)) for name in sections if name in config}
    try:
        yield
    finally:
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for name, node in saved.items():
                config[name] = node


def _apply(override: Override, config: DictConfig) -> list[str]:
    """Sets one value; returns what is wrong with it."""
    parent, _, key = override.key_or_group.rpartition(".")
    try:
        known = known_keys(config, parent)
        if known and key not in known:  # Hydra lets `+key=value` add keys even to typed nodes
            return [unknown_key(override.key_or_group, known)]
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
    except (HydraException, OmegaConfBaseException) as error:
        return [explain(error, override.input_line)]
    return []
