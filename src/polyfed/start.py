"""`polyfed.run`: run a recipe to its end, as a simulation in this process or on Flower's simulation runtime."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from polyfed.core.errors import PolyfedWarning, RecipeError, did_you_mean
from polyfed.core.option_checks import checked
from polyfed.data.sources import Memory
from polyfed.experiment.recipes.from_data import DataOptions, make_recipe, with_data
from polyfed.experiment.recipes.recipe import Recipe, recipe_of
from polyfed.experiment.recipes.sections import misplaced
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.results.records import Records
from polyfed.experiment.results.run_result import Run
from polyfed.experiment.running.assembly import ENGINES
from polyfed.experiment.running.events import Emitter, Listener
from polyfed.experiment.running.loop import execute
from polyfed.report.progress import Progress


def run(
    recipe: Recipe | str | Path | None = None,
    out: str | Path | None = None,
    *,
    data: Any = None,
    resume: bool = False,
    engine: str | Mapping[str, Any] | None = None,
    device: Literal["cpu", "cuda", "auto"] | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool = False,
    **options: Unpack[DataOptions],
) -> Run:
    """Run a recipe, or a method on your own data, to its end.

    `run(data=..., **options)` runs `make_recipe(data, **options)`, and the folder `out` holds that recipe. If the data
    was in memory, the recipe file cannot hold the data. To resume such a run, call `run` again with the same data and
    options.

    Args:
        recipe: a recipe, or the path of one; None makes a recipe from `data` and `options`.
        out: the folder for the files of the run. If None, the run writes no files.
        data: your own data, see `make_recipe`. If `recipe` is given too, `data` replaces the recipe's data.
        resume: continue the run in `out`; the result equals that of an uninterrupted run bit for bit.
        engine: an engine to use instead of the recipe's, or options of the section [engine] such as `{"debug": True}`.
        device: replaces the recipe's device.
        listeners: called with every event, as `listener(event, **facts)`.
        progress: whether to show the progress while the run goes on: a live panel in a notebook or a terminal, a few
            lines on standard error anywhere else.
        options: labels, clients and the sections of a recipe; see `make_recipe`. If `recipe` is given, only options
            that say how `data` is read are allowed.

    Returns:
        The finished run. A warning names each part of the method that had no effect in the whole run.

    Raises:
        PolyfedError: one of `polyfed.core.errors`; its text says what to do.
    """
    recipe = _recipe(recipe, data, options)
    if isinstance(engine, str):
        if engine not in ENGINES:
            raise RecipeError(f"'{engine}' is not an engine; {did_you_mean(engine, ENGINES)}")
        engine = {"name": engine}
    changes = {**(engine or {}), **({} if device is None else {"device": device})}
    chosen = checked("[engine]", EngineSpec, changes, advice=misplaced)
    recipe = replace(recipe, engine=replace(recipe.engine, **chosen))
    _refuse_engine(recipe)
    records = _records(out, recipe, resume=resume)
    play = execute
    if recipe.engine.name == "flower":
        from polyfed.deploy.server.server import simulate  # needs the extra polyfed[flower]

        play = partial(simulate, execute=execute)
    with ExitStack() as stack:
        shown = [stack.enter_context(Progress())] if progress else []
        if records is not None:
            stack.enter_context(records.alone())
        return _with_warnings(play(recipe, records, Emitter([*shown, *listeners])))


def _refuse_engine(recipe: Recipe) -> None:
    """Refuse an engine that cannot run this recipe here."""
    if recipe.engine.name == "devices":
        raise RecipeError("[engine] name = 'devices' is for runs that `polyfed submit` begins. Take 'vectorised'")
    if recipe.engine.name == "flower" and isinstance(recipe.data, Memory):
        raise RecipeError(
            "the engine 'flower' runs clients in processes that read the data themselves, and this data is in memory. "
            "Save it with numpy.savez and give the file, or use the engine 'vectorised' or 'sequential'"
        )


def _records(out: str | Path | None, recipe: Recipe, *, resume: bool) -> Records | None:
    """Return the records in the folder of the run, or None without a folder."""
    if resume and out is None:
        raise RecipeError("resume=True needs the folder of the run to continue, as in out='runs/one'")
    return None if out is None else Records(Path(out), resume=resume, recipe=recipe.table())


def _with_warnings(finished: Run) -> Run:
    """Warn of each part of the method that had no effect in the run, and return the run."""
    for text in finished.result.get("concerns", ()):
        warnings.warn(f"a part of the method had no effect in this run: {text}", PolyfedWarning, stacklevel=3)
    return finished


def _recipe(recipe: Recipe | str | Path | None, data: Any, options: DataOptions) -> Recipe:
    """The recipe to run."""
    if recipe is None and data is None:
        raise RecipeError("give a recipe or its path, or your own data, as in run(data={'audio': x}, labels=y)")
    if recipe is None:
        return make_recipe(data, **options)
    if data is None and options:
        raise RecipeError(f"{next(iter(options))} is given without data. Give data=..., or change the recipe")
    made = recipe_of(recipe)
    return made if data is None else with_data(made, data, options)
