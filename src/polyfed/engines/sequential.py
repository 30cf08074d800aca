"""The sequential engine: one client after another. It is the reference, and suits debugging and large models."""

from collections.abc import Iterator, Sequence

from polyfed.core.request import Request, Send
from polyfed.engines.in_process import InProcess
from polyfed.engines.worker_process import Unit
from polyfed.federation.replies import ReplyStack


class Sequential(InProcess):
    """Runs one client at a time, with ordinary autograd."""

    name = "sequential"

    def units(self, request: Request, clients: Sequence[int], send: Send) -> Iterator[Unit]:
        """Every client is a unit."""
        return ([client] for client in clients)

    def run_stack(self, request: Request, group: Unit, send: Send) -> ReplyStack | None:
        """Clients are never stacked."""
        return None
