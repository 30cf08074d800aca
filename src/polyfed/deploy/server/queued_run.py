"""Run an app in this process, with the devices of polyfed's own server on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path

from polyfed.deploy.app_folder import RECIPE, app_config, placed
from polyfed.deploy.device.tasks import packed
from polyfed.deploy.server.hosting import RUNS
from polyfed.deploy.server.run_log import LOGGER, STATUS_FOLDER
from polyfed.deploy.server.server import finished, serve
from polyfed.engines.queued import QueueTransport
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.warm_start import APP_COPY
from polyfed.transport.queue import Queue
from polyfed.transport.tokens import Register


def run_here(app: Path, credentials: Path, changes: Mapping[str, str]) -> Path:
    """Run an app in this process to its end, with the devices of the server on this machine. It continues a run.

    Args:
        app: folder of the app.
        credentials: the credentials of the server.
        changes: values of `out` and `data` that replace those of the app.

    Returns:
        The folder of the run.

    Raises:
        PolyfedError: the run failed, or the folder holds no app.
    """
    config = app_config(app) | dict(changes)
    out = Path(config["out"])
    if finished(placed(load_recipe(app / RECIPE), config["data"]), out):
        LOGGER.info("the run in %s is at its end: nothing to do. Another --out begins another run", out)
        return out
    os.environ[STATUS_FOLDER] = str((credentials / RUNS).absolute())
    model = app / APP_COPY
    texts = (app / RECIPE).read_text(encoding="utf-8"), model.read_text(encoding="utf-8") if model.exists() else ""
    register = Register(credentials)
    transport = QueueTransport(queue=Queue(credentials / "queue"), app=packed(*texts), joined=register.numbers)
    try:
        serve(app / RECIPE, transport, config, execute)
    finally:
        transport.end()
        register.close()
    return out
