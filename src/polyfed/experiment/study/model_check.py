"""Checks, before a study starts, that the algorithm of each recipe can train the model on the data."""

import json
import warnings
from dataclasses import dataclass, field

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.data import Columns
from polyfed.experiment.recipes.cross_checks import check_model
from polyfed.experiment.recipes.defaults import with_encoders
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import prepared, with_task
from polyfed.experiment.running.assembly import model_of
from polyfed.privacy.egress.policy import Policy

SECTIONS = ("data", "task", "model", "algorithm", "evaluate", "egress")
"""The sections of a recipe that the check reads. Recipes that agree in them get the same answer."""


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
