"""Checks of messages and local states before they are sent or saved."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree

ODD = "tensor that is sparse, quantised, nested or without values (device 'meta')"
DENSE = "a dense tensor: x.to_dense() of a sparse tensor, or x.dequantize() of a quantised one"


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor stores its numbers one by one in memory, so that it can be sent and saved."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)


def malformed(msg: Message) -> str:
    """Describe the first field with a wrong type or a tensor that is not dense; return "" if there is none."""
    for name, declared in msg.declared.items():
        value: Any = getattr(msg, name)
        if declared.bare:
            fine = isinstance(value, Tensor)
        else:
            fine = isinstance(value, Mapping) and all(
                isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items()
            )
        if not fine:
            wanted = "a Tensor" if declared.bare else "a Tree, a dict of tensors by name"
            return f"{type(msg).__name__}.{name} is declared as {wanted}; it is a {type(value).__name__}"
        if not all(map(is_dense, [value] if declared.bare else value.values())):
            return f"{type(msg).__name__}.{name} holds a {ODD}. Send {DENSE}"
    return ""


def check_sent(request: Request, send: Send) -> None:
    """Refuse a message of the server that its task does not declare, or that cannot be sent.

    A client in another process rebuilds the message from the declared class. The fields that only a subclass has would
    be lost.

    Raises:
        RecipeError: a message has another class than the task declares, or a field cannot be sent.
    """
    for message in [send] if isinstance(send, Message) else send.values():
        if type(message) is not request.got:
            raise RecipeError(
                f"task {request.name} declares that it receives {request.got.__name__}, but the server sends "
                f"{type(message).__name__}. Send the declared class, or declare the class that you send"
            )
        if flaw := malformed(message):
            raise RecipeError(f"the server sends a message for task {request.name} that cannot be sent: {flaw}")


def checked_local(kept: Any, where: str) -> Tree:
    """Return a client's local state, or refuse it if it cannot be saved.

    Args:
        kept: the local state.
        where: what made it, for the error text.

    Raises:
        RecipeError: the local state is not a dict of dense tensors.
    """
    if not (isinstance(kept, Mapping) and all(isinstance(value, Tensor) for value in kept.values())):
        what = type(kept).__name__
        if isinstance(kept, Mapping):
            what = ", ".join(f"'{k}': {type(v).__name__}" for k, v in kept.items() if not isinstance(v, Tensor))
        raise RecipeError(
            f"{where}: a client's local state is a dict of tensors by name, so that it can be saved; this one has "
            f"{what}. A number becomes a tensor by torch.tensor(...)"
        )
    if odd := [name for name, value in kept.items() if not is_dense(value)]:
        raise RecipeError(
            f"{where}: '{odd[0]}' in the client's local state is a {ODD}, which cannot be saved. Keep {DENSE}"
        )
    return cast(Tree, kept)
