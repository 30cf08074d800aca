"""An HTTP client for a device's processes. It follows no redirects and limits the size of an answer.

Flower's HTTP client follows redirects. A hostile server could therefore make a device send requests to any address that
the device can reach, such as the other machines of a hospital. Flower's client also holds each answer in memory as a
whole, and unpacks compressed answers, so a hostile server could fill the memory of a device.

This file imports no other file of polyfed. The SuperNode loads this file by its path, without the package. The package
would load PyTorch into a process that does not need it (`polyfed.engines.flower.device.supernode_process`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.supercore.protobuf import client as protobuf_client

LARGEST_ANSWER = 2**23
"""Largest size in bytes of an answer of the server. Flower 1.41 sends a message in pieces of 5 MiB, and the app of a
recipe is far smaller."""


class _Careful(httpx.Client):
    """Flower's HTTP client without redirects, without compression, and without answers above a limit.

    Args:
        limit: the largest size in bytes of the body of an answer, or None for no limit.
        options: see `httpx.Client`.
    """

    def __init__(self, *, limit: int | None, **options: Any) -> None:
        super().__init__(**options | {"follow_redirects": False})
        self.headers["accept-encoding"] = "identity"
        self._limit = limit

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send a request; see `httpx.Client.send`.

        Raises:
            ValueError: the body of the answer is larger than the limit. The client then reads no further piece of it.
        """
        if stream or self._limit is None:
            return super().send(request, stream=stream, **options)
        answer, body = super().send(request, stream=True, **options), bytearray()
        try:
            for piece in answer.iter_raw():
                body += piece
                if len(body) > self._limit:
                    raise ValueError(f"the server sent an answer of more than {self._limit} bytes to {request.url}")
        finally:
            answer.close()
        headers = [pair for pair in answer.headers.multi_items() if pair[0].lower() not in _OF_THE_TRANSFER]
        parts: dict[str, Any] = {"request": answer.request, "extensions": answer.extensions}
        return httpx.Response(answer.status_code, headers=headers, content=bytes(body), **parts)


_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that describe how a body was sent. A compressed body stays compressed, so Flower cannot read it."""


class _Module:
    """Replaces the module `httpx` in Flower's client: it has all names of the module, but another class `Client`."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(httpx, name)

    def Client(self, **options: Any) -> _Careful:  # noqa: N802  the name of the class that it replaces
        """Make a client."""
        return _Careful(**options | self._options)


@contextmanager
def careful_calls(limit: int | None = LARGEST_ANSWER, **options: Any) -> Iterator[None]:
    """Make the HTTP clients that Flower creates inside this `with` statement careful.

    Args:
        limit: the largest size in bytes of the body of an answer, or None for no limit.
        options: options of `httpx.Client`, such as `trust_env=False` for a client that uses no proxy.
    """
    names = vars(protobuf_client)
    whole = names["httpx"]
    names["httpx"] = _Module(limit=limit, **options)
    try:
        yield
    finally:
        names["httpx"] = whole
