"""The sections of a recipe, and overrides: `--set section.key=value` on the command line."""

import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.vocabulary import advice_for
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.settings import CheckpointSpec, EngineSpec, StopSpec
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.attack import Attack
from polyfed.federation.network import Network
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.model import ModelSpec
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.limits import Limits
from polyfed.training.optimisers import Train

SECTIONS: Mapping[str, type | tuple[str, ...]] = {
    "data": ("name",),
    "clients": ClientsSpec,
    "model": ModelSpec,
    "train": Train,
    "algorithm": ("name",),
    "selection": ("name",),
    "server": ServerOptimiser,
    "evaluate": Evaluation,
    "network": Network,
    "attack": Attack,
    "secure_aggregation": SecureAggregation,
    "privacy": Privacy,
    "egress": (),
    "limits": Limits,
    "engine": EngineSpec,
    "checkpoint": CheckpointSpec,
    "stop": StopSpec,
    "tracking": ("name",),
    "task": ("name",),
}
"""A map from each section to the dataclass whose fields are its keys, or to the keys that it has for every class.
`seed` and `rounds` come before the sections."""


def set_options(overrides: Sequence[str]) -> list[str]:
    """The overrides as arguments of a command line."""
    return [word for override in overrides for word in ("--set", override)]


def called(path: Path, overrides: Sequence[str]) -> str:
    """Return the name of a recipe in error messages: its path and its overrides, as the mistake may be in either."""
    return shlex.join(["recipe", str(path), *set_options(overrides)])


def refuse_unknown(key: str) -> None:
    """Refuse a top-level key that is not a section.

    Raises:
        RecipeError: the key is not a section. The text lists the sections that have an option of this name, or else the
            nearest section.
    """
    if key in SECTIONS:
        return
    if sections := homes(key):
        places = " or ".join(f"{section}.{key}" for section in sections)
        raise RecipeError(f"'{key}' belongs in a section: write {places}", (key,))
    if meant := advice_for(key):
        raise RecipeError(f"no section or key '{key}'; {meant} Sections: {', '.join(SECTIONS)}", (key,))
    raise RecipeError(f"no section or key '{key}'; {did_you_mean(key, (*SECTIONS, 'seed', 'rounds'))}", (key,))


def homes(key: str) -> list[str]:
    """The sections that have an option of this name."""
    return [section for section, options in SECTIONS.items() if key in _names(options)]


def _names(options: type | tuple[str, ...]) -> Collection[str]:
    return options if isinstance(options, tuple) else {f.name for f in fields(options)}


def apply(table: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into a recipe's table.

    Args:
        table: the recipe, which is changed in place.
        override: the override. Its value is TOML, or a word without quotes.

    Raises:
        RecipeError: the override names no key or assigns a value to a section, or its value is not valid TOML.
    """
    path, _, text = override.partition("=")
    names, value = _path(path, override), _value(text, override)
    if names[0] in SECTIONS and len(names) == 1 and not (isinstance(value, dict) and "name" in value):
        raise RecipeError(
            f"--set {override}: '{names[0]}' is a section; set its keys one by one, as in --set {names[0]}.key=value"
        )
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {override}: '{name}' is a value, not a section")
    table[names[-1]] = value


def _path(text: str, override: str) -> list[str]:
    """Return the parts of a dotted key. A part may be quoted."""
    found: Any
    try:
        found = tomllib.loads(f"{text.strip()} = 0") if "=" in override else {}
    except tomllib.TOMLDecodeError:
        found = {}
    names: list[str] = []
    while isinstance(found, dict) and len(found) == 1:
        ((name, found),) = found.items()
        names.append(name)
    if not names or found != 0:
        raise RecipeError(
            f"--set {override}: write section.key=value, as in --set train.lr=0.1. A key with other characters than "
            "letters, digits, - and _ needs quotes, and the shell needs quotes around the whole: "
            '--set \'egress."*".server=["parameters"]\''
        )
    return names


def _value(text: str, override: str) -> Any:
    """Return an override's value: TOML if it is valid TOML, else a number if it is one (such as `.5`), else a word."""
    text = text.strip()
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise RecipeError(
                f"--set {override}: {text} is not TOML ({error}). Words inside lists and tables need quotes, and the "
                'shell needs quotes around the whole: --set \'section.key=["a", "b"]\''
            ) from None
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else text
    if len(found) > 1:
        raise RecipeError(f"--set {override}: give one key and one value; repeat --set for more")
    return found["value"]
