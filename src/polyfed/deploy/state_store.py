"""A client's local state on its own disk. It survives a restart of the client and goes back with a resumed server.

A state is stored under the place (round, number of the request) of the task that left it. A task begins with the newest
state before its own place, so repeating it gives the same reply. Each state is a checkpoint of
`polyfed.experiment.checkpoint`: safetensors and JSON, written atomically, with a checksum. Only the device's own user
can read the files. States of runs that are over are deleted; ledgers are kept.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polyfed.core.errors import BadReply, CheckpointError
from polyfed.core.files import replace_text
from polyfed.core.parsing import parse_json
from polyfed.core.tree import Tree
from polyfed.engines.protocol import RequestId
from polyfed.experiment import checkpoint

JOURNAL = "journal.json"

Place = tuple[int, int]


BEFORE: Place = (-1, -1)
"""The place before every request."""

KEPT_RUNS = 3
"""Runs whose states a client keeps: those it has worked for most recently."""


@dataclass(frozen=True)
class Journal:
    """How far a client has come in a run.

    Attributes:
        session: the newest session of the server that the client has answered.
        place: the newest place in that session.
        floor: requests up to this place cannot be repeated, as the states before them have been deleted.
    """

    session: int = -1
    place: Place = BEFORE
    floor: Place = BEFORE


class Store:
    """The local states of one client in one run.

    Args:
        folder: folder of this client and run, as `<state folder>/<run>/client-<number>`; made when it is first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process works for this client, then hold its folder.

        Files that are written meanwhile can be read by this user only.
        """
        before = os.umask(0o077)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, self.folder.parent):
                folder.chmod(0o700)  # it may have been made by an earlier version
            with (self.folder / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        finally:
            os.umask(before)

    def prune(self) -> None:
        """Delete the states of all but the `KEPT_RUNS` runs that this client has worked for most recently.

        Their ledgers stay, and a request of such a run is refused.
        """
        journals = [*self.folder.parent.parent.glob(f"*/{self.folder.name}/{JOURNAL}")]
        newest = sorted(journals, key=lambda path: path.stat().st_mtime, reverse=True)
        stores = [store for path in newest if (store := Store(path.parent))._places()]
        for old in stores[KEPT_RUNS:]:
            if old.folder != self.folder:
                places = old._places()
                old._note(replace(old._journal(), floor=places[-1]))
                for place in places:
                    shutil.rmtree(old._path(place))

    def begin(self, request_id: RequestId) -> tuple[Tree, tuple[str, ...]] | None:
        """Begin a task; states of later places are deleted.

        Returns:
            the state that the task begins with and the modalities that the client had when it was written, or None if
            the client has no state yet.

        Raises:
            BadReply: the request is stale, as a later one of this or of a later session has been answered; or the
                states before it have been deleted.
            CheckpointError: the state on disk is damaged.
        """
        journal = self._journal()
        if (request_id.session, request_id.place) < (journal.session, journal.place):
            raise BadReply(f"is stale: it is {request_id}, and {journal} has been answered")
        if request_id.place <= journal.floor:
            raise BadReply(f"asks for {request_id.place} (round, request), states up to {journal.floor} are forgotten")
        if journal.floor != BEFORE and not self._places():
            raise BadReply("is of an old run whose local state has been deleted here; begin a new run")
        for place in [place for place in self._places() if place >= request_id.place]:
            shutil.rmtree(self._path(place))
        self._note(Journal(request_id.session, request_id.place, journal.floor))
        places = self._places()
        if not places:
            return None
        found = checkpoint.load(self._path(places[-1]))
        assert found is not None, "a place is listed when its checkpoint is whole"
        return found[1]["local"], tuple(found[1]["modalities"])

    def keep(self, request_id: RequestId, local: Tree, modalities: tuple[str, ...], kept: int) -> None:
        """Write the state that a task left, and delete those that no request can need any more.

        The server can repeat its newest request, and it can go back to the end of any round that is not settled. So
        the state before this one is kept, the last of every such round, and the last of the settled rounds.

        Args:
            request_id: id of the request.
            local: the state.
            modalities: the client's modalities.
            kept: the newest settled round: the server will never ask for it or an earlier one again.
        """
        content = {"local": local, "modalities": list(modalities)}
        checkpoint.save(self._path(request_id.place), request_id.round, content)
        places = self._places()
        last_of = {place[0]: place for place in places}
        settled = [place for place in places if place[0] <= kept]
        wanted = {*places[-2:], *(place for round, place in last_of.items() if round > kept), *settled[-1:]}
        if len(settled) > 1:
            self._note(
                Journal(request_id.session, request_id.place, settled[-1])
            )  # a resumed server goes on from the last
        for place in [place for place in places if place not in wanted]:
            shutil.rmtree(self._path(place))

    def forget(self, request_id: RequestId) -> None:
        """Remove the state that a task left, since its reply does not leave."""
        shutil.rmtree(self._path(request_id.place), ignore_errors=True)

    def _note(self, journal: Journal) -> None:
        replace_text(self.folder / JOURNAL, json.dumps(asdict(journal)))

    def _journal(self) -> Journal:
        path = self.folder / JOURNAL
        if not path.exists():
            return Journal()
        try:
            facts = parse_json(path.read_text())
            return Journal(int(facts["session"]), _place(facts["place"]), _place(facts["floor"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy") from error

    def _places(self) -> list[Place]:
        found = []
        for path in self.folder.glob("state-*-*"):
            if (path / checkpoint.LATEST).exists():  # otherwise the writer died before it was whole
                _, round, request = path.name.split("-")
                found.append((int(round), int(request)))
        return sorted(found)

    def _path(self, place: Place) -> Path:
        return self.folder / f"state-{place[0]:06d}-{place[1]:03d}"


def _place(pair: list[int]) -> Place:
    round, request = pair
    return int(round), int(request)
