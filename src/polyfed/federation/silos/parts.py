"""What a method lets the silos do, each for itself: its *parts*, and the requests that they ask of their devices.

A part is a generator. It yields an `Ask`, gets the usable replies of the devices of its silo, and returns what the edge
of the silo keeps. It knows nothing but its silo. The server learns only the replies of tasks whose scope is `server`.

Where a part runs is no concern of the method. `in_lockstep` runs the parts of all silos in one process, each of their
requests together with the same request of the other silos, so that an engine can stack the devices of all silos. In a
deployment with edges, each part runs at the edge of its silo (`polyfed.deploy.edge`).
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from polyfed.core.errors import TooFewReplies
from polyfed.core.messages import Message
from polyfed.core.request import Accept, HeldOut, Send, Task
from polyfed.core.tasks import info_of
from polyfed.federation.replies import Replies

_S = TypeVar("_S")


@dataclass(frozen=True)
class Ask:
    """A request of a part to devices of its silo. All silos ask the same tasks in the same order.

    Attributes:
        task: what the devices do.
        send: the message of each device.
        quorum, turn, accept, held_out: see `Federation.ask`.
        if_any: whether there is no request if no silo has a message to send.
    """

    task: Task
    send: Mapping[int, Message]
    quorum: bool = True
    turn: int = 0
    accept: Accept | None = None
    held_out: HeldOut = "test"
    if_any: bool = False


Part = Generator[Ask, Mapping[int, Any], _S]
"""The work of one silo: a generator that returns what its edge keeps."""

MakePart = Callable[[int, Sequence[int], Any, Any, Any], Part[Any]]
"""`part(silo, devices, kept, got, fed)`: a method of the algorithm. `kept` is what the edge has kept (None at first),
`got` the server's message, and `fed` tells the facts about the devices; a part never calls `fed.ask`."""


@dataclass(frozen=True)
class Answered:
    """A request whose replies the server may see.

    Attributes:
        task: what the devices did.
        number: number of the request in its round.
        turn: see `Federation.ask`.
        replies: the usable replies.
    """

    task: Task
    number: int
    turn: int
    replies: Replies


@dataclass
class InSilos:
    """What parts have left.

    Attributes:
        kept: silo -> what its part returned; empty if edges keep it.
        answers: the requests whose replies the server may see, in order.
        missing: the silos that could not take part, each with the reason.
    """

    kept: dict[int, Any] = field(default_factory=dict)
    answers: list[Answered] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)

    def of(self, task: Task) -> Replies:
        """Return the replies to the only request for a task, which are empty if there was none."""
        result = self.all_of(task)
        assert len(result) <= 1
        return result[0] if result else Replies([])

    def all_of(self, task: Task) -> list[Replies]:
        """Return the replies to each request for a task."""
        return [answer.replies for answer in self.answers if answer.task == task]


class Asking(Protocol):
    """The part of a federation that `in_lockstep` uses."""

    asked: int

    def ask(
        self,
        task: Task,
        clients: Sequence[int],
        send: Send,
        *,
        quorum: bool = True,
        turn: int = 0,
        accept: Accept | None = None,
        held_out: HeldOut = "test",
    ) -> Replies:
        """See `Federation.ask`."""


def in_lockstep(fed: Asking, parts: Mapping[int, Part[Any]]) -> InSilos:
    """Run the parts of some silos, with one request to all of their devices at a time.

    A part that raises `TooFewReplies` leaves its silo out; the others go on.
    """
    result, running = InSilos(), dict(parts)
    said: dict[int, Any] = dict.fromkeys(running)
    while running:
        asks: dict[int, Ask] = {}
        for silo, part in list(running.items()):
            try:
                asks[silo] = part.send(said[silo])
                continue
            except StopIteration as end:
                result.kept[silo] = end.value
            except TooFewReplies as error:
                result.missing[silo] = str(error)
            del running[silo]
        if asks:
            replies = _asked(fed, list(asks.values()), result)
            said = {silo: {c: replies[c] for c in ask.send if c in replies} for silo, ask in asks.items()}
    return result


def _asked(fed: Asking, asks: Collection[Ask], found: InSilos) -> Replies:
    """Ask the devices of all silos at once."""
    first = next(iter(asks))
    assert all(ask.task == first.task for ask in asks), "all silos ask the same tasks in the same order"
    send = {client: msg for ask in asks for client, msg in ask.send.items()}
    if first.if_any and not send:
        return Replies([])
    checks = {client: ask.accept for ask in asks for client in ask.send if ask.accept is not None}

    def accept(client: int, reply: Any) -> str:
        return checks[client](client, reply) if client in checks else ""

    number, options = fed.asked, dict[str, Any](quorum=first.quorum, turn=first.turn, held_out=first.held_out)
    replies = fed.ask(first.task, sorted(send), send, accept=accept if checks else None, **options)
    if info_of(first.task).scope == "server":
        found.answers.append(Answered(first.task, number, first.turn, replies))
    return replies
