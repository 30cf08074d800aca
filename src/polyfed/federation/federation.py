"""The server's view of the clients: facts about them, and one method, `ask`.

An algorithm's `round` reaches the clients only through `fed.ask(task, clients, send)`. An engine decides how the
clients are run; this module does not know which engine it is. The server trusts no reply: it checks names, shapes,
types and finiteness before use, drops a bad reply with a reason, and continues the round if enough clients answered.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import BadReply, Diverged, RecipeError, TooFewReplies
from polyfed.core.messages import LABELS, Message, tensors
from polyfed.core.request import Accept, Request, Send, Task
from polyfed.core.tasks import path_of
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.data.columns import Column, Columns
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.context import ClientContext
from polyfed.federation.network import Clock
from polyfed.federation.replies import Answer, Replies, ReplyStack
from polyfed.federation.reply_validation import NOT_FINITE, ReplyValidator
from polyfed.training import SingleClientData

HUGE = 1e8
"""A model with larger values is taken for broken: clients that train on it are not blamed for NaN and infinity."""


class Answering(Protocol):
    """What runs the clients: an engine."""

    name: str

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on these clients; each reply has passed its client's egress gate."""
        ...


@dataclass
class Federation:
    """The clients of a run, in one round.

    Attributes:
        clients: facts.
        evaluation_clients: which of TEST and VALIDATION exist.
        owner: the algorithm whose tasks may be asked.
        context: the server's own site: the model with all modalities, for what the server itself computes.
        template: the model's tree, against which parameters and gradients are checked.
        round: the round, from 1.
        min_replies: fewer usable answers end the run (fewer asked: all of those).
        emit: takes events.
        clock: simulated time and the links of the clients, where the run has a network model.
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
    emit: Callable[..., None] = lambda *_, **__: None
    clock: Clock | None = None
    round: int = 0
    asked: int = 0
    _senders: set[int] = field(default_factory=set, init=False, repr=False)
    _validator: ReplyValidator | None = field(default=None, init=False, repr=False)

    @property
    def validator(self) -> ReplyValidator:
        """What replies must look like, for the present template."""
        if self._validator is None or self._validator.template is not self.template:
            self._validator = ReplyValidator(self.template, self.context.model, self.clients.modalities)
        return self._validator

    def begin(self, round: int) -> None:
        """Enter a round."""
        self.round, self.asked = round, 0
        if self.clock is not None:
            self.clock.begin(round)

    def ask(
        self,
        task: Task,
        clients: Sequence[int],
        send: Send,
        *,
        quorum: bool = True,
        turn: int = 0,
        accept: Accept | None = None,
    ) -> Replies:
        """Have these clients run a task on a message each; `send` is one message or one a client.

        Args:
            task: a method of the algorithm, or of one of its parts, marked `@task`.
            clients: numbers; the order does not matter.
            send: what they receive; parts of trees that belong to modalities a client lacks are left out.
            quorum: whether too few answers end the run; no, where others have answered already or are asked next.
            turn: another one for every time that a round asks the same anew, so that batches and dropout differ.
            accept: `accept(client, reply)` says what is wrong with a reply that is well formed but does not answer what
                was asked, and nothing otherwise; such a reply is dropped like any bad one.

        Raises:
            EgressError: a client's policy refused to let the reply go.
            TooFewReplies: see `require_quorum`.
            Diverged: see `require_quorum`; or the message to all clients, usually the merged model, is not finite.
        """
        request = Request(task, path_of(task, self.owner), self.round, self.rounds, self.asked, self.seed, turn)
        self.asked += 1
        for client in clients:
            if type(client) is not int or not (client in self.evaluation_clients or 0 <= client < len(self.clients)):
                raise RecipeError(
                    f"{request.name} is asked of {client!r}: clients are numbers from 0 to {len(self.clients) - 1}"
                )
        if not clients:
            return Replies([])
        peak = self._check_sent(request, send)
        answer = self.engine.answer(request, sorted(clients), send)
        missing = dict(answer.missing)
        parts = [kept for part in answer.parts if (kept := self._inspect(request, part, missing, accept))]
        parts = self._in_time(parts, missing)
        if peak > HUGE:
            missing = {
                client: f"{why}{self._broken(peak)}" if why.endswith(NOT_FINITE) else why
                for client, why in missing.items()
            }
        self._senders.update(client for part in parts for client in part.clients if client >= 0)
        for client, reason in sorted(missing.items()):
            self.emit("client-missing", round=self.round, task=request.name, client=client, reason=reason)
        replies = Replies(parts, missing)
        if quorum:
            self.require_quorum(replies, request.name)
        return replies

    def _check_sent(self, request: Request, send: Send) -> float:
        """The largest absolute value in a message to all clients; 0 where each is sent a message of its own.

        The first message after a merge shows whether the server's own model is still finite. If it is, the replies so
        far did no harm, and the list of suspects begins anew.

        Raises:
            Diverged: the message holds NaN or infinity.
        """
        if not isinstance(send, Message):
            return 0.0
        peaks: dict[torch.device, list[Tensor]] = {}  # a message may hold tensors of the host beside those of a GPU
        for _, _, value in tensors(send):
            if value.is_floating_point() and value.numel():
                peaks.setdefault(value.device, []).append(value.abs().amax().float())
        found = [float(torch.stack(group).amax()) for group in peaks.values()]
        peak = max(found, default=0.0)
        if not all(map(math.isfinite, found)):
            raise Diverged(
                f"round {self.round}, task {request.name}: the server's own model {NOT_FINITE}{self._suspects()}. "
                "Lower [train] lr, set [train] clip_norm, or leave out the client whose updates are too large"
            )
        if peak <= HUGE:
            self._senders.clear()
        return peak

    def _broken(self, peak: float) -> str:
        return f", but the model that it was sent already held values up to {peak:.1e}{self._suspects()}"

    def _suspects(self) -> str:
        """Whose replies were merged since the server's model was last fine."""
        shown = ", ".join(map(str, sorted(self._senders)[:10]))
        more = f" and {len(self._senders) - 10} more" if len(self._senders) > 10 else ""
        return f"; it was merged from replies of clients {shown}{more}" if shown else ""

    def require_quorum(self, replies: Replies, what: str) -> None:
        """End the run if too few of those who were asked gave a usable answer.

        Args:
            replies: of one ask, or of several that belong together.
            what: the task, for the message.

        Raises:
            TooFewReplies: fewer than `min_replies` usable answers.
            Diverged: nobody answered with finite numbers. One such client is dropped like any bad reply; when all
                are, it is the run that has left the finite numbers.
        """
        missing, asked = replies.missing, len(replies) + len(replies.missing)
        lost = {client: why for client, why in sorted(missing.items()) if NOT_FINITE in why}
        if lost and not replies:
            raise Diverged(
                f"round {self.round}, task {what}: training left the finite numbers at {len(lost)} of {asked} "
                f"clients. {_listed(lost)}. Lower [train] lr, set [train] clip_norm, or scale the features down"
            )
        if len(replies) < min(self.min_replies, asked):
            raise TooFewReplies(
                f"round {self.round}, task {what}: {len(replies)} of {asked} clients answered, "
                f"[engine] min_replies = {self.min_replies}. {_listed(missing)}"
            )

    def server_data(
        self,
        x: Mapping[str, Tensor],
        y: Tensor | None = None,
        *,
        present: Mapping[str, Tensor] | None = None,
        number: int = 0,
    ) -> SingleClientData:
        """A view over rows that the server received, for training on the server: the clients' own machinery.

        Args:
            x: modality -> (n, ...) float32.
            y: labels (n,) int64, where they were sent; zeros otherwise.
            present: modality -> bool (n,), for one that some rows lack.
            number: tells views of one round apart; their batch orders differ.
        """
        n = len(next(iter(x.values())))
        device = next(iter(x.values())).device
        rows = torch.arange(n, device=device)
        columns = Columns(
            name="received",
            modalities={name: Column(value) for name, value in x.items()},
            label=torch.zeros_like(rows) if y is None else y,
            num_classes=self.context.num_classes,
            split=torch.zeros(n, dtype=torch.int8, device=device),
            ids=rows,
            present=present or {},
        )
        key = keys.key(self.seed, "server", number, self.round)
        return SingleClientData(columns, rows, tuple(x), self.context.model, key, self.round, self.rounds)

    def _in_time(self, parts: list[ReplyStack], missing: dict[int, str]) -> list[ReplyStack]:
        """The parts without clients that ran past the round's deadline in simulated time."""
        late = {} if self.clock is None else self.clock.late([c for part in parts for c in part.clients])
        missing.update(late)
        return [left for part in parts if (left := part.without(late)) is not None] if late else parts

    def _inspect(
        self, request: Request, part: ReplyStack, missing: dict[int, str], accept: Accept | None
    ) -> ReplyStack | None:
        """The part without replies that must not be used; reasons go to `missing`."""
        try:
            self.validator.check(part.message, request.reply)
        except BadReply as error:
            missing.update(dict.fromkeys(part.clients, str(error)))
            return None
        bad = self._foreign(part) | self.validator.unusable(part)
        if accept is not None and (fine := part.without(bad)):
            bad |= {client: words for client, reply in Replies([fine]).items() if (words := accept(client, reply))}
        missing.update(bad)
        return part.without(bad)

    def _foreign(self, part: ReplyStack) -> dict[int, str]:
        """Clients that sent something of a modality which they do not have, and which: it would enter the means."""
        msg = part.message
        sent = {block_of(key) for name, key, _ in tensors(msg) if key is not None and name not in msg.whole}
        known = {client: {*self.clients.owned(client), SHARED, LABELS} for client in part.clients if client >= 0}
        more = {client: sent - own for client, own in known.items() if not sent <= own}
        return {client: f"sent something of {min(m)}, which it does not have" for client, m in more.items()}


def _listed(reasons: Mapping[int, str]) -> str:
    """The first few clients that are missing, and why."""
    return "; ".join(f"client {client}: {why}" for client, why in sorted(reasons.items())[:3])
