"""How far models move in a round, by block: the global model, and the models that clients send back.

The server computes these numbers from data that it already has, so clients send nothing more.
"""

import math
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import Message
from polyfed.core.request import Send
from polyfed.core.system.openmp import threads_worth
from polyfed.core.tree import Tree, block_of, size_bytes
from polyfed.federation.replies import Replies


def block_norms(new: Tree | None, old: Tree | None) -> dict[str, float]:
    """Return the 2-norm of `new - old` in each block, over the floating-point tensors; empty if a model is None.

    Args:
        new: the global model after a round.
        old: the global model before this round.
    """
    if new is None or old is None:
        return {}
    norms: dict[str, list[Tensor]] = {}
    with threads_worth(size_bytes(new)):
        for name, value in new.items():
            before = old.get(name)
            if before is not None and before.shape == value.shape and value.is_floating_point():
                norm = torch.linalg.vector_norm(value.detach() - before.detach().to(value.device), dtype=torch.float64)
                norms.setdefault(block_of(name), []).append(norm)
    return {block: float(torch.linalg.vector_norm(torch.stack(parts))) for block, parts in norms.items()}


MOST_CLIENTS = 8
"""The largest number of clients of a request whose updates are measured. Measuring all would take more time than
computing their mean."""


class ClientUpdates:
    """The norms of the clients' updates in a round, for each block. An update is `reply.params - sent.params`.

    The norms may cover only some of the clients. A request is measured only if all its clients receive the same
    message, and if this message and the replies have a field `params`. At most `MOST_CLIENTS` clients of a request are
    measured.
    """

    def __init__(self) -> None:
        self._norms: dict[str, list[float]] = {}

    def watch(self, send: Send, replies: Replies) -> None:
        """Measure the replies to one request, if every client received the same model.

        Args:
            send: the message that the clients received.
            replies: their usable replies.
        """
        sent = getattr(send, "params", None)
        if not isinstance(send, Message) or not isinstance(sent, dict) or not sent:
            return
        chosen = {*list(replies)[:: -(-len(replies) // MOST_CLIENTS) or 1]}
        for part in replies.parts:
            trained = getattr(part.message, "params", None)
            places = [place for place, client in enumerate(part.clients) if client in chosen and client >= 0]
            if isinstance(trained, dict) and places:
                with threads_worth(part.num_bytes):
                    self._add(sent, trained, places)

    def means(self) -> dict[str, float]:
        """Block -> the mean norm over the measured clients that sent the block, in any order of their replies."""
        return {block: math.fsum(norms) / len(norms) for block, norms in self._norms.items()}

    def _add(self, sent: Tree, trained: dict[str, Any], places: list[int]) -> None:
        """Add the norms of the clients at these places of a stack.

        Each sum runs along the last dimension, so a client's norm does not depend on the other clients of its stack.
        """
        norms: dict[str, list[Tensor]] = {}
        for name, stack in trained.items():
            before = sent.get(name)
            if before is None or stack.dim() != before.dim() + 1 or not stack.is_floating_point():
                continue
            received = before.detach()[tuple(map(slice, stack.shape[1:]))]  # cut to the ranks of the clients
            moved = stack.detach()[places] - received.to(stack.device)
            flat = moved.unsqueeze(1).flatten(1).float()  # (clients, numbers), also for a parameter of one number
            norms.setdefault(block_of(name), []).append(torch.linalg.vector_norm(flat, dim=1))
        for block, parts in norms.items():
            self._norms.setdefault(block, []).extend(torch.stack(parts, dim=1).norm(dim=1).tolist())
