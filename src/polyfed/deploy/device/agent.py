"""The process of a device that waits for the server. It needs little memory, because it does not import PyTorch.

Each device has a thread, which waits for a request, writes what it carries to the device's state folder, lets another
process run the task (`polyfed.deploy.device.tasks`) and sends the reply. Several devices can share this process, for
example on a gateway. `polyfed device` starts it, with the configuration in an open file.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Any, Self

from polyfed.core.errors import BadReply, CheckpointError, PolyfedError, RecipeError
from polyfed.core.system.files import lock, without_links
from polyfed.core.system.log_lines import logger_of
from polyfed.deploy.device.contacts import Contact, note_contact
from polyfed.deploy.device.monitor import DeviceMonitor
from polyfed.privacy.egress.audit_log.keys import tie
from polyfed.transport.connection import TAKEN, TOO_LARGE, Connection
from polyfed.transport.logins import PrivateKey
from polyfed.transport.queue import REQUEST

TASKS = "polyfed.deploy.device.tasks"

LOOK_SECONDS = 2.0
"""While a task works, how often the device asks whether the server still waits for its reply."""

IDLE_SECONDS = 60.0
"""The process that runs tasks, which holds PyTorch, ends when no task has come for so long."""

LARGEST_APP = 2**25
"""Largest size in bytes of a recipe and the values of its warm start."""

LARGEST_HEADER = 2**22

KEPT_APPS = 8
"""Number of recipes that stay in the state folder, so that not every request fetches its recipe."""

PAUSE_SECONDS = 10.0
"""How long a device waits after a message that it could not answer, and which the server will offer again."""

MESSAGES, APPS = "agent.messages", "agent.apps"
"""Folders in the state folder. No server can choose these names for a run, whose folder lies beside them: they have a
dot, and names of runs have none (`polyfed.engines.protocol.RUN_NAME`)."""

LOST = "the process of its task was killed twice, for example because the device has too little memory"

WAITS = "A run that has begun without them takes them when `polyfed submit` is called again, which continues the run"

LOGGER = logger_of("device", "stderr")

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass
class Running:
    """A task in the other process.

    Attributes:
        number: its number.
        ended: set when it has ended.
        facts: `verdict` and `bytes_up` of its reply; None if the other process was lost.
    """

    number: int
    ended: Event = field(default_factory=Event)
    facts: dict[str, Any] | None = None


class Tasks:
    """The process that runs tasks: started when one comes, and ended when none has come for a while.

    Args:
        parallel: number of tasks that may run at the same time.
        idle_seconds: see `IDLE_SECONDS`.
    """

    def __init__(self, parallel: int, idle_seconds: float = IDLE_SECONDS) -> None:
        self.slots, self.idle_seconds = BoundedSemaphore(parallel), idle_seconds
        self._lock, self._used, self._count = Lock(), time.monotonic(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._running: dict[int, Running] = {}

    def begin(self, **task: Any) -> Running:
        """Begin a task; see `polyfed.deploy.device.tasks`."""
        with self._lock:
            self._count += 1
            running = self._running[self._count] = Running(self._count)
            self._say({"task": running.number, **task})
        return running

    def cancel(self, running: Running) -> None:
        """End a task, and wait until it has ended."""
        with self._lock:
            self._say({"cancel": running.number})
        running.ended.wait()

    def prepare(self) -> None:
        """Start the process, because a task will come."""
        with self._lock:
            self._started()

    def rest(self) -> None:
        """End the process if no task has come for a while."""
        with self._lock:
            if self._process is not None and not self._running and time.monotonic() - self._used > self.idle_seconds:
                self._end()

    def close(self) -> None:
        """End the process and its tasks."""
        with self._lock:
            if self._process is not None:
                self._end()

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        self._used = time.monotonic()
        if self._process is None:
            # -P: Python imports nothing from the current folder
            words = [sys.executable, "-P", "-m", TASKS]
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            Thread(target=self._listen, args=(self._process,), daemon=True).start()
        return self._process

    def _say(self, line: dict[str, Any]) -> None:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it has just died, and `_listen` ends its tasks
            return

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            with self._lock:
                self._used = time.monotonic()
                running = self._running.pop(told.pop("task"))
            running.facts = told
            running.ended.set()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written to a process that has died
                pipe.close()
        with self._lock:
            if self._process is not process and self._process is not None:
                return
            self._process = None
            lost, self._running = self._running, {}
        for running in lost.values():
            running.ended.set()


@dataclass(frozen=True)
class Offer:
    """A request that waits for this device, as the server describes it."""

    id: str
    header: str
    body: tuple[str, int]
    app: tuple[str, int]

    @classmethod
    def read(cls, told: dict[str, Any]) -> Self:
        """Check what the server says. Names of files are made from it.

        Raises:
            BadReply: it is not the description of a request.
        """
        match told:
            case {
                "id": str(name),
                "header": str(header),
                "body": {"sha256": str(body), "size": int(body_size)},
                "app": {"sha256": str(app), "size": int(app_size)},
            } if (
                REQUEST.fullmatch(name)
                and len(header) <= LARGEST_HEADER
                and header.isascii()
                and (_DIGEST.fullmatch(body) or not body_size)
                and _DIGEST.fullmatch(app)
                and min(body_size, app_size) >= 0
            ):
                return cls(name, header, (body, body_size), (app, app_size))
        raise BadReply("is not the description of a request")


class Device:
    """One device: it answers one request after another.

    Args:
        connection: its calls to the server.
        config: its configuration, as `NodeConfig` describes it, with `state`.
        tasks: runs its tasks.
        limit: size in bytes of the largest message that it fetches.
        done: called with the facts of each task that has ended.
    """

    def __init__(self, connection: Connection, config: dict[str, Any], tasks: Tasks, limit: int, done: Any) -> None:
        self.connection, self.config, self.tasks, self.limit, self.done = connection, config, tasks, limit, done
        self.state = Path(config["state"])
        self.failed = 0
        self._noted: Contact | None = None

    def run(self) -> None:
        """Answer requests until the process ends, or the server refuses this device."""
        try:
            with alone_in(self.state):
                while True:
                    self._turn()
        except InterruptedError:
            return
        except PolyfedError as error:
            self.failed = error.exit_code
            LOGGER.error("client %s: %s", self.config.get("client"), error)
        finally:
            self.connection.close()

    def _turn(self) -> None:
        """Wait for a request, and answer it. No message of the server ends the device, and neither does a full disk."""
        try:
            told = self.connection.next()
            self._note_contact()
            if told is not None:
                self._answer(Offer.read(told))
        except (InterruptedError, PolyfedError):
            raise
        except (BadReply, OSError) as error:
            LOGGER.warning("client %s could not answer: the message %s", self.config.get("client"), error)
            self.connection.stop.wait(PAUSE_SECONDS)  # the server offers it again
        except Exception:  # a fault of polyfed, but the other devices of this process, and later requests, go on
            LOGGER.exception("client %s could not answer", self.config.get("client"))
            self.connection.stop.wait(PAUSE_SECONDS)

    def _note_contact(self) -> None:
        """Write to the audit log whose server this is, and which keys have changed, before anything leaves for it."""
        line, client = self.connection, self.config.get("client")
        if not line.certificate:
            return
        place = f"{line.host}:{line.port}", line.authority, client if type(client) is int else -1
        now = Contact(*place, line.key.fingerprint, line.certificate, line.ends)
        if now == self._noted:
            return
        try:
            note_contact(self.state, now)
        except CheckpointError as error:  # whatever would be written to the log is refused too, and says so
            LOGGER.warning("client %s: %s", client, error)
        tie(self.state, line.key)
        self._noted = now

    def _answer(self, offer: Offer) -> None:
        self.tasks.prepare()
        tie(self.state, self.connection.key)
        place = private_folder(private_folder(self.state / MESSAGES) / offer.id)
        for old in place.parent.iterdir():  # a folder that is left is of a process that was killed
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
        reply, stamp = place / "reply", place / "stamp"
        # the reply exists if an earlier process was killed while it sent the reply
        if reply.exists() and not (stamp.exists() and stamp.read_text() == self._stamp()):
            reply.unlink()  # the owner has changed the policy since
        sent = TAKEN if reply.exists() or self._worked(offer, place) else ""
        if sent and (sent := self.connection.send(offer.id, reply)) == TOO_LARGE:
            why = f"the reply is too large: {reply.stat().st_size} bytes, more than [deployment] message_megabytes"
            reply.unlink()
            sent = self.connection.send(offer.id, reply) if self._ran(offer, place, [why]) else ""
        if sent != TAKEN:
            LOGGER.warning("client %s gives up a task: nobody waits for its reply any more", self.config.get("client"))
        shutil.rmtree(place, ignore_errors=True)

    def _stamp(self) -> str:
        """Return a digest of the configuration and the policy, under which a reply was made."""
        policy = self.config.get("policy")
        text = Path(policy).read_bytes() if policy and Path(policy).is_file() else b""
        return hashlib.sha256(json.dumps(self.config).encode() + b"\0" + text).hexdigest()

    def _fetched(self, offer: Offer, place: Path) -> str | None:
        """Write what a request carries to files. Return why it is refused, or "", or None if nobody waits for it."""
        with open(place / "header", "w", encoding="ascii", opener=without_links) as file:
            file.write(offer.header)
        apps, (app, app_size), (body, size) = private_folder(self.state / APPS), offer.app, offer.body
        if app_size > LARGEST_APP or size > self.limit:
            most = LARGEST_APP if app_size > LARGEST_APP else self.limit
            return f"the message is too large: {max(app_size, size)} bytes, and this device fetches at most {most}"
        if not _holds(apps / app, app):
            part = place / "app"  # here, as the folder of the message goes with it
            if not self.connection.fetch(offer.id, "app", app, app_size, part):
                return None
            part.rename(apps / app)
            for old in sorted(apps.iterdir(), key=lambda one: one.lstat().st_mtime)[:-KEPT_APPS]:
                old.unlink()
        os.utime(apps / app)
        if size and not self.connection.fetch(offer.id, "body", body, size, place / "body"):
            return None
        return ""

    def _worked(self, offer: Offer, place: Path) -> bool:
        """Run the task of a request. Return False if nobody waits for its reply any more."""
        if (refusal := self._fetched(offer, place)) is None:
            return False
        while not self.tasks.slots.acquire(timeout=LOOK_SECONDS):
            if not self.connection.is_open(offer.id):
                return False
        try:
            return self._ran(offer, place, [refusal, refusal, LOST])  # again, as the same task gives the same reply
        finally:
            self.tasks.slots.release()

    def _ran(self, offer: Offer, place: Path, tries: list[str]) -> bool:
        """Run the task of a request, once for each reason to refuse it, until there is a reply; see `_worked`.

        Raises:
            OSError: the process of the task died each time.
        """
        for why in tries:
            with open(place / "stamp", "w", opener=without_links) as file:
                file.write(self._stamp())
            task = {"folder": str(place), "app": str(self.state / APPS / offer.app[0])}
            running = self.tasks.begin(**task, config=self.config, refusal=why)
            while not running.ended.wait(LOOK_SECONDS):
                if not self.connection.is_open(offer.id):
                    self.tasks.cancel(running)
                    return False
            self.done(running.facts or {})
            if (place / "reply").exists():
                return True
        raise OSError("was not answered, because its process is killed again and again")


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can read, unless it exists, and return its path.

    Raises:
        OSError: it is a link, or no folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(number, 0o700)
    finally:
        os.close(number)
    return path


@contextmanager
def alone_in(state: Path) -> Iterator[Path]:
    """Keep the state folder of a device from other processes, by a lock on the file whose path this yields.

    Raises:
        RecipeError: another process uses it, or it cannot be used.
    """
    try:
        path = private_folder(state) / "agent.lock"
        file = open(path, "wb", opener=without_links)  # noqa: SIM115  closed below
    except OSError as error:
        raise RecipeError(f"{state} cannot be used: {error}") from None
    with file:
        try:
            lock(file, wait=False)
        except BlockingIOError:
            why = f"another process uses {state}; end it, or give this device another folder (state)"
            raise RecipeError(why) from None
        yield path


def _holds(path: Path, sha256: str) -> bool:
    """Return whether a file has this digest. One that was written before the power failed may not."""
    try:
        with open(path, "rb", opener=without_links) as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def serving(credentials: str, host: str, port: int) -> Any:
    """Serve the devices of a silo in a thread of the edge's process, and return the server with its `thread`."""
    from polyfed.deploy.credentials import care_for_certificate  # only an edge serves
    from polyfed.transport.hub import HubServer

    hub: Any = HubServer(Path(credentials), host, port, lambda: care_for_certificate(Path(credentials)))
    hub.thread = Thread(target=hub.run, daemon=True)
    hub.thread.start()
    return hub


def main(number: int) -> int:
    """Run the devices of the configuration in an open file, until a signal ends this process. Return the exit code."""
    with open(number, "rb") as file:
        told = json.load(file)
    stop, tasks = Event(), Tasks(told["parallel"], told["idle_seconds"])
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stop.set())
    contact = os.memfd_create("contact")
    os.utime(contact, (0, 0))
    monitor = DeviceMonitor(told["metrics_port"], contact) if told["metrics_port"] else None
    devices, threads = [], []
    hub = serving(**told["hub"]) if "hub" in told else None
    try:
        for one in told["devices"]:
            note = partial(LOGGER.warning, "client %s: %s", one["config"].get("client"))
            connection = Connection(told["server"], Path(told["ca"]), PrivateKey(Path(one["key"])), stop, note)
            done = monitor.done if monitor is not None else lambda facts: None
            devices.append(Device(connection, one["config"], tasks, told["limit"], done))
        who = "%d devices are ready and wait for %s. %s" if hub is None else "%d edge is ready and waits for %s. %s"
        LOGGER.info(who, len(devices), told["server"], WAITS)
        for device in devices:
            threads.append(Thread(target=device.run, daemon=True))
            threads[-1].start()
        while not stop.is_set() and any(thread.is_alive() for thread in threads):
            last = min(device.connection.contact for device in devices)
            os.utime(contact, (last, last))
            tasks.rest()
            if monitor is not None:
                monitor.certificate = min(device.connection.ends for device in devices)
            monitor.wait(1.0) if monitor is not None else stop.wait(1.0)
    finally:
        tasks.close()
        if hub is not None:
            hub.server.should_exit = True
            hub.thread.join()
    return next((device.failed for device in devices if device.failed), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
