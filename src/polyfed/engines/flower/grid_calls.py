"""Calls of a Flower grid, whose failures become a `TransportError` with a sentence."""

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
"""Bytes of a message besides its body: the header, of at most 4 MiB, and what Flower adds to every piece."""

FEW_PIECES, LEAST_PIECE = 64, 2**20
"""A message may have `FEW_PIECES` pieces, and one more for every `LEAST_PIECE` bytes that are allowed."""

TOO_LARGE = "polyfed does not fetch so much"


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages. Returns the id of each; empty for a message that the SuperLink did not take.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("send messages"):
        return [identity or "" for identity in grid.push_messages(messages)] if messages else []


def pull(grid: Grid, identities: Sequence[str], limit: int) -> list[Message]:
    """The replies that have come to these messages.

    A reply that is too large comes as an error (`is_too_large`), and at most `limit` bytes of it were fetched.

    Args:
        grid: the grid.
        identities: of the messages.
        limit: size of the largest reply, in bytes.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("fetch replies"), at_most(http_grid, limit):
        return list(grid.pull_messages(identities)) if identities else []


def online(grid: Grid) -> list[int]:
    """The nodes that are online.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("list the SuperNodes"):
        return list(grid.get_node_ids())


@contextmanager
def at_most(module: Any, limit: int) -> Iterator[None]:
    """Inside this block, Flower fetches at most so many bytes of a message, and then fails with an `ObjectPullError`.

    Flower stores a message in pieces of 5 MiB and puts them together in memory, whatever their number.

    Args:
        module: the module of Flower's that fetches messages by `pull_objects`.
        limit: in bytes.
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
    """Whether this is the reason of an error by which Flower says that a message was not fetched for its size."""
    return reason is not None and TOO_LARGE in reason


@contextmanager
def _sentence(what: str) -> Iterator[None]:
    """Flower tries again by itself where it may help, so what is raised here is final."""
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        raise TransportError(
            f"the server could not {what} ({type(error).__name__}: {error!s:.300}). The SuperLink's own log says why "
            "(a full disk, a locked database, a message that is too large); the same `flwr run` goes on"
        ) from error
