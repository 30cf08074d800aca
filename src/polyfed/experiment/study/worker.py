"""A process that executes the runs of a sweep in sequence: `python -m polyfed.experiment.study.worker`.

The process reads jobs as lines of JSON from standard input, and writes messages as lines of JSON to standard output. It
ends when its input is closed. It therefore also ends when the process that started it is killed.
"""

import json
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from polyfed.core.errors import PolyfedError, PolyfedWarning
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.lock import alone_in
from polyfed.experiment.running.loop import execute
from polyfed.experiment.running.machine import memory_of

LEAVE = 30.0
"""The number of seconds to wait for another process that still writes to the folder of a run."""

REFUSED = 1
"""The exit code for an exception that is not polyfed's own."""


class _Paused(Exception):
    """The run has had the round after which it pauses."""


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Execute the jobs that arrive, until the input is closed."""
    waiting: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in jobs:
            waiting.put(json.loads(line))
        os._exit(0)  # at once, even in the middle of a round, because a run on disk can be resumed at any moment

    def tell(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while True:
        carry_out(waiting.get(), tell)


def carry_out(job: Mapping[str, Any], tell: Any) -> None:
    """Execute one job, and report its rounds and its result.

    Args:
        job: `recipe`, the table of a recipe, `folder`, the folder of the run, and `until`, the round after which the
            run pauses, or 0.
        tell: a function that is called with the facts of each message.
    """
    started = time.perf_counter()
    until = job.get("until", 0)

    def listen(event: str, **facts: Any) -> None:
        if event == "run-started":
            tell(event="round", round=facts["first_round"] - 1, rounds=facts["rounds"], memory=memory_of(os.getpid()))
        elif event == "round-finished":
            tell(event="round", round=facts["row"]["round"], memory=memory_of(os.getpid()))
            if facts["row"]["round"] == until:  # its row and its checkpoint are on the disk
                raise _Paused

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PolyfedWarning)
        outcome: dict[str, Any]
        try:
            _wait_for(Path(job["folder"]))
            records = Records(Path(job["folder"]), resume=True)
            with records.alone():
                execute(parse_recipe(job["recipe"]), records, Emitter([listen]))
            outcome = {"code": 0, "why": ""}
        except _Paused:
            outcome = {"code": 0, "why": "", "paused": True}
        except PolyfedError as error:
            outcome = {"code": error.exit_code, "why": f"{type(error).__name__}: {error}"}
        except Exception as error:  # a mistake in a user's encoder, or in polyfed, ends only this run
            outcome = {"code": REFUSED, "why": f"{type(error).__name__}: {error}"}
    tell(
        event="done",
        **({"paused": False} | outcome),
        seconds=time.perf_counter() - started,
        remarks=list(dict.fromkeys(str(w.message) for w in caught)),
    )


def _wait_for(folder: Path) -> None:
    """Create the folder of a run, and wait until no other process uses this folder.

    If a sweep was killed and started again, a process of the killed sweep may still write to the folder for a moment.

    Raises:
        RecipeError: the other process does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, "another process is writing this run", "End it, and start the sweep again", LEAVE):
        pass


def main() -> None:
    """Serve on standard input and output. All other output goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
