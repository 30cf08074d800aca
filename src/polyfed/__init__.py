"""polyfed: multimodal federated learning. One implementation of a method runs in simulation and on real devices.

The names below are the public functions and classes. With them, a program can load or parse a recipe, `check` which
data the recipe allows to leave the clients, `run` the recipe, and read the results of the run. It can also `sweep` a
study of many runs, and `compare` runs. If you write your own method, import from `polyfed.algorithms`, `polyfed.core`
and `polyfed.training`. Each name is imported when it is first used, so that `polyfed --help` does not wait for PyTorch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polyfed.core import moved

if TYPE_CHECKING:
    from polyfed.experiment.check import Check, check
    from polyfed.experiment.from_data import make_recipe
    from polyfed.experiment.models import Models
    from polyfed.experiment.recipe import Recipe, load_recipe, parse_recipe
    from polyfed.experiment.run_result import Run, load_run
    from polyfed.experiment.saved_model import load_model
    from polyfed.experiment.study import sweep
    from polyfed.report.compare import Comparison, compare
    from polyfed.run import run

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
    "load_model",
    "load_recipe",
    "load_run",
    "make_recipe",
    "parse_recipe",
    "run",
    "sweep",
]

_PLACES = {
    "Check": "experiment.check",
    "Comparison": "report.compare",
    "Models": "experiment.models",
    "Recipe": "experiment.recipe",
    "Run": "experiment.run_result",
    "check": "experiment.check",
    "compare": "report.compare",
    "load_model": "experiment.saved_model",
    "load_recipe": "experiment.recipe",
    "load_run": "experiment.run_result",
    "make_recipe": "experiment.from_data",
    "parse_recipe": "experiment.recipe",
    "run": "run",
    "sweep": "experiment.study",
}
"""The module of each name, without `polyfed.`."""

_ROOMS = (
    *("core", "model", "data", "training", "privacy", "federation", "evaluation", "selection"),
    *("algorithms", "engines", "report", "experiment", "deploy", "cli"),
)
"""The packages that `import polyfed` makes available as attributes, as in `polyfed.algorithms.ALGORITHMS`."""

if not TYPE_CHECKING:  # type checkers read the imports above, and still report a name that does not exist

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name == "__version__":
            from importlib.metadata import version

            found = version("polyfed")
        elif name in _PLACES:
            found = getattr(import_module(f"polyfed.{_PLACES[name]}"), name)
        elif name in _ROOMS:
            found = import_module(f"polyfed.{name}")
        else:
            raise AttributeError(f"module 'polyfed' has no attribute '{name}'")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        """The public names, including those that are not imported yet."""
        return sorted({*globals(), *__all__})


class _FrontDoor(ModuleType):
    """The type of the module `polyfed`. It makes sure that `polyfed.run` is the function `run`.

    The function is defined in the file polyfed/run.py. When Python imports this file, it sets the attribute `run` of
    the package to the module. This class sets the attribute to the function instead.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # after Python has imported the module polyfed.run, it sets the attribute `run` of the package to that module
        super().__setattr__(name, value.run if name == "run" and isinstance(value, ModuleType) else value)


sys.modules[__name__].__class__ = _FrontDoor

moved.install()
