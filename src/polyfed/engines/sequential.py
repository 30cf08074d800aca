"""The sequential engine: it runs one client after another.

This engine is the reference for the others, and it is useful for debugging.
"""

from collections.abc import Iterator, Sequence

from typing_extensions import override

from polyfed.core.request import Request, Send
from polyfed.engines.in_process import InProcess
from polyfed.engines.workers.process import Unit


class Sequential(InProcess):
    """Runs one client at a time, with ordinary autograd."""

    name = "sequential"

    @override
    def units(self, request: Request, clients: Sequence[int], send: Send) -> Iterator[Unit]:
        return ([client] for client in clients)
