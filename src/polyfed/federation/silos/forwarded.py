"""What a server whose silos have edges asks of them, and what they forward; see `polyfed.engines.edges`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polyfed.core.messages import Message
from polyfed.core.request import Request


@dataclass
class Forwarded:
    """A request of edges whose replies the server may see.

    Attributes:
        task: name of the task.
        number: number of the request in its round.
        turn: see `Federation.ask`.
        replies: what devices have replied, unchecked.
        missing: the devices without a reply, each with the reason.
    """

    task: str
    number: int
    turn: int
    replies: dict[int, Message] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)


@dataclass
class FromEdges:
    """What edges have answered.

    Attributes:
        answers: the requests whose replies the server may see, in order.
        missing: the silos whose edge did not answer, each with the reason.
        last: number of the request that comes next.
    """

    answers: list[Forwarded] = field(default_factory=list)
    missing: dict[int, str] = field(default_factory=dict)
    last: int = 0


class Edges(Protocol):
    """Sends parts to the edges of silos; see `polyfed.engines.edges`."""

    def in_silos(self, place: Request, part: str, silos: Mapping[int, Sequence[int]], send: Message) -> FromEdges:
        """Let edges run a part.

        Args:
            place: a request of this round, for its numbers.
            part: name of the part.
            silos: the devices of each silo.
            send: the message to each edge.
        """
