"""Which local states a device keeps. Earlier ones stay, because the server may resume from an earlier round.

A place is a pair (round, number of the request). Each state is stored under the place of the task that returned it. A
task starts from the newest state of an earlier place, and never from a state that the task itself has stored. If the
server repeats a task, the task therefore starts from the same state as before and gives the same reply. A device
deletes the states of old runs, but keeps their ledgers.
"""

import json
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save

from polyfed.core.errors import BadReply
from polyfed.core.system.files import AUDIT
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tree import Tree
from polyfed.deploy.device.memory.store import DeviceStore, Memory, Place
from polyfed.engines.protocol import RequestId
from polyfed.experiment.running.checkpoint import separate

BEFORE: Place = (-1, -1)
"""The place before every request."""

KEPT_LEDGERS = 100
"""Number of the most recent runs whose folders a device keeps, so that new names of runs do not fill its disk."""

KEPT_RUNS, KEPT_UNENDED = 3, 20
"""Number of the most recent runs, and of those that have not ended, whose states and replies a client keeps. A job may
wait or be paused while others run, and needs its states to go on."""

_OF = "run = ? AND client = ?"


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


def check_fresh(memory: Memory, request_id: RequestId) -> None:
    """Refuse a request that the client must not answer any more. This changes nothing on the disk.

    Raises:
        BadReply: the client has already begun a task of a later request or of a newer session, or the states before
            the request have been deleted.
    """
    journal = journal_of(memory)
    if (request_id.session, request_id.place) < (journal.session, journal.place):
        raise BadReply(f"is stale: it is {request_id}, and {journal} has been answered")
    if request_id.place <= journal.floor:
        raise BadReply(f"asks for {request_id.place} (round, request), states up to {journal.floor} are forgotten")
    if journal.floor != BEFORE and not places_of(memory):
        raise BadReply("is of an old run whose local state has been deleted here; begin a new run")


def state_before(memory: Memory, request_id: RequestId) -> tuple[Tree, tuple[str, ...]] | None:
    """Load the state from which the task of a request starts. This changes nothing on the disk.

    Returns:
        The newest state of an earlier request, and the modalities that the client had when this state was written.
        None if there is no such state.

    Raises:
        sqlite3.DatabaseError: the state on disk is damaged. The transaction turns this into a `CheckpointError`.
    """
    found = memory.rows.execute(
        f"SELECT round, request, modalities, names, digest FROM states WHERE {_OF} AND (round, request) < (?, ?) "
        "ORDER BY round DESC, request DESC LIMIT 1",
        (memory.run, memory.client, *request_id.place),
    ).fetchone()
    if found is None:
        return None
    round, request, modalities, names, digest = found
    try:
        tensors = load(memory.read("states", (round, request), digest))
        return {name: tensors[str(at)] for at, name in enumerate(parse_json(names))}, tuple(parse_json(modalities))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise sqlite3.DatabaseError(f"the local state of round {round} is damaged: {error}") from error


def begin(memory: Memory, request_id: RequestId, *, again: bool = False) -> None:
    """Begin a task: forget the states that this request and later requests have left.

    Args:
        memory: what the device remembers of the client and the run.
        again: whether the reply is known, so that no task runs. The states then stay, because the server may also
            repeat the later requests, and their replies may be known too.

    Raises:
        BadReply: the request is not fresh; see `check_fresh`.
    """
    check_fresh(memory, request_id)
    if not again:
        memory.rows.execute(
            f"DELETE FROM states WHERE {_OF} AND (round, request) >= (?, ?)",
            (memory.run, memory.client, *request_id.place),
        )
    memory.rows.execute(f"DELETE FROM ended WHERE {_OF}", (memory.run, memory.client))  # it gets more rounds
    _note(memory, Journal(request_id.session, request_id.place, journal_of(memory).floor))


def keep(memory: Memory, request_id: RequestId, local: Tree, modalities: tuple[str, ...], kept: int) -> None:
    """Write the state that a task returned, and forget states that no request can need any more.

    A round is settled if the server will never repeat any request of this round. These states stay:

    - the new state
    - the state just before the new state, because the server can repeat its newest request
    - the last state of each round that is not settled, because the server can resume after this round
    - the newest state from a settled round, because the server can resume after the last settled round

    Args:
        memory: what the device remembers of the client and the run.
        local: the state.
        modalities: the client's modalities.
        kept: the newest settled round.
    """
    of = (memory.run, memory.client)
    tensors = {str(at): value.detach().cpu().contiguous() for at, value in enumerate(local.values())}
    content = save(separate(tensors))
    digest = memory.write("states", request_id.place, lambda path: path.write_bytes(content))
    names = json.dumps([*local])  # safetensors does not keep their order, on which sums depend
    row = (*of, *request_id.place, json.dumps(modalities), names, digest)
    memory.rows.execute("INSERT INTO states VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    places = places_of(memory)
    last_of = {place[0]: place for place in places}
    settled = [place for place in places if place[0] <= kept]
    wanted = {*places[-2:], *(place for round, place in last_of.items() if round > kept), *settled[-1:]}
    if len(settled) > 1:  # a resumed server continues from the last settled round
        _note(memory, Journal(request_id.session, request_id.place, settled[-1]))
    for place in set(places) - wanted:
        memory.rows.execute(f"DELETE FROM states WHERE {_OF} AND round = ? AND request = ?", (*of, *place))


def end(store: DeviceStore, run: str, client: int) -> None:
    """Note that a run has ended, so that its states need not be kept for long."""
    if store.begun:
        with store.transaction(run, client) as memory:
            memory.rows.execute("INSERT OR REPLACE INTO ended VALUES (?, ?)", (run, client))


def prune(store: DeviceStore, run: str, client: int) -> None:
    """Delete the states and replies of old runs of this client: see `KEPT_RUNS`. Those of this run stay.

    The ledgers of the `KEPT_LEDGERS` most recent runs stay. The client refuses later requests of all these runs. Older
    folders are deleted: the audit log of the device holds all entries of their ledgers. A run that another process
    works on at this moment waits for the next request.
    """
    with store.transaction(run, client) as memory:
        query = "SELECT run FROM journals WHERE client = ? ORDER BY rowid DESC"  # each note gives a new rowid
        runs = [name for (name,) in memory.rows.execute(query, (client,))]
        full = {
            name
            for table in ("states", "replies", "trainings")
            for (name,) in memory.rows.execute(f"SELECT DISTINCT run FROM {table} WHERE client = ?", (client,))
        }
        ended = {name for (name,) in memory.rows.execute("SELECT run FROM ended WHERE client = ?", (client,))}
    recent = [name for name in runs if name in full]
    kept = {*recent[:KEPT_RUNS], *[name for name in recent if name not in ended][:KEPT_UNENDED]}
    for name in [name for name in recent if name not in kept]:
        with store.alone(name, client, wait=False) as own:
            if own is not None and name != run:
                with own.transaction() as memory:
                    _forget_run(memory)
    for name in [name for name in runs if (store.folder / name).is_dir()][KEPT_LEDGERS:]:
        if name != run and (store.folder / AUDIT).exists():
            shutil.rmtree(store.folder / name / f"client-{client}", ignore_errors=True)
            with suppress(OSError):  # other clients of this run
                (store.folder / name).rmdir()


def _forget_run(memory: Memory) -> None:
    """Forget the states and replies of a run, and raise its floor without making the run more recent."""
    of = (memory.run, memory.client)
    if places := places_of(memory):
        memory.rows.execute(f"UPDATE journals SET floor_round = ?, floor_request = ? WHERE {_OF}", (*places[-1], *of))
    for table in ("states", "replies", "trainings"):
        memory.rows.execute(f"DELETE FROM {table} WHERE {_OF}", of)


def places_of(memory: Memory) -> list[Place]:
    """Return the places of the states of a client, in ascending order."""
    query = f"SELECT round, request FROM states WHERE {_OF} ORDER BY round, request"
    return [(round, request) for round, request in memory.rows.execute(query, (memory.run, memory.client))]


def journal_of(memory: Memory) -> Journal:
    """Return the progress of a client in a run."""
    query = f"SELECT session, round, request, floor_round, floor_request FROM journals WHERE {_OF}"
    found = memory.rows.execute(query, (memory.run, memory.client)).fetchone()
    if found is None:
        return Journal()
    session, round, request, *floor = found
    return Journal(session, (round, request), (floor[0], floor[1]))


def _note(memory: Memory, journal: Journal) -> None:
    row = (memory.run, memory.client, *journal.place, journal.session, *journal.floor)
    memory.rows.execute("INSERT OR REPLACE INTO journals VALUES (?, ?, ?, ?, ?, ?, ?)", row)
