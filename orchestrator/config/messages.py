"""Hydra's and YAML's exceptions as one full sentence each: key, value, what would be valid."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


def explain(error: Exception, override: str | None = None) -> str:
    """`override`: the argument that caused it."""
    sentence = _sentence(error, override)
    file = re.match(r"In '([^']+)'", str(error))
    return f"{file[1]}.yaml: {sentence}" if file else sentence


def _sentence(error: Exception, override: str | None) -> str:
    cause = _cause(error)
    if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark is not None:
        mark = cause.problem_mark
        return f"{mark.name}:{mark.line + 1}: this is not YAML: {cause.problem}."
    if isinstance(cause, OverrideParseException):
        return f"{override} cannot be read as key=value: quote the value, for example 'key=\"a value\"'."
    if isinstance(cause, MissingConfigException):
        return " ".join(str(cause).split("Config search path")[0].split()) + "."
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and is_dataclass(cause.object_type):
        return unknown_key(str(cause.full_key or override), [f.name for f in fields(cause.object_type)])
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and override is not None:
        return f"{override}: there is no {cause.full_key} yet; to add it, write +{override.lstrip('+')}."
    if isinstance(cause, OmegaConfBaseException):
        key = override or cause.full_key or "the config"
        return f"{key}: {str(cause).splitlines()[0]}."
    text = " ".join(str(error).split())
    return text if text.endswith(".") else text + "."


def unknown_key(full: str, valid: Sequence[str]) -> str:
    parent, _, key = full.rpartition(".")
    close = difflib.get_close_matches(key, valid, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    place = f"keys of {parent}" if parent else "top-level keys"
    return f"{full} is not a key.{hint} The {place} are: {', '.join(sorted(valid))}."


def known_keys(config: DictConfig, parent: str) -> list[str]:
    """The keys of the typed node at `parent` ("" is the root); empty where any key may stand."""
    node = OmegaConf.select(config, parent) if parent else config
    kind = OmegaConf.get_type(node) if node is not None else None
    return [f.name for f in fields(kind)] if kind is not None and is_dataclass(kind) else []


def _cause(error: BaseException) -> BaseException:
    """What Hydra wrapped: OmegaConf's or YAML's own exception says more."""
    inner = error.__cause__ or error.__context__
    if isinstance(error, OverrideParseException) or inner is None or not isinstance(error, HydraException):
        return error
    return _cause(inner)
