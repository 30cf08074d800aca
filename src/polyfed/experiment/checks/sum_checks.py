"""Checks whether a method needs only sums of what the clients send, as [secure_aggregation] requires."""

from typing import Any

from polyfed.algorithms import NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.registry import name_of
from polyfed.core.tree import SHARED
from polyfed.data import Population
from polyfed.experiment.checks.privacy_support import read_singly
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.aggregation import shortfall, tolerance
from polyfed.federation.client_registry import ClientRegistry
from polyfed.selection import Selector


def refuse_single_replies(recipe: Recipe, population: Population) -> None:
    """Refuse secure aggregation if the server would have to read a field of a message that is not sum-only.

    Raises:
        RecipeError: there is such a field. The text gives the task and the field.
    """
    method = recipe.algorithm
    secure = method.secure_aggregation
    if secure is None:
        return
    where = f"[secure_aggregation]: '{name_of(method, NAMED)}' cannot use it"
    tested = population.test is not None and bool((population.test.sizes > 0).any())
    if single := read_singly(method, tested=tested):
        task, field = single
        raise RecipeError(
            f"{where}, because the server reads {field} of every single client (task {task})"
            f"{_advice(task)}. Methods that read only sums are fedavg and others that average parameters",
            ("secure_aggregation",),
        )


def _advice(task: str) -> str:
    """Return a clause for an error text: it names the option that switches the task off. "" if no option does."""
    return {"class_means": "; [evaluate] unimodal = 'auto' does without"}.get(task, "")


def refuse_small_cohorts(recipe: Recipe, clients: ClientRegistry) -> None:
    """Refuse secure aggregation if the cohort of a round has fewer clients than a sum needs.

    Only the server can call this function, because a device that checks a recipe does not know the other clients.

    Raises:
        RecipeError: the cohort has fewer than `min_clients` clients. The text contains the size of the cohort.
    """
    secure, selector = recipe.algorithm.secure_aggregation, getattr(recipe.algorithm, "selector", None)
    if secure is None or not isinstance(selector, Selector):
        return
    if (size := selector.size(clients)) < secure.min_clients:
        raise RecipeError(
            f"[secure_aggregation] min_clients = {secure.min_clients}: a round asks {size} clients only, so no sum "
            f"would ever be read. Set min_clients to at most {size}, or raise [clients] participation",
            ("secure_aggregation", "min_clients"),
        )


def refuse_few_replies(recipe: Recipe, clients: ClientRegistry) -> None:
    """Refuse a robust rule that needs more replies for a block than a round can have.

    Only the server can call this function; see `refuse_small_cohorts`.

    Raises:
        RecipeError: the rule needs more replies than a block can have. The text gives the block and both numbers.
    """
    method: Any = recipe.algorithm
    selector = getattr(method, "selector", None)
    if not isinstance(method, Averaging) or not isinstance(selector, Selector) or not tolerance(method.server, 1)[1]:
        return
    size = method.merges(clients)
    holders = clients.holds[clients.num_rows > 0].sum(0).tolist()
    for block, held in [(SHARED, size), *zip(clients.modalities, holders, strict=True)]:
        num = min(size, held)
        why = shortfall(method.server, num, f"at most {num} clients send the block '{block}' in a round")
        if num and why:
            raise RecipeError(why, ("server", "lying"))


def refuse_small_blocks(recipe: Recipe, population: Population) -> None:
    """Refuse secure aggregation if a modality has too few clients, because its block would never be summed.

    Only the server can call this function; see `refuse_small_cohorts`.

    Raises:
        RecipeError: fewer than `min_clients` clients have training rows, or one of the modalities is held by fewer than
            `min_clients` clients with training rows. The text gives the modality and the number of these clients.
    """
    secure = recipe.algorithm.secure_aggregation
    if secure is None:
        return
    trains = population.train.sizes > 0
    holders = zip(population.columns.modalities, population.holds[trains].sum(0).tolist(), strict=True)
    counts = {f"modality '{name}' is": num for name, num in holders} | {"rows are": int(trains.sum())}
    if few := {what: num for what, num in counts.items() if 0 < num < secure.min_clients}:
        what, num = next(iter(few.items()))
        raise RecipeError(
            f"[secure_aggregation] min_clients = {secure.min_clients}: {what} held by {num} clients only, so no "
            f"sum over them would ever be read. Lower min_clients, or leave the modality out",
            ("secure_aggregation", "min_clients"),
        )
