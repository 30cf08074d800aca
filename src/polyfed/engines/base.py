"""The base class of all engines: it makes client contexts and egress gates, and runs a task on a single client."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import EgressError, PolyfedError
from polyfed.core.messages import Message, map_tensors, tensors
from polyfed.core.packing import Packings, Pieces
from polyfed.core.request import HeldOut, Request, Send, client_key, noise_key
from polyfed.core.sendable import checked_local
from polyfed.core.tree import SHARED, Tree, clone, same_tensors, select
from polyfed.data import Population, Shards
from polyfed.engines.machine.allocator import keep_freed_memory
from polyfed.engines.machine.gpu import placed, with_rows
from polyfed.engines.masking import masked, secrets_apart
from polyfed.engines.task_results import Inputs, describe_failure, only_the_gate_refuses, reason_of, reply_and_local
from polyfed.engines.work_count import MeteredClientData, given_work
from polyfed.evaluation.scores import Evaluation
from polyfed.federation.client_registry import TEST, VALIDATION, ClientRegistry, registry_of
from polyfed.federation.clock import Clock
from polyfed.federation.context import ClientContext
from polyfed.federation.links.measured import MeasuredLinks
from polyfed.federation.replies import Answer
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.wire.compression import Compression, Wire, residuals_apart
from polyfed.model import Model
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.egress.announcement import Announcement, Announcer, Asking
from polyfed.privacy.egress.gate import EgressGate
from polyfed.privacy.egress.ledger import Ledger
from polyfed.privacy.egress.limit_guard import LimitGuard
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.privacy.egress.policy import Policy
from polyfed.privacy.egress.requirements import NO_REQUIREMENTS, Requirements
from polyfed.training import SingleClientData
from polyfed.training.client_data import ClientData
from polyfed.training.per_sample import PerSample
from polyfed.training.progress import Progress

Emit = Callable[..., None]

Evaluates = Callable[[str], EgressError | None]
"""Counts a task that reads the test rows of a device in its budget. Returns a refusal if the budget is spent."""


class Method(Asking, Protocol):
    """The part of an algorithm that an engine uses."""

    @property
    def evaluation(self) -> Evaluation:
        """The [evaluate] section: when and how models are evaluated."""

    @property
    def secure_aggregation(self) -> SecureAggregation | None:
        """The [secure_aggregation] section, or None without it."""

    @property
    def handles_missing_rows(self) -> bool:
        """Whether the algorithm handles rows that lack a modality which other rows of the same client have."""

    def received_template(self, task: str, model: Model) -> Tree:
        """Return the names, shapes and types of the parameters that a task receives."""

    def may_lack(self, task: str) -> bool:
        """Return whether a task may receive parameters without blocks that the client has."""

    def first_local(self, context: ClientContext, key: int) -> Tree:
        """Make a client's first local state. `key` seeds the random numbers."""


class Engine(ABC):
    """Runs clients. Subclasses decide where and how. Evaluation clients always run in the server's process.

    Args:
        population: the data, and the rows and modalities of each client.
        algorithm: the algorithm whose tasks the clients run and whose `first_local` makes a client's first local state.
        initial: the model's initial parameters, drawn from the run's seed.
        policy: the egress policy: the kinds of data that may leave a client.
        ledger: records every message between the server and the clients.
        device: the PyTorch device that holds the data and trains.
        emit: called with the name and the fields of each event.
        debug: whether a client's exception ends the run. Otherwise the engine drops the client from the request.
        clock: counts the work of the clients, or None if the recipe has no [network] section.
        links: gets what a transport measures of the clients, or None if nobody needs it.
        objective: what the model learns to predict.
        privacy: how replies are protected under [privacy].
        limits: resource limits of the device on which this engine runs its client.
        required: the protection that this device demands.
        on_device: whether this engine runs on a device of a deployment; see `ClientContext.on_device`.
        wire: how messages are compressed, or None if the recipe has no [wire] section.
        copied: makes the engine's copy of `initial`, in memory or on the disk.
    """

    name: str
    keeps_locals: ClassVar[bool] = True
    """Whether `locals` holds the clients' local states. If not, each client keeps its local state in its process."""

    def __init__(
        self,
        population: Population,
        model: Model,
        algorithm: Method,
        initial: Tree,
        *,
        policy: Policy,
        ledger: Ledger,
        device: torch.device | str = "cpu",
        emit: Emit = lambda *_, **__: None,
        debug: bool = False,
        clock: Clock | None = None,
        links: MeasuredLinks | None = None,
        objective: Objective = CLASSES,
        privacy: Mechanism | None = None,
        limits: Limits = NO_LIMITS,
        required: Requirements = NO_REQUIREMENTS,
        on_device: bool = False,
        wire: Wire | None = None,
        copied: Callable[[Tree], Tree] = clone,
    ) -> None:
        keep_freed_memory()
        self.population, self.model, self.algorithm = population, model, algorithm
        self.initial = copied(initial)  # the algorithm may change its first state, which holds the same tensors
        self.policy, self.ledger, self.emit, self.debug = policy, ledger, emit, debug
        self.clock, self.links = clock, links
        self.device, self.objective = torch.device(device), objective
        self.privacy, self.limits, self.required, self.on_device = privacy, limits, required, on_device
        self.compression = None if wire is None else Compression(wire, model)
        self.columns = placed(population.columns, self.device, emit)
        self.registry = registry_of(population)
        asked = asks_own(algorithm, self.registry)
        self.announcer = Announcer(algorithm, model, objective, policy, asked, required, privacy)
        self.locals: dict[int, Tree] = {}
        self._start_empty: set[int] = set()  # clients whose first local state is empty, so that it is made only once
        # the server will not repeat this round or earlier ones: clients in other processes may delete older states
        self.kept = 0
        self._evaluates: Evaluates | None = None
        self._trains: Evaluates | None = None
        self._progress: Progress | None = None
        self.packed: Pieces | None = None  # what the device sends in place of the compressed tensors of its reply
        self._contexts: dict[tuple[str, ...], ClientContext] = {}

    @property
    def evaluation_clients(self) -> tuple[int, ...]:
        """The evaluation clients that have rows."""
        rows = {TEST: self.population.test_rows, VALIDATION: self.population.validation_rows}
        return tuple(evaluation_client for evaluation_client, index in rows.items() if len(index))

    @abstractmethod
    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on these clients, and return the replies that the clients' egress gates let pass.

        A client that fails is listed as missing, with the reason.

        Args:
            request: the task, with its round, number and seed.
            clients: the clients' numbers, in ascending order.
            send: one message for all clients, or a mapping with one message for each.

        Raises:
            EgressError: a client's policy refused to release its reply.
        """

    def check(self) -> None:  # noqa: B027
        """Refuse machines that cannot run the clients, before the first request.

        Raises:
            RecipeError: all faults of all machines.
        """

    def close(self) -> None:  # noqa: B027
        """End the processes that the engine has started. The engine starts them again if it gets another request."""

    def saved(self, round: int) -> None:
        """Note that the run will not repeat this round or an earlier one."""
        self.kept = round

    def resume(self, locals: Mapping[int, Tree], round: int) -> None:
        """Continue after a round, with the local states that the clients had then."""
        self.locals, self.kept = dict(locals), round

    def for_request(
        self,
        ledger: Ledger,
        locals: Mapping[int, Tree],
        evaluates: Evaluates | None,
        trains: Evaluates | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Return this engine for a single request to a device, whose local state and ledger come from its disk.

        Args:
            ledger: records the messages of the request.
            locals: the local state of the client, if it has one.
            evaluates: counts the request in the budget of evaluations; None without such a budget.
            trains: refuses a request that reads the training rows; None if it may.
            progress: keeps the state of its local trainings.
        """
        one = copy(self)
        one.ledger, one.locals, one._evaluates, one._trains = ledger, dict(locals), evaluates, trains
        one.packed, one._progress = {}, progress
        return one

    def move(self, device: torch.device) -> None:
        """Compute on another device from now on. Local states stay where they are."""
        self.device = device
        self.columns = placed(self.population.columns, device, self.emit)
        self.initial = {name: value.to(device) for name, value in self.initial.items()}
        self._contexts.clear()

    def context(self, client: int) -> ClientContext:
        """Return the client's context. Clients with the same modalities share a context."""
        owned = self.registry.modalities if client < 0 else self.registry.owned(client)
        kind = (*owned, "examiner") if client < 0 else owned
        if kind not in self._contexts:
            blocks = {*owned, SHARED}
            self._contexts[kind] = ClientContext(
                model=self.model,
                modalities=owned,
                num_classes=self.population.columns.num_classes,
                initial=select(self.initial, blocks),
                evaluation_client=client < 0,
                policy=self.policy.for_client(owned),
                objective=self.objective,
                on_device=self.on_device,
            )
        return self._contexts[kind]

    def local(self, request: Request, client: int) -> Tree:
        """Return the client's local state. The first call makes this state."""
        if client in self.locals or client in self._start_empty:
            return self.locals.get(client, {})
        made = first_local(self.algorithm, self.context(client), request.seed, client, self.device)
        self.keep({client: made})
        self._start_empty |= set() if made else {client}
        return self.locals.get(client, {})

    def keep(self, locals: Mapping[int, Tree]) -> None:
        """Store local states of clients. A client that never had a state takes no memory and no checkpoint space.

        The stored tensors are contiguous. A state that a worker process or a file returns is contiguous, too, and the
        memory layout of a tensor changes how operations round.
        """
        for client, local in locals.items():
            if local or client in self.locals:
                self.locals[client] = {name: value.contiguous() for name, value in local.items()}

    def rows(self, client: int) -> Tensor:
        """Return the indices of the rows on which this client trains or, for an evaluation client, evaluates."""
        evaluated = {TEST: self.population.test_rows, VALIDATION: self.population.validation_rows}
        return evaluated[client] if client < 0 else self.population.train[client]

    def own_rows(self, client: int, held_out: HeldOut) -> Tensor:
        """Return the indices of the client's own test or validation rows. Evaluation clients have none."""
        own = held_out_of(self.population, held_out)
        return self.population.test_rows[:0] if own is None or client < 0 else own[client]

    def node(self, clients: tuple[int, ...], context: ClientContext) -> EgressGate:
        """Make the egress gate of these clients, which share a context."""
        announcement = self.announcement(context.modalities)
        terms = context.evaluation_client, self.on_device, self.rounds
        return EgressGate(clients, context.blocks, self.ledger, announcement, *terms)

    def rounds(self, msg: Message) -> Packings:
        """Return how the tensors of a message to clients are rounded."""
        return {} if self.compression is None else self.compression.packings_down(msg)

    def announcement(self, modalities: tuple[str, ...]) -> Announcement:
        """Return the announcement for clients with these modalities: everything that their replies can hold."""
        return self.announcer.of(modalities)

    def alone(self, request: Request, client: int, send: Send, missing: dict[int, str]) -> Message | None:
        """Pass the message through the client's gate, then run the task on this client alone; see `ClientExchange`."""
        msg = self.to_device(send if isinstance(send, Message) else send[client])
        got = self.node((client,), self.context(client)).receive(request, msg)
        return ClientExchange(self, request, client, got, missing).run()

    def view(self, request: Request, client: int) -> SingleClientData:
        """Return the dataset on which this client runs a task alone."""
        rows, tests, modalities = (
            self.rows(client),
            self.own_rows(client, request.held_out),
            self.context(client).modalities,
        )
        return SingleClientData(
            columns=with_rows(self.columns, [rows, tests], modalities, self.device),
            index=rows.to(self.device),
            modalities=modalities,
            model=self.model,
            key=client_key(request, client),
            round=request.round,
            rounds=request.rounds,
            test_index=tests.to(self.device),
            privacy=self.per_sample(request, client),
            smallest=self.limits.min_batch_size if client >= 0 else 0,
            progress=self.progress(request, client),
        )

    def progress(self, request: Request, client: int) -> Progress | None:
        """Return what keeps the state of the local trainings of a task, or None."""
        return self._progress

    def guard(self, request: Request, client: int) -> LimitGuard:
        """Return what holds a task of this client to the limits of the device. Evaluation clients have no limits."""
        if client < 0:
            return LimitGuard(NO_LIMITS, client, request.name, self.objective)
        exact = self.required.score_noise is None
        return LimitGuard(self.limits, client, request.name, self.objective, self._evaluates, self._trains, exact)

    def failed(self, request: Request, client: int, error: Exception, missing: dict[int, str]) -> None:
        """Put the reason for a client's failure into `missing`, and emit the event `client-failed`."""
        reason = missing[client] = reason_of(error)
        trace = "".join(traceback.format_exception(error))
        self.emit("client-failed", client=client, task=request.name, reason=reason, trace=trace)

    def per_sample(self, request: Request, client: int) -> PerSample | None:
        """Return how the task's training protects single rows, or None if it does not protect them."""
        return None if self.privacy is None or client < 0 else self.privacy.per_sample(request.name)

    def metered(self, request: Request, clients: Sequence[int], view: ClientData) -> ClientData:
        """Wrap the dataset of these clients to count their work. Without a [network] section, return it unchanged."""
        if self.clock is None or clients[0] < 0:
            return view
        rows = list(self.registry.rows_of(clients).values())
        counter = self.clock.counter(request.number, clients)
        return MeteredClientData(view, rows, self.context(clients[0]).modalities, self.model, counter)

    def count_given(self, request: Request, clients: Sequence[int], work: Tensor) -> None:
        """Count the clients' work on given batches, (K,), in simulated time."""
        if self.clock is not None and clients[0] >= 0:
            self.clock.counter(request.number, clients)(1.0, work.tolist())

    def to_device(self, msg: Any) -> Any:
        """Return a message with its tensors on the device of this engine."""
        return msg if self.device.type == "cpu" else map_tensors(msg, lambda tensor: tensor.to(self.device))


def asks_own(method: Method, clients: ClientRegistry) -> bool:
    """Return whether the server may ask for scores on own test rows or on own validation rows of a client."""
    return bool(clients.tested) or (method.evaluation.reads_validation and bool(clients.validated))


class Exchange(ABC):
    """One request to clients that run together: the task, the protection of its reply, and the egress gate.

    A subclass runs the task for one client, or for a stack of clients. It runs it in `run` itself, so that a user who
    debugs a task sees few frames of polyfed.

    Args:
        clients: the clients, which have the same modalities.
        got: the message of the clients. In a stack it is the message of the first one, for the text of an error.
    """

    stacked: ClassVar[bool]

    def __init__(self, engine: Engine, request: Request, clients: Sequence[int], got: Any) -> None:
        self.engine, self.request, self.clients, self.got = engine, request, clients, got
        self.context = engine.context(clients[0])
        self.gate = engine.node(tuple(clients), self.context)
        self.packings: Packings = {}

    @abstractmethod
    def run(self) -> Message | None:
        """Run the task, and return what the gate lets pass of its protected reply; None if the task failed.

        Raises:
            PolyfedError: the gate refused the reply, or the task breaks a rule for tasks.
            Exception: the task raised this exception, and `debug` is set.
        """

    def ends_the_run(self, error: Exception) -> bool:
        """Return whether a task's exception ends the run. Without `debug`, only an error of polyfed does."""
        if isinstance(error, PolyfedError):
            return True
        if self.engine.debug:
            error.add_note(describe_failure(self.request, self.clients, self.got))
        return self.engine.debug

    def released(self, leaving: Message) -> Message:
        """Return what the gate lets pass, and store the clients' new local states."""
        reply = self.gate.release(self.request, leaving, stacked=self.stacked, packings=self.packings)
        self.keep()
        if any(tensor.requires_grad for _, _, tensor in tensors(reply)):
            reply = map_tensors(reply, Tensor.detach)  # otherwise the reply keeps the autograd graph alive
        return reply

    def compressed(self, client: int, got: Message, reply: Message, residuals: Tree) -> tuple[Any, Tree]:
        """Return a client's reply as the server will read it, and what compression has lost for the client so far."""
        engine = self.engine
        if engine.compression is None or client < 0:
            return reply, residuals
        reply, residuals, pieces, self.packings = engine.compression.sent(self.request, client, got, reply, residuals)
        if engine.packed is not None:
            engine.packed.update(pieces)
        return reply, residuals

    @abstractmethod
    def keep(self) -> None:
        """Store the clients' new local states. The gate has then let their reply pass."""


class ClientExchange(Exchange):
    """The exchange with one client, whose message the gate has already received.

    Args:
        got: the message that the gate let pass.
        missing: gets the reason if the client fails.
    """

    stacked = False

    def __init__(self, engine: Engine, request: Request, client: int, got: Any, missing: dict[int, str]) -> None:
        super().__init__(engine, request, (client,), got)
        self.client, self.missing = client, missing
        self.view, self.guard = engine.view(request, client), engine.guard(request, client)
        self.left: Tree = {}

    @override
    def run(self) -> Message | None:
        engine, request, client, got = self.engine, self.request, self.client, self.got
        view, guard = self.view, self.guard
        try:
            metered = engine.metered(request, (client,), view)
            watched = guard.watch(metered, engine.model)
            # the task may change its dicts, so it gets dicts of its own
            fields = {name: v if isinstance(v, Tensor) else dict(v) for name in got.kinds for v in [getattr(got, name)]}
            own, residuals = residuals_apart(engine.local(request, client))
            own, secrets = secrets_apart(request, own)
            inputs = Inputs(request, self.context, fields, own)
            with guard.enforced(len(view.index)), only_the_gate_refuses(request), inputs.unchanged():
                returned = request.task(self.context, watched, own, type(got)(**fields))
            reply, local = reply_and_local(request, returned)
            engine.count_given(request, (client,), given_work(metered).reshape(1))
            guard.check_reply(reply, view, self.context.num_classes)
            reply = engine.required.with_noise(reply, engine.objective, client)
            if engine.privacy is not None and client >= 0:
                reply = engine.privacy.of_one(request.name, got, reply, noise_key(request, client))
            reply, left = masked(request, reply, local, secrets)
            leaving, residuals = self.compressed(client, got, inputs.apart(reply), residuals)
            self.left = {**left, **residuals}
        except Exception as error:
            if self.ends_the_run(error):
                raise
            engine.failed(request, client, error, self.missing)
            return None
        return self.released(leaving)

    @override
    def keep(self) -> None:
        if not same_tensors(self.left, self.engine.locals.get(self.client, {})):
            self.engine.keep({self.client: clone(self.left)})


def held_out_of(population: Population, held_out: HeldOut) -> Shards | None:
    """Return the own test rows or the own validation rows of all clients, or None if no client has any."""
    return population.test if held_out == "test" else population.own_validation


def first_local(algorithm: Method, context: ClientContext, seed: int, client: int, device: torch.device | str) -> Tree:
    """Make a client's first local state, on the device. The local state of an evaluation client is empty."""
    made = algorithm.first_local(context, keys.key(seed, "local", client)) if client >= 0 else {}
    made = checked_local(made, "the first local state")
    return {name: value.to(device) for name, value in made.items()}
