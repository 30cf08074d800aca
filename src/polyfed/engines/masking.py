"""Masks the replies of clients under secure aggregation, before the egress gate checks them."""

from collections.abc import Sequence

import torch

from polyfed.core.messages import Message, map_tensors
from polyfed.core.request import Request
from polyfed.core.tree import Tree
from polyfed.federation.secure_aggregation.state import SECRETS


def secrets_apart(request: Request, local: Tree) -> tuple[Tree, Tree]:
    """Return the local state that a task sees, and the secrets that mask its reply.

    The tasks of the secure aggregation protocol receive the secrets. A task whose reply is masked does not receive
    them.
    """
    if request.reply.masks is None:
        return local, {}
    secrets = {name: value for name, value in local.items() if name.startswith(f"{SECRETS}.")}
    return {name: value for name, value in local.items() if name not in secrets}, secrets


def masked(request: Request, reply: Message, local: Tree, secrets: Tree) -> tuple[Message, Tree]:
    """Return the message that leaves the client, and its new local state. Secure aggregation masks the reply.

    If the reply has another type than the task declares, this function does not change it. The egress gate then refuses
    the reply.

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
    """Return the stacked messages that leave the clients, and the local state of each client.

    Args:
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
