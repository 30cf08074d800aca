"""Submit an app and wait for its end, with polyfed's exit code. `flwr run --stream` ends with 0 after any run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError, RecipeError, command
from polyfed.core.system.stop_signals import handling, interrupt
from polyfed.deploy.app_folder import APP, RECIPE, placed
from polyfed.deploy.launch import CONNECTION, statuses_of
from polyfed.deploy.processes import loopback_without_proxy
from polyfed.deploy.server.run_log import UNFINISHED, read_status
from polyfed.deploy.server.server import finished
from polyfed.engines.flower import QUIET
from polyfed.experiment.recipes.recipe import load_recipe

STARTED = re.compile(r"started run (\d+)")
"""The line with which `flwr run` tells the id of the new run."""

LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Submission:
    """An app and the SuperLink that runs it.

    Attributes:
        app: folder of the app.
        credentials: folder of the credentials of the SuperLink on this machine.
        changes: values of `out` and `data` that replace those of the app.
        show: called with each part of the log.
    """

    app: Path
    credentials: Path
    changes: Mapping[str, str]
    show: Callable[[str], None]

    def run(self) -> Path:
        """Run the app to its end. Ctrl-C and SIGTERM stop the run, and the next call continues it.

        If a run writes to the same folder already, this call shows its log instead of submitting another one. If the
        folder holds the result, nothing is submitted.

        Returns:
            The folder of the run.

        Raises:
            RecipeError: the folders hold no app or no connection to a SuperLink.
            PolyfedError: the run failed, or could not be submitted. `exit_code` is that of the run, or 1 if the run
                was killed.
        """
        config = self._config()
        out = Path(config["out"])
        if finished(placed(load_recipe(self.app / RECIPE), config["data"]), out):
            self.show(f"polyfed: the run in {out} is at its end: nothing to do. Another --out begins another run\n")
            return out
        identity = self._under_way(out)
        if identity:
            self.show(f"polyfed: run {identity} writes to {out} already; its log follows\n")
            words = ["log", identity, CONNECTION, "--stream"]
        else:
            # JSON strings of paths are TOML strings as well
            pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items())
            words = ["run", str(self.app), CONNECTION, "--stream", *(["--run-config", pairs] if pairs else [])]
        self._judge(self._followed(words, identity))
        return out

    def _config(self) -> dict[str, str]:
        """Return the configuration of the app, with the changes."""
        if not (self.app / APP).exists():
            raise RecipeError(
                f"{self.app} holds no app; write one: {command('app', self.app, '--recipe', 'RECIPE.toml')}"
            )
        if not (self.credentials / "flwr" / "config.toml").exists():
            start = command("superlink", self.credentials)
            raise RecipeError(f"no SuperLink uses {self.credentials}; start it: {start}")
        project = tomllib.loads((self.app / "pyproject.toml").read_text(encoding="utf-8"))
        config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
        return {key: str(value) for key, value in config.items()} | dict(self.changes)

    def _under_way(self, out: Path) -> str:
        """Return the id of the Flower run that writes to a folder and has not ended, or ""."""
        for folder in statuses_of(self.credentials).glob("*/"):
            told = read_status(folder)
            if told and told["state"] in UNFINISHED and Path(told["run"]) == out.absolute():
                return folder.name
        return ""

    def _followed(self, words: list[str], identity: str) -> str:
        """Run a command of Flower that shows a log, and return the id of the run, or "" if there is none."""
        with handling(interrupt, signal.SIGTERM):
            command = [str(Path(sys.executable).with_name("flwr")), *words]
            # in a session of its own: Ctrl-C reaches this process only, which then stops the run
            with subprocess.Popen(
                command,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        text = line.decode(errors="replace")
                        self.show(text)
                        if not identity and (found := STARTED.search(text)):
                            identity = found[1]
                    self._wait(identity)
                except KeyboardInterrupt:
                    self._stop(identity)
                    raise
                finally:
                    process.kill()
        return identity

    def _wait(self, identity: str) -> None:
        """Wait until the server of a run has ended. Its log may break off before, for example on a full disk."""
        folder = statuses_of(self.credentials) / identity
        while identity and (told := read_status(folder)) and told["state"] in UNFINISHED:
            time.sleep(LOOK_SECONDS)

    def _stop(self, identity: str) -> None:
        if identity:
            words = [str(Path(sys.executable).with_name("flwr")), "stop", identity, CONNECTION]
            subprocess.run(words, env=self._environment(), capture_output=True, check=False)

    def _judge(self, identity: str) -> None:
        """Raise the error of a run that has failed."""
        if not identity:
            raise _failure(f"`flwr` submitted nothing; does `{command('superlink', self.credentials)}` run?")
        told = read_status(statuses_of(self.credentials) / identity)
        if told is None:
            raise _failure(f"run {identity} ended before its server wrote a status; see the log of the SuperLink")
        if told["state"] != "finished":
            raise _failure(told["error"], told["exit_code"] or 1)

    def _environment(self) -> dict[str, str]:
        own = {"FLWR_HOME": str((self.credentials / "flwr").absolute()), "PYTHONUNBUFFERED": "1"}
        return QUIET | dict(os.environ) | own | loopback_without_proxy(os.environ)


def _failure(text: str, exit_code: int = 1) -> PolyfedError:
    """Return an error that ends the command with this exit code."""
    error = PolyfedError(text)
    error.exit_code = exit_code
    return error
