"""The sections of a recipe, where a key belongs, and `--set section.key=value`, which writes it from outside."""

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from polyfed.data import ClientsSpec
from polyfed.errors import RecipeError, did_you_mean
from polyfed.evaluation import Evaluation
from polyfed.model import ModelSpec
from polyfed.network import Network
from polyfed.optim import ServerOptimiser, Train
from polyfed.settings import CheckpointSpec, EngineSpec

SECTIONS: Mapping[str, type | None] = {
    "data": None,
    "clients": ClientsSpec,
    "model": ModelSpec,
    "train": Train,
    "algorithm": None,
    "selection": None,
    "server": ServerOptimiser,
    "network": Network,
    "egress": None,
    "evaluate": Evaluation,
    "engine": EngineSpec,
    "checkpoint": CheckpointSpec,
    "tracking": None,
}
"""Sections of a recipe, and whose options they hold where that never changes; `seed` and `rounds` stand before them."""


def called(path: Path, overrides: Sequence[str]) -> str:
    """What errors call a recipe: its path and what was written into it from outside, either may be at fault."""
    return shlex.join(["recipe", str(path), *(word for override in overrides for word in ("--set", override))])


def refuse_unknown(key: str) -> None:
    """Refuse a word that is no section; one that is an option of some is sent there.

    Raises:
        RecipeError: with what is meant or allowed.
    """
    if key in SECTIONS:
        return
    homes = [f"{name}.{key}" for name, cls in SECTIONS.items() if cls and key in {f.name for f in fields(cls)}]
    if homes:
        raise RecipeError(f"'{key}' belongs in a section: write {' or '.join(homes)}")
    raise RecipeError(f"no section or key '{key}'; {did_you_mean(key, (*SECTIONS, 'seed', 'rounds'))}")


def apply(table: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into a recipe's table; the value is TOML, or a bare word.

    Raises:
        RecipeError: it does not say where, or speaks of a section as of a value.
    """
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"--set {override}: write section.key=value, as in --set train.lr=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word
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
