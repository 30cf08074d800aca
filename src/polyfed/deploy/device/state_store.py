"""A client's local states on its own disk. Earlier states stay, because the server may resume from an earlier round.

A place is a pair (round, number of the request). Each state is stored under the place of the task that returned it. A
task starts from the newest state of an earlier place, and never from a state that the task itself has stored. If the
server repeats a task, the task therefore starts from the same state as before and gives the same reply. Each state is a
checkpoint (`experiment/running/checkpoint.py`): safetensors and JSON, written atomically, with a checksum. Only the
device's own user can read the files. The store deletes states of old runs, but keeps their ledgers.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from polyfed.core.errors import BadReply, CheckpointError
from polyfed.core.system.files import AUDIT, replace_text, without_links
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tree import Tree
from polyfed.engines.protocol import RequestId
from polyfed.experiment.running import checkpoint

JOURNAL = "journal.json"

Place = tuple[int, int]

BEFORE: Place = (-1, -1)
"""The place before every request."""

KEPT_LEDGERS = 100
"""Number of the most recent runs whose folders a device keeps, so that new names of runs do not fill its disk."""

KEPT_RUNS = 3
"""Number of the most recent runs whose states a client keeps."""


@dataclass(frozen=True)
class Journal:
    """The progress of a client in a run.

    Attributes:
        session: number of the newest session in which the client has begun a task. A session is the time from one start
            of the server to its end.
        place: the place of the newest task in that session, as a pair (round, number of the request).
        floor: requests up to this place cannot be repeated, because the states before them have been deleted.
    """

    session: int = -1
    place: Place = BEFORE
    floor: Place = BEFORE


class Store:
    """The local states of one client in one run.

    Args:
        folder: folder of this client and run, `<state folder>/<run>/client-<number>`. The first use makes the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def has_state(self) -> bool:
        """Whether the folder holds a local state."""
        return bool(self._places())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process uses this client's folder, then lock the folder.

        Files that are made inside the `with` block can be read only by the user who runs this process.
        """
        before = os.umask(0o077)
        try:
            for folder in (self.folder.parent, self.folder):
                if folder.is_symlink():
                    raise CheckpointError(f"{folder} is a symbolic link. Move the folder itself to its place")
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(0o700)  # an earlier version may have made the folder with other rights
            with open(self.folder / "lock", "w", opener=without_links) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        finally:
            os.umask(before)

    def prune(self) -> None:
        """Delete the states of all runs except the `KEPT_RUNS` most recent runs of this client.

        The ledgers of the `KEPT_LEDGERS` most recent runs stay. The client refuses later requests of these runs. Older
        folders are deleted: the audit log of the device holds all entries of their ledgers.
        """
        journals = [*self.folder.parent.parent.glob(f"*/{self.folder.name}/{JOURNAL}")]
        newest = sorted(journals, key=lambda path: path.stat().st_mtime, reverse=True)
        stores = [store for path in newest if (store := Store(path.parent))._places()]
        for old in stores[KEPT_RUNS:]:
            if old.folder != self.folder:
                old._note(replace(old._journal(), floor=old._places()[-1]))
                for place in old._places():
                    shutil.rmtree(old._path(place))
        for path in newest[KEPT_LEDGERS:]:
            if path.parent != self.folder and (path.parents[2] / AUDIT).exists():
                shutil.rmtree(path.parent)
                with contextlib.suppress(OSError):  # other clients of this run
                    path.parents[1].rmdir()

    def check_fresh(self, request_id: RequestId) -> None:
        """Refuse a request that the client must not answer any more. This changes nothing on the disk.

        Raises:
            BadReply: the client has already begun a task of a later request or of a newer session, or the states
                before the request have been deleted.
            CheckpointError: the journal on disk is damaged.
        """
        journal = self._journal()
        if (request_id.session, request_id.place) < (journal.session, journal.place):
            raise BadReply(f"is stale: it is {request_id}, and {journal} has been answered")
        if request_id.place <= journal.floor:
            raise BadReply(f"asks for {request_id.place} (round, request), states up to {journal.floor} are forgotten")
        if journal.floor != BEFORE and not self._places():
            raise BadReply("is of an old run whose local state has been deleted here; begin a new run")

    def before(self, request_id: RequestId) -> tuple[Tree, tuple[str, ...]] | None:
        """Load the state from which the task of a request starts. This changes nothing on the disk.

        Returns:
            The newest state of an earlier request, and the modalities that the client had when this state was written.
            None if there is no such state.

        Raises:
            CheckpointError: the state on disk is damaged.
        """
        places = [place for place in self._places() if place < request_id.place]
        if not places:
            return None
        found = checkpoint.load(self._path(places[-1]))
        assert found is not None, "a place is listed when its checkpoint is whole"
        return found[1]["local"], tuple(found[1]["modalities"])

    def begin(self, request_id: RequestId, *, again: bool = False) -> None:
        """Begin a task: delete what this request and later requests have left on the disk.

        Args:
            again: whether the reply to the request is known and is sent again. Nothing is then deleted, because the
                server may also repeat the later requests, and their replies may be known too.

        Raises:
            BadReply: the request is not fresh; see `check_fresh`.
            CheckpointError: the journal on disk is damaged.
        """
        self.check_fresh(request_id)
        for place in () if again else self._places():
            if place >= request_id.place:
                shutil.rmtree(self._path(place))
        self._note(Journal(request_id.session, request_id.place, self._journal().floor))

    def keep(self, request_id: RequestId, local: Tree, modalities: tuple[str, ...], kept: int) -> None:
        """Write the state that a task returned, and delete states that no request can need any more.

        A round is settled if the server will never repeat any request of this round. The store keeps these states:

        - the new state
        - the state just before the new state, because the server can repeat its newest request
        - the last state of each round that is not settled, because the server can resume after this round
        - the newest state from a settled round, because the server can resume after the last settled round

        Args:
            local: the state.
            modalities: the client's modalities.
            kept: the newest settled round.
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
            )  # a resumed server continues from the last settled round
        for place in [place for place in places if place not in wanted]:
            shutil.rmtree(self._path(place))

    def forget(self, request_id: RequestId) -> None:
        """Remove the state that a task returned, because the reply was not sent."""
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
        """Return the places for which the folder holds a whole state, in ascending order."""
        found = []
        for path in self.folder.glob("state-*-*"):
            if (path / checkpoint.LATEST).exists():  # otherwise the process died before the checkpoint was complete
                _, round, request = path.name.split("-")
                found.append((int(round), int(request)))
        return sorted(found)

    def _path(self, place: Place) -> Path:
        """Return the folder of the state of a place."""
        return self.folder / f"state-{place[0]:06d}-{place[1]:03d}"


def _place(pair: list[int]) -> Place:
    round, request = pair
    return int(round), int(request)
