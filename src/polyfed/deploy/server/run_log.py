"""Progress of a server's run: lines in the server's log, and a status file for `polyfed status` and the metrics.

The events of the run update the log and the status file. The status file holds counts, times, and reasons for missing
replies. The status file reveals nothing about labels, because it holds no classes, no accuracy and no loss.

Each start of a run has a folder of its own, which is named by its id. The run's process locks this folder until it
ends, so a reader knows at once that the process was killed, whatever the status file says.
"""

import json
import logging
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.system.files import replace_text
from polyfed.core.system.log_lines import logger_of
from polyfed.experiment.running.lock import alone_in, is_locked

STATUS_FOLDER = "POLYFED_STATUS_FOLDER"
"""Environment variable with the folder in which each run has a folder for its status; `polyfed submit` sets it."""

RUNS = "runs"
"""The folder in the credentials of a server with the statuses of its runs."""

STATUS = "status.json"

KEPT_RUNS = 100
"""Number of runs of which `remove_old` keeps the status."""

UNFINISHED = ("enrolling", "running")

KILLED = "the server of the run has ended without a word (stopped, killed, or out of memory); submit the app to go on"
"""The error of a run whose status says that it goes on, although its process has ended."""

LOGGER = logger_of("server", "stderr")  # standard output is for the result

LOGGED = ("client-missing", "late-reply")
"""Events whose log line lists all facts. Other events have their own sentences."""

MARK = "WARNING: "
"""The start of a note that is a warning."""

SCORES = ("accuracy", "mae", "recall1", "loss")
"""Scores of the global model that a round's log line shows if they are available."""

WRITE_EVERY = 1.0
"""Seconds between two writes of the status for the events in `LOGGED`, of which a round may have thousands."""

KEPT_REASONS = 20
"""Largest number of clients for which the status holds the newest reason for a missing reply."""


def log_run(event: str, **facts: Any) -> None:
    """Write an event of the run as a line of its log."""
    level = logging.INFO
    if event == "round-finished":
        row = facts["row"]
        evaluated = row.get("metrics", {}).get("global", {})
        shown = "".join(f", {name} {evaluated[name]:.4f}" for name in SCORES if name in evaluated)
        text = f"round {row['round']}: {len(row['cohort'])} asked, {row['bytes_up']} bytes up{shown}"
        facts = {"round": row["round"], "asked": len(row["cohort"]), "bytes_up": row["bytes_up"]}
    elif event == "note":
        text, facts = str(facts["text"]), {}
        if text.startswith(MARK):  # the line of the log names its level already
            text, level = text.removeprefix(MARK), logging.WARNING
    elif event in LOGGED:
        level = logging.WARNING
        text = f"{event}: " + ", ".join(f"{name} {value}" for name, value in facts.items())
    else:
        return
    LOGGER.log(level, "%s", text, extra={"facts": {"event": event} | facts})


class RunStatus:
    """Writes the status of the run to a file. An object of this class is called with every event of the run.

    Args:
        folder: the folder for the status. This process locks it until it ends. Each write replaces the whole file
            atomically, so a reader never sees an incomplete file.
        run: the run folder.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        self.path, self.complained, self._crowded = folder / STATUS, False, -WRITE_EVERY
        self._alive = ExitStack()
        self.facts: dict[str, Any] = {
            "run": str(run.absolute()),
            "state": "enrolling",
            "round": 0,
            "rounds": 0,
            "enrolled": 0,
            "wanted": 0,
            "cohort": 0,
            "round_seconds": 0.0,
            "bytes_up": 0,
            "bytes_down": 0,
            "missing_replies": 0,
            "late_replies": 0,
            "reasons": {},
            "error": "",
            "exit_code": 0,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._alive.enter_context(alone_in(folder, "another process writes this status", "Stop it", seconds=5.0))
        except (OSError, RecipeError) as error:
            self._complain(error)
        self._write()

    def __call__(self, event: str, **facts: Any) -> None:
        """Update the status for an event. Events that do not affect the status are ignored."""
        handler = getattr(self, f"_on_{event.replace('-', '_')}", None)
        if handler is not None:
            handler(**facts)
            now = time.monotonic()
            if event not in LOGGED or now - self._crowded >= WRITE_EVERY:
                self._crowded = now if event in LOGGED else self._crowded
                self._write()

    def failed(self, error: str, exit_code: int = 1) -> None:
        """Record the error that ended the run."""
        self.facts |= {"state": "failed", "error": error, "exit_code": exit_code}
        self._write()

    def _on_enrolling(self, enrolled: int, wanted: int) -> None:
        self.facts |= {"enrolled": enrolled, "wanted": wanted}

    def _on_run_started(self, **facts: Any) -> None:
        self.facts |= {"state": "running", "rounds": facts["rounds"], "round": facts["first_round"] - 1}

    def _on_round_finished(self, row: dict[str, Any]) -> None:
        self.facts |= {"round": row["round"], "cohort": len(row["cohort"])}
        self.facts["round_seconds"] = sum(row["seconds"].values())
        for name in ("bytes_up", "bytes_down"):
            self.facts[name] += row[name]

    def _on_client_missing(self, round: int, task: str, client: int, reason: str) -> None:
        self.facts["missing_replies"] += 1
        reasons: dict[str, Any] = self.facts["reasons"]
        reasons.pop(str(client), None)
        reasons[str(client)] = {"round": round, "task": task, "reason": reason}
        for old in [*reasons][:-KEPT_REASONS]:
            del reasons[old]

    def _on_late_reply(self, discarded: int, **_: Any) -> None:
        self.facts["late_replies"] += discarded

    def _on_run_stopped(self, reason: str, **_: Any) -> None:
        self.failed(reason)

    def _on_run_finished(self, **_: Any) -> None:
        self.facts["state"] = "finished"

    def _write(self) -> None:
        try:
            replace_text(self.path, json.dumps(self.facts | {"updated": time.time()}))
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError | PolyfedError) -> None:
        """Log that the status cannot be written. The run does not depend on it."""
        if not self.complained:
            LOGGER.warning("the status cannot be written: %s", error)
        self.complained = True


def listeners_of(run: Path, identity: str) -> tuple[list[Any], RunStatus | None]:
    """Return all listeners of a server's run, and the one that writes the status.

    The second value is None if `STATUS_FOLDER` is not set.

    Args:
        run: the run folder.
        identity: the name of this start of the run.
    """
    where = os.environ.get(STATUS_FOLDER)
    if where:
        remove_old(Path(where))  # a server may run for months
    status = RunStatus(Path(where) / identity, run) if where else None
    return [log_run] if status is None else [log_run, status], status


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what `RunStatus` wrote to a folder, or None if it wrote nothing.

    If the process that wrote the status has ended although the run goes on, the run has failed.
    """
    alive = is_locked(folder)  # first: a process that is alive here may write its last status before the next line
    try:
        result = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(result, dict):
        return None
    if result.get("state") in UNFINISHED and not alive:
        result |= {"state": "failed", "error": KILLED, "exit_code": 1}
    return result


def remove_old(folder: Path) -> None:
    """Remove the statuses of all runs in a folder but the latest `KEPT_RUNS`."""
    runs = sorted(folder.glob("*/"), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in runs[KEPT_RUNS:]:
        if not is_locked(old):
            shutil.rmtree(old, ignore_errors=True)
