"""Checks whether a method needs only sums of what the clients send, as [secure_aggregation] requires."""

from typing import Any

from polyfed.algorithms import NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import RecipeError
from polyfed.core.registry import name_of
from polyfed.core.tasks import types_of
from polyfed.core.tree import SHARED
from polyfed.data import Population
from polyfed.experiment.checks.privacy_support import read_singly, sent, withheld_of
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.aggregation import shortfall, tolerance
from polyfed.federation.client_registry import ClientRegistry
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Selector

HONEST_FORMS = ("label-flip",)
"""Attacks that change a client's data, so that they also exist where the server sees no reply."""


def refuse_single_replies(recipe: Recipe, population: Population) -> None:
    """Refuse secure aggregation if the server would have to read the reply of a single client.

    The server has to read single replies in two cases. First, the method or its selector needs them, and says why in
    `single_replies`. Second, a message has a field that is not declared as sum-only.

    Raises:
        RecipeError: the server would have to read such a reply, or another section does not fit secure aggregation. The
            text contains the reason, or the task and the field.
    """
    method = recipe.algorithm
    secure = method.secure_aggregation
    if secure is None:
        return
    where = f"[secure_aggregation]: '{name_of(method, NAMED)}' cannot use it"
    if recipe.privacy is not None:
        _refuse_privacy(recipe, recipe.privacy)
    if method.single_replies:
        raise RecipeError(f"{where}, because {method.single_replies}. Remove one of the two")
    if recipe.attack is not None and recipe.attack.name not in HONEST_FORMS:
        raise RecipeError(
            f"[attack] name = '{recipe.attack.name}' changes single replies on their way, and under "
            f"[secure_aggregation] they are masked. Allowed: {', '.join(HONEST_FORMS)}"
        )
    tested = population.test is not None and bool((population.test.sizes > 0).any())
    if single := read_singly(method, tested=tested):
        task, field = single
        raise RecipeError(
            f"{where}, because the server reads {field} of every single client (task {task})"
            f"{_advice(task)}. Methods that read only sums are fedavg and others that average parameters"
        )


def _refuse_privacy(recipe: Recipe, privacy: Privacy) -> None:
    """Refuse options of [privacy] that cannot be used if the server reads only sums.

    Raises:
        RecipeError: [privacy] has such an option. The text contains the option and the reason.
    """
    if privacy.amplification:
        raise RecipeError(
            "[privacy] amplification = true needs a secret cohort, and under [secure_aggregation] the clients of a "
            "cohort see one another's public keys. Remove amplification",
            ("privacy", "amplification"),
        )
    if privacy.adaptive:
        raise RecipeError(
            '[privacy] clip = "adaptive" needs the norms of single updates, and under [secure_aggregation] the server '
            'reads only sums. Set clip = "joint"',
            ("privacy", "clip"),
        )
    method = recipe.algorithm
    withheld = withheld_of(method, privacy.unprotected)
    for name, task, field in sent(method):
        kind = types_of(task)[1].masks
        by = None if kind is None else method.weight_of(field, kind)
        if by is not None and f"{name}.{by}" in withheld and f"{name}.{field}" not in withheld:
            raise RecipeError(
                f"[secure_aggregation] multiplies {field} by {by} at the clients, and under [privacy] clients send "
                'zeros as their number of rows. Set [algorithm] aggregation = "uniform"',
                ("algorithm", "aggregation"),
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
    size = selector.size(clients)
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
    counts = dict(zip(population.columns.modalities, population.holds[trains].sum(0).tolist(), strict=True))
    counts["all"] = int(trains.sum())
    if few := {name: num for name, num in counts.items() if 0 < num < secure.min_clients}:
        name, num = next(iter(few.items()))
        what = f"modality '{name}' is" if name != "all" else "rows are"
        raise RecipeError(
            f"[secure_aggregation] min_clients = {secure.min_clients}: {what} held by {num} clients only, so no "
            f"sum over them would ever be read. Lower min_clients, or leave the modality out"
        )
