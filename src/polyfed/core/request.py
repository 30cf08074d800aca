"""One question of the server to some clients: what engines answer and gates judge by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.messages import Message
from polyfed.core.tasks import info_of, types_of
from polyfed.core.tree import Tree

Task = Callable[..., tuple[Message, Tree]]
"""A method marked `@task`, bound to its algorithm or part of it."""

Accept = Callable[[int, Any], str]
"""`accept(client, reply)` -> what is wrong with it; empty when nothing is."""

Send = Message | Mapping[int, Message]
"""One message for all, or one for each client."""


@dataclass(frozen=True)
class Request:
    """One question of the server to some clients.

    Attributes:
        task: the bound method that answers.
        name: its name as seen from the algorithm, as `update` or `selector.score`.
        round: the round, from 1; 0 is set-up.
        rounds: rounds of the run.
        number: of the ask in its round, from 0.
        seed: of the run.
        turn: asks of one round and one turn give a client the same random numbers, those of another turn others.
        got: the message type that the task receives.
        reply: the message type it is declared to answer with.
        scope: how far the reply may travel, as the task itself says.
        loop_because: why the task cannot be vectorised; empty when it can.
    """

    task: Task
    name: str
    round: int
    rounds: int
    number: int
    seed: int
    turn: int = 0
    got: type[Message] = field(init=False)
    reply: type[Message] = field(init=False)
    scope: str = field(init=False)
    loop_because: str = field(init=False)

    def __post_init__(self) -> None:
        """Read what the task declares; nobody who asks may say otherwise."""
        (got, reply), info = types_of(self.task), info_of(self.task)
        known = {"got": got, "reply": reply, "scope": info.scope, "loop_because": info.loop_because}
        for name, value in known.items():
            object.__setattr__(self, name, value)


def names_as_sent(field: str, sent: Mapping[int, Message]) -> Accept:
    """Accepts replies whose tree has the names of the one that the client was sent in a field of that name."""

    def flaw(client: int, reply: Message) -> str:
        same = getattr(reply, field).keys() == getattr(sent[client], field).keys()
        return "" if same else f"sent other names in {field} than it was sent"

    return flaw
