"""A limit on the bytes of a message that Flower fetches. Both the server and the SuperNode of a device use this limit.

This file imports no other file of polyfed. The SuperNode loads this file by its path, without the package. The package
would load PyTorch into a process that does not need it (`polyfed.engines.flower.device.supernode_process`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

SLACK = 2**24
"""Additional bytes that a message may take: a header of at most 4 MiB, and Flower's overhead for every piece."""

FEW_PIECES, LEAST_PIECE = 64, 2**20
"""A message may have `FEW_PIECES` pieces, plus one for every `LEAST_PIECE` bytes of the limit."""

TOO_LARGE = "polyfed does not fetch so much"

DEVICE_LIMIT = "POLYFED_MESSAGE_MEGABYTES"
"""Environment variable with the limit of a device, in units of 2**20 bytes; `polyfed supernode` sets it."""


@contextmanager
def at_most(module: Any, limit: int) -> Iterator[None]:
    """Limit the size of the messages that Flower fetches inside this `with` statement.

    A larger message raises an `ObjectPullError`.

    Flower stores a message in pieces of 5 MiB and joins them in memory. Flower itself does not limit the number of
    pieces.

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
