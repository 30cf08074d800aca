"""Finds the reasons why a recipe cannot give the protection that its section [privacy] describes.

The server checks this before a run. A device that demands protection checks it again.
"""

from collections.abc import Iterator, Sequence

import torch

from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.federation.client_registry import ClientRegistry
from polyfed.model import Model
from polyfed.privacy.differential.section import Privacy


def refuse(spec: Privacy, reasons: Sequence[str]) -> None:
    """Raise a `RecipeError` that lists why the section cannot be honoured, unless there are no reasons."""
    if reasons:
        raise RecipeError(f'[privacy] unit = "{spec.unit}" cannot be honoured: ' + "; ".join(reasons), ("privacy",))


def faults_of_model(model: Model, initial: Tree) -> Iterator[str]:
    """Yield a fault if the model has entries that are not trained parameters, because clients would send these too."""
    if buffers := [name for name in initial if name not in model.trainable(initial)]:
        yield (
            f"the model has buffers that follow the rows of a batch, such as {buffers[0]} (BatchNorm). Use layers "
            "without them, such as GroupNorm or LayerNorm"
        )


def share_rows(clients: ClientRegistry, population: Population, *, deployed: bool) -> bool:
    """Return whether several clients hold the same rows.

    In a deployment, the server does not know the rows. It assumes that the clients share rows if they are in silos.
    """
    if deployed:
        return clients.silo is not None
    rows = population.train.rows
    return len(rows) > 0 and int(torch.bincount(rows).max()) > 1


def faults_of_rows(model: Model, *, shared: bool) -> Iterator[str]:
    """Yield the reasons why [privacy] cannot protect single rows.

    Training could use a row more often than the calculation of epsilon assumes, or the gradients of single rows might
    not exist.

    Args:
        shared: whether several clients hold the same rows.
    """
    if shared:
        yield "several clients hold the same rows, as in silos, and epsilon counts the uses of a row by one client"
    if model.recomputes:
        yield "gradient checkpointing computes layers again, which the gradients of single rows do not allow"
