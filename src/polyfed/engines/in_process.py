"""Base class of the engines that hold all clients in this process, with their data and local states."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Self

import torch
from typing_extensions import override

from polyfed.core.errors import PolyfedError, RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.core.system.openmp import using_threads
from polyfed.core.tree import SHARED, Tree
from polyfed.data import Population
from polyfed.engines.base import ClientExchange, Emit, Engine, Exchange, Method
from polyfed.engines.task_results import only_the_gate_refuses
from polyfed.engines.workers.cluster import Cluster
from polyfed.engines.workers.pool import Workers
from polyfed.engines.workers.process import Unit
from polyfed.federation.replies import Answer, ReplyStack, stacked
from polyfed.model import Model
from polyfed.privacy.egress.ledger import Ledger
from polyfed.training.client_data import FOLD_BATCH, TRAINING_PASSES
from polyfed.training.step_plan import steps_trained

UNIT_FLOPS = 1e8
"""Floating-point operations of local training that justify a worker process. They take about 20 ms of one core for the
small models of the benchmarks, and sending the job takes 1 ms (docs/performance.md)."""

SLOW = 0.04
"""Seconds of a request in one process that justify worker processes, also if its clients compute little. Small models
spend most of the time on the dispatch of operations, which a count of floating-point operations does not show."""

THREADED_STEP = 3e7
"""Least floating-point operations of a step, or of a batch of an evaluation, that several threads compute. With 2.5e7
operations, two threads make a round 1.16 times as fast on an idle machine, and half as fast on a busy machine
(docs/performance.md)."""


class InProcess(Engine):
    """Runs the clients of a population in this process, or on worker processes forked from it.

    Args:
        population: see `Engine`.
        model: see `Engine`.
        algorithm: see `Engine`.
        initial: see `Engine`.
        workers: number of worker processes. If there is only one, or if a request has little work, clients run in this
            process.
        threads: threads that PyTorch uses for requests with enough work, in every worker or in this process. 0 leaves
            the number unchanged. The rounding of the result depends on `threads` and, with `gpus`, on `workers`.
        gpus: the GPUs on which workers train; worker i uses GPU i modulo their number. All requests then go to the
            workers, and this process stays on the CPU. Without `gpus`, workers use the device of this process.
        cluster: the Ray cluster on whose nodes the workers run. If None, they are forked from this process.
        kwargs: the other arguments of `Engine`.

    Raises:
        RecipeError: some rows lack a modality that their client has, and the algorithm does not handle such rows.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that tasks import late. Worker processes share them, because the server's process imports them first."""

    def __init__(
        self,
        population: Population,
        model: Model,
        algorithm: Method,
        initial: Tree,
        *,
        workers: int = 1,
        threads: int = 0,
        gpus: Sequence[torch.device] = (),
        cluster: Cluster | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(population, model, algorithm, initial, **kwargs)
        self.threads, self.gpus = threads, gpus
        self._row_flops: dict[tuple[str, ...], int] = {}
        self._unit_seconds: dict[str, list[float]] = {}  # by task: seconds of a unit here, in the last two requests
        self.pool = Workers(self, workers, threads, gpus, cluster) if workers > 1 or cluster is not None else None
        _refuse_missing_rows(population, algorithm)

    def in_worker(self, emit: Emit) -> Self:
        """Return this engine for a worker process, which starts no workers and books nothing that is booked already.

        Args:
            emit: receives the events of the worker.
        """
        one = copy(self)
        one.pool, one.emit, one.ledger = None, emit, Ledger(self.ledger.run, hashing=self.ledger.hashing)
        return one

    @property
    def trains_on(self) -> torch.device:
        """The device on which clients train. With several GPUs, it is the first one."""
        return self.gpus[0] if self.gpus else self.device

    @override
    def check(self) -> None:
        if self.pool is not None:
            self.pool.check()

    @override
    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    @abstractmethod
    def units(self, request: Request, clients: Sequence[int], send: Send) -> Iterator[Unit]:
        """Divide the clients into units: stacks, and single clients.

        Stacks of different sizes give slightly different results, because floating-point sums are rounded differently.
        On a CPU, the units therefore depend only on the recipe, not on the machine.
        """

    def stack_exchange(self, request: Request, group: Unit, send: Send) -> Exchange:
        """Return what runs the task on several clients at once. If its `run` returns None, they run one by one."""
        raise AssertionError(f"the engine {self.name} has units of one client only")

    @override
    def answer(
        self, request: Request, clients: Sequence[int], send: Send, units: Sequence[Unit] | None = None
    ) -> Answer:
        """Run the task in units of clients, here or on worker processes, which get their units from this process."""
        threads, start = 0, time.perf_counter()
        last = self._unit_seconds.setdefault(request.name, [])
        missing: dict[int, str] = {}
        if units is None:
            clients = [client for client in clients if self.has_local(request, client, missing)]
            if not clients:
                return Answer([], missing)
            units = [*self.units(request, clients, send)]
            evaluates = clients[0] < 0
            shareable = not evaluates and (self.gpus or len(units) > 1)
            work = {client: flops for unit in units for client, flops in self.work(unit).items()} if shareable else {}
            much = sum(work.values()) >= 2 * UNIT_FLOPS
            step_flops = self._evaluation_flops if evaluates else self._step_flops
            single = much or max(map(step_flops, units)) < THREADED_STEP
            # the first request is slower than the others, and so is one that makes programs for its steps
            slow = single and len(last) == 2 and min(last) * len(units) >= SLOW
            if self.pool is not None and (self.gpus or (work and (much or slow))):
                shared = self.pool.answer(request, units, send, work or dict.fromkeys(clients, 1.0))
                return Answer(shared.parts, missing | shared.missing, shared.combined)
            # threads change the rounding, so their number must not depend on `slow` or on the number of workers
            threads = self.threads if single else 0
        parts: list[ReplyStack] = []
        alone: list[int] = []
        replies: dict[int, Message] = {}
        for unit in units:
            with using_threads(threads):  # for each unit, because the algorithm's code may change the number
                reply = self.stack_exchange(request, unit, send).run() if len(unit) > 1 else None
            if reply is None:
                alone.extend(unit)
            else:
                parts.append(ReplyStack(tuple(unit), reply))
        for client, got in self.received(request, sorted(alone), send).items():
            with using_threads(threads):
                reply = ClientExchange(self, request, client, got, missing).run()
            if reply is not None:
                replies[client] = reply
        answer = Answer.of([*parts, *stacked(replies)], missing)
        if (how := request.combining) is not None:
            answer = Answer([], missing, how.total(self, request.reply, units, answer.parts, send))
        last[:] = [*last[-1:], (time.perf_counter() - start) / len(units)]
        return answer

    def again(self, request: Request, clients: Sequence[int], send: Send, locals: Mapping[int, Tree | None]) -> Answer:
        """Run a task once more, and return single replies: nothing is booked, counted or reported a second time.

        Args:
            locals: the clients' local states before the request; None for a client that had none.
        """
        for client, tree in locals.items():
            self.locals.pop(client, None)
            self.locals |= {} if tree is None else {client: tree}
        ledger, emit, clock = self.ledger, self.emit, self.clock
        self.ledger, self.emit, self.clock = Ledger(ledger.run, hashing=ledger.hashing), _silent, None
        try:
            return self.answer(request, clients, send)
        finally:
            self.ledger, self.emit, self.clock = ledger, emit, clock

    def has_local(self, request: Request, client: int, missing: dict[int, str]) -> bool:
        """Return whether the client has a local state. The first call makes this state.

        Returns:
            True, or False if the algorithm failed to make the state. This method then puts the reason into `missing`.

        Raises:
            PolyfedError: the algorithm raised this error.
            Exception: the algorithm raised this exception, and `debug` is set.
        """
        if client in self.locals or client in self._start_empty:
            return True
        try:
            with only_the_gate_refuses(request):
                self.local(request, client)
        except PolyfedError:
            raise
        except Exception as error:
            if self.debug:
                error.add_note(f"in client {client}, round {request.round}, when its first local state was made")
                raise
            self.failed(request, client, error, missing)
            return False
        return True

    def work(self, unit: Unit) -> dict[int, float]:
        """Return an estimate of the floating-point operations of each client's local training in one request.

        Args:
            unit: clients that have the same modalities.
        """
        train, row_flops = self.algorithm.train, TRAINING_PASSES * self._flops_of_a_row(unit[0])

        def trained(rows: int) -> int:
            return train.epochs * rows if train.steps is None else train.steps * (train.batch_size or rows)

        return {client: float(row_flops * trained(rows)) for client, rows in self.registry.rows_of(unit).items()}

    def steps(self, client: int) -> int:
        """Return the number of steps of a client's local training in one request, at least 1."""
        return max(steps_trained(int(self.registry.num_rows[client]), self.algorithm.train, skip_single=False), 1)

    def _step_flops(self, unit: Unit) -> float:
        """Return an estimate of the floating-point operations of a step of all clients of a unit."""
        work = self.work(unit)
        largest = max(unit, key=work.__getitem__)
        return len(unit) * work[largest] / self.steps(largest)

    def _evaluation_flops(self, unit: Unit) -> float:
        """Return the floating-point operations of one batch of an evaluation."""
        return float(FOLD_BATCH * self._flops_of_a_row(unit[-1]))

    def _flops_of_a_row(self, client: int) -> int:
        """Return the floating-point operations of a forward pass of one row."""
        owned = self.context(client).modalities
        if owned not in self._row_flops:  # once for all clients with these modalities, as each request asks for it
            read = [name for name in owned if name in self.model.modalities]
            self._row_flops[owned] = sum(self.model.flops(block) for block in (*read, SHARED))
        return self._row_flops[owned]

    def received(self, request: Request, clients: Sequence[int], send: Send) -> dict[int, Any]:
        """Pass the messages through the clients' gates, and return the message that each client receives.

        If all clients get the same message, one call of one gate serves all clients that have the same modalities.
        """
        if not isinstance(send, Message):
            nodes = {client: self.node((client,), self.context(client)) for client in clients}
            return {client: node.receive(request, self.to_device(send[client])) for client, node in nodes.items()}
        alike: dict[int, list[int]] = {}
        for client in clients:
            alike.setdefault(id(self.context(client)), []).append(client)
        result: dict[int, Any] = {}
        for group in alike.values():
            got = self.node(tuple(group), self.context(group[0])).receive(request, self.to_device(send))
            result |= dict.fromkeys(group, got)
        return {client: result[client] for client in clients}


def _silent(name: str, **facts: Any) -> None:
    """Emit nothing."""


def _refuse_missing_rows(population: Population, algorithm: Method) -> None:
    if algorithm.handles_missing_rows:
        return
    train, lacking = population.train, []
    for place, name in enumerate(population.columns.modalities):
        if name in population.columns.present:
            there = train.counts(population.columns.present[name].cpu().long(), 2)[:, 1]
            if bool((population.holds[:, place] & (there > 0) & (there < train.sizes)).any()):
                lacking.append(name)
    if lacking:
        raise RecipeError(
            f"data '{population.columns.name}': some rows of a client lack {', '.join(lacking)} "
            f"('{lacking[0]}_present', or [clients] missing_rows), and {type(algorithm).__name__} takes every row of a "
            "client for complete. Leave such rows out, or give them to clients of their own, which [clients] missing "
            "or holdings says lack it. Test rows may lack modalities, as with [clients] missing_rows_test"
        )
