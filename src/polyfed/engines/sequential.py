"""The sequential engine: one client after another. It is the reference, and suits debugging and large models."""

from collections.abc import Sequence

from polyfed.core.messages import Message
from polyfed.core.request import Request, Send
from polyfed.engines.in_process import InProcess
from polyfed.federation.replies import Answer, stacked


class Sequential(InProcess):
    """Runs one client at a time, with ordinary autograd."""

    name = "sequential"

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        """Run the task on these clients; see `Engine.answer`."""
        replies: dict[int, Message] = {}
        missing: dict[int, str] = {}
        for client, got in self.received(request, clients, send).items():
            reply = self.run_received(request, client, got, missing)
            if reply is not None:
                replies[client] = reply
        return Answer.of(stacked(replies), missing)
