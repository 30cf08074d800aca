"""Checks whether the clients of a run, and the over-selection of clients, fit the rest of the recipe."""

from collections.abc import Mapping

from polyfed.algorithms import NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.core.registry import name_of
from polyfed.core.tasks import tasks_of, types_of
from polyfed.data import Population
from polyfed.experiment.checks.sum_checks import refuse_single_replies, refuse_small_blocks
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.section_checks import refuse_breaches
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.federation.outliers import COMPARED
from polyfed.objective import Classification, Regression
from polyfed.privacy.egress.limits import NO_LIMITS


def refuse_clients(recipe: Recipe, population: Population, *, one_device: bool = False) -> None:
    """Refuse a recipe if its clients, or its over-selection of clients, do not fit the rest of the recipe.

    Args:
        population: the clients.
        one_device: whether the population holds only the device that checks the recipe. The number of clients is then
            not checked.

    Raises:
        DataError: see `refuse_row_numbers`.
        RecipeError: see `refuse_small_clients`, `refuse_overselect`, `refuse_single_replies`, `refuse_idle_attack`,
            `refuse_dropout`, `refuse_subsets`, `refuse_conformal`, `refuse_small_blocks`.
    """
    refuse_row_numbers(recipe, population)
    refuse_small_clients(recipe, population)
    refuse_overselect(recipe)
    refuse_single_replies(recipe, population)
    refuse_idle_attack(recipe)
    refuse_dropout(recipe, population, one_device=one_device)
    refuse_subsets(recipe, population, one_device=one_device)
    refuse_conformal(recipe, population, one_device=one_device)
    if not one_device:
        refuse_small_blocks(recipe, population)


def refuse_idle_attack(recipe: Recipe) -> None:
    """Refuse an attack on what clients send if the method's clients send nothing that it could change.

    Raises:
        RecipeError: no reply of the method holds parameters, embeddings or another kind that attackers falsify.
    """
    attack, method = recipe.attack, recipe.algorithm
    if attack is None or not attack.falsifies:
        return
    training = {name: task for name, task in tasks_of(method).items() if name not in method.only_evaluates}
    asked = (types_of(task)[1] for name, task in training.items() if method.will_ask(name, tested=True))
    if not any(said.kind in COMPARED for reply in asked for said in reply.declared.values()):
        raise RecipeError(
            f"[attack] name = '{attack.name}' changes what clients send, and clients of "
            f"'{name_of(method, NAMED)}' send the server only statistics for training. Choose "
            "'label-flip', or 'backdoor' with scale = 1.0, which change what attackers train on, or remove [attack]",
            ("attack", "name"),
        )


def refuse_dropout(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse `[train] modality_dropout` where rows cannot lose a modality, or where this makes no sense.

    Raises:
        RecipeError: the option names an unknown modality, the method takes rows for complete, the task learns from
            pairs of modalities, or no client has two modalities.
    """
    given, method = recipe.algorithm.train.modality_dropout, recipe.algorithm
    if not (any(given.values()) if isinstance(given, Mapping) else given):
        return
    names, where = tuple(population.columns.modalities), "[train] modality_dropout"
    unknown = [name for name in given if name not in names] if isinstance(given, Mapping) and not one_device else []
    if unknown:
        why = f"names modality '{unknown[0]}', which the data lacks; {did_you_mean(unknown[0], names)}"
    elif not method.handles_missing_rows:
        why = (
            f"'{name_of(method, NAMED)}' takes every row of a client for complete, and its loss would use the "
            "embeddings of modalities that a row has lost. Remove it"
        )
    elif task_of(recipe).BY_MODALITY:
        why = "the task learns from pairs of modalities, and a row with one modality is no pair. Remove it"
    elif not one_device and not bool((population.holds.sum(1) > 1).any()):
        why = (
            "no client has two modalities, and a row never loses its only one, so it has no effect. Remove it, or give "
            "clients more modalities"
        )
    else:
        return
    raise RecipeError(f"{where}: {why}", ("train", "modality_dropout"))


def refuse_subsets(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse `[evaluate] subsets` where subsets cannot be scored.

    Raises:
        RecipeError: the task predicts from pairs of modalities, there is only one modality, or no test row has one of
            the modalities.
    """
    which, columns, rows = recipe.algorithm.evaluation.subsets, population.columns, population.test_rows
    if which == "none" or one_device:
        return
    bare = [name for name, there in columns.present.items() if len(rows) and not bool(there.cpu()[rows].any())]
    if task_of(recipe).WHOLE:
        why = "the task compares the embeddings of two modalities, and has no prediction from another subset. Remove it"
    elif len(columns.modalities) == 1:
        why = f"the data has one modality, '{next(iter(columns.modalities))}', and thus one subset. Remove it"
    elif bare:
        why = (
            f"no test row has '{bare[0]}', so no subset with it can be scored. Leave it out of [data] modalities, "
            "lower [clients] missing_rows_test, or give test rows that have it"
        )
    else:
        return
    raise RecipeError(f"[evaluate] subsets = '{which}': {why}", ("evaluate", "subsets"))


def refuse_conformal(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse `[evaluate] conformal` where no sets can be promised.

    Raises:
        RecipeError: the task has neither classes nor targets, silos predict together, or no client has validation rows.
    """
    evaluation, method = recipe.algorithm.evaluation, recipe.algorithm
    if evaluation.conformal == "none":
        return
    rows = population.own_validation
    if not isinstance(task_of(recipe), Classification | Regression):
        why = "sets are for the task 'classification', and intervals for 'regression'. Remove it"
    elif evaluation.conformal == "class" and not isinstance(task_of(recipe), Classification):
        why = "the task has no classes. Set it to 'split'"
    elif method.aligns_rows:
        why = f"the devices of a silo predict together in '{name_of(method, NAMED)}', none alone. Remove it"
    elif not one_device and (rows is None or not len(rows.rows)):
        why = (
            "no client has validation rows, on which the promise rests. Set [clients] validation, as in validation = "
            "0.2; on a device, mark rows with split 2"
        )
    elif recipe.algorithm.secure_aggregation is not None and evaluation.conformal_groups != "all":
        why = "secure aggregation gives sums over all clients only. Set conformal_groups = 'all'"
    else:
        _refuse_shrinkage(recipe, population)
        return
    raise RecipeError(f"[evaluate] conformal = '{evaluation.conformal}': {why}", ("evaluate", "conformal"))


def _refuse_shrinkage(recipe: Recipe, population: Population) -> None:
    if not recipe.algorithm.evaluation.shrinkage:
        return
    if not isinstance(task_of(recipe), Classification):
        why = "the widths of intervals follow from the counts of `conformal`, so predict_set has it anyway. Remove it"
    elif len(population.columns.modalities) == 1:
        why = "the data has one modality, so no row lacks one. Remove it"
    else:
        return
    raise RecipeError(f"[evaluate] shrinkage = true: {why}", ("evaluate", "shrinkage"))


def refuse_row_numbers(recipe: Recipe, population: Population) -> None:
    """If devices match their rows by sample ids, refuse data that has only row numbers as ids.

    Raises:
        DataError: the data has no ids. The text says how to add them.
    """
    if recipe.algorithm.aligns_rows and population.columns.numbered:
        raise DataError(
            f"data '{population.columns.name}' has no sample ids, with which the devices of a silo match their rows, "
            "and row numbers prove nothing. Save the array 'id' with the data: one integer for each row, the same for "
            "a sample everywhere. If row i of every array is the same sample, set [data] ids = 'rows' (in Python, "
            "ids='rows')"
        )


def refuse_small_clients(recipe: Recipe, population: Population) -> None:
    """Refuse a recipe if its smallest client breaks the recipe's own [limits]. Clients without rows are ignored.

    Raises:
        RecipeError: a limit is broken. The text names the smallest client, the limit and the value.
    """
    sizes = population.train.sizes
    if recipe.limits == NO_LIMITS or not bool((sizes > 0).any()):
        return
    least = int(sizes[sizes > 0].min())
    client = int((sizes == least).nonzero()[0])
    refuse_breaches(recipe.limits, recipe.algorithm.train, recipe.rounds, least, f"client {client}: ")


def refuse_overselect(recipe: Recipe) -> None:
    """Refuse over-selection in a recipe in which it would have no effect, or would not work as documented.

    Raises:
        RecipeError: the algorithm does not use the method `round` of `Averaging`. In this method, the server sends one
            request to each client of the cohort, and does not need the replies of all of them. The error also occurs if
            all clients are equally fast, which is so if the recipe has no section [network] and its engine is not
            `flower`.
    """
    if recipe.clients.overselect is None:
        return
    where = f"[clients] overselect = {recipe.clients.overselect:g}"
    if getattr(type(recipe.algorithm), "round", None) is not Averaging.round:
        raise RecipeError(
            f"{where}: algorithm '{name_of(recipe.algorithm, NAMED)}' needs the replies of all clients that it "
            "asks, or asks them one after the other. Remove it, or take an algorithm that averages, such as fedavg"
        )
    if recipe.network is None and recipe.engine.name != "flower":
        raise RecipeError(
            f"{where}: no client is slower than another where no time passes. Add a section [network], take "
            "[engine] name = 'flower', or remove it"
        )
