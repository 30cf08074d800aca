"""polyfed: multimodal federated learning. One implementation of a method runs in simulation and on real devices.

The names below are the public front door: load or parse a recipe, `check` what it lets leave the clients, `run` it, and
read what the run wrote; `sweep` a study of many runs, and `compare` them. Methods of your own import from
`polyfed.algorithms`, `polyfed.core` and `polyfed.training`.
"""

from importlib.metadata import version

from polyfed.core import moved
from polyfed.experiment.check import Check, check
from polyfed.experiment.from_data import make_recipe
from polyfed.experiment.models import Models
from polyfed.experiment.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.run_result import Run, load_run
from polyfed.experiment.saved_model import load_model
from polyfed.experiment.study import sweep
from polyfed.report.compare import Comparison, compare
from polyfed.run import run

__version__ = version("polyfed")

__all__ = [
    "Check",
    "Comparison",
    "Models",
    "Recipe",
    "Run",
    "__version__",
    "check",
    "compare",
    "load_model",
    "load_recipe",
    "load_run",
    "make_recipe",
    "parse_recipe",
    "run",
    "sweep",
]

moved.install()
