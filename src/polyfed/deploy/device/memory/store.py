"""The crash-safe store of a device: what it must not forget, over all runs and restarts, in one SQLite file.

A device counts requests, runs, evaluations, replies with noise and their epsilon. It notes which secrets of secure
aggregation it has used, how far each run has come, and which local states and replies it keeps. A server therefore
gains nothing from a new run name or from a restart. Everything that decides about one request is read and written in
one transaction: it is on disk before the device computes a reply, and a refused request leaves no trace. A store that
is full, damaged, emptied or a link refuses, and never begins from zero.

The tensors of a state or a training and the body of a reply are files beside the store, because SQLite writes 300 MB
three times as slowly as a file. A row names each file and its digest. The file is on disk before its row, and goes
after its row, so whatever moment a process dies at, a row never names a file that is not whole; a file that no row
names is deleted.

The counts of old runs stay, because they are far smaller than the entries of the same requests in the audit log.
"""

import errno
import hashlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import CheckpointError
from polyfed.core.system.files import lock, sync, without_links

STORE = "device.sqlite3"
"""File in the state folder of a device."""

_COUNT = "INTEGER NOT NULL CHECK (typeof({0}) = 'integer' AND {0} > 0)"
_NUMBER = "INTEGER NOT NULL CHECK (typeof({0}) = 'integer' AND {0} >= -1)"
_OF_CLIENT = "run TEXT NOT NULL, client INTEGER NOT NULL"
_AT = f"{_OF_CLIENT}, round {_NUMBER.format('round')}, request {_NUMBER.format('request')}"

Place = tuple[int, int]
"""A place in a run: (round, number of the request)."""

DURABLE = "PRAGMA synchronous = FULL"
"""What makes a transaction last even if the power fails as soon as it has ended."""

KINDS = {
    "states": ("state-{:06d}-{:03d}.safetensors", "round, request"),
    "replies": ("reply-{:06d}-{:03d}.bin", "round, request"),
    "trainings": ("training-{:06d}-{:03d}-{:02d}-{:d}.safetensors", "round, request, number, steps"),
}
"""The tables whose rows have a file: the name of the file, and the columns from which it is made."""

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
    "purposes": f"{_OF_CLIENT}, purpose TEXT NOT NULL, PRIMARY KEY (run, client)",
    "secrets": f"{_OF_CLIENT}, name TEXT NOT NULL, use TEXT NOT NULL, PRIMARY KEY (run, client, name)",
    "unmasked": f"{_AT}, PRIMARY KEY (run, client)",
    "ended": f"{_OF_CLIENT}, PRIMARY KEY (run, client)",
    "journals": f"{_AT}, session {_NUMBER.format('session')}, floor_round {_NUMBER.format('floor_round')}, "
    f"floor_request {_NUMBER.format('floor_request')}, PRIMARY KEY (run, client)",
    "states": f"{_AT}, modalities TEXT NOT NULL, names TEXT NOT NULL, digest TEXT NOT NULL, "
    "PRIMARY KEY (run, client, round, request)",
    "replies": f"{_AT}, use TEXT NOT NULL, header TEXT NOT NULL, digest TEXT NOT NULL, "
    "PRIMARY KEY (run, client, round, request)",
    "trainings": f"{_AT}, number {_NUMBER.format('number')}, steps {_NUMBER.format('steps')}, use TEXT NOT NULL, "
    "skeleton TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (run, client, round, request, number)",
}
"""The tables, which the device checks whenever it opens the store:

- `uses`: what was used of the budgets per day, and when
- `requests`: how often the device was asked in a round
- `releases`: how often it answered a request with noise of its own
- `spent`: how many Gaussian mechanisms with this noise all runs together have used
- `units`: the unit that [privacy] protected in the newest request, and the blocks that could reveal other modalities
- `purposes`: the purpose for which a run began
- `secrets`: digests of the secrets used, with the request that they served or the conditions they were drawn under
- `unmasked`: the newest request for which the client has revealed shares
- `ended`: the runs that have ended, as the server has said
- `journals`: the newest request that the client has begun, and up to which request none can come again
- `states`: the local states from which a request may start
- `replies`: the replies with noise that may have to be sent again
- `trainings`: the states of the local trainings of a task that has no reply yet
"""

VERSION, ADDED = 1, {1: ("ended", "trainings")}
"""The version of the tables, which the store notes as `user_version`, and the tables that each version has added. A
store of an older release gets them; a table that its version has is never made again, as its counts would be lost."""


@dataclass(frozen=True)
class Memory:
    """What a device remembers, as one client of one run uses it within a transaction.

    Attributes:
        rows: the connection, within the transaction.
        run: the run.
        client: the client's number.
        folder: the client's folder of this run, with the files that rows name and with its ledger.
    """

    rows: sqlite3.Connection
    run: str
    client: int
    folder: Path

    def write(self, kind: str, place: tuple[int, ...], fill: Callable[[Path], object]) -> str:
        """Write the file of a row, which this transaction adds. Return the digest.

        Args:
            kind: the table of the row.
            place: the values of the columns from which the name of the file is made.
            fill: writes the content to an empty file.
        """
        path = self.folder / KINDS[kind][0].format(*place)
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        fill(draft)
        sync(draft)
        digest = _sha256_of(draft)
        os.replace(draft, path)
        sync(self.folder)
        return digest

    def checked(self, kind: str, place: tuple[int, ...], digest: str) -> Path:
        """Return the path of the file of a row.

        Raises:
            sqlite3.DatabaseError: the file is missing, is a link, or is not the one that the row names.
        """
        path = self.folder / KINDS[kind][0].format(*place)
        try:
            found = _sha256_of(path)
        except OSError as error:
            raise sqlite3.DatabaseError(f"{path} cannot be read: {error}") from error
        if found != digest:
            raise sqlite3.DatabaseError(f"{path} is damaged")
        return path

    def read(self, kind: str, place: Place, digest: str) -> bytes:
        """Read the file of a row.

        Raises:
            sqlite3.DatabaseError: the file is missing, is a link, or is not the one that the row names.
        """
        return self.checked(kind, place, digest).read_bytes()

    def files(self) -> set[str]:
        """Return the names of the files that the rows of this client and run name."""
        of = (self.run, self.client)
        return {
            name.format(*place)
            for table, (name, columns) in KINDS.items()
            for place in self.rows.execute(f"SELECT {columns} FROM {table} WHERE run = ? AND client = ?", of)
        }


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
            CheckpointError: the store is damaged, cannot be written, or is a link.
        """
        try:
            self._make()
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from error
        try:
            with closing(sqlite3.connect(self.path, timeout=60.0, isolation_level=None)) as rows:  # undoes if not done
                rows.execute(DURABLE)
                rows.execute("BEGIN IMMEDIATE")
                _upgrade(rows)
                for table in TABLES:
                    (found,) = rows.execute(f"PRAGMA quick_check({table})").fetchone()
                    if found != "ok":
                        raise sqlite3.DatabaseError(f"the table '{table}' is damaged: {found}")
                yield Memory(rows, run, client, self.folder_of(run, client))
                rows.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> CheckpointError:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        return CheckpointError(
            f"{self.path} cannot be used: {os.strerror(errno.ENOSPC) if full else error}. The device answers nothing "
            "before it can count. Free space on the disk, or restore the state folder from a copy, which does not know "
            "what was spent since; if the data is new, give the device a new folder"
        )

    @contextmanager
    def alone(self, run: str, client: int, *, wait: bool = True) -> Iterator["ClientStore | None"]:
        """Lock the folder of a client and run against other processes, and make it if it does not exist.

        Args:
            client: the client's number.
            wait: whether to wait for the process that has the lock. If not, the block gets None in its place.

        Raises:
            CheckpointError: the folder cannot be made, or a part of its path is a link.
        """
        folder = self.folder_of(run, client)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (folder.parent, folder):
                path.mkdir(mode=0o700, exist_ok=True)
                os.close(_plain_folder(path))
            number = _plain_folder(folder)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be used: {error}. It must be a folder and no link") from error
        try:
            try:
                lock(number, wait=wait)
            except BlockingIOError:
                yield None
                return
            yield ClientStore(self, run, client, folder)
        finally:
            os.close(number)

    def folder_of(self, run: str, client: int) -> Path:
        """Return the folder of a client in a run."""
        return self.folder / run / f"client-{client}"

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
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft, folder = self.path.with_name(f".{STORE}.draft"), os.open(self.folder, os.O_RDONLY)
        try:
            lock(folder)
            if self.begun:  # another process has made it meanwhile
                return
            draft.unlink(missing_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with closing(sqlite3.connect(draft, isolation_level=None)) as rows:
                rows.execute("PRAGMA journal_mode = MEMORY")
                rows.execute(DURABLE)
                for table, columns in TABLES.items():
                    rows.execute(f"CREATE TABLE {table} ({columns})")
                rows.execute(f"PRAGMA user_version = {VERSION}")
            os.rename(draft, self.path)
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass(frozen=True)
class ClientStore:
    """The part of a store that one client and run uses, while it has the lock of its folder.

    Attributes:
        store: the store.
        run: the run.
        client: the client's number.
        folder: the client's folder of this run.
    """

    store: DeviceStore
    run: str
    client: int
    folder: Path

    @contextmanager
    def transaction(self) -> Iterator[Memory]:
        """Begin a transaction, as `DeviceStore.transaction`. At its end, delete the files that no row names."""
        named: set[str] | None = None
        try:
            with self.store.transaction(self.run, self.client) as memory:
                named = memory.files()
                yield memory
                after = memory.files()
            named = after  # only now, because a transaction that fails leaves the rows as they were
        finally:
            if named is not None:
                self._sweep(named)

    def _sweep(self, named: set[str]) -> None:
        for path in self.folder.iterdir():
            if path.suffix in (".safetensors", ".bin", ".draft") and path.name not in named:
                with suppress(OSError):  # a later transaction tries again
                    path.unlink()


def _upgrade(rows: sqlite3.Connection) -> None:
    """Make the tables that the release which wrote the store did not have, within the transaction.

    Raises:
        sqlite3.DatabaseError: a newer release wrote it.
    """
    (found,) = rows.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        raise sqlite3.DatabaseError("it is of a newer release of polyfed, which must be installed again")
    for version in range(found + 1, VERSION + 1):
        for table in ADDED[version]:
            rows.execute(f"CREATE TABLE IF NOT EXISTS {table} ({TABLES[table]})")
        rows.execute(f"PRAGMA user_version = {version}")


def _sha256_of(path: Path) -> str:
    with open(path, "rb", opener=without_links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain_folder(path: Path) -> int:
    """Open a folder that is no link, make it readable for its user only, and return the file descriptor."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    os.fchmod(number, 0o700)
    return number
