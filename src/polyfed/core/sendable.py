"""Checks of messages and local states before they are sent or saved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Request, Send

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
