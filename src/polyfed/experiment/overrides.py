"""The sections of a recipe, where a key belongs, and `--set section.key=value`, which writes it from outside."""

import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.settings import CheckpointSpec, EngineSpec
from polyfed.federation.network import Network
from polyfed.model import ModelSpec
from polyfed.training.optimisers import ServerOptimiser, Train

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
    "egress": (),
    "engine": EngineSpec,
    "checkpoint": CheckpointSpec,
    "tracking": ("name",),
}
"""Sections of a recipe: whose options they hold, or which ones always; `seed` and `rounds` stand before them."""


def set_options(overrides: Sequence[str]) -> list[str]:
    """Overrides as they stand on a command line."""
    return [word for override in overrides for word in ("--set", override)]


def called(path: Path, overrides: Sequence[str]) -> str:
    """What errors call a recipe: its path and what was written into it from outside, either may be at fault."""
    return shlex.join(["recipe", str(path), *set_options(overrides)])


def refuse_unknown(key: str) -> None:
    """Refuse a word that is no section; one that is an option of some is sent there.

    Raises:
        RecipeError: with what is meant or allowed.
    """
    if key in SECTIONS:
        return
    if homes := [f"{section}.{key}" for section, options in SECTIONS.items() if key in _names(options)]:
        raise RecipeError(f"'{key}' belongs in a section: write {' or '.join(homes)}")
    raise RecipeError(f"no section or key '{key}'; {did_you_mean(key, (*SECTIONS, 'seed', 'rounds'))}")


def _names(options: type | tuple[str, ...]) -> Collection[str]:
    return options if isinstance(options, tuple) else {f.name for f in fields(options)}


def apply(table: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into a recipe's table; the value is TOML, or a bare word.

    Raises:
        RecipeError: it does not say where, or speaks of a section as of a value, or its value is neither.
    """
    path, _, text = override.partition("=")
    names, value = _path(path, override), _value(text, override)
    # another data set or algorithm comes with keys of its own; elsewhere what is not named should stay as it is
    if names[0] in SECTIONS and len(names) == 1 and not (isinstance(value, dict) and "name" in value):
        raise RecipeError(
            f"--set {override}: '{names[0]}' is a section; write its keys one by one, --set {names[0]}.key=value"
        )
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"--set {override}: '{name}' is a value, not a section")
    table[names[-1]] = value


def _path(text: str, override: str) -> list[str]:
    """The names of a dotted key, which may be quoted."""
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
        raise RecipeError(f"--set {override}: write section.key=value, as in --set train.lr=0.1")
    return names


def _value(text: str, override: str) -> Any:
    """A value in TOML; else a word that needs no quotes, or a number as people write it (.5)."""
    text = text.strip()
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise RecipeError(
                f"--set {override}: {text} is not TOML ({error}). Words inside of lists and tables need quotes, and so "
                'do the quotes from the shell: --set \'section.key=["a", "b"]\''
            ) from None
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else text
    if len(found) > 1:
        raise RecipeError(f"--set {override}: one key and one value; repeat --set for more")
    return found["value"]
