"""Worker processes: a pool of processes that run the clients of a request in parallel, on one machine or on several.

There are two transports. On one machine, the processes are forked from the server's process before or during a run, so
they share the data, the model and the algorithm without a copy. On the nodes of a Ray cluster, they are actors
(`cluster.py`), and each node holds the data once.

The server's process has all local states. A worker receives them with the request and returns the new local states. So
any worker can run any client, and you can resume a run with another number of workers. If a worker dies, no state is
lost, and another worker runs its clients again. An actor also keeps the states that it has returned, and receives the
same clients first, so that a state travels to it only after another worker has changed it.
docs/decisions/0016-workers.md has the reasons.

A request is divided into units: a unit is a stack of clients, or one client. Every worker uses the same number of
threads, so the result of a unit does not depend on the process that runs it. So the result of a request does not depend
on the number of workers.
"""

import errno
import importlib
import math
import os
import signal
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from multiprocessing import connection
from typing import Any

import torch
from torch import multiprocessing
from typing_extensions import override

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.core.system.openmp import can_end_idle_threads, end_idle_threads
from polyfed.core.tree import Tree, size_bytes
from polyfed.engines.workers.cluster import Cluster, Lost
from polyfed.engines.workers.process import Done, Entries, Job, Sent, Served, Unit, message_of, names, serve, values
from polyfed.engines.workers.shared_memory import Arena, Memory, Packed, copied
from polyfed.federation.combined import Combined, Span, halves, summed
from polyfed.federation.replies import Answer, ReplyStack

BUNDLES = 4
"""Average number of bundles of units that each worker gets in a request. More bundles balance the load better, but each
bundle costs about 0.3 ms to send."""

FACTS = ("round", "rounds", "number", "seed", "turn", "held_out", "combining")
"""Attributes of a request that travel with its jobs, beside the name of its task."""

TRIES = 2
"""Largest number of attempts to run a bundle whose worker process dies."""


class Workers:
    """A pool of worker processes. The processes start at the first call of `answer`.

    Args:
        engine: the engine whose clients the workers run.
        num: number of processes. On one machine 2 or more; on a cluster, 0 means one for each `threads` cores.
        threads: number of threads that PyTorch uses in each process. 0 leaves the number unchanged.
        devices: the devices on which workers run; worker i uses device i modulo their number. Without devices, the
            workers use the engine's device.
        cluster: the Ray cluster on whose nodes the workers run, or None for processes forked from this one.

    Attributes:
        wanted: `num`. The attribute `num` follows the size of a cluster.
        started: the running workers.
        broadcast: memory for a message that all clients receive.
        returned: number of jobs that workers have returned.
        moved: bytes of local states that were sent to a worker.
        received: bytes of replies, or of their sums, that workers have sent.

    Raises:
        RecipeError: the workers would use several threads, and a forked process could wait for them forever.
    """

    def __init__(
        self,
        engine: Served,
        num: int,
        threads: int = 1,
        devices: Sequence[torch.device] = (),
        cluster: Cluster | None = None,
    ) -> None:
        assert num > 1 or cluster is not None
        if threads != 1 and cluster is None and not can_end_idle_threads():
            raise RecipeError(
                f"[engine] workers = {num}, threads = {threads}: PyTorch cannot end its idle threads on this machine, "
                "because its OpenMP library lacks omp_pause_resource_all. Processes that start meanwhile could wait "
                "forever. Set threads = 1, or workers = 1",
                ("engine", "workers"),
            )
        self.engine, self.num, self.threads, self.devices = engine, num, threads, devices or (engine.device,)
        self.wanted = num
        self.cluster = cluster
        self.broadcast: Memory = Arena() if cluster is None else Packed()
        self.started: list[_Worker] = []
        self.returned = self.moved = self.received = 0
        self._told: list[tuple[str, dict[str, Any]]] = []
        self._close = weakref.finalize(self, _close_all, self.started, os.getpid())

    def check(self) -> None:
        """Refuse a cluster that cannot run the clients, before a request needs it.

        Raises:
            RecipeError: see `Cluster.check`.
        """
        if self.cluster is not None:
            self.cluster.check(self.engine, self.threads, self.devices[0])

    def start(self, num: int) -> None:
        """Start worker processes until `num` of them run. On a cluster, fewer may find a free core.

        Raises:
            RecipeError: the operating system refused to start a process, or no node of the cluster has a free core.
        """
        if self.cluster is not None:
            lacking = num - len(self.started)
            actors = self.cluster.start(self.engine, lacking, none_yet=not self.started) if lacking > 0 else []
            self.started.extend(_Actor(self, self.cluster, actor, node) for actor, node in actors)
            return
        for name in self.engine.imports:
            importlib.import_module(name)
        while len(self.started) < num:
            try:
                self.started.append(_Forked(self, self.devices[len(self.started) % len(self.devices)]))
            except OSError as error:
                raise RecipeError(
                    f"[engine] workers: worker process {len(self.started) + 1} of {self.num} could not start: {error}. "
                    "Set workers to a smaller number, or raise the limits of this process (`ulimit -n`, `ulimit -u`)",
                    ("engine", "workers"),
                ) from error

    def close(self) -> None:
        """End all worker processes."""
        self._close()
        self._close = weakref.finalize(self, _close_all, self.started, os.getpid())
        if self.cluster is not None:
            self.cluster.close()

    def answer(self, request: Request, units: Sequence[Unit], send: Send, work: Mapping[int, float]) -> Answer:
        """Run the units of a request on the workers.

        Args:
            units: the clients, grouped into the units that the engine runs together.
            send: one message for all clients, or a mapping with one message for each.
            work: an estimate of the work of each client, on any scale, to balance the load.

        Raises:
            PolyfedError: a worker's gate refused a reply, a task broke a rule, or a worker process could not start.
        """
        clients = [client for unit in units for client in unit]
        if self.cluster is not None:
            self.num = self.cluster.open(self.engine, self.wanted, self.threads, self.devices[0])  # nodes join and end
        spans = [] if request.combining is None else subtrees(units, work, BUNDLES * self.num)
        todo = dict(enumerate([[*units[a:b]] for a, b in spans] if spans else bundled(units, work, BUNDLES * self.num)))
        self.start(min(self.num, len(todo)))
        end_idle_threads()
        sent = None
        if isinstance(send, Message):
            sent = [(clients, list(zip(names(send), self.broadcast.write(values(send)), strict=True)))]
        try:
            answer, sums = self._collect(request, todo, send, sent)
        except BaseException:
            self.close()  # the workers may still send results of this request, and nobody will read them
            raise
        if request.combining is None:
            return answer
        result = {span: sums.get(number, Combined()) for number, span in enumerate(spans)}
        return replace(answer, combined=summed((0, len(units)), result.get))

    def _collect(
        self, request: Request, todo: dict[int, list[Unit]], send: Send, sent: Sent | None
    ) -> tuple[Answer, dict[int, Combined]]:
        """Send the bundles to idle workers, one after another, and collect the results.

        A worker whose result outlives its next job gets this job first, so that it does not wait for the server.

        Returns:
            The replies, and for each bundle the sum of its replies, if workers combine them.
        """
        answer, sums = Answer([], {}), dict[int, Combined]()
        waiting, tries = list(todo), dict.fromkeys(todo, 0)
        busy: dict[_Worker, int] = {}
        arrived: dict[_Worker, tuple[int, Any]] = {}  # worker -> a bundle, and what gives its result
        while waiting or busy or arrived:
            for worker in self.started:
                if waiting and worker not in busy and (worker.ahead or worker not in arrived):
                    number = max(waiting, key=lambda number: worker.holds(todo[number]))  # the first one of equal ones
                    waiting.remove(number)
                    tries[number] += 1
                    worker.give(self._job(worker, request, todo[number], send, sent))
                    busy[worker] = number
            idle = [worker for worker in busy if worker not in arrived]
            ready = idle[0].ready(idle, wait=not arrived) if idle else []
            arrived |= {worker: (busy.pop(worker), worker.pending) for worker in ready}
            if not arrived or (waiting and any(worker.ahead for worker in ready)):
                continue
            worker = next(iter(arrived))
            number, result = arrived.pop(worker)
            taken = worker.take(result)
            if taken is not None:
                total = self._merge(request, worker, *taken, answer)
                if total is not None:
                    assert number not in sums, "no bundle counts twice"
                    sums[number] = total
                continue
            reason = self._replace(worker, todo[number])
            if worker in busy:  # the next job of a dead worker has not begun
                tries[again := busy.pop(worker)] -= 1
                waiting.append(again)
            if tries[number] < TRIES:
                waiting.append(number)
            else:
                reason = f"{reason}, {TRIES} times; lack of memory is the usual cause"
                answer.missing.update({client: reason for unit in todo[number] for client in unit})
        return Answer.of(answer.parts, answer.missing), sums

    def _job(self, worker: "_Worker", request: Request, units: list[Unit], send: Send, sent: Sent | None) -> Job:
        """Write the messages and local states of the units into the worker's memory, and return the job."""
        clients = [client for unit in units for client in unit]
        own = {} if isinstance(send, Message) else {client: send[client] for client in clients}
        trees = {client: self.engine.local(request, client) for client in clients}
        held = [client for client, tree in trees.items() if worker.held.get(client) is tree]
        trees = {client: tree for client, tree in trees.items() if client not in held}
        self.moved += sum(map(size_bytes, trees.values()))
        flat = [value for msg in own.values() for value in values(msg)]
        flat += [value for tree in trees.values() for value in tree.values()]
        places = iter(worker.down.write(flat))
        messages = [([client], [(name, next(places)) for name in names(msg)]) for client, msg in own.items()]
        locals_ = {client: [(name, next(places)) for name in tree] for client, tree in trees.items()}
        facts = {name: getattr(request, name) for name in FACTS}
        stale, worker.stale = worker.stale, []
        parcel = messages if sent is None else sent
        return Job(request.name, facts, units, parcel, sent is not None, locals_, held, stale)

    def _merge(self, request: Request, worker: "_Worker", done: Done, up: Memory, answer: Answer) -> Combined | None:
        """Add a worker's results to the answer, the local states, the ledger, the clock and the events.

        Returns:
            The sum of the replies, if the job combined them.
        """
        self.returned += 1
        for entry in done.entries:
            self.engine.ledger.book(entry)
        for event in done.events:
            name, facts = event
            if event not in self._told:  # several workers emit the same event
                self.engine.emit(name, **facts)
            if name in ("looped", "note"):
                self._told.append(event)
        if self.engine.clock is not None:
            self.engine.clock.spent_flops.setdefault(request.number, {}).update(done.spent_flops)
        if done.error is not None:
            raise done.error
        answer.missing.update(done.missing)
        for clients, entries in done.parts:
            answer.parts.append(ReplyStack(clients, message_of(request.reply, entries, up, copy=True)))
            self.received += answer.parts[-1].num_bytes
        for client, tree in done.locals.items():
            values = up.read(place for _, place in tree)
            self.engine.keep({client: {name: copied(v) for (name, _), v in zip(tree, values, strict=True)}})
            if worker.remembers:
                self._remember(worker, client)
        return None if done.combined is None else self._sums(*done.combined, up)

    def _sums(self, combined: Combined, entries: Entries, up: Memory) -> Combined:
        """Return the sum of the replies of a job, with its tensors, which are in the worker's memory."""
        found = up.read(place for _, place in entries)
        sums = {entry: copied(value) for (entry, _), value in zip(entries, found, strict=True)}
        self.received += sum(value.nbytes for value in sums.values())
        return replace(combined, sums=sums)

    def _remember(self, worker: "_Worker", client: int) -> None:
        """Note that this worker holds the client's newest state, and that no other worker does."""
        worker.held[client] = self.engine.locals[client]
        for other in self.started:
            if other is not worker and other.held.pop(client, None) is not None:
                other.stale.append(client)

    def _replace(self, dead: "_Worker", units: list[Unit]) -> str:
        """Replace a dead worker with a new one, and return a text on how the dead worker ended.

        A cluster gets new workers only when no others are left, or before the next request, because the node of the
        dead one may be gone.
        """
        reason = dead.end()
        dead.close()
        place = self.started.index(dead)
        if isinstance(dead, _Forked):
            self.started[place] = _Forked(self, dead.device)
        else:
            del self.started[place]
            self.start(1)
        clients = [client for unit in units for client in unit]
        self.engine.emit("note", text=f"client {clients[0]} and {len(clients) - 1} more: {reason}")
        return reason


class _Worker(ABC):
    """One worker process, and the memory in which it receives and returns tensors.

    Attributes:
        down: the memory of the tensors that the worker receives.
        pending: what gives the result of the last job.
        held: client -> the newest local state, if the worker holds it too. These are the objects of the engine.
        stale: clients of which the worker holds an older state.
    """

    remembers = False
    """Whether the worker keeps the local states that it has returned."""
    ahead = False
    """Whether the result of a job stays readable while the worker runs its next one."""
    down: Memory
    pending: Any = None

    def __init__(self) -> None:
        self.held: dict[int, Tree] = {}
        self.stale: list[int] = []

    def holds(self, units: list[Unit]) -> int:
        """Return the bytes of the local states of these clients that the worker holds."""
        return sum(size_bytes(self.held[client]) for unit in units for client in unit if client in self.held)

    @abstractmethod
    def give(self, job: Job) -> None:
        """Send a job. If the worker has died, this method does nothing, and `take` returns None."""

    @abstractmethod
    def take(self, pending: Any) -> tuple[Done, Memory] | None:
        """Return the results of a job and the memory of their tensors, or None if the worker has died.

        Args:
            pending: the worker's attribute of this name when `ready` returned the worker.
        """

    @abstractmethod
    def ready(self, workers: list["_Worker"], *, wait: bool) -> list["_Worker"]:
        """Return those of these workers, all of this class, that have sent results or have ended.

        Args:
            wait: whether to wait until there are some.
        """

    @abstractmethod
    def end(self) -> str:
        """Return a text on how the dead worker ended."""

    @abstractmethod
    def close(self) -> None:
        """End the process and free its memory."""


class _Actor(_Worker):
    """A worker on a node of a Ray cluster. Ray starts it, notices its end, and moves the bytes of its messages."""

    remembers = ahead = True

    def __init__(self, pool: Workers, cluster: Cluster, actor: Any, node: str) -> None:
        super().__init__()
        self.pool, self.cluster, self.actor, self.node = pool, cluster, actor, node
        self.down = Packed()

    @override
    def give(self, job: Job) -> None:
        assert isinstance(self.pool.broadcast, Packed)
        assert isinstance(self.down, Packed)
        broadcast = self.cluster.once(self.pool.broadcast.content) if job.shared else None
        self.pending = self.cluster.give(self.actor, job, broadcast, self.down.content)

    @override
    def take(self, pending: Any) -> tuple[Done, Memory] | None:
        try:
            done, content = self.cluster.result(pending)
        except Lost as lost:
            self.reason = str(lost)
            return None
        assert isinstance(done, Done)
        return done, Packed(content)

    @override
    def ready(self, workers: list[_Worker], *, wait: bool) -> list[_Worker]:
        finished = self.cluster.ended([worker.pending for worker in workers], wait=wait)
        return [worker for worker in workers if worker.pending in finished]

    @override
    def end(self) -> str:
        return f"its worker on node {self.node} was lost ({self.reason})"

    @override
    def close(self) -> None:
        self.cluster.kill(self.actor)


class _Forked(_Worker):
    """A worker process that was forked from this process, and the shared memory of both."""

    down: Arena
    up: Arena

    def __init__(self, pool: Workers, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.down, self.up = Arena(), Arena()
        self.connection, theirs = multiprocessing.Pipe()
        # a worker notices the end of the server's process only if no other worker holds the server's end of this
        # worker's pipe open
        foreign = [self.connection, *(w.connection for w in pool.started if isinstance(w, _Forked))]
        memory = (pool.broadcast, self.down, self.up)
        arguments = (pool.engine, theirs, foreign, memory, pool.threads, device)
        self.process = multiprocessing.get_context("fork").Process(target=serve, args=arguments, daemon=True)
        with _stdin_dropped(), warnings.catch_warnings():
            end_idle_threads()
            # Python 3.12 warns about forks of processes with threads, but a worker uses no lock that a thread may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()
        self.exited = _exit_of(self.process.pid)

    @override
    def give(self, job: Job) -> None:
        with suppress(BrokenPipeError):
            self.connection.send(job)

    @override
    def take(self, pending: Any) -> tuple[Done, Memory] | None:
        try:
            if not self.connection.poll():
                return None
            done = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        assert isinstance(done, Done)
        return done, self.up

    @override
    def ready(self, workers: list[_Worker], *, wait: bool) -> list[_Worker]:
        # if a task has started a process, the new process may hold the worker's end of the pipe open. The pipe then
        # does not end when the worker ends, so this also waits for the end of the worker's process (`pidfd_open`)
        forked = [worker for worker in workers if isinstance(worker, _Forked)]
        exits = [worker.exited for worker in forked if worker.exited is not None]
        result = set(connection.wait([*(worker.connection for worker in forked), *exits], None if wait else 0))
        return [worker for worker in forked if worker.connection in result or worker.exited in result]

    @override
    def end(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        return "its worker process was ended " + (
            f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        )

    @override
    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        if self.exited is not None:
            os.close(self.exited)
        self.down.close()
        self.up.close()


def _exit_of(process: int | None) -> int | None:
    """Return a file descriptor that becomes readable when a process ends; None if Linux lacks `pidfd_open` (< 5.3)."""
    assert process is not None
    try:
        return os.pidfd_open(process)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


_stdins: list[Any] = []
"""Holds the standard input of this process while the process forks a worker. Otherwise empty."""


@contextmanager
def _stdin_dropped() -> Iterator[None]:
    """Inside a `with` block of this context manager, every forked process starts without `sys.stdin`.

    `multiprocessing` closes `sys.stdin` in the new process, and closing it takes a lock. If another thread of this
    process reads `sys.stdin` during the fork, the reading thread holds the lock. Nobody in the new process ever
    releases its copy of the lock, so the new process would wait for it forever.
    """
    _stdins.append(sys.stdin)
    try:
        yield
    finally:
        _stdins.pop()


def _drop_stdin() -> None:
    if _stdins:
        sys.stdin = None  # `_stdins` keeps the object, because its deletion would close the stream


if hasattr(os, "register_at_fork"):  # not on Windows, where there are no forks
    os.register_at_fork(after_in_child=_drop_stdin)


def _close_all(workers: list[_Worker], owner: int) -> None:
    """End these worker processes. Later workers have a copy of the list, and its deletion there must end nothing."""
    while workers and os.getpid() == owner:
        workers.pop().close()


def subtrees(units: Sequence[Unit], work: Mapping[int, float], most: int) -> list[Span]:
    """Divide the tree of the units into subtrees of at most one part in `most` of the work, or of a single unit.

    The subtree with the most work is the first one.
    """
    each = list(accumulate((sum(work[client] for client in unit) for unit in units), initial=0.0))
    result, left = list[Span](), [(0, len(units))]
    while left:
        span = left.pop()
        if span[1] - span[0] > 1 and each[span[1]] - each[span[0]] > 1.0001 * each[-1] / most:  # sums are rounded
            left += reversed(halves(span))
        else:
            result.append(span)
    return sorted(result, key=lambda span: each[span[0]] - each[span[1]])


def bundled(units: Sequence[Unit], work: Mapping[int, float], most: int) -> list[list[Unit]]:
    """Divide units into at most `most` bundles with about equal work, and put the bundle with the most work first.

    A unit is a single client or a stack of clients. A bundle holds either one or more single clients, or one stack.
    """
    total = sum(work[client] for unit in units for client in unit)
    bundles: list[list[Unit]] = []
    filled = math.inf
    for unit in units:
        size = sum(work[client] for client in unit)
        if len(unit) > 1 or filled + size > total / most:
            bundles.append([])
            filled = 0.0
        bundles[-1].append(unit)
        filled = math.inf if len(unit) > 1 else filled + size
    return sorted(bundles, key=lambda bundle: -sum(work[client] for unit in bundle for client in unit))
