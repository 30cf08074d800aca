"""The crash-safe store of a device: what it must not forget, over all runs and restarts, in one SQLite file.

A device counts requests, runs, evaluations, replies with noise and their epsilon. It notes which secrets of secure
aggregation it has used, and keeps replies with noise. A server therefore gains nothing from a new run name or from a
restart. Everything that decides about one request is read and written in one transaction: it is on disk before the
device computes a reply, and a refused request leaves no trace. A store that is full, damaged, emptied or a link
refuses, and never begins from zero.

The counts of old runs stay, because they are far smaller than the entries of the same requests in the audit log.
"""

import fcntl
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import CheckpointError

STORE = "device.sqlite3"
"""File in the state folder of a device."""

_COUNT = "INTEGER NOT NULL CHECK (typeof({0}) = 'integer' AND {0} > 0)"
_OF_CLIENT = "run TEXT NOT NULL, client INTEGER NOT NULL"

BODIES = "bodies"

TABLES = {
    "uses": "budget TEXT NOT NULL, at REAL NOT NULL CHECK (typeof(at) = 'real' AND at >= 0), name TEXT NOT NULL",
    "requests": f"{_OF_CLIENT}, round INTEGER NOT NULL, times {_COUNT.format('times')}, "
    "PRIMARY KEY (run, client, round)",
    "releases": f"{_OF_CLIENT}, request TEXT NOT NULL, times {_COUNT.format('times')}, "
    "PRIMARY KEY (run, client, request)",
    "spent": "unit TEXT NOT NULL CHECK (unit IN ('client', 'example')), "
    "noise REAL NOT NULL CHECK (typeof(noise) = 'real' AND noise > 0 AND noise < 9e999), "
    f"times {_COUNT.format('times')}, PRIMARY KEY (unit, noise)",
    "units": f"{_OF_CLIENT}, unit TEXT NOT NULL CHECK (unit IN ('', 'client', 'example')), mixed TEXT NOT NULL, "
    "PRIMARY KEY (run, client)",
    "secrets": f"{_OF_CLIENT}, name TEXT NOT NULL, use TEXT NOT NULL, PRIMARY KEY (run, client, name)",
    "unmasked": f"{_OF_CLIENT}, round INTEGER NOT NULL, request INTEGER NOT NULL, PRIMARY KEY (run, client)",
    "replies": f"{_OF_CLIENT}, round INTEGER NOT NULL, request INTEGER NOT NULL, use TEXT NOT NULL, "
    "header TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run, client, round, request)",
    BODIES: f"{_OF_CLIENT}, round INTEGER NOT NULL, request INTEGER NOT NULL, part INTEGER NOT NULL, "
    "bytes BLOB NOT NULL, PRIMARY KEY (run, client, round, request, part), "
    "FOREIGN KEY (run, client, round, request) REFERENCES replies ON DELETE CASCADE",
}
"""The tables, which the device checks whenever it opens the store, except for the large bodies, which have a digest:

- `uses`: what was used of the budgets per day, and when
- `requests`: how often the device was asked in a round
- `releases`: how often it answered a request with noise of its own
- `spent`: how many Gaussian mechanisms with this noise all runs together have used
- `units`: the unit that [privacy] protected in the newest request, and the blocks that could reveal other modalities
- `secrets`: digests of the secrets used, with the request that they served or the conditions they were drawn under
- `unmasked`: the newest request for which the client has revealed shares
- `replies`: the replies with noise that may have to be sent again
- `bodies`: their bodies, in parts
"""


@dataclass(frozen=True)
class Memory:
    """What a device remembers, as one client of one run uses it within a transaction.

    Attributes:
        rows: the connection, within the transaction.
        run: the run.
        client: the client's number.
    """

    rows: sqlite3.Connection
    run: str
    client: int


@dataclass(frozen=True)
class DeviceStore:
    """The store in a state folder. Several processes may use it at once.

    Attributes:
        folder: the state folder of the device.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """The path of the SQLite file."""
        return self.folder / STORE

    @property
    def begun(self) -> bool:
        """Whether there is a file, or a link in its place."""
        return os.path.lexists(self.path)

    @contextmanager
    def transaction(self, run: str, client: int) -> Iterator[Memory]:
        """Begin a transaction that no other process interrupts. It is on disk when the block ends, or undone.

        Raises:
            CheckpointError: the file is damaged, cannot be written, or is a link.
        """
        try:
            self._make()
            with closing(sqlite3.connect(self.path, timeout=60.0, isolation_level=None)) as rows:  # undoes if not done
                rows.execute("PRAGMA synchronous = FULL")
                rows.execute("PRAGMA foreign_keys = ON")
                rows.execute("BEGIN IMMEDIATE")
                for table in TABLES.keys() - {BODIES}:
                    (found,) = rows.execute(f"PRAGMA quick_check({table})").fetchone()
                    if found != "ok":
                        raise sqlite3.DatabaseError(f"the table '{table}' is damaged: {found}")
                yield Memory(rows, run, client)
                rows.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(
                f"{self.path} cannot be used: {error}. The device answers nothing before it can count. Free space on "
                "the disk, or restore the file from a copy; if the data is new, give the device a new state folder"
            ) from error

    def _make(self) -> None:
        """Make the file, which only the user of this process can read, unless it exists.

        Raises:
            OSError: the file is no plain file, or it is empty. SQLite would take an empty file for a new store.
        """
        if not self.begun:
            self._create()
        number = os.open(self.path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            facts = os.fstat(number)
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
                raise OSError("it is a link or no file")
            if not facts.st_size:
                raise OSError("it is empty")
            os.chmod(self.path, 0o600)
        finally:
            os.close(number)

    def _create(self) -> None:
        """Put a new file in its place as a whole, so that no process, and no crash, leaves it without its tables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft, folder = self.path.with_name(f".{STORE}.draft"), os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if self.begun:  # another process has made it meanwhile
                return
            draft.unlink(missing_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with closing(sqlite3.connect(draft, isolation_level=None)) as rows:
                rows.execute("PRAGMA journal_mode = MEMORY")
                rows.execute("PRAGMA auto_vacuum = FULL")  # deleted replies free the disk
                rows.execute("PRAGMA synchronous = FULL")
                for table, columns in TABLES.items():
                    rows.execute(f"CREATE TABLE {table} ({columns})")
            os.rename(draft, self.path)
            os.fsync(folder)
        finally:
            os.close(folder)
