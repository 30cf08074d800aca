"""One client after another: the reference, for debugging and for models too big to stack."""

from collections.abc import Iterator, Sequence

from polyfed.core.messages import Message
from polyfed.core.request import Ask, Send
from polyfed.engines.in_process import InProcess
from polyfed.federation.replies import Part, stacked


class Sequential(InProcess):
    """Runs each asked client by itself, with plain autograd on one live module."""

    name = "sequential"

    def _run(self, ask: Ask, clients: Sequence[int], send: Send, missing: dict[int, str]) -> Iterator[Part]:
        replies: dict[int, Message] = {}
        for client, got in self.received(ask, clients, send).items():
            reply = self.worked(ask, client, got, missing)
            if reply is not None:
                replies[client] = reply
        yield from stacked(replies)
