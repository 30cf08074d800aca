"""Run an app with the devices of polyfed's own server on this machine, in this process or as a job of the server."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError
from polyfed.core.system.files import RECEIPTS
from polyfed.deploy.app_folder import APP, RECIPE, app_config, placed
from polyfed.deploy.device.tasks import packed
from polyfed.deploy.server.jobs import Job, Jobs
from polyfed.deploy.server.late_receipts import owe
from polyfed.deploy.server.membership import expected
from polyfed.deploy.server.run_log import LOGGER, RUNS, STATUS_FOLDER
from polyfed.deploy.server.server import finished, serve
from polyfed.engines.queued import QueueTransport
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.warm_start import APP_COPY
from polyfed.transport.queue import Queue
from polyfed.transport.tokens import Register


def run_here(
    app: Path, credentials: Path, changes: Mapping[str, str], begun: Callable[[str], object] = lambda run: None
) -> Path:
    """Run an app in this process to its end, with the devices of the server on this machine. It continues a run.

    Args:
        app: folder of the app.
        credentials: the credentials of the server.
        changes: values of `out` and `data` that replace those of the app.
        begun: called with the name of this start of the run.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run failed, or the folder holds no app.
    """
    config = app_config(app) | dict(changes)
    out = Path(config["out"])
    if finished(placed(load_recipe(app / RECIPE), config["data"]), out) and (out / RECEIPTS).exists():
        LOGGER.info("the run in %s is at its end: nothing to do. Another --out begins another run", out)
        _owe(credentials, out, app)
        return out
    os.environ[STATUS_FOLDER] = str((credentials / RUNS).absolute())
    model = app / APP_COPY
    texts = (app / RECIPE).read_text(encoding="utf-8"), model.read_text(encoding="utf-8") if model.exists() else ""
    register = Register(credentials)
    known: dict[str, Any] = {"joined": register.numbers, "renewed": register.replaced, "registered": register.keys}
    transport = QueueTransport(queue=Queue(credentials / "queue"), app=packed(*texts), **known)
    try:
        begun(transport.identity)
        serve(app / RECIPE, transport, config, execute)
    finally:
        transport.end()
        register.close()
    _owe(credentials, out, app)
    return out


def _owe(credentials: Path, out: Path, app: Path) -> None:
    """Let the server ask those for their receipts who were away at the end. The run is as good without."""
    try:
        owe(credentials, out, (app / RECIPE).read_text(encoding="utf-8"))
    except (PolyfedError, OSError, ValueError) as error:
        LOGGER.warning("devices that have not signed the run in %s are not asked later: %s", out, error)


def enqueue(app: Path, credentials: Path, changes: Mapping[str, str], at: float, wait: float) -> Job:
    """Put a run of an app into the queue of the server that uses these credentials, now or later.

    Args:
        app: folder of the app, which is copied.
        credentials: the credentials of the server.
        changes: values of `out` and `data` that replace those of the app.
        at: the job does not start before this moment, in seconds since 1970.
        wait: for how many seconds the job is tried again while too few devices answer.

    Raises:
        RecipeError: the folder holds no app or a wrong recipe, or another job has the same folder for its run.
    """
    config = app_config(app) | dict(changes)
    recipe = placed(load_recipe(app / RECIPE), config["data"])
    expected(recipe)
    files = [app / name for name in (APP, RECIPE, APP_COPY) if (app / name).exists()]
    result = {"name": config["name"], "purpose": recipe.deployment.purpose, "rounds": recipe.rounds}
    result |= {"out": str(Path(config["out"]).absolute()), "data": config["data"]}
    return Jobs.of_server(credentials).add(files, **result, at=at, wait=wait)
