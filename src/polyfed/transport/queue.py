"""The packets that wait on the server's disk, between the process of a run and the web server.

Both processes open the same folder. The rows of the requests are in one SQLite file, and what they carry is in files
beside it. Nothing depends on the life of a process: a web server that was killed finds every open request again, and a
reply that a device has delivered waits for the run. A process wakes the other one through a *bell*, a named pipe.
Whether a bell has a listener also tells whether its process is alive.
"""

import hashlib
import os
import re
import secrets
import select
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from polyfed.transport.carried import Carried

OPEN, ANSWERED, CLOSED, LATE = "open", "answered", "closed", "late"
"""The states of a request. A reply to a closed request is refused, and the request becomes late."""

SERVER = "server"
"""The name of the web server's bell. The bell of a run has the run's name."""

RUN = re.compile(r"[0-9a-f]{16}")
REQUEST = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}")
"""Patterns of the names of runs and requests, from which the names of files are made."""

LOCK_SECONDS = 60.0
"""How long a write waits for the write of the other process."""

KEPT_SECONDS = 3600.0
"""How long a closed request is remembered, so that a late reply is counted."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, device TEXT NOT NULL, header TEXT NOT NULL, body TEXT NOT NULL,
    size INTEGER NOT NULL, app TEXT NOT NULL, most INTEGER NOT NULL, state TEXT NOT NULL, since REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS open_requests ON requests (device) WHERE state = 'open';
CREATE TABLE IF NOT EXISTS devices (device TEXT PRIMARY KEY, online INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS carried (
    id TEXT PRIMARY KEY, up_bytes INTEGER NOT NULL, up_s REAL NOT NULL, down_bytes INTEGER NOT NULL,
    down_s REAL NOT NULL, work_s REAL NOT NULL
);
"""


class Pieces(Protocol):
    """The content of a file, piece by piece, any number of times."""

    def __iter__(self) -> Iterator[memoryview]: ...

    def __len__(self) -> int: ...


Content = bytes | memoryview | Pieces
"""What a request carries: bytes, or pieces with their common length."""

_bells: set[int] = set()


class Bell:
    """A named pipe on which this process waits until another one rings.

    Args:
        path: where the pipe is, or will be.
    """

    def __init__(self, path: Path) -> None:
        draft = path.with_name(f".{path.name}")
        draft.unlink(missing_ok=True)
        os.mkfifo(draft, 0o600)
        self.number = os.open(draft, os.O_RDWR | os.O_NONBLOCK)  # reading and writing: it has no end of file
        draft.rename(path)  # only now, so that nobody takes its process for dead
        _bells.add(self.number)

    def wait(self, seconds: float) -> bool:
        """Wait until somebody rings, at most so many seconds. Return whether somebody did."""
        rung = bool(select.select([self.number], [], [], max(seconds, 0.0))[0])
        if rung:
            self.drain()
        return rung

    def drain(self) -> None:
        """Forget that somebody has rung."""
        with suppress(BlockingIOError):
            os.read(self.number, 2**16)

    def close(self) -> None:
        """Listen no more."""
        if self.number in _bells:
            _bells.remove(self.number)
            os.close(self.number)


def ring(path: Path) -> bool:
    """Ring a bell. Return whether its process is alive."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(number, b".")
    except BlockingIOError:  # it has been rung so often that the pipe is full
        pass
    finally:
        os.close(number)
    return True


def _leave_bells() -> None:
    """Close the bells of the parent in a forked process, which would make a parent that has died look alive."""
    for number in _bells:
        os.close(number)
    _bells.clear()


os.register_at_fork(after_in_child=_leave_bells)


class Waiting(NamedTuple):
    """A request that waits for a device.

    Attributes:
        id: its name.
        run: the name of the run that sent it.
        device: fingerprint of the key of the device for which it is.
        header: the packet's header, JSON.
        body: SHA-256 of the packet's body, or "" for an empty body.
        size: size in bytes of the body.
        app: SHA-256 of the recipe, and what belongs to it.
        most: largest size in bytes of the reply.
        state: OPEN, ANSWERED, CLOSED or LATE.
    """

    id: str
    run: str
    device: str
    header: str
    body: str
    size: int
    app: str
    most: int
    state: str


@contextmanager
def at_once(rows: sqlite3.Connection) -> Iterator[None]:
    """Make all writes of the block at once, or none if it fails. No other process writes meanwhile."""
    rows.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        rows.execute("ROLLBACK")
        raise
    rows.execute("COMMIT")


class Queue:
    """The requests and replies in a folder.

    Args:
        folder: the folder, which is made if it does not exist. Only this user can read it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)  # it may come from a copy
        path = self.folder / "queue.sqlite3"  # a server may be made in one thread and serve in another
        self._rows = sqlite3.connect(path, LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        self._rows.execute("PRAGMA journal_mode = WAL")
        self._rows.execute("PRAGMA synchronous = NORMAL")
        self._rows.executescript(_SCHEMA)

    def transaction(self) -> AbstractContextManager[None]:
        """Make all writes of the block at once, or none."""
        return at_once(self._rows)

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    # what both processes do

    def bell(self, name: str) -> Path:
        """Return the path of the bell of the web server or of a run."""
        return self.folder / f"{name}.bell"

    def file(self, run: str, name: str) -> Path:
        """Return the path of a file of a run."""
        return self.folder / f"{run}.{name}"

    def reply(self, request: str, kind: str = "reply") -> Path:
        """Return the path of the reply to a request, or to what has come of it: a `part`, or the `whole`, unchecked."""
        assert REQUEST.fullmatch(request), "a name that this queue has made"
        return self.folder / f"{request}.{kind}"

    def find(self, request: str) -> Waiting | None:
        """Return a request, or None if there is none of this name."""
        row = self._rows.execute(f"SELECT {_FIELDS} FROM requests WHERE id = ?", (request,)).fetchone()
        return None if row is None else Waiting(*row)

    # what the process of a run does

    def keep(self, run: str, content: Content) -> str:
        """Write what requests of a run carry to a file, unless it is there, and return its SHA-256."""
        total, pieces = hashlib.sha256(), [content] if isinstance(content, bytes | memoryview) else content
        for piece in pieces:
            total.update(piece)
        digest = total.hexdigest()
        path = self.file(run, digest)
        if not path.exists():
            draft = path.with_suffix(".draft")
            with open(draft, "wb") as file:
                file.writelines(pieces)
            draft.rename(path)
        return digest

    def add(self, run: str, packets: Sequence[tuple[str, str, Content]], app: str, most: int) -> list[str]:
        """Add requests of a run, and return their names.

        Args:
            run: name of the run.
            packets: for each request the device, the header and the body.
            app: what `keep` returned for the app.
            most: largest size in bytes of a reply.
        """
        known: dict[int, str] = {}  # the same body goes to many devices
        rows = []
        for device, header, body in packets:
            if body and id(body) not in known:
                known[id(body)] = self.keep(run, body)
            name = f"{run}.{secrets.token_hex(8)}"
            rows.append(Waiting(name, run, device, header, known[id(body)] if body else "", len(body), app, most, OPEN))
        with self.transaction():
            marks = ", ".join("?" * (len(Waiting._fields) + 1))
            self._rows.executemany(f"INSERT INTO requests VALUES ({marks})", [(*row, time.time()) for row in rows])
            old = (run, CLOSED, LATE, time.time() - KEPT_SECONDS)
            self._rows.execute("DELETE FROM requests WHERE run = ? AND state IN (?, ?) AND since < ?", old)
        ring(self.bell(SERVER))
        return [row.id for row in rows]

    def states(self, run: str, states: Collection[str]) -> dict[str, Waiting]:
        """Return the requests of a run in one of these states, by name."""
        marks = ", ".join("?" * len(states))
        rows = self._rows.execute(
            f"SELECT {_FIELDS} FROM requests WHERE run = ? AND state IN ({marks})", (run, *states)
        )
        return {row[0]: Waiting(*row) for row in rows}

    def forget(self, requests: Collection[str]) -> None:
        """Delete requests whose replies have been read, and the replies."""
        with self.transaction():
            for table in ("requests", "carried"):
                self._rows.executemany(f"DELETE FROM {table} WHERE id = ?", [(name,) for name in requests])
        for name in requests:
            self.reply(name).unlink(missing_ok=True)

    def carried(self, requests: Collection[str]) -> dict[str, Carried]:
        """Return what the web server has measured of these requests, by name."""
        rows = (self._rows.execute("SELECT * FROM carried WHERE id = ?", (name,)).fetchone() for name in requests)
        return {row[0]: Carried(*row[1:]) for row in rows if row is not None}

    def shut(self, run: str, requests: Collection[str]) -> None:
        """Close open requests, and delete the bodies that no open request carries. Devices give up their tasks."""
        with self.transaction():
            self._rows.executemany(
                "UPDATE requests SET state = ?, since = ? WHERE id = ? AND state = ?",
                [(CLOSED, time.time(), name, OPEN) for name in requests],
            )
        for name in requests:  # what a device has begun to send, which could otherwise fill the disk
            for kind in ("part", "whole"):
                self.reply(name, kind).unlink(missing_ok=True)
        carried = {name for row in self.states(run, [OPEN]).values() for name in (row.body, row.app)}
        for path in self.folder.glob(f"{run}.{'[0-9a-f]' * 64}"):
            if path.suffix.removeprefix(".") not in carried:
                path.unlink(missing_ok=True)
        ring(self.bell(SERVER))

    def online(self) -> list[str] | None:
        """Return the devices that are connected, or None if the web server is not running."""
        if not ring(self.bell(SERVER)):
            return None
        return [device for (device,) in self._rows.execute("SELECT device FROM devices WHERE online ORDER BY device")]

    # what the web server does

    def next_for(self, device: str) -> Waiting | None:
        """Return the oldest open request for a device."""
        text = f"SELECT {_FIELDS} FROM requests WHERE device = ? AND state = ? ORDER BY rowid LIMIT 1"
        row = self._rows.execute(text, (device, OPEN)).fetchone()
        return None if row is None else Waiting(*row)

    def wanted(self) -> set[str]:
        """Return the devices for which there is an open request."""
        return {device for (device,) in self._rows.execute("SELECT device FROM requests WHERE state = ?", (OPEN,))}

    def deliver(self, request: Waiting, kind: str = "part", carried: Carried | None = None) -> bool:
        """Hand the reply in the file of this kind to the run. Return False, and delete it, if the request is closed.

        Args:
            carried: what was measured of the request.
        """
        came, reply = self.reply(request.id, kind), self.reply(request.id)
        with self.transaction():
            done = self._rows.execute(
                "UPDATE requests SET state = ? WHERE id = ? AND state = ?", (ANSWERED, request.id, OPEN)
            )
            if done.rowcount:
                came.rename(reply)
                self._note(request, carried)
        came.unlink(missing_ok=True)
        ring(self.bell(request.run))
        return done.rowcount == 1

    def too_late(self, request: Waiting, carried: Carried | None = None) -> None:
        """Note that a device has a reply to a closed request, so that the run counts it."""
        with self.transaction():
            told = (LATE, request.id, CLOSED)
            if self._rows.execute("UPDATE requests SET state = ? WHERE id = ? AND state = ?", told).rowcount:
                self._note(request, carried)

    def _note(self, request: Waiting, carried: Carried | None) -> None:
        if carried is not None:
            marks = ", ".join("?" * (len(Carried._fields) + 1))
            self._rows.execute(f"INSERT OR REPLACE INTO carried VALUES ({marks})", (request.id, *carried))

    def mark(self, online: Mapping[str, bool]) -> None:
        """Note which devices are connected, and wake the runs."""
        with self.transaction():
            self._rows.executemany("INSERT OR REPLACE INTO devices VALUES (?, ?)", list(online.items()))
        for path in self.folder.glob("*.bell"):
            if RUN.fullmatch(path.stem):
                ring(path)

    def nobody_is_online(self) -> None:
        """Forget which devices were connected when an earlier web server ended."""
        with self.transaction():
            self._rows.execute("DELETE FROM devices")

    def tidy(self) -> None:
        """Delete what runs have left whose processes have ended."""
        names = {path.name.partition(".")[0] for path in self.folder.iterdir()}
        for run in filter(RUN.fullmatch, names):
            if ring(self.bell(run)):
                continue
            with self.transaction():
                self._rows.execute("DELETE FROM carried WHERE substr(id, 1, 16) = ?", (run,))
                self._rows.execute("DELETE FROM requests WHERE run = ?", (run,))
            for path in self.folder.glob(f"{run}.*"):
                path.unlink(missing_ok=True)


_FIELDS = ", ".join(Waiting._fields)
