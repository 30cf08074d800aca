"""One client after another: the reference, for debugging and for models too big to stack."""

from collections.abc import Iterator, Sequence

from polyfed.ask import Ask, Send
from polyfed.engines.inprocess import InProcess
from polyfed.replies import Part


class Sequential(InProcess):
    """Runs each asked client by itself, with plain autograd on one live module."""

    name = "sequential"

    def _run(self, ask: Ask, clients: Sequence[int], send: Send, missing: dict[int, str]) -> Iterator[Part]:
        for client, got in self.received(ask, clients, send).items():
            part = self.worked(ask, client, got, missing)
            if part is not None:
                yield part
