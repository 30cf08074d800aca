"""A client's local state on its own disk: it survives a restart of the client, and goes back with a resumed server.

A state is kept under the place (round, ask) of the task that left it. A task at a place begins with the newest state
before that place, so that doing it again gives the same. Each state is a checkpoint of `polyfed.experiment.checkpoint`:
safetensors and JSON, written atomically, with a checksum.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from polyfed.core.errors import BadReply, CheckpointError
from polyfed.core.files import replace_text
from polyfed.core.tree import Tree
from polyfed.engines.protocol import RequestId
from polyfed.experiment import checkpoint

JOURNAL = "journal.json"

Place = tuple[int, int]


BEFORE: Place = (-1, -1)
"""Before anything."""


@dataclass(frozen=True)
class Journal:
    """How far a client has come.

    Attributes:
        session: the newest session of the server that was answered.
        place: the newest place in it.
        floor: the place of the oldest state that is left, once older ones have been forgotten.
    """

    session: int = -1
    place: Place = BEFORE
    floor: Place = BEFORE


class Store:
    """Local states of one client in one run.

    Args:
        folder: of this client and run; made when it is first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process works for this client."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def begin(self, request_id: RequestId) -> tuple[Tree, tuple[str, ...]] | None:
        """The state a task begins with and the modalities the client had then, or None where there is none yet; what
        later places left is forgotten.

        Raises:
            BadReply: the ask is stale: a later one of this or of a later session has been answered.
            CheckpointError: the state on disk is damaged.
        """
        journal = self._journal()
        if (request_id.session, request_id.place) < (journal.session, journal.place):
            raise BadReply(f"is stale: it asks for {request_id}, answered has been {journal}")
        if request_id.place <= journal.floor:
            raise BadReply(f"asks for {request_id.place} (round, ask), states up to {journal.floor} are forgotten")
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
        """Write the state a task left, and forget those that no ask can want any more.

        The server can repeat the newest ask, and it can go back to the end of any round that it has not settled yet:
        wanted are the state before this one, the last of every such round, and the last of those that are settled.

        Args:
            request_id: of the task.
            local: the state.
            modalities: of the client.
            kept: the newest round that the server will never ask again.
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
            facts = json.loads(path.read_text())
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
