"""The process of a job: `python -m polyfed.deploy.server.job_process CREDENTIALS NUMBER START`.

It locks the folder of the job, obeys the orders in its record, and notes there how the run ended. It imports PyTorch
only after it has the lock, so that everybody knows at once that it lives. If another release is installed meanwhile, it
ends, and the server starts the job again: modules that it has not imported yet would be of that release.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Thread
from typing import Any

from polyfed.core.errors import CheckpointError, PolyfedError, RecipeError, TooFewReplies, TransportError
from polyfed.core.system.stop_signals import handling, interrupt
from polyfed.deploy.server.jobs import (
    COPY,
    END_SECONDS,
    FAILED,
    FINISHED,
    LOGGER,
    LOOK_SECONDS,
    RUNNING,
    WAITING,
    Job,
    Jobs,
    rounds_done,
)
from polyfed.experiment.running.lock import alone_in

AGAIN_SECONDS = 30.0
"""Pause before a job that too few devices answered is tried again, in which the next one has its turn."""


def work(jobs: Jobs, number: int, start: int) -> None:
    """Run a job in this process to its end, unless the record says otherwise, and note in the record how it ended.

    Args:
        start: the count of its starts, which tells this process from an earlier or later one.
    """
    busy = alone_in(jobs.place(number), "another process works on this job", "Wait for it", seconds=5.0)
    ended = Event()
    with handling(interrupt, signal.SIGTERM), busy:
        try:
            if not _is_mine(jobs, number, start):
                return
            Thread(target=_obey, args=(jobs, number, start, ended), daemon=True).start()
            changes = _run(jobs, jobs.get(number))
        except KeyboardInterrupt:  # an order, or the server ends
            changes = {"state": WAITING}
        ended.set()
        jobs.change(number, RUNNING, **changes)


def _run(jobs: Jobs, job: Job) -> Mapping[str, Any]:
    """Run a job, and return the changes of its record."""
    from polyfed.deploy.server.queued_run import run_here  # only here, as it imports PyTorch

    app, changes = jobs.place(job.id) / COPY, {"out": job.out, "data": job.data}
    try:
        run_here(app, jobs.credentials, changes, lambda run: jobs.change(job.id, RUNNING, run=run))
    except (TooFewReplies, TransportError) as error:
        return _tried(job, error)
    except PolyfedError as error:
        return {"state": FAILED, "reason": str(error), "exit_code": error.exit_code}
    except Exception as error:
        LOGGER.exception("job %d was ended by a fault", job.id)
        why = f"{type(error).__name__}: {error}; its log has the traceback"
        return {"state": FAILED, "reason": why, "exit_code": 1}
    return {"state": FINISHED, "reason": "", "exit_code": 0, "failing": 0.0, "kills": 0}


def _tried(job: Job, error: PolyfedError) -> Mapping[str, Any]:
    """Return the changes of the record after a try in which too few devices, or no server, answered."""
    now, exit_code = time.time(), error.exit_code
    failing = job.failing if job.failing and rounds_done(Path(job.out))["round"] <= job.begun_at else now
    if now - failing >= job.wait:
        why = f"{error}. It was tried for {job.wait / 3600:g} hours (--wait); `polyfed jobs ... resume` tries again"
        return {"state": FAILED, "reason": why, "exit_code": exit_code}
    again = {"at": now + AGAIN_SECONDS, "failing": failing}
    return {"state": WAITING, "reason": f"tries again: {error}", "exit_code": exit_code, **again}


def _is_mine(jobs: Jobs, number: int, start: int) -> bool:
    job = jobs.get(number)
    return (job.state, job.starts) == (RUNNING, start)


def _release() -> str:
    """Return the release that is installed, or "" while pip replaces it."""
    try:
        return version("polyfed")
    except PackageNotFoundError:
        return ""


def _obey(jobs: Jobs, number: int, start: int, ended: Event) -> None:
    """End this process as soon as the record does not say any more that it runs, or another release is installed."""
    release = _release()
    while not ended.wait(LOOK_SECONDS):
        try:
            if _is_mine(jobs, number, start) and _release() == release:
                continue
        except (OSError, CheckpointError):  # the disk may be away for a moment
            continue
        except RecipeError:  # somebody has removed the folder
            LOGGER.warning("the folder of job %d is gone", number)
        os.kill(os.getpid(), signal.SIGTERM)
        if not ended.wait(END_SECONDS):
            os._exit(1)  # a kill at any moment loses nothing but the round


if __name__ == "__main__":
    work(Jobs(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
