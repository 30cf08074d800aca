"""The server's view of the clients: facts about them, and the method `ask`, which sends requests to them.

An algorithm's `round` reaches the clients only through `fed.ask(task, clients, send)`. The engine decides where clients
run. The server validates each reply, drops a bad one with a reason, and continues if enough clients have answered.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import BadReply, Diverged, RecipeError, TooFewReplies
from polyfed.core.messages import OF_THE_MODEL, Message
from polyfed.core.request import Accept, HeldOut, Request, Send, Task, contiguous
from polyfed.core.sendable import check_sent
from polyfed.core.system.openmp import threads_worth
from polyfed.core.system.tracing import span
from polyfed.core.tasks import info_of, path_of, tasks_of, types_of
from polyfed.core.tree import Tree
from polyfed.data.columns import Column, Columns
from polyfed.federation.attack import Attack, cure
from polyfed.federation.client_ranks import ClientRanks
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.clock import Clock
from polyfed.federation.combined import Combined, CombinedReplies, Combining
from polyfed.federation.context import ClientContext
from polyfed.federation.links.measured import MeasuredLinks
from polyfed.federation.links.network import Rates
from polyfed.federation.message_validation import NOT_FINITE, MessageValidator, foreign, largest_magnitude
from polyfed.federation.open_work import Buffer, OpenWork, first_to_arrive
from polyfed.federation.outliers import ALONE, OutlierCheck, Sizes, too_far
from polyfed.federation.private_mean import PrivateMean
from polyfed.federation.replies import Answer, Replies, ReplyStack, listed, stacked
from polyfed.federation.secure_aggregation.server import SecureSum, Summing
from polyfed.federation.silos.forwarded import Edges
from polyfed.federation.silos.parts import Answered, InSilos, MakePart, in_lockstep
from polyfed.federation.wire.compression import Compression
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.training import SingleClientData
from polyfed.training.optimisers import Moments

HUGE = 1e8
"""Largest absolute value of a healthy model. If the server sends larger values and a client replies with NaN or
infinity, the error text names the model as the cause."""


FAR_LARGER = (
    "round {round}: a reply may be far larger than the others, so the clients run again and their replies are compared "
    "one by one"
)

Watch = Callable[[Send, Replies], None]
"""Called after a request, with the messages that were sent and the usable replies."""


class Answering(Protocol):
    """The part of an engine that the federation uses."""

    name: str

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on these clients and return the replies that passed the clients' egress gates."""
        ...


class Combines(Answering, Protocol):
    """An engine that sums replies where the clients ran."""

    locals: dict[int, Tree]

    def again(self, request: Request, clients: Sequence[int], send: Send, locals: Mapping[int, Tree | None]) -> Answer:
        """Run a task once more from these local states, and return single replies; nothing is booked again."""
        ...


class Holding(Answering, Protocol):
    """An engine whose clients work on while the server goes on, if it `holds` their requests."""

    holds: bool

    def gather(
        self, round: int, asked: Sequence[tuple[Request, Sequence[int], Send]], enough: int, interval_s: float | None
    ) -> list[Answer]:
        """Ask clients, and return for each request the answers that have come when `enough` clients have replied.

        A client that is neither among the replies nor missing still works. The next call names it again.

        Args:
            round: the round that fills a buffer.
            asked: the requests, each with its clients and with what they received, also those of earlier rounds.
            enough: number of replies to all requests together.
            interval_s: see `Federation.gather`.
        """
        ...


@dataclass
class Federation:
    """The clients of a run, as an algorithm sees them on the server.

    Attributes:
        clients: the client registry.
        engine: runs the clients.
        owner: the algorithm whose tasks the clients run.
        context: the server's own context, with all modalities, for computations on the server.
        template: the model's tree. Parameters and gradients in replies must match its names, shapes and types.
        seed: the run's seed.
        rounds: number of rounds of the run.
        evaluation_clients: the evaluation clients of this run: TEST, VALIDATION, both or neither.
        outlier_factor: how many times as large as the median update an update may be (`OutlierCheck`); 0 allows any
            size.
        rows_cap: largest weight of the test rows that a device reports, as a multiple of the median over the devices
            (`[deployment] rows_cap`); 0 sets no limit.
        min_replies: the quorum: the run ends if fewer clients give a usable reply. A request to fewer than
            `min_replies` clients needs a reply from each of them.
        combine: whether replies that are only summed are summed where the clients ran (`combined.py`).
        emit: called with the name and the fields of each event.
        clock: simulated time and the links of the clients, or None if the recipe has no [network] section.
        links: the measured links of the clients, or None unless [network] channel is `measured`.
        attack: the simulated attack of the [attack] section, or None.
        ranks: the LoRA ranks of the clients.
        privacy: how replies are protected under [privacy], or None.
        compression: how messages are compressed under [wire], or None.
        edges: sends parts to the edges of silos, or None if they run in this process; see `in_silos`.
        round: the current round, from 1; 0 before the first.
        evaluating: whether requests now evaluate the models. Simulated attackers answer such requests truthfully.
        asked: number of requests so far in this round.
    """

    clients: ClientRegistry
    engine: Answering
    owner: object
    context: ClientContext
    template: Tree
    seed: int
    rounds: int
    evaluation_clients: tuple[int, ...] = ()
    min_replies: int = 1
    outlier_factor: float = 100.0
    rows_cap: float = 0.0
    combine: bool = False
    emit: Callable[..., None] = lambda *_, **__: None
    clock: Clock | None = None
    links: MeasuredLinks | None = None
    attack: Attack | None = None
    ranks: ClientRanks = ClientRanks()
    privacy: Mechanism | None = None
    compression: Compression | None = None
    edges: Edges | None = None
    round: int = 0
    evaluating: bool = False
    asked: int = 0
    _watching: list[Watch] = field(default_factory=list, init=False, repr=False)
    _senders: set[int] = field(default_factory=set, init=False, repr=False)
    _single: set[str] = field(default_factory=set, init=False, repr=False)
    _validator: MessageValidator | None = field(default=None, init=False, repr=False)

    @property
    def validator(self) -> MessageValidator:
        """The reply validator for the current template."""
        if self._validator is None or self._validator.template is not self.template:
            context = self.context
            objective, size = context.objective, context.num_classes
            self._validator = MessageValidator(self.template, context.model, self.clients.modalities, objective, size)
        return self._validator

    @property
    def holding(self) -> Holding | None:
        """The engine, if its clients work on while the server goes on."""
        return cast(Holding, self.engine) if getattr(self.engine, "holds", False) else None

    @property
    def rates(self) -> Rates | None:
        """The rates of all clients in this round, measured or simulated; None without the section [network]."""
        if self.links is not None:
            return self.links.rates()
        return None if self.clock is None else self.clock.links.rates(self.round)

    def capped(self, rows: Mapping[int, float]) -> dict[int, float]:
        """Return the numbers of rows that clients reported, each at most `rows_cap` times the median of those above 0.

        The server cannot check these numbers, and one of them could decide a weighted mean.
        """
        known = [count for count in rows.values() if count]
        most = self.rows_cap * statistics.median_low(known) if self.rows_cap and known else math.inf
        return {client: min(count, most) for client, count in rows.items()}

    def private_mean(self, moments: Moments) -> PrivateMean | None:
        """Return the private mean of the current request if [privacy] protects clients; see `PrivateMean.after`."""
        if self.privacy is None or self.privacy.unit != "client":
            return None
        return PrivateMean.after(self.privacy, keys.key(self.seed, "privacy", self.round, self.asked), moments)

    def begin(self, round: int) -> None:
        """Start a round: set its number and restart the count of requests."""
        self.round, self.asked, self.evaluating = round, 0, False
        if self.clock is not None:
            self.clock.begin(round)
        if self.links is not None:
            self.links.begin()

    def end_after(self, round: int) -> None:
        """Make this round the last one of the run."""
        self.rounds = round

    def begin_evaluation(self) -> None:
        """Start the evaluation after a round. The count of requests goes on."""
        self.evaluating = True

    def expect(self, model: Tree) -> None:
        """Require replies to match this model: a method's `init` may add tensors to the model or remove some."""
        self.template = model

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Call `watch` after every request of the `with` block."""
        self._watching.append(watch)
        try:
            yield
        finally:
            self._watching.remove(watch)

    def ask(
        self,
        task: Task,
        clients: Sequence[int],
        send: Send,
        *,
        quorum: bool = True,
        turn: int = 0,
        accept: Accept | None = None,
        enough: int | None = None,
        secure: bool = True,
        held_out: HeldOut = "test",
    ) -> Replies:
        """Send a request to these clients and return their replies.

        Args:
            task: a method of the algorithm, or of one of its parts, that is marked `@task`.
            clients: the clients' numbers, in any order.
            send: one message for all clients, or a mapping with one message for each. A client receives only the blocks
                that it has, and adapters of its own LoRA rank.
            quorum: if True, too few replies end the run. After several requests with False, call `require_quorum` once.
            turn: a different number each time a round repeats a request, so that batches and dropout masks differ.
            accept: an additional check of valid replies. `accept(client, reply)` returns a reason to drop the reply,
                or a falsy value to keep it.
            enough: how many replies close the request, without waiting for slower clients. None waits for all.
            held_out: which own rows the task scores, if it scores any.
            secure: whether sum-only replies are summed under [secure_aggregation]. The protocol's own steps pass False.

        Returns:
            The replies. Under secure aggregation, these are `SummedReplies`, and `accept` has no effect.

        Raises:
            EgressError: a client's policy refused to release its reply.
            RecipeError: a client does not exist, or a message is not as the task declares or cannot be sent.
            TooFewReplies: fewer clients than the quorum gave a usable reply.
            Diverged: no client replied with finite numbers, or the message to all clients is not finite.
        """
        path = path_of(task, self.owner)  # first of all, as only a task says what it sends
        if secure and types_of(task)[1].masks is not None:
            options: dict[str, Any] = {"turn": turn, "enough": enough, "held_out": held_out}
            return self._summed(task, clients, send, quorum=quorum, **options)
        enough = None if enough is None else max(enough, min(self.min_replies, len(clients)))
        request = Request(task, path, self.round, self.rounds, self.asked, self.seed, turn, enough, held_out)
        self.asked += 1
        self._check_clients(request, clients)
        if not clients:
            return Replies([])
        peak = self._check_sent(request, send)
        sent = self._as_read(request, send, clients)
        how = self._combining(request, accept) if self.combine else None
        asked = request if how is None else replace(request, combining=how)
        with span("request", task=request.name, clients=len(clients)):
            answer = (self.engine.answer if how is None else self._combined)(asked, sorted(clients), sent)
        if answer.combined is not None and how is not None:
            missing = self._missing(request, answer.missing | answer.combined.missing, peak)
            summed = CombinedReplies.of(answer.combined, how, self.template, self.clients, missing)
            return self._told(request, send, summed, quorum=quorum)
        if self.attack is not None and not self.evaluating:
            answer = self.attack.falsify(answer, sent, self.attack.attackers(len(self.clients), self.seed))
        parts, missing = self.usable(request, answer, sent, accept)
        return self._told(request, send, Replies(parts, self._missing(request, missing, peak)), quorum=quorum)

    def _combined(self, request: Request, clients: Sequence[int], sent: Send) -> Answer:
        """Return the sums of the replies, or each reply if one may be far larger than the others."""
        engine = cast(Combines, self.engine)
        before = {client: engine.locals.get(client) for client in clients}
        answer = engine.answer(request, clients, sent)
        if answer.combined is None or not self._alone(request, answer.combined, sent):
            return answer
        self.emit("note", text=FAR_LARGER.format(round=self.round))
        return engine.again(replace(request, combining=None), clients, sent, before)

    def _told(self, request: Request, send: Send, replies: Replies, *, quorum: bool) -> Replies:
        """Return the replies to a request, after those who watch have seen them; see `ask`."""
        self._senders.update(client for client in replies if client >= 0)
        self._report(request, send, replies, quorum=quorum)
        return replies

    def _alone(self, request: Request, found: Combined, sent: Send) -> bool:
        """Return whether the replies of a sum must be compared one by one, as one may be far larger than the others."""
        check = OutlierCheck(self.outlier_factor, sent)
        return bool(self.outlier_factor) and not check.harmless(request.reply, found.bounds)

    def _combining(self, request: Request, accept: Accept | None) -> Combining | None:
        """Return how the replies to a request are summed where the clients ran, or None if each travels."""
        how = Combining.of(request.reply, cast(Summing, self.owner), self.template, compared=bool(self.outlier_factor))
        if how is not None and accept is None:
            return how
        large = any(said.kind in OF_THE_MODEL for said in request.reply.declared.values())
        if large and not self.evaluating and request.name not in self._single:
            self._single.add(request.name)
            why = "the server reads more than their sum" if how is None else "the method checks each of them"
            self.emit("note", text=f"[engine] combine: replies to {request.name} travel one by one, because {why}")
        return None

    def _as_read(self, request: Request, send: Send, clients: Sequence[int]) -> Send:
        """Return the messages of a request as clients will read them: with their LoRA ranks, and rounded."""
        sent: Send = contiguous(self.ranks.sized(send, clients))
        if self.compression is None or max(clients) < 0:  # evaluation clients are the server's own
            return sent
        return self.compression.rounded(request, sent)

    def in_silos(
        self,
        part: MakePart,
        silos: Mapping[int, Sequence[int]],
        kept: Mapping[int, Any],
        send: Message,
        accept: Accept | None = None,
    ) -> InSilos:
        """Let each silo do its part, and return what the server may see of it; see `polyfed.federation.silos.parts`.

        Args:
            part: a method of the algorithm.
            silos: the devices of each silo that takes part.
            kept: what the edge of each silo has kept.
            send: the server's message to the edges.
            accept: an additional check of the replies that the server sees; see `ask`.
        """
        if self.edges is not None:
            return self._at_edges(self.edges, part.__name__, silos, send, accept)
        return in_lockstep(self, {silo: part(silo, own, kept.get(silo), send, self) for silo, own in silos.items()})

    def _at_edges(
        self, edges: Edges, part: str, silos: Mapping[int, Sequence[int]], send: Message, accept: Accept | None
    ) -> InSilos:
        """Let edges do the part, and check what they forward as if the devices had been asked from here.

        Raises:
            TooFewReplies: no edge answered, outside of an evaluation.
        """
        tasks = {name: task for name, task in tasks_of(self.owner).items() if info_of(task).scope == "server"}
        place = (self.round, self.rounds, self.asked, self.seed)
        peak = self._peak(part, send)
        with span("request", task=part, clients=len(silos)):
            told = edges.in_silos(Request(next(iter(tasks.values())), part, *place), part, silos, send)
        self.asked = told.last
        result = InSilos(missing=told.missing)
        lost_silos = {client: why for silo, why in told.missing.items() for client in silos[silo]}
        if len(lost_silos) == sum(map(len, silos.values())) and not self.evaluating:
            raise TooFewReplies(f"round {self.round}, part {part}: no edge answered. {listed(lost_silos)}")
        for one in told.answers:
            task = tasks[one.task]
            request = Request(task, one.task, self.round, self.rounds, one.number, self.seed, one.turn)
            parts, lost = self.usable(request, Answer.of(stacked(one.replies), one.missing | lost_silos), send, accept)
            usable = Replies(parts, self._missing(request, lost, peak))
            self._senders.update(client for stack in parts for client in stack.clients)
            self._report(request, send, usable, quorum=False)
            result.answers.append(Answered(task, one.number, one.turn, usable))
        return result

    def gather(
        self,
        task: Task,
        clients: Sequence[int],
        send: Message,
        *,
        open: Sequence[OpenWork],
        sent: Mapping[int, Message],
        changes: Mapping[str, int],
        enough: int,
        now_s: float = 0.0,
        interval_s: float | None = None,
    ) -> Buffer:
        """Ask these clients, and return the first `enough` replies of them and of those that were asked before.

        The other clients go on, and a later call returns their replies: on devices in the order in which they come, in
        a simulation in the order of simulated time, without [network] in the order in which they were asked.

        Args:
            task: see `ask`.
            clients: the clients that now begin.
            send: what they receive.
            open: what other clients work on, from the buffer before.
            sent: round -> what the clients that were asked in this round received.
            changes: block -> how often the server has changed it so far.
            enough: number of replies that fill the buffer; at least `min_replies`.
            now_s: simulated seconds since the start of the run.
            interval_s: the longest wait in seconds, if `min_replies` have come. None: until the buffer is full.

        Raises:
            EgressError, RecipeError, TooFewReplies, Diverged: see `ask`.
        """
        what, number = path_of(task, self.owner), self.asked
        enough = max(enough, min(self.min_replies, len(open) + len(clients)))
        new = [OpenWork(client, self.round, number, dict(changes)) for client in sorted(clients)]
        if self.holding is not None:
            buffer = self._gathered(self.holding, task, [*open, *new], {**sent, self.round: send}, enough, interval_s)
        else:
            fresh = self.ask(task, clients, send, quorum=False)
            times = {} if self.clock is None else self.clock.times().seconds.get(number, {})
            begun = [
                replace(work, arrives_s=now_s + times.get(work.client, 0.0)) for work in new if work.client in fresh
            ]
            times_s: dict[str, Any] = {"now_s": now_s, "interval_s": interval_s}
            buffer = first_to_arrive(fresh, [*open, *begun], enough, self.min_replies, **times_s)
        self.require_quorum(buffer.replies, what)
        return buffer

    def _gathered(
        self,
        engine: Holding,
        task: Task,
        works: Sequence[OpenWork],
        sent: Mapping[int, Message],
        enough: int,
        interval_s: float | None,
    ) -> Buffer:
        """Fill a buffer from clients that work while the server goes on; see `gather`."""
        path, groups = path_of(task, self.owner), dict[tuple[int, int], list[int]]()
        self.asked += 1
        for work in works:
            groups.setdefault((work.round, work.number), []).append(work.client)
        asked: list[tuple[Request, list[int], Any]] = []
        for (round, number), clients in groups.items():
            request = Request(task, path, round, self.rounds, number, self.seed)
            self._check_clients(request, clients)
            asked.append((request, sorted(clients), self._as_read(request, sent[round], clients)))
        peak = max([0.0, *(self._check_sent(one, sent[one.round]) for one, *_ in asked if one.round == self.round)])
        parts, missing = list[ReplyStack](), dict[int, str]()
        with span("request", task=path, clients=sum(len(clients) for _, clients, _ in asked)):
            answers = engine.gather(self.round, asked, enough, interval_s)
        for (request, _, message), answer in zip(asked, answers, strict=True):
            usable, lost = self.usable(request, answer, message)
            replies = Replies(usable, self._missing(request, lost, peak))
            self._senders.update(replies)
            self._report(request, sent[request.round], replies, quorum=False)
            parts, missing = [*parts, *usable], missing | replies.missing
        parts.sort(key=lambda part: part.clients[0])
        came = {client for part in parts for client in part.clients}
        left = tuple(work for work in works if work.client not in came and work.client not in missing)
        there = {work.client: work for work in works if work.client in came}
        return Buffer(Replies(parts, missing), there, tuple(sorted(left, key=lambda work: work.client)))

    def usable(
        self, request: Request, answer: Answer, sent: Send, accept: Accept | None = None
    ) -> tuple[list[ReplyStack], dict[int, str]]:
        """Return the replies of an answer that the server uses, and the other clients, each with the reason.

        Args:
            request: what the clients were asked.
            answer: what came back.
            sent: the messages that the clients received.
            accept: see `ask`.
        """
        missing = dict(answer.missing)
        stacks = (self._inspect(request, part, missing, accept) for part in self.ranks.split(answer.parts))
        return self._in_time(request, self._alike([s for s in stacks if s], sent, missing), missing), missing

    def _report(self, request: Request, send: Send, replies: Replies, *, quorum: bool) -> None:
        """Require the quorum, and show the replies to those who watch."""
        if quorum:
            self.require_quorum(replies, request.name)
        for watch in self._watching:
            watch(send, replies)

    def _missing(self, request: Request, missing: dict[int, str], peak: float) -> dict[int, str]:
        """Emit an event for each client without a usable reply, and return the clients with the reasons."""
        broken = self._broken(peak) if peak > HUGE else ""
        result = {c: f"{why}{broken}" if why.endswith(NOT_FINITE) else why for c, why in missing.items()}
        for client, reason in sorted(result.items()):
            self.emit("client-missing", round=self.round, task=request.name, client=client, reason=reason)
        return result

    def _summed(self, task: Task, clients: Sequence[int], send: Send, *, quorum: bool, **options: Any) -> Replies:
        """Ask under secure aggregation; see `ask`."""
        method: Summing = task.__self__  # type: ignore[attr-defined]
        ask, hidden = partial(self.ask, secure=False), self.privacy.withholds if self.privacy else lambda _: False
        secure = SecureSum(ask, method, self.clients, self.template, self.emit, self.asked, hidden)
        replies = secure.of(task, clients, send, **options)
        if quorum and clients:
            self.require_quorum(replies, path_of(task, self.owner))
        return replies

    def _check_clients(self, request: Request, clients: Sequence[int]) -> None:
        """Raise a RecipeError if a request names a client that does not exist."""
        last = len(self.clients) - 1
        for client in clients:
            if type(client) is not int or not (client in self.evaluation_clients or 0 <= client <= last):
                raise RecipeError(f"{request.name} is asked of {client!r}: clients are numbers from 0 to {last}")

    def _check_sent(self, request: Request, send: Send) -> float:
        """Check the messages of a request. Return the largest magnitude in a message for all clients, otherwise 0.

        The first message after a merge of replies carries the new model. If no value in this message exceeds `HUGE`,
        the replies merged so far did no harm, and this method clears the list of clients that an error would name.

        Raises:
            Diverged: a message for all clients holds NaN or infinity.
            RecipeError: a message is not as the task declares or cannot be sent.
        """
        check_sent(request, send)
        return self._peak(request.name, send) if isinstance(send, Message) else 0.0

    def _peak(self, name: str, send: Message) -> float:
        """Return the largest magnitude in a message for all clients; see `_check_sent`."""
        peak = largest_magnitude(send)
        if not math.isfinite(peak):
            raise Diverged(
                f"round {self.round}, task {name}: the server's own model {NOT_FINITE}{self._suspects()}. "
                "Lower [train] lr, set [train] clip_norm, or leave out the client whose updates are too large"
            )
        if peak <= HUGE:
            self._senders.clear()
        return peak

    def _broken(self, peak: float) -> str:
        return f", but the model that it was sent already held values up to {peak:.1e}{self._suspects()}"

    def _suspects(self) -> str:
        """Name the clients whose replies were merged since the server's model was last healthy."""
        shown = ", ".join(map(str, sorted(self._senders)[:10]))
        shown += f" and {len(self._senders) - 10} more" if len(self._senders) > 10 else ""
        return f"; it was merged from replies of clients {shown}" if shown else ""

    def require_quorum(self, replies: Replies, what: str) -> None:
        """End the run if too few of the clients that were asked gave a usable reply.

        Args:
            replies: the replies to one request, or the joined replies to several requests with a common quorum.
            what: name of the task, for the error text.

        Raises:
            TooFewReplies: fewer than `min_replies` clients gave a usable reply.
            Diverged: there is no usable reply, and at least one client replied with NaN or infinity. If other clients
                reply with finite numbers, the server only drops the client with NaN or infinity.
        """
        missing, asked = replies.missing, len(replies) + len(replies.missing)
        lost = {client: why for client, why in sorted(missing.items()) if NOT_FINITE in why}
        if lost and not replies:
            raise Diverged(
                f"round {self.round}, task {what}: training left the finite numbers at {len(lost)} of {asked} "
                f"clients. {listed(lost)}. {cure(self.attack)}"
            )
        if len(replies) < min(self.min_replies, asked):
            raise TooFewReplies(
                f"round {self.round}, task {what}: {len(replies)} of {asked} clients answered, "
                f"[engine] min_replies = {self.min_replies}. {listed(missing)}"
            )

    def server_data(
        self,
        x: Mapping[str, Tensor],
        y: Tensor | None = None,
        *,
        present: Mapping[str, Tensor] | None = None,
        number: int = 0,
    ) -> SingleClientData:
        """Make a client dataset from rows that the server received, so that the server can train on them.

        Args:
            x: modality -> values, (n, ...) float32.
            y: labels, int64 (n,), or targets, float32 (n, T). If None, all labels are class 0.
            present: modality -> which rows have it, bool (n,); only for modalities that some rows lack.
            number: a different number for each dataset made in a round, so that their batch orders differ.
        """
        n = len(next(iter(x.values())))
        device = next(iter(x.values())).device
        rows = torch.arange(n, device=device)
        columns = Columns(
            name="received",
            modalities={name: Column(value) for name, value in x.items()},
            label=torch.zeros_like(rows) if y is None else y,
            num_classes=self.context.num_classes if y is None or y.dim() == 1 else y.shape[1],
            split=torch.zeros(n, dtype=torch.int8, device=device),
            ids=rows,
            present=present or {},
        )
        key = keys.key(self.seed, "server", number, self.round)
        return SingleClientData(columns, rows, tuple(x), self.context.model, key, self.round, self.rounds)

    def _in_time(self, request: Request, parts: list[ReplyStack], missing: dict[int, str]) -> list[ReplyStack]:
        """Drop clients whose replies come too late in simulated time: after the deadline or the end of the request."""
        if self.clock is None:
            return parts
        replied = [client for part in parts for client in part.clients]
        late = self.clock.late(request.number, replied)
        if request.enough is not None:
            replied = [client for client in replied if client not in late]
            late |= self.clock.closed_before(request.number, replied, request.enough)
        missing.update(late)
        return [left for part in parts if (left := part.without(late)) is not None] if late else parts

    def _inspect(
        self, request: Request, part: ReplyStack, missing: dict[int, str], accept: Accept | None
    ) -> tuple[ReplyStack, Sizes] | None:
        """Return the stack without unusable replies, and the sizes of the other replies, or None if it is empty.

        The reasons go into `missing`.
        """
        try:
            self.validator.check(part.message, request.reply, self.ranks.shapes(part.clients[0]))
        except BadReply as error:
            missing.update(dict.fromkeys(part.clients, str(error)))
            return None
        with threads_worth(part.num_bytes):
            unusable, sizes = self.validator.unusable(part)
            bad = foreign(part, self.clients) | unusable
        if accept is not None and (fine := part.without(bad)):
            bad |= {client: words for client, reply in Replies([fine]).items() if (words := accept(client, reply))}
        if not bad:
            return part, sizes
        missing.update(bad)
        kept = [i for i, client in enumerate(part.clients) if client not in bad]
        left = part.without(bad)
        return None if left is None else (left, {block: norms[kept] for block, norms in sizes.items()})

    def _alike(self, found: list[tuple[ReplyStack, Sizes]], sent: Send, missing: dict[int, str]) -> list[ReplyStack]:
        """Return the stacks without replies that are far larger than the others, and put the reasons into `missing`.

        Under central differential privacy, the server clips every update. Whether it uses an update must then not
        depend on the other clients' data, because the accountant does not count such a choice.
        """
        parts = [part for part, _ in found]
        clipped = self.privacy is not None and self.privacy.unit == "client" and self.privacy.central
        if not self.outlier_factor or clipped:
            return parts
        check = OutlierCheck(self.outlier_factor, sent)
        bad = check.bad(parts, {place: sizes for place, (_, sizes) in enumerate(found)})
        missing.update(bad)
        return [left for part in parts if (left := part.without(bad)) is not None] if bad else parts

    def too_far(self, tree: Tree, sent: Tree, factor: float = ALONE) -> str:
        """Return what is wrong with parameters that one client has moved too far, or an empty text (`too_far`)."""
        return too_far(tree, sent, factor) if self.outlier_factor else ""
