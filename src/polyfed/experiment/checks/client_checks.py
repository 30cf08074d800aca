"""Checks whether the clients of a run and their rows fit the recipe."""

from collections.abc import Mapping

from polyfed.algorithms import NAMED
from polyfed.core.errors import DataError, RecipeError, did_you_mean
from polyfed.core.registry import name_of
from polyfed.core.tree import SHARED
from polyfed.data import Population
from polyfed.experiment.checks.sum_checks import refuse_single_replies, refuse_small_blocks
from polyfed.experiment.recipes.cross_checks import refuse_breaches
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.privacy.egress.limits import NO_LIMITS


def refuse_clients(recipe: Recipe, population: Population, *, one_device: bool = False) -> None:
    """Refuse a recipe if its clients do not fit it.

    Args:
        population: the clients.
        one_device: whether the population holds only the device that checks the recipe. The number of clients is then
            not checked.

    Raises:
        DataError: see `refuse_row_numbers`.
        RecipeError: see `refuse_small_clients`, `refuse_single_replies`, `refuse_dropout`, `refuse_subsets`,
            `refuse_conformal`, `refuse_no_validation`, `refuse_small_blocks`.
    """
    refuse_row_numbers(recipe, population)
    refuse_small_clients(recipe, population)
    refuse_single_replies(recipe, population)
    refuse_dropout(recipe, population, one_device=one_device)
    refuse_unknown_blocks(recipe, population, one_device=one_device)
    refuse_subsets(recipe, population, one_device=one_device)
    refuse_conformal(recipe, population, one_device=one_device)
    refuse_no_validation(recipe, population, one_device=one_device)
    if not one_device:
        refuse_small_blocks(recipe, population)


def refuse_dropout(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse `[train] modality_dropout` where the clients have nothing to drop.

    Raises:
        RecipeError: the option names an unknown modality, or no client has two modalities.
    """
    given = recipe.algorithm.train.modality_dropout
    if one_device or not (any(given.values()) if isinstance(given, Mapping) else given):
        return
    names = tuple(population.columns.modalities)
    if unknown := [name for name in given if name not in names] if isinstance(given, Mapping) else []:
        why = f"names modality '{unknown[0]}', which the data lacks; {did_you_mean(unknown[0], names)}"
    elif not bool((population.holds.sum(1) > 1).any()):
        why = (
            "no client has two modalities, and a row never loses its only one, so it has no effect. Remove it, or give "
            "clients more modalities"
        )
    else:
        return
    raise RecipeError(f"[train] modality_dropout: {why}", ("train", "modality_dropout"))


def refuse_unknown_blocks(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse a table `[wire] compress` that names a block which the data lacks.

    Raises:
        RecipeError: it does.
    """
    given = None if recipe.wire is None else recipe.wire.compress
    names = (*population.columns.modalities, SHARED)
    if not one_device and isinstance(given, Mapping) and (unknown := [name for name in given if name not in names]):
        why = f"names '{unknown[0]}', which is no modality of the data; {did_you_mean(unknown[0], names)}"
        raise RecipeError(f"[wire] compress {why}", ("wire", "compress"))


def refuse_subsets(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse `[evaluate] subsets` where the data has no subsets to score.

    Raises:
        RecipeError: there is only one modality, or no test row has one of the modalities.
    """
    which, columns, rows = recipe.algorithm.evaluation.subsets, population.columns, population.test_rows
    if which == "none" or one_device:
        return
    bare = [name for name, there in columns.present.items() if len(rows) and not bool(there.cpu()[rows].any())]
    if len(columns.modalities) == 1:
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
    """Refuse `[evaluate] conformal` if no client has validation rows.

    Raises:
        RecipeError: no client has any.
    """
    wanted, rows = recipe.algorithm.evaluation.conformal, population.own_validation
    if wanted != "none" and not one_device and (rows is None or not len(rows.rows)):
        raise RecipeError(
            f"[evaluate] conformal = '{wanted}': no client has validation rows, on which the promise rests. Set "
            "[clients] personal_validation, as in personal_validation = 0.2; on a device, mark rows with split 2",
            ("evaluate", "conformal"),
        )
    if wanted != "none":
        _refuse_shrinkage(recipe, population)


def refuse_no_validation(recipe: Recipe, population: Population, *, one_device: bool) -> None:
    """Refuse a method whose clients choose by their own validation rows if no client has any.

    Raises:
        RecipeError: no client has any.
    """
    rows = population.own_validation
    if recipe.algorithm.needs_own_validation and not one_device and (rows is None or not len(rows.rows)):
        raise RecipeError(
            f"[algorithm] name = '{name_of(recipe.algorithm, NAMED)}': no client has validation rows of its own, by "
            "which it weighs its models. Set [clients] validation, as in validation = 0.2; on a device, mark rows with "
            "split 2",
            ("clients", "validation"),
        )


def _refuse_shrinkage(recipe: Recipe, population: Population) -> None:
    if recipe.algorithm.evaluation.shrinkage and len(population.columns.modalities) == 1:
        why = "the data has one modality, so no row lacks one. Remove it"
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
