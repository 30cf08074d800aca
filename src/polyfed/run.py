"""`polyfed.run`: run a recipe to its end, as a simulation in this process or with Flower."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.experiment.assembly import ENGINES
from polyfed.experiment.events import Emitter, Listener
from polyfed.experiment.loop import execute
from polyfed.experiment.recipe import Recipe, recipe_of
from polyfed.experiment.records import Records
from polyfed.experiment.run_result import Run
from polyfed.report.progress import Progress


def run(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    engine: str | None = None,
    device: Literal["cpu", "cuda", "auto"] | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool = False,
) -> Run:
    """Run a recipe to its end.

    Args:
        recipe: a recipe, or the path of one.
        out: the folder for the files of the run; None writes none.
        resume: continue the run in `out`; the result equals that of an uninterrupted run bit for bit.
        engine: replaces the recipe's engine.
        device: replaces the recipe's device.
        listeners: called with every event, as `listener(event, **facts)`.
        progress: whether to show the progress while the run goes on: a live panel in a notebook or a terminal, a few
            lines on standard error anywhere else.

    Returns:
        The finished run.

    Raises:
        PolyfedError: one of `polyfed.core.errors`; its text says what to do.
    """
    recipe = recipe_of(recipe)
    for given, allowed in ((engine, ENGINES), (device, ("cpu", "cuda", "auto"))):
        if given is not None and given not in allowed:
            raise RecipeError(f"'{given}' is not an engine or a device; {did_you_mean(given, allowed)}")
    changes = {k: v for k, v in (("name", engine), ("device", device)) if v is not None}
    recipe = replace(recipe, engine=replace(recipe.engine, **changes))  # type: ignore[arg-type]
    records = None if out is None else Records(Path(out), resume=resume)
    play = execute
    if recipe.engine.name == "flower":
        from polyfed.deploy.server import simulate  # needs the extra polyfed[flower]

        play = partial(simulate, execute=execute)
    with ExitStack() as stack:
        shown = [stack.enter_context(Progress())] if progress else []
        if records is not None:
            stack.enter_context(records.alone())
        return play(recipe, records, Emitter([*shown, *listeners]))
