"""What an engine does with the result of a task: it checks the result, and masks the reply under secure aggregation."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message, malformed, map_tensors
from polyfed.core.request import Request
from polyfed.core.tree import Tree
from polyfed.federation.secure_aggregation.state import SECRETS


def secrets_apart(request: Request, local: Tree) -> tuple[Tree, Tree]:
    """Return the local state that a task sees, and the secrets that mask its reply.

    The tasks of secure aggregation see their secrets. A task whose reply is masked does not.
    """
    if request.reply.masks is None:
        return local, {}
    secrets = {name: value for name, value in local.items() if name.startswith(f"{SECRETS}.")}
    return {name: value for name, value in local.items() if name not in secrets}, secrets


def masked(request: Request, reply: Message, local: Tree, secrets: Tree) -> tuple[Message, Tree]:
    """Return what leaves the client, and its new local state: under secure aggregation, the masked reply.

    A reply of another type than the task declares stays as it is, and the egress gate refuses it.

    Raises:
        Refusal: the reply cannot be masked. The client then sends nothing.
    """
    if request.reply.masks is None:
        return reply, local
    if type(reply) is not request.reply.masks:
        return reply, local | secrets
    method = request.task.__self__  # type: ignore[attr-defined]
    kind = type(reply)
    hidden, after = method.secure_aggregation.mask(reply, lambda field: method.weight_of(field, kind), secrets)
    return hidden, local | after


def masked_stack(request: Request, made: Message, after: Tree, secrets: Sequence[Tree]) -> tuple[Message, list[Tree]]:
    """Return what leaves the clients of a stack, stacked again, and the local state of each of them.

    Args:
        request: the request.
        made: the stacked replies.
        after: the stacked local states.
        secrets: the secrets of each client.

    Raises:
        Refusal: the reply of a client cannot be masked.
    """
    locals_ = [{name: value[i].clone() for name, value in after.items()} for i in range(len(secrets))]
    if request.reply.masks is None:
        return made, locals_
    each = [
        masked(request, map_tensors(made, lambda t, i=i: t[i]), local, own)
        for i, (local, own) in enumerate(zip(locals_, secrets, strict=True))
    ]
    first, *others = [reply for reply, _ in each]
    return map_tensors(first, lambda *values: torch.stack(values), *others), [local for _, local in each]


@contextmanager
def only_the_gate_refuses(request: Request) -> Iterator[None]:
    """Turn an `EgressError` that a task raises in the `with` block into a `RuntimeError`.

    The text of a refusal leaves the device, so only the egress gate may write this text. A task that raises
    `EgressError` fails like a task that raises any other exception.
    """
    try:
        yield
    except EgressError as error:
        raise RuntimeError(f"task {request.name} raised EgressError, which only the gate may") from error


def reply_and_local(request: Request, returned: Any) -> tuple[Message, Tree]:
    """Check what a task returned, and split it into the reply and the client's new local state.

    Raises:
        RecipeError: the task did not return a message and a local state. Or a field of the message differs from its
            declaration (tensor or tree), or the local state is not a dict of tensors.
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


def describe_failure(request: Request, clients: Sequence[int], got: Message) -> str:
    """Describe where a task failed: clients, round, task, and the shapes of the message that it received."""
    shapes: Mapping[str, Any] = {
        name: tuple(value.shape) if isinstance(value, Tensor) else {k: tuple(v.shape) for k, v in value.items()}
        for name, value in ((field, getattr(got, field)) for field in got.kinds)
    }
    return f"in client(s) {list(clients)[:8]}, round {request.round}, task {request.name}; received {shapes}"
