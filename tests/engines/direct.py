"""A recipe played through the ClientApp in this process: packets, Flower's bytes, file-backed local state; no Ray."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from polyfed.deploy.handlers import Simulated
from polyfed.deploy.server.server import engine_by
from polyfed.engines.flower import DirectGrid, GridTransport, client_app
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble, population_of


def grid_of(recipe: Recipe, folder: Path, wrap: Any = lambda handler: handler) -> DirectGrid:
    """A grid whose nodes are the recipe's clients; `wrap` may change what a handler answers."""
    return DirectGrid(client_app(wrap(Simulated(recipe, folder))), population_of(recipe).num_clients)


def joined(recipe: Recipe, grid: DirectGrid, run: str = "run") -> Assembly:
    """The server's parts, its clients enrolled."""
    transport = GridTransport(grid)
    answers = transport.enrol(grid.clients, 30)
    assert len(answers) == grid.clients
    return assemble(recipe, run, population=population_of(recipe), engine=engine_by(transport, recipe))


def played(recipe: Recipe, parts: Assembly) -> tuple[Any, list[dict[str, Any]]]:
    """All rounds: the final state, and the server's ledger."""
    fed, method = parts.fed, recipe.algorithm
    state: Any = parts.start()
    for round in range(1, recipe.rounds + 1):
        fed.begin(round)
        state = method.round(state, fed)
        parts.engine.saved(round)
    return state, list(parts.ledger.rows())
