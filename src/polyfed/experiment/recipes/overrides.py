"""Overrides of a recipe: `--set section.key=value` on the command line."""

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.experiment.recipes.sections import SECTIONS


def set_options(overrides: Sequence[str]) -> list[str]:
    """The overrides as arguments of a command line."""
    return [word for override in overrides for word in ("--set", override)]


def called(path: Path, overrides: Sequence[str]) -> str:
    """Return the name of a recipe in error messages: its path and its overrides, as the mistake may be in either."""
    return shlex.join(["recipe", str(path), *set_options(overrides)])


def apply(table: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into a recipe's table, or remove a section with `section={}`.

    Args:
        table: the recipe, which is changed in place.
        override: the override. Its value is TOML, or a word without quotes.

    Raises:
        RecipeError: the override names no key or assigns a value to a section, or its value is not valid TOML.
    """
    path, _, text = override.partition("=")
    names, value = _path(path, override), _value(text, override)
    if names[0] in SECTIONS and len(names) == 1 and value == {}:
        table.pop(names[0], None)
        return
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
        result = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise RecipeError(
                f"--set {override}: {text} is not TOML ({error}). Words inside lists and tables need quotes, and the "
                'shell needs quotes around the whole: --set \'section.key=["a", "b"]\''
            ) from None
        return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else text
    if len(result) > 1:
        raise RecipeError(f"--set {override}: give one key and one value; repeat --set for more")
    return result["value"]
