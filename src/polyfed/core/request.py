"""`Request`: one question of the server to some clients. Engines answer it, and egress gates check the replies.

This file also has the keys from which the clients of a request draw random numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from polyfed.core import keys
from polyfed.core.messages import Message, map_tensors, tensors
from polyfed.core.tasks import info_of, types_of
from polyfed.core.tree import Tree

Task = Callable[..., tuple[Message, Tree]]
"""A method marked with `@task`, bound to its algorithm or to a part of it."""

Accept = Callable[[int, Any], str]
"""`accept(client, reply)` returns what is wrong with a reply, or an empty text if nothing is wrong."""

Send = Message | Mapping[int, Message]
"""The messages of a request: one message for all clients, or one for each client."""


HeldOut = Literal["test", "validation"]
"""Own rows of a client that it does not train on."""

HELD_OUT: tuple[HeldOut, ...] = get_args(HeldOut)


@dataclass(frozen=True)
class Request:
    """One question of the server to some clients.

    Attributes:
        task: the bound method that clients run.
        name: name of the task as seen from the algorithm, such as `update` or `selector.score`.
        round: number of the round, from 1; the set-up has number 0.
        rounds: number of rounds of the run.
        number: number of the request in its round, from 0.
        seed: seed of the run.
        turn: a number from which a client derives its random key, together with the round and the seed. In two
            requests of one round with the same turn, a client therefore draws the same random numbers.
        held_out: which own rows of a client `ClientData.test` has in this request: its `test` rows, or its
            `validation` rows.
        enough: number of replies after which the request closes. None means that the server waits for all replies.
        combining: a `federation.combined.Combining`: the engine may sum the replies and return them as
            `Answer.combined`. None: it returns each reply.
        got: the type of message that the task receives.
        reply: the type of message that the task declares as its reply.
        scope: how far replies may travel, as the task declares: `server` or `silo`.
        loop_because: why the task cannot run under vmap; empty if it can.
    """

    task: Task
    name: str
    round: int
    rounds: int
    number: int
    seed: int
    turn: int = 0
    enough: int | None = None
    held_out: HeldOut = "test"
    combining: Any = None
    got: type[Message] = field(init=False)
    reply: type[Message] = field(init=False)
    scope: str = field(init=False)
    loop_because: str = field(init=False)

    def __post_init__(self) -> None:
        """Set `got`, `reply`, `scope` and `loop_because` from the task; callers cannot override them."""
        (got, reply), info = types_of(self.task), info_of(self.task)
        known = {"got": got, "reply": reply, "scope": info.scope, "loop_because": info.loop_because}
        for name, value in known.items():
            object.__setattr__(self, name, value)


def client_key(request: Request, client: int) -> int:
    """Return the key from which a client derives its random numbers in a round, or in one turn of a round."""
    return keys.key(request.seed, "client", client, request.round, *((request.turn,) if request.turn else ()))


def noise_key(request: Request, client: int) -> int:
    """Return the key from which a simulated client draws the noise of its reply to this request."""
    return keys.fold_in(client_key(request, client), request.number)


def contiguous(send: Send) -> Any:
    """Return the messages of a request with contiguous tensors, as they would arrive over a network.

    The memory layout of a tensor changes how operations round. The result of a task must not depend on whether its
    message came from another process. Messages with contiguous tensors are returned as they are. Messages that share a
    tensor also share its contiguous copy.
    """
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.contiguous()
        return copies[id(tensor)]

    def of_one(msg: Message) -> Any:
        return msg if all(value.is_contiguous() for *_, value in tensors(msg)) else map_tensors(msg, copied)

    return of_one(send) if isinstance(send, Message) else {client: of_one(msg) for client, msg in send.items()}


def names_as_sent(field: str, sent: Mapping[int, Message]) -> Accept:
    """Return an `Accept` that requires a Tree with the same names as the Tree that the client received.

    Args:
        field: name of the field, in the message that was sent and in the reply.
        sent: the message that the server sent to each client.
    """

    def flaw(client: int, reply: Message) -> str:
        same = getattr(reply, field).keys() == getattr(sent[client], field).keys()
        return "" if same else f"sent other names in {field} than it was sent"

    return flaw
