"""Recipes that run with and without workers."""

from dataclasses import replace
from typing import Any

from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from world import through


def alone(made: Recipe) -> Recipe:
    """The recipe in one process."""
    return replace(made, engine=EngineSpec(name=made.engine.name, workers=1))


def played(made: Recipe) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The parts of a run, its final state, and its ledger."""
    parts = assemble(made)
    try:
        return parts, through(parts, made.rounds), list(parts.ledger.rows())
    finally:
        parts.engine.close()
