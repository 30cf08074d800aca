"""polyfed: multimodal federated learning. One implementation of a method runs in simulation and on real devices.

The names below are the public functions and classes. With them, a program can load or parse a recipe, `check` which
data the recipe allows to leave the clients, `run` the recipe, and read the results of the run. It can also `sweep` a
study of many runs, `compare` runs, `recommend` a method for your data, and pack results so that others can run them
again (`pack_entry`, `verify_entry`). If you write your own method, import from `polyfed.algorithms`, `polyfed.core` and
`polyfed.training`. Each name is imported when it is first used, so that `polyfed --help` does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.experiment.checks.check import Check, check
    from polyfed.experiment.evaluate import evaluate
    from polyfed.experiment.leaderboard.packing import pack_entry
    from polyfed.experiment.leaderboard.verification import verify_entry
    from polyfed.experiment.recipes.from_data import make_recipe
    from polyfed.experiment.recipes.recipe import Recipe, load_recipe, parse_recipe
    from polyfed.experiment.results.models import Models
    from polyfed.experiment.results.run_result import Run, load_run
    from polyfed.experiment.results.saved_model import load_model
    from polyfed.experiment.study import sweep
    from polyfed.recommendation.recommend import recommend
    from polyfed.report.comparison.compare import Comparison, compare
    from polyfed.start import run

    __version__: str

__all__ = [
    "Check",
    "Comparison",
    "Models",
    "Recipe",
    "Run",
    "__version__",
    "check",
    "compare",
    "evaluate",
    "load_model",
    "load_recipe",
    "load_run",
    "make_recipe",
    "pack_entry",
    "parse_recipe",
    "recommend",
    "run",
    "sweep",
    "verify_entry",
]

_PLACES = {
    "Check": "experiment.checks.check",
    "Comparison": "report.comparison.compare",
    "Models": "experiment.results.models",
    "Recipe": "experiment.recipes.recipe",
    "Run": "experiment.results.run_result",
    "check": "experiment.checks.check",
    "compare": "report.comparison.compare",
    "evaluate": "experiment.evaluate",
    "load_model": "experiment.results.saved_model",
    "load_recipe": "experiment.recipes.recipe",
    "load_run": "experiment.results.run_result",
    "make_recipe": "experiment.recipes.from_data",
    "pack_entry": "experiment.leaderboard.packing",
    "parse_recipe": "experiment.recipes.recipe",
    "recommend": "recommendation.recommend",
    "run": "start",
    "sweep": "experiment.study",
    "verify_entry": "experiment.leaderboard.verification",
}
"""The module of each name, without `polyfed.`."""

_ROOMS = (
    *("core", "model", "data", "training", "privacy", "federation", "evaluation", "selection"),
    *("algorithms", "engines", "report", "experiment", "deploy", "recommendation", "laws", "cli"),
)
"""The packages that `import polyfed` makes available as attributes, as in `polyfed.algorithms.ALGORITHMS`."""

if not TYPE_CHECKING:  # type checkers read the imports above, and still report a name that does not exist

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name == "__version__":
            from importlib.metadata import version

            result = version("polyfed")
        elif name in _PLACES:
            result = getattr(import_module(f"polyfed.{_PLACES[name]}"), name)
        elif name in _ROOMS:
            result = import_module(f"polyfed.{name}")
        else:
            raise AttributeError(f"module 'polyfed' has no attribute '{name}'")
        globals()[name] = result
        return result

    def __dir__() -> list[str]:
        """The public names, including those that are not imported yet."""
        return sorted({*globals(), *__all__})
