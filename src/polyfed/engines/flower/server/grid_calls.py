"""Calls of a Flower grid. A call that fails raises a `TransportError` with a clear text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.superlink.grid import http_grid

from polyfed.core.errors import TransportError
from polyfed.engines.flower.device.fetch_limit import TOO_LARGE, at_most


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages and return their ids, with an empty text for each message that the SuperLink did not accept.

    Raises:
        TransportError: the SuperLink failed, or did not say which messages it accepted.
    """
    with _sentence("send messages"):
        sent = [identity or "" for identity in grid.push_messages(messages)] if messages else []
        if len(sent) != len(messages):
            raise OSError(f"the SuperLink returned {len(sent)} ids for {len(messages)} messages")
    return sent


def pull(grid: Grid, identities: Sequence[str], limit: int) -> list[Message]:
    """Of the replies to these messages, return those that have already arrived.

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
            "(a full disk, a locked database, a message that is too large); `polyfed submit` goes on"
        ) from error
