"""The row of laws for an algorithm of the user's own: `pytest tests/laws --own module:Class --own-recipe FILE`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from laws.rows import Row
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import PolyfedError, RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.core.registry import name_of
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.parts import algorithm_of, build
from polyfed.experiment.recipes.recipe import read_table
from polyfed.experiment.recipes.sections import PARTS
from polyfed.privacy.egress.policy import Policy

MODALITIES = ("a", "b")
"""The modalities of the laws' small federation."""

READ = ("algorithm", "egress", "clients", *PARTS.values())
"""The sections of the recipe that the laws use; data, model and engine are those of the laws."""


def row_from(cls: type[Algorithm], path: Path) -> Row:
    """Options, policy and clients for the laws, from the sections `READ` of a recipe.

    The laws bring data of their own, with the modalities `a` and `b`. So rows of [egress] are for these, or for `*`.

    Raises:
        pytest.UsageError: the recipe cannot be read or does not fit the laws.
    """
    try:
        return _row(cls, {name: entry for name, entry in read_table(path).items() if name in READ})
    except PolyfedError as error:
        raise pytest.UsageError(f"--own-recipe {path}: {error}") from None


def _row(cls: type[Algorithm], sections: dict[str, Any]) -> Row:
    name = name_of(cls(), {})
    named = sections.setdefault("algorithm", {}).setdefault("name", name)
    if named.rpartition(":")[2] != cls.__name__:
        raise RecipeError(
            f"[algorithm] name = '{named}' is not the class that --own names; {did_you_mean(named, [name])}"
        )
    sections["algorithm"]["name"] = name
    clients: ClientsSpec = build("[clients]", ClientsSpec, sections.get("clients", {}))
    problems = Problems()
    made = algorithm_of(sections, clients, problems)
    problems.attempt(lambda: Policy.parse(sections.get("egress", {}), MODALITIES))
    problems.raise_all()
    assert made is not None
    given = {key for key in sections["algorithm"] if key != "name"}
    given |= {part for part, section in PARTS.items() if section in sections}
    options = {f.name: getattr(made, f.name) for f in fields(cls) if f.name in given}
    return Row(options, egress=sections.get("egress", {}), clients=sections.get("clients", {}))
