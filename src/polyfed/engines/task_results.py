"""Checks of what a task returned, raised or changed, and the description of a task that failed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message, map_tensors, tensors
from polyfed.core.request import Request
from polyfed.core.sendable import checked_local, malformed
from polyfed.core.tree import Tree, memory_of
from polyfed.federation.context import ClientContext
from polyfed.training.programs.check import same_bits

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of BatchNorm's running statistics."""


def reply_and_local(request: Request, returned: Any) -> tuple[Message, Tree]:
    """Check what a task returned, and split it into the reply and the client's new local state.

    Raises:
        RecipeError: the task did not return a pair of a message and a local state. Or a field of the message is a
            tensor where a tree is declared, or a tree where a tensor is declared. Or the local state is not a dict of
            tensors. Or a tensor cannot be sent or saved, because it is sparse, quantised, nested or without values.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Message)):
        raise RecipeError(
            f"task {request.name} must return a message and the local state of the client, as in "
            f"`return Update(...), local`; it returned {type(returned).__name__}"
        )
    reply: Message = returned[0]
    if flaw := malformed(reply):
        raise RecipeError(f"task {request.name} returned a message that cannot be sent: {flaw}")
    return reply, checked_local(returned[1], f"task {request.name}")


class Inputs:
    """The tensors that a task receives. The task must not change them. `apart` copies those that its reply contains.

    The clients of a process share the tensors of a message, and each worker process has a copy of them. A change in
    place would therefore reach only the clients of one process, so the result would depend on the number of processes.

    Args:
        context: the context of the clients, which holds the initial parameters.
        fields: the values of the message's fields.
        local: the clients' local states.
    """

    def __init__(
        self, request: Request, context: ClientContext, fields: Mapping[str, Tensor | Tree], local: Tree
    ) -> None:
        self._task = request.name
        self._trees = {"context.initial": context.initial, "its local state": local}
        for name, value in fields.items():
            self._trees[f"got.{name}"] = {"": value} if isinstance(value, Tensor) else value

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Refuse a task that changes one of these tensors in place in the `with` block.

        PyTorch counts the changes of a tensor's values, but not those of BatchNorm's running statistics. This method
        therefore compares the values of these statistics before and after the block.

        Raises:
            RecipeError: the task changed a tensor.
        """
        found = [(where, name, tensor) for where, tree in self._trees.items() for name, tensor in tree.items()]
        statistics = [(where, tensor, tensor.clone()) for where, name, tensor in found if name.endswith(STATISTICS)]

        def marks() -> list[tuple[int, bool]]:  # inference tensors have no version
            return [(0 if tensor.is_inference() else tensor._version, tensor.requires_grad) for *_, tensor in found]

        def refuse() -> None:
            normed = {where for where, tensor, old in statistics if not same_bits(tensor, old)}
            if (after := marks()) == before and not normed:
                return
            pairs = [(where, was, now) for (where, *_), was, now in zip(found, before, after, strict=True)]
            flagged = {where for where, (_, was), (_, now) in pairs if was != now}
            where = " and of ".join(sorted(normed | {where for where, was, now in pairs if was != now}))
            why = ". With a training batch, BatchNorm changes its running statistics" if normed else ""
            why += ". `requires_grad_` changes a tensor, too: PyTorch then fills its `.grad`" if flagged else ""
            raise RecipeError(
                f"task {self._task} changed a tensor of {where} in place, and other clients may share this tensor. "
                f"Make a new tensor, as in `x + 1` instead of `x.add_(1)`, or clone the tensor first{why}"
            )

        before = marks()
        try:
            yield
        except Exception:
            refuse()
            raise
        refuse()

    def apart(self, reply: Message) -> Any:
        """Return a task's reply in which copies replace tensors that share memory with these inputs or with each other.

        Otherwise, if the server changed a reply in place, it would also change its own model or another field.
        """
        taken = {memory_of(tensor) for tree in self._trees.values() for tensor in tree.values()}
        sent = [memory_of(tensor) for *_, tensor in tensors(reply)]
        if len(taken.union(sent)) == len(taken) + len(sent):
            return reply

        def own(tensor: Tensor) -> Tensor:
            if (place := memory_of(tensor)) in taken:
                return tensor.clone()
            taken.add(place)
            return tensor

        return map_tensors(reply, own)


def reason_of(error: BaseException) -> str:
    """Return the class and the text of a task's exception. Its `__str__` may raise another exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be shown"


def describe_failure(request: Request, clients: Sequence[int], got: Message) -> str:
    """Describe where a task failed: clients, round, task, and the shapes of the message that it received."""
    shapes: Mapping[str, Any] = {
        name: tuple(value.shape) if isinstance(value, Tensor) else {k: tuple(v.shape) for k, v in value.items()}
        for name, value in ((field, getattr(got, field)) for field in got.kinds)
    }
    return f"in client(s) {list(clients)[:8]}, round {request.round}, task {request.name}; received {shapes}"


@contextmanager
def only_the_gate_refuses(request: Request) -> Iterator[None]:
    """Turn an `EgressError` that a task raises in the `with` block into a `RuntimeError`.

    Devices send the text of an `EgressError` to the server, so a task could put data into this text. As a
    `RuntimeError`, the exception is an ordinary failure of the task.
    """
    try:
        yield
    except EgressError as error:
        raise RuntimeError(f"task {request.name} raised EgressError, which only the gate may") from error
