"""Does a method need only sums of what the clients send, as [secure_aggregation] requires?"""

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import RecipeError
from polyfed.core.masked import sum_only
from polyfed.core.registry import name_of
from polyfed.core.tasks import parts, tasks_of, types_of
from polyfed.data import Population
from polyfed.experiment.recipe import Recipe

HONEST_FORMS = ("label-flip",)
"""Attacks that change a client's data, so that they also exist where the server sees no reply."""


def refuse_single_replies(recipe: Recipe, population: Population) -> None:
    """Refuse secure aggregation for a method that needs the replies of single clients.

    The method and its selector declare this: by `single_replies`, and by messages with fields that are not sum-only.

    Raises:
        RecipeError: with the task and the field, and the reason.
    """
    method = recipe.algorithm
    secure = method.secure_aggregation
    if secure is None:
        return
    where = f"[secure_aggregation]: '{name_of(method, ALGORITHMS)}' cannot use it"
    if recipe.privacy is not None:
        raise RecipeError(
            f"{where} together with [privacy]: the server could not clip the replies, and the noise of clients "
            "would have no place in the range of the integers. Remove one of the two"
        )
    if method.single_replies:
        raise RecipeError(f"{where}, because {method.single_replies}. Remove one of the two")
    if recipe.attack is not None and recipe.attack.name not in HONEST_FORMS:
        raise RecipeError(
            f"[attack] name = '{recipe.attack.name}' changes single replies on their way, and under "
            f"[secure_aggregation] they are masked. Allowed: {', '.join(HONEST_FORMS)}"
        )
    own = tuple(prefix for prefix, part in parts(method) if part is secure)
    tested = population.test is not None and bool((population.test.sizes > 0).any())
    for name, task in tasks_of(method).items():
        if name.startswith(own) or not method.will_ask(name, tested=tested):
            continue
        reply = types_of(task)[1]
        if reply.masks is None and not sum_only(reply):
            field = next(field for field, said in reply.declared.items() if not said.sum_only)
            raise RecipeError(
                f"{where}, because the server reads {reply.__name__}.{field} of every single client (task {name})"
                f"{_advice(name)}. Methods that read only sums are fedavg and others that average parameters"
            )


def _advice(task: str) -> str:
    """Return what switches a task of every method off."""
    return {"class_means": "; [evaluate] unimodal = 'auto' does without"}.get(task, "")


def refuse_small_blocks(recipe: Recipe, population: Population) -> None:
    """Refuse secure aggregation if too few clients have a modality, so that its block would never be summed.

    Raises:
        RecipeError: with the modality and the number of its clients.
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
