"""polyfed: multimodal federated learning, one text of an algorithm for simulation and for real devices."""

from importlib.metadata import version

from polyfed.experiment.check import Check, check
from polyfed.experiment.models import Models
from polyfed.experiment.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.run_result import Run, load_run
from polyfed.experiment.saved_model import load_model
from polyfed.run import run

__version__ = version("polyfed")

__all__ = [
    "Check",
    "Models",
    "Recipe",
    "Run",
    "__version__",
    "check",
    "load_model",
    "load_recipe",
    "load_run",
    "parse_recipe",
    "run",
]
