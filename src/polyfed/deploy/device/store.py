"""The crash-safe store of a device: what it must not forget, over all runs and restarts, in one SQLite file.

It counts the requests, runs and evaluations of the last 24 hours. A server therefore gains nothing from a new run name
or from a restart. A store that is full, damaged or a link refuses, and never begins again from zero.
"""

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import CheckpointError
from polyfed.privacy.egress.limits import Limits

STORE = "device.sqlite3"
"""File in the state folder of a device."""

DAY = 24 * 3600.0
"""Length in seconds of the window of the limits per day. A calendar day would allow twice as many around midnight."""

_TABLES = """
CREATE TABLE IF NOT EXISTS uses (budget TEXT NOT NULL, at REAL NOT NULL, name TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS uses_by_time ON uses (budget, at);
"""


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

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction that no other process interrupts. It is on disk when the block ends, or undone.

        Raises:
            CheckpointError: the file is damaged, cannot be written, or is a link.
        """
        try:
            self._make()
            connection = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("BEGIN IMMEDIATE")
                for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                    connection.execute(statement)
                yield connection
                connection.execute("COMMIT")
            finally:
                connection.close()  # undoes what was not committed
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(
                f"{self.path} cannot be used: {error}. The device answers nothing before it can count. Free space on "
                "the disk, or restore the file from a copy; if the data is new, give the device a new state folder"
            ) from error

    def spend(self, limits: Limits, budget: str, name: str, client: int, task: str) -> None:
        """Count a use of a budget, and refuse the request if more than allowed lie within the last 24 hours.

        Args:
            limits: the limits of the device.
            budget: a limit, such as `max_requests_per_day`.
            name: the run. `max_runs_per_day` counts each name once.
            client: the client's number, for the message.
            task: the task, for the message.

        Raises:
            EgressError: the budget is spent.
            CheckpointError: the store cannot be used.
        """
        if limits.value(budget) is None:
            return
        with self.transaction() as store:
            last, clock = store.execute("SELECT max(at) FROM uses").fetchone()[0] or 0.0, time.time()
            now = max(clock, last)  # a clock that is set back frees nothing
            store.execute("DELETE FROM uses WHERE at <= ?", (now - DAY,))
            if budget == "max_runs_per_day":
                known = store.execute("SELECT 1 FROM uses WHERE budget = ? AND name = ?", (budget, name)).fetchone()
                if known:
                    store.execute("UPDATE uses SET at = ? WHERE budget = ? AND name = ?", (now, budget, name))
                    return
            count = store.execute("SELECT count(*) FROM uses WHERE budget = ?", (budget,)).fetchone()[0]
            if error := limits.refusal(budget, count + 1, client, task):
                if last > clock + DAY:
                    error.add_note(f"{self.path} holds a use {last - clock:.0f} s in the future. Check the clock")
                raise error
            store.execute("INSERT INTO uses VALUES (?, ?, ?)", (budget, now, name))

    def _make(self) -> None:
        """Make the file, which only the user of this process can read, unless it exists.

        Raises:
            OSError: the file is no plain file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            facts = os.fstat(number)
            if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
                raise OSError("it is a link or no file")
            os.chmod(self.path, 0o600)
        finally:
            os.close(number)
