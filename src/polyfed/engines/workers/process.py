"""A worker process: the jobs that it receives, the results that it returns, and how it runs a job."""

import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO, TextIOWrapper
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Protocol, Self, TextIO, cast

import torch

from polyfed.core.errors import PolyfedError
from polyfed.core.messages import Message, tensors
from polyfed.core.request import Request, Send
from polyfed.core.tasks import task_of
from polyfed.core.tree import Tree
from polyfed.data import Population
from polyfed.engines.machine.gpu import deterministic
from polyfed.engines.workers.shared_memory import Arena, Memory, Place, copied
from polyfed.federation.clock import Clock
from polyfed.federation.combined import Combined
from polyfed.federation.replies import Answer
from polyfed.privacy.egress.ledger import Entry, Ledger

Unit = list[int]
"""Numbers of the clients that an engine runs together."""

Named = tuple[str, str | None]
"""The name of a message's field, and the name in its Tree, or None if the field is a Tensor."""

Entries = list[tuple[Named, Place]]
"""The names of a message's tensors, and their places in shared memory."""

Sent = list[tuple[list[int], Entries]]
"""Pairs of clients and the message that these clients receive."""

Kept = dict[int, list[tuple[str, Place]]]
"""Client -> the names of the tensors in its local state, and their places in shared memory."""


class Served(Protocol):
    """The part of an engine that a worker uses."""

    algorithm: Any
    population: Population
    initial: Tree
    imports: ClassVar[tuple[str, ...]]
    device: torch.device
    locals: dict[int, Tree]
    ledger: Ledger
    clock: Clock | None
    kept: int
    emit: Callable[..., None]

    def in_worker(self, emit: Callable[..., None]) -> Self:
        """Return this engine for a worker process."""
        ...

    def resume(self, locals: Mapping[int, Tree], round: int) -> None:
        """Take these local states of clients."""
        ...

    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
        """Run the task on the clients of these units."""
        ...

    def local(self, request: Request, client: int) -> Tree:
        """Return the client's local state."""
        ...

    def move(self, device: torch.device) -> None:
        """Compute on another device from now on."""
        ...

    def keep(self, locals: Mapping[int, Tree]) -> None:
        """Store local states of clients."""
        ...


@dataclass(frozen=True)
class Job:
    """A job for a worker: some units of a request, with their messages and local states.

    Attributes:
        task: name of the task.
        facts: other attributes of the `Request`, by name.
        units: the units.
        sent: the messages, either in the memory that all workers read or in the worker's own memory.
        shared: whether `sent` is one message in the memory that all workers read.
        locals: the clients' local states, in the worker's own memory.
        held: clients of which the worker still holds the newest local state, so that it does not travel.
        stale: clients whose states the worker may forget, because another worker has newer ones.
    """

    task: str
    facts: dict[str, Any]
    units: list[Unit]
    sent: Sent
    shared: bool
    locals: Kept
    held: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Done:
    """The results of a job. All tensors are in the worker's memory for replies.

    Attributes:
        parts: for each reply stack, the clients and the stacked message.
        missing: clients without a reply, each with the reason.
        locals: the local states that changed.
        entries: the entries of the worker's ledger.
        events: names and fields of the events, in order.
        spent_flops: client -> the number of floating-point operations that its tasks took. Simulated time uses it.
        error: the exception that ends the run, or None.
        combined: the sum of the replies without its tensors, and the places of these, if the job combines replies.
    """

    parts: list[tuple[tuple[int, ...], Entries]]
    missing: dict[int, str]
    locals: Kept
    entries: list[Entry]
    events: list[tuple[str, dict[str, Any]]]
    spent_flops: dict[int, float]
    error: BaseException | None
    combined: tuple[Combined, Entries] | None = None


def serve(
    engine: Served,
    connection: Connection,
    foreign: Sequence[Connection],
    memory: tuple[Arena, Arena, Arena],
    threads: int,
    device: torch.device,
) -> None:
    """Run jobs in a worker process until the server's process closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the server's process handles it
    for other in foreign:
        other.close()
    if threads:
        torch.set_num_threads(threads)
    events: list[tuple[str, dict[str, Any]]] = []
    engine = engine.in_worker(lambda name, **facts: events.append((name, facts)))
    own_streams()
    with deterministic(device):
        while True:
            try:
                job = connection.recv()
                events.clear()
                connection.send(run(engine, job, *memory, device, {}, events))
            except (EOFError, ConnectionError):
                return


def run(
    engine: Served,
    job: Job,
    broadcast: Memory,
    down: Memory,
    up: Memory,
    device: torch.device,
    held: dict[int, Tree],
    events: list[tuple[str, dict[str, Any]]],
) -> Done:
    """Run a job with the worker's copy of the engine, on this device.

    Args:
        engine: the copy, made by `in_worker`.
        broadcast: the memory of a message for all workers.
        down: the memory of the job's other tensors.
        up: the memory for the results.
        device: the device that trains.
        held: the local states that the worker holds from earlier jobs; this function updates it.
        events: the list that gets the events of the copy. It is empty when the job starts.
    """
    try:
        _move(engine, device)
        return _done(engine, job, broadcast, down, up, events, held)
    except Exception:
        return Done([], {}, {}, [], events, {}, _unexpected())
    finally:
        for stream in _streams:  # the text would be lost when the server's process kills the worker
            with suppress(OSError, ValueError):  # for example, a task has closed the stream
                stream.flush()


_streams: list[TextIO] = []
"""The standard output and the standard error of a worker, if `own_streams` has made them."""


def own_streams() -> None:
    """Give the worker its own `sys.stdout` and `sys.stderr`, if they are ordinary files.

    Another thread of the server's process may have held the lock of a stream during the fork. Nobody in the worker
    would release this lock, so a task that prints would wait for it forever.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if type(old) is TextIOWrapper and not old.closed and isinstance(getattr(old.buffer, "raw", None), FileIO):
            lines = 1 if old.line_buffering else -1
            new = open(old.fileno(), "w", lines, old.encoding, old.errors, closefd=False)  # noqa: SIM115
            new.reconfigure(write_through=old.write_through)
            setattr(sys, name, new)
            _streams.append(new)


def _done(
    engine: Served,
    job: Job,
    broadcast: Memory,
    down: Memory,
    up: Memory,
    events: list[tuple[str, dict[str, Any]]],
    held: dict[int, Tree],
) -> Done:
    """Run a job on the engine's device, and write the results into the worker's memory."""
    request = Request(task_of(engine.algorithm, job.task), job.task, **job.facts)
    source = broadcast if job.shared else down
    messages = {client: msg for k, e in job.sent for msg in [message_of(request.got, e, source)] for client in k}
    clients = [client for unit in job.units for client in unit]
    send: Send = messages[clients[0]] if job.shared else messages
    if engine.clock is not None:
        engine.clock.spent_flops.clear()
    before = {
        c: dict(zip([n for n, _ in tree], [v.to(engine.device) for v in down.read(p for _, p in tree)], strict=True))
        for c, tree in job.locals.items()
    } | {c: held[c] for c in job.held}
    for client in job.stale:
        held.pop(client, None)
    engine.resume(before, engine.kept)
    error: BaseException | None = None
    answer = Answer([], {})
    try:
        # the method of the class, because the server's process may have replaced the engine's own, to watch requests
        answer = type(engine).answer(engine, request, clients, send, units=job.units)
    except PolyfedError as ending:
        error = _sendable(ending)
    except Exception:
        error = _unexpected()
    except BaseException as ending:  # such as SystemExit, which a task raised; it ends the run
        error = _sendable(ending)
    changed = {client: tree for client, tree in engine.locals.items() if tree is not before[client]}
    held.update(changed)
    combined: Combined | None = answer.combined
    flat = [value for part in answer.parts for value in values(part.message)]
    flat += [] if combined is None else combined.sums.values()
    places = iter(up.write([*flat, *(value for tree in changed.values() for value in tree.values())]))
    parts = [(part.clients, [(name, next(places)) for name in names(part.message)]) for part in answer.parts]
    total = None
    if combined is not None:
        total = replace(combined, sums={}), [(entry, next(places)) for entry in combined.sums]
    return Done(
        parts,
        answer.missing,
        {client: [(name, next(places)) for name in tree] for client, tree in changed.items()},
        engine.ledger.drain(),
        events,
        {} if engine.clock is None else engine.clock.spent_flops.pop(request.number, {}),
        error,
        total,
    )


def _move(engine: Served, device: torch.device) -> None:
    """Move the worker's copy of the engine to its device, before the first job."""
    if engine.device == device:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams use the current GPU
    engine.move(device)


def _unexpected() -> RuntimeError:
    """Return an error with the traceback of the exception that is being handled."""
    return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")


def _sendable(error: BaseException) -> BaseException:
    """Return an exception that can be sent to the server's process: this one, or one of a class of polyfed or Python.

    The author of an exception class may not have made it for pickling. For example, if its constructor needs two
    arguments, pickle cannot rebuild the exception.
    """
    known = next(base for base in type(error).__mro__ if base.__module__ in (PolyfedError.__module__, "builtins"))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:  # the constructor may raise any error
        return cast(BaseException, known(str(error)))
    return error


def names(msg: Message) -> list[Named]:
    """Return the names of a message's tensors, in the order of `values`."""
    return [(field, key) for field, key, _ in tensors(msg)]


def values(msg: Message) -> list[torch.Tensor]:
    """Return the tensors of a message."""
    return [value for *_, value in tensors(msg)]


def message_of(kind: type[Message], entries: Entries, memory: Memory, *, copy: bool = False) -> Any:
    """Rebuild a message from its tensors in a memory. If `copy` is True, the message holds copies of the tensors."""
    fields: dict[str, Any] = {name: None if declared.bare else {} for name, declared in kind.declared.items()}
    read = memory.read(place for _, place in entries)
    for ((name, key), _), value in zip(entries, read, strict=True):
        value = copied(value) if copy else value
        if key is None:
            fields[name] = value
        else:
            fields[name][key] = value
    return kind(**fields)
