"""Checks of a study's runs before any training: of their models, of their messages and of the study's metrics."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polyfed.core.errors import EgressError, PolyfedError, RecipeError, did_you_mean
from polyfed.data import Columns, Population
from polyfed.evaluation.client_statistics import personal
from polyfed.experiment.checks.check import personal_fix, refuse_forbidden
from polyfed.experiment.recipes.cross_checks import check_model
from polyfed.experiment.recipes.defaults import with_encoders
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import prepared, with_task
from polyfed.experiment.running.assembly import model_of, population_of
from polyfed.experiment.running.dry_run import assembled_dry, metrics_of
from polyfed.experiment.study.study_file import GROUPS
from polyfed.privacy.egress.policy import Policy
from polyfed.report.scores import POOLED, TITLES

OF_VARYING = {
    **{name: {"mae", "rmse"} for name in ("pearson", "concordance", "r2")},
    "weighted_kappa": {"mae", "accuracy"},
}
"""Metrics that are undefined if the predictions or the labels are constant, as those of an untrained model may be. Each
with other metrics: the runs that measure all of them may also measure this metric."""

SECTIONS = ("data", "task", "model", "algorithm", "evaluate", "egress")
"""The sections of a recipe that the check reads. Recipes that agree in them get the same answer."""

Measured = Mapping[str, set[str]]
"""Group -> names of the metrics that a run measures."""

KNOWN = {*TITLES, "loss", *personal({0: 0.0}, {0: 1.0})}
"""Names of metrics that some run may have."""


@dataclass
class ModelCheck:
    """Builds the models of a study's recipes, and remembers the faults.

    Attributes:
        faults: Maps the sections of a recipe, as JSON, to the text of the fault. The text is empty if the model fits.
    """

    faults: dict[str, str] = field(default_factory=dict)

    def refuse(self, recipe: Recipe, columns: Columns) -> None:
        """Refuse a recipe whose model cannot be built, or whose algorithm cannot train this model.

        Args:
            columns: the data of the recipe.

        Raises:
            RecipeError: the model does not fit. A run of the recipe would fail with the same text.
        """
        table = recipe.table()
        read = json.dumps([table.get(section) for section in SECTIONS], sort_keys=True, default=str)
        if read not in self.faults:
            self.faults[read] = fault_of(recipe, columns)
        if self.faults[read]:
            raise RecipeError(self.faults[read])


def fault_of(recipe: Recipe, columns: Columns) -> str:
    """Return why the recipe's algorithm cannot train its model on this data, or "" if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        try:
            columns = prepared(recipe, columns)
            whole = with_task(with_encoders(recipe, columns), columns)
            policy = Policy.parse(recipe.egress, columns.modalities, guards=recipe.egress)
            shapes = {name: column.shape for name, column in columns.modalities.items()}
            check_model(whole.algorithm, model_of(whole, shapes, columns.num_classes, policy))
        except PolyfedError as error:
            return str(error)
    return ""


def clients_of(recipe: Recipe, columns: Columns) -> Population | None:
    """Return the clients of a run with their rows, or None if the data cannot be divided. The run then says why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return population_of(recipe, columns)
        except Exception:  # the run itself will say what is wrong
            return None


def measured_by(recipe: Recipe, population: Population) -> tuple[Measured, str] | None:
    """Return the metrics of a run, and how to change its recipe so that it also has personal metrics.

    Returns:
        None if the metrics are not known before the run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = metrics_of(replace(recipe, engine=replace(recipe.engine, device="cpu")), population)
        except Exception:  # the run itself will say what is wrong
            return None
    return result, personal_fix(tested=population.test is not None)


def policy_fault(recipe: Recipe, population: Population) -> str:
    """Return why the policy refuses what the algorithm announces, or "" if it refuses nothing.

    The text lists all forbidden parts and the lines of a policy that would allow them, as a run does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            refuse_forbidden(assembled_dry(replace(recipe, engine=replace(recipe.engine, device="cpu")), population))
        except EgressError as error:
            return str(error)
        except Exception:  # the run itself will say what is wrong
            return ""
    return ""


def metric_fault(metrics: Sequence[str], measured: Measured, fix: str) -> str:
    """Return why a run has none of the metrics, or an empty text if it has one of them.

    The text is also empty if a metric does not start with the name of a group, because `study_file` reports this.

    Args:
        metrics: the study's metrics, such as `global.accuracy`.
        measured: the metrics of the run.
        fix: how to change the recipe so that the run also has personal metrics.
    """
    if any(_is_in(metric, measured) or metric.partition(".")[0] not in GROUPS for metric in metrics):
        return ""
    names = _names([measured])
    hint = (
        f"its runs have no score, because no model of theirs has test rows: {fix}"
        if not names
        else f"its runs do not measure it; {did_you_mean(metrics[0], names)}"
    )
    if names and any(metric.partition(".")[2].removeprefix(POOLED) in KNOWN for metric in metrics):
        hint += ". To leave these runs out of the study, add a [[when]] with skip"
    if names and "personal" not in measured and any(metric.startswith("personal.") for metric in metrics):
        hint += f". For personal metrics, {fix}"
    return f"metric = {' or '.join(repr(metric) for metric in metrics)}: {hint}"


def misspelt(metrics: Sequence[str], found: Sequence[Measured]) -> list[str]:
    """Return an error text for each metric whose name is neither in `KNOWN` nor among the metrics of any run.

    If there is only one metric, the result is empty, because `metric_fault` already reports this metric.

    Args:
        metrics: the study's metrics, such as `global.accuracy`.
        found: the metrics of each run.
    """
    known = KNOWN.union(*(values for measured in found for values in measured.values()))
    return [
        f"metric = '{metric}': no run measures it; {did_you_mean(metric, _names(found))}"
        for metric in metrics
        if len(metrics) > 1 and metric.partition(".")[2].removeprefix(POOLED) not in known
    ]


def _names(found: Iterable[Measured]) -> set[str]:
    return {f"{group}.{name}" for measured in found for group in GROUPS for name in measured.get(group, ())}


def _is_in(metric: str, measured: Measured) -> bool:
    """Return whether a run may have a metric.

    The evaluation before the run uses few rows. A metric that is undefined on them may still be defined in the run.
    """
    group, _, name = metric.partition(".")
    values = measured.get(group)
    if values is None:
        return False
    if group == "global":
        later = name in OF_VARYING and values >= OF_VARYING[name]
    else:
        later = name.startswith(POOLED) and name.removeprefix(POOLED) in KNOWN
    return not values or name in values or later
