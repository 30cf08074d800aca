"""Rounds that a deployed run repeats after it was resumed, and that [privacy] has to count."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyfed.core.system.files import read_notes, replace_text
from polyfed.experiment.results.records import Records
from polyfed.experiment.running.assembly import Assembly

REPEATED = "repeated-rounds.json"
"""The file in the folder of a deployed run that counts its repeated rounds. `rounds` is the number of repeated rounds,
and `begun` is the newest round that has begun."""


class Repetitions:
    """Counts the rounds that were repeated or interrupted. They raise epsilon, like the other rounds of the run.

    A deployed run draws the noise of differential privacy from the operating system's random generator, so nobody can
    draw the same noise again. A repeated round therefore releases a second result with other noise, and epsilon must
    cover both results. An interrupted round counts too, because its result may have been
    released.

    Args:
        records: the records of the run, or None if the run writes no files.
        assembly: the parts of the run.

    Attributes:
        rounds: number of repeated and interrupted rounds. It is 0 without [privacy], and in a simulation.
    """

    def __init__(self, records: Records | None, assembly: Assembly) -> None:
        counts = records is not None and assembly.guarantee is not None and assembly.deployed
        self._path = records.folder / REPEATED if records is not None and counts else None
        self.rounds, self._records, self._ledger = 0, records, assembly.ledger

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Enclose the set-up of a run. If an exception ends a deployed set-up, the audit log still gets its entries.

        The data of these entries has arrived here, so the server's log must name it. A run that is refused leaves its
        folder free: the ledger gets the entries only if the folder already holds the run.
        """
        try:
            yield
        except BaseException:
            entries, records = self._ledger.drain(), self._records
            if entries and records is not None and records.audit is not None:
                (records.book if records.begun else records.audit.append)(entries, self._ledger.run)
            raise

    def begin(self, round: int) -> None:
        """Record the start of a round in the file, before the first request of the round is sent."""
        if self._path is not None:
            replace_text(self._path, json.dumps({"rounds": self.rounds, "begun": round}))

    def rewound(self, records: Records, places: dict[str, int], round: int) -> list[dict[str, Any]]:
        """Cut the records back to a checkpoint, and count the rounds that had begun after it.

        Args:
            records: the records of the run.
            places: file name -> size in bytes at the checkpoint.
            round: the round of the checkpoint, or 0 without a checkpoint.

        Returns:
            The rows of the remaining rounds.

        Raises:
            CheckpointError: the files do not hold the rounds up to the checkpoint, or a file is damaged.
        """
        noted = {} if self._path is None else read_notes(self._path, int)
        begun = max(noted.get("begun", 0), len(records.rounds()))
        left = records.rewind(places, round)
        if self._path is not None:
            self.rounds = noted.get("rounds", 0) + max(begun - round, 0)
            self.begin(round)
        return left
