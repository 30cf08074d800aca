"""The program that a device's SuperNode runs: Flower's `flower-supernode`, with some additions.

The program fetches no message above a size limit from the server, and follows no redirect. It answers one message at a
time and sends only the reply to this message (`OneMessage`). If the server refuses the device's key, or if an error
ends the connection, the program logs this and exits with code 6. If the process that runs the tasks ends, or if a reply
never comes, the program logs this and exits with code 1. Its log lines have polyfed's format.

`polyfed supernode` runs this file by its path. This file does not import the package polyfed, because that would load
PyTorch into a process that does not need it.
"""

import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from flwr.common.constant import Status, SubStatus
from flwr.supercore.exit.exit_handler import trigger_exit_handlers
from flwr.supercore.logger import console_handler
from flwr.supercore.retry import http_retry
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

LOG_LINES = Path(__file__).parents[3] / "core" / "system" / "log_lines.py"
FETCH_LIMIT = Path(__file__).with_name("fetch_limit.py")
CAREFUL_HTTP = Path(__file__).with_name("careful_http.py")

WORKER = "POLYFED_WORKER"
"""Environment variable with the id of the process that runs the tasks; `polyfed supernode` sets it."""

CONTACT = "POLYFED_CONTACT"
"""Environment variable with the number of the open file that `touch` marks; `polyfed supernode` sets it."""

LOST = (
    "the process that runs the tasks of this device has ended (killed, or out of memory). The SuperNode ends too, "
    "because the server would otherwise wait for a device that answers nothing. Start `polyfed supernode` again, or "
    "run it under a service manager that does so"
)

LET_END = 10.0
"""Seconds between the end of the process that runs the tasks and the end of this program. If both got the same signal,
this program signs off from the server and ends by itself within this time. Flower takes at most 5 seconds."""

BROKEN = (
    "the connection to the server has ended with the error above, for example because the server has a new certificate "
    "(this device then needs the new ca.pem). Start `polyfed supernode` again, or run it under a service manager that "
    "does so"
)

REFUSED = (
    "the server refused the key of this device: the key is not registered there, or the clocks of the two machines "
    "differ. Ask the server's operator to put this device's public key (*.pub) into the credentials folder, and to "
    "start `polyfed superlink` again"
)

STUCK = (
    "no task of this device works any more, and the reply to the last message of the server has not come. The "
    "SuperNode ends, because it would answer nothing else. Start `polyfed supernode` again, or run it under a service "
    "manager that does so"
)

STUCK_SECONDS, ENDED_SECONDS = 60.0, 20.0
"""How long a device waits for a reply that no task can give any more, and how often it asks, while a task works,
whether the run goes on."""

CONNECTION_FAILED = 6
"""The exit code of `polyfed.core.errors.TransportError`."""


class Telling:
    """Replaces the module `os` in `http_retry`, which is Flower's code that repeats failed calls to the server.

    If the server answers "unauthorized", Flower's code interrupts the process with `os.kill`. Flower does not log that
    the server refused the key, and the process would exit with code 0. This class logs the refusal, and remembers it so
    that `main` can exit with another code.

    Attributes:
        code: the exit code of the program, or None if nothing has happened that needs a code of its own.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def kill(self, process: int, number: int) -> None:
        """Log that the server has refused the key, and interrupt the process."""
        self.end(REFUSED, CONNECTION_FAILED, number)

    def watch(self, worker: int) -> None:
        """End this process when the process that runs the tasks, a child of this process, has ended."""

        def wait() -> None:
            os.waitpid(worker, 0)
            time.sleep(LET_END)
            self.end(LOST, 1, signal.SIGTERM)

        Thread(target=wait, daemon=True).start()

    def end(self, why: str, code: int, number: int) -> None:
        """Log a reason, and end this process by a signal and with this exit code."""
        self.code = code
        logging.getLogger("flwr").error(why)
        os.kill(os.getpid(), number)


class OneMessage:
    """Keeps a SuperNode at the message that it has received last.

    Flower's SuperNode handles one message after another, but it sends whichever reply lies in its store. If a run ends
    while the SuperNode receives a message of it, the message and its task stay, and a minute later Flower writes an
    error as their reply. The SuperNode would send this error in place of the reply to the next run's message, and would
    stay one reply behind for ever. This class replaces the two functions between which Flower's loop alternates.

    Args:
        module: Flower's module `start_client_internal`, whose functions are replaced.
        stuck: called if the reply to a message can no longer come.
    """

    def __init__(self, module: Any, stuck: Callable[[], None]) -> None:
        names = vars(module)
        self._receive, self._send = names["_pull_and_store_message"], names["_push_messages"]
        names["_pull_and_store_message"], names["_push_messages"] = self.receive, self.send
        self.stuck = stuck
        self._asked: Any = None
        self._check: Callable[[], None] = lambda: None

    def receive(self, *, state: Any, object_store: Any, receive: Any, pull_object: Any, **more: Any) -> int | None:
        """Receive a message. If its run ends meanwhile, forget the message and its task."""
        self._asked = None

        def received() -> Any:
            found = receive()
            self._asked = None if found is None else found[0].metadata
            return found

        options = {"state": state, "object_store": object_store, "receive": received, "pull_object": pull_object}
        run: int | None = self._receive(**options, **more)
        if run is None and self._asked is not None:
            _forget(state, object_store)
        # the message itself has been confirmed and is not sent again, but the call fails if its run has ended; unlike
        # Flower's call for this question, it leaves no line in the server's log
        self._check = lambda: pull_object(self._asked.run_id, self._asked.message_id)
        return run

    def send(self, *, state: Any, object_store: Any, **more: Any) -> None:
        """Wait for the reply to the message and send it. If the run ends meanwhile, forget the message and its task."""
        try:
            self._send(state=_Awaiting(state, self._asked, self), object_store=object_store, **more)
        except RunNotRunningException:
            logging.getLogger("flwr").info("run %s has ended; its task is given up", self._asked.run_id)
            _forget(state, object_store)

    def ended(self) -> None:
        """Ask the server about the run of the message.

        Raises:
            RunNotRunningException: the run has ended.
        """
        with suppress(Exception):  # every other answer leaves open whether the run goes on
            self._check()


class _Awaiting:
    """A SuperNode's state, from which only the reply to one message can be taken.

    It also watches whether this reply can still come.
    """

    def __init__(self, state: Any, asked: Any, owner: OneMessage) -> None:
        self._state, self._of, self._owner = state, asked, owner
        self._worked = self._looked = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_messages_legacy(self, **filters: Any) -> Sequence[Any]:
        """Return the reply if it has come, and delete replies to other messages."""
        found = self._state.get_messages_legacy(**filters)
        other = [one.metadata.message_id for one in found if one.metadata.reply_to_message_id != self._of.message_id]
        if other:
            self._state.delete_messages(message_ids=other)
        if len(found) == len(other):
            self._look(time.monotonic())
        return [one for one in found if one.metadata.message_id not in other]

    def _look(self, now: float) -> None:
        if _unfinished(self._state):
            self._worked = now
        elif now - self._worked > STUCK_SECONDS:
            self._worked = now  # the signal that ends the process arrives after this call
            self._owner.stuck()
        if now - self._looked > ENDED_SECONDS:
            self._looked = now
            self._owner.ended()


def _unfinished(state: Any) -> Sequence[Any]:
    found: Sequence[Any] = state.get_tasks(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING])
    return found


def _forget(state: Any, object_store: Any) -> None:
    """Delete all messages and end all tasks. The process of a task can then deliver no reply any more."""
    for task in _unfinished(state):
        state.finish_task(task.task_id, SubStatus.STOPPED, "the run has ended")
    state.delete_messages()
    object_store.clear()


def touch(*_: Any) -> None:
    """Mark the open file `CONTACT` with the present time of the monotonic clock, which all processes share."""
    now = time.monotonic_ns()
    os.utime(int(os.environ[CONTACT]), ns=(now, now))


def contact_hooks() -> dict[str, Any]:
    """Return the option of an HTTP client that calls `touch` for each answer in which the server did what was asked."""
    if CONTACT not in os.environ:
        return {}
    return {"event_hooks": {"response": [lambda answer: touch() if answer.is_success else None]}}


def speak_as_polyfed(config: dict[str, Any], log_lines: Any) -> None:
    """Give the web server on loopback polyfed's log format. Flower starts this web server with uvicorn's defaults.

    Args:
        config: uvicorn's default logging configuration, which this function changes.
        log_lines: the class `LogLines`.
    """
    config["formatters"] = {name: {"()": log_lines, "role": "device"} for name in config["formatters"]}


def main() -> None:
    """Run the SuperNode until a signal or an error ends it.

    If an error ends the connection to the server, Flower's function returns, but Flower's web server for tasks would
    keep this process alive. The device would then never connect again, and no service manager would start it again.
    """
    log_lines = runpy.run_path(str(LOG_LINES))
    vars(console_handler)["format"] = log_lines["LogLines"]("device").format
    console_handler.addFilter(log_lines["says_something"])
    speak_as_polyfed(uvicorn.config.LOGGING_CONFIG, log_lines["LogLines"])
    fetch_limit, careful_http = runpy.run_path(str(FETCH_LIMIT)), runpy.run_path(str(CAREFUL_HTTP))
    telling = vars(http_retry)["os"] = Telling()
    if WORKER in os.environ:
        telling.watch(int(os.environ[WORKER]))
    limit = int(os.environ[fetch_limit["DEVICE_LIMIT"]]) * 2**20
    OneMessage(start_client_internal, lambda: telling.end(STUCK, 1, signal.SIGTERM))
    with fetch_limit["at_most"](start_client_internal, limit), careful_http["careful_calls"](**contact_hooks()):
        try:
            flower_supernode()
            logging.getLogger("flwr").error(BROKEN)
            trigger_exit_handlers(run_before_force_exit=False)
            telling.code = CONNECTION_FAILED
        finally:
            if telling.code is not None:
                sys.exit(telling.code)


if __name__ == "__main__":
    main()
