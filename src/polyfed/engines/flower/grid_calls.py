"""Calls of a Flower grid. If a call fails, it raises a `TransportError` with a clear text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.superlink.grid import http_grid

from polyfed.core.errors import TransportError

SLACK = 2**24
"""Bytes that a message may take besides its body: a header of at most 4 MiB, and Flower's overhead for every piece."""

FEW_PIECES, LEAST_PIECE = 64, 2**20
"""A message may have `FEW_PIECES` pieces, plus one for every `LEAST_PIECE` bytes of the limit."""

TOO_LARGE = "polyfed does not fetch so much"


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages and return their ids. The id is empty if the SuperLink did not accept the message.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("send messages"):
        return [identity or "" for identity in grid.push_messages(messages)] if messages else []


def pull(grid: Grid, identities: Sequence[str], limit: int) -> list[Message]:
    """Return the replies to these messages that have arrived.

    For a reply that is too large, the result holds an error message (`is_too_large`). This function fetches at most
    about `limit` bytes of such a reply.

    Args:
        grid: the grid.
        identities: the ids of the messages.
        limit: size of the largest reply, in bytes.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("fetch replies"), at_most(http_grid, limit):
        return list(grid.pull_messages(identities)) if identities else []


def online(grid: Grid) -> list[int]:
    """Return the ids of the nodes that are online.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("list the SuperNodes"):
        return list(grid.get_node_ids())


@contextmanager
def at_most(module: Any, limit: int) -> Iterator[None]:
    """Limit the bytes of a message that Flower fetches in this block. A larger message raises an `ObjectPullError`.

    Flower stores a message in pieces of 5 MiB and joins them in memory. Flower itself does not limit their number.

    Args:
        module: the Flower module that fetches messages with `pull_objects`.
        limit: the limit in bytes, without `SLACK`.
    """
    whole = module.pull_objects

    def bounded(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **more: Any) -> Any:
        lock, left = Lock(), [limit + SLACK]

        def fetch(identity: str) -> bytes:
            content = pull_object_fn(identity)
            with lock:
                left[0] -= len(content)
                if left[0] < 0:
                    raise ObjectPullError(identity, TOO_LARGE)
            return content

        if len(object_ids) > FEW_PIECES + limit // LEAST_PIECE:
            raise ObjectPullError(object_ids[0], TOO_LARGE)
        return whole(object_ids=object_ids, pull_object_fn=fetch, **more)

    module.pull_objects = bounded
    try:
        yield
    finally:
        module.pull_objects = whole


def is_too_large(reason: str | None) -> bool:
    """Return whether this reason of a Flower error means that a message was too large to fetch."""
    return reason is not None and TOO_LARGE in reason


@contextmanager
def _sentence(what: str) -> Iterator[None]:
    """Turn connection errors in this block into a `TransportError`. Flower has already tried the call repeatedly."""
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        raise TransportError(
            f"the server could not {what} ({type(error).__name__}: {error!s:.300}). The SuperLink's own log says why "
            "(a full disk, a locked database, a message that is too large); the same `flwr run` goes on"
        ) from error
