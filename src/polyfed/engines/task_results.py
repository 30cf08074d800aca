"""Checks of what a task returned, raised or changed, and the description of a task that failed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message, malformed
from polyfed.core.request import Request
from polyfed.core.tree import Tree


def reply_and_local(request: Request, returned: Any) -> tuple[Message, Tree]:
    """Check what a task returned, and split it into the reply and the client's new local state.

    Raises:
        RecipeError: the task did not return a pair of a message and a local state. Or a field of the message is a
            tensor where a tree is declared, or a tree where a tensor is declared. Or the local state is not a dict of
            tensors.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Message)):
        raise RecipeError(
            f"task {request.name} must return a message and the local state of the client, as in "
            f"`return Update(...), local`; it returned {type(returned).__name__}"
        )
    reply: Message = returned[0]
    kept: Any = returned[1]
    if flaw := malformed(reply):
        raise RecipeError(f"task {request.name} returned a message that is not as declared: {flaw}")
    if not (isinstance(kept, Mapping) and all(isinstance(value, Tensor) for value in kept.values())):
        what = type(kept).__name__
        if isinstance(kept, Mapping):
            what = ", ".join(f"'{k}': {type(v).__name__}" for k, v in kept.items() if not isinstance(v, Tensor))
        raise RecipeError(
            f"task {request.name}: a client's local state is a dict of tensors by name, so that it can be saved; this "
            f"one has {what}. A number becomes a tensor by torch.tensor(...)"
        )
    return reply, cast(Tree, kept)


@contextmanager
def inputs_unchanged(
    request: Request, initial: Tree, fields: Mapping[str, Tensor | Tree], local: Tree
) -> Iterator[None]:
    """Refuse a task that changes a tensor of its inputs in place in the `with` block.

    The clients of a process share the tensors of a message, and each worker process has a copy of them. A change in
    place would reach only the clients of one process, so the result would depend on the number of processes.

    Args:
        request: the request.
        initial: `context.initial`.
        fields: the values of the message's fields.
        local: the client's local state.

    Raises:
        RecipeError: the task changed a tensor.
    """
    trees = {"context.initial": initial, "its local state": local}
    trees |= {f"got.{name}": {"": value} if isinstance(value, Tensor) else value for name, value in fields.items()}
    versions = [
        (where, tensor, tensor._version)
        for where, tree in trees.items()
        for tensor in tree.values()
        if not tensor.is_inference()  # such tensors have no version
    ]
    try:
        yield
    finally:
        changed = sorted({where for where, tensor, version in versions if tensor._version != version})
        if changed:
            raise RecipeError(
                f"task {request.name} changed a tensor of {' and of '.join(changed)} in place, and other clients may "
                "share this tensor. Make a new tensor, as in `x + 1` instead of `x.add_(1)`, or clone the tensor first"
            )


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
