"""Calls of a Flower grid, whose failures become a `TransportError` with a sentence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from polyfed.core.errors import TransportError


def push(grid: Grid, messages: Sequence[Message]) -> list[str]:
    """Send messages. Returns the id of each; empty for a message that the SuperLink did not take.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("send messages"):
        return [identity or "" for identity in grid.push_messages(messages)] if messages else []


def pull(grid: Grid, identities: Sequence[str]) -> list[Message]:
    """The replies that have come to these messages.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("fetch replies"):
        return list(grid.pull_messages(identities)) if identities else []


def online(grid: Grid) -> list[int]:
    """The nodes that are online.

    Raises:
        TransportError: the SuperLink failed.
    """
    with _sentence("list the SuperNodes"):
        return list(grid.get_node_ids())


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
