"""A transport through polyfed's own server, `polyfed server`: requests and replies lie in a queue on the disk."""

import json
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from typing_extensions import override

from polyfed.core.errors import TransportError
from polyfed.core.system import tracing
from polyfed.core.system.mapping import mapped
from polyfed.core.system.tracing import PARENT
from polyfed.engines.patience import LARGEST_ENROLMENT, Arrived, Node, PatientTransport
from polyfed.federation.wire.wire_format import MAX_HEADER, Packet, unframed
from polyfed.transport.queue import ANSWERED, LATE, Bell, Queue

GONE_SECONDS = 60.0
"""For so long the run waits for a web server that is not running. A service manager starts it again by then."""


@dataclass(kw_only=True)
class QueueTransport(PatientTransport):
    """A `Transport` whose requests wait in a queue until devices fetch them. Nothing is lost if a process is killed.

    Attributes:
        queue: the queue, which the web server serves.
        app: what a device needs besides a request: the recipe.
    """

    queue: Queue
    app: bytes
    identity: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bell, self._gone = Bell(self.queue.bell(self.identity)), 0.0

    @override
    def push(self, packets: Sequence[tuple[Node, Packet]], seconds: float, *, enrols: bool) -> list[str]:
        most = (LARGEST_ENROLMENT if enrols else self.limit) + 4 + MAX_HEADER
        parent = {PARENT: here} if (here := tracing.here()) else {}
        texts = [(str(n), json.dumps(one.header | parent, separators=(",", ":")), one.body) for n, one in packets]
        with self._written():
            app = self.queue.keep(self.identity, self.app)  # again if it was deleted, because nobody needed it
            return self.queue.add(self.identity, texts, app, most) if texts else []

    @override
    def pull(self, identities: Sequence[str], limit: int) -> list[Arrived]:
        if not identities:
            return []
        wanted = set(identities)
        found = [row for name, row in self.queue.states(self.identity, [ANSWERED, LATE]).items() if name in wanted]
        came, carried = [], self.queue.carried([row.id for row in found])
        for row in found:
            said: Packet | str = "came after its request had been closed"
            if row.state == ANSWERED:
                said = unframed(mapped(self.queue.reply(row.id)))
            if isinstance(said, Packet) and len(said.body) > limit:
                said = f"is too large: more than {limit} bytes"
            came.append(Arrived(row.id, row.device, said, carried=carried.get(row.id)))
        if found:
            with self._written():
                self.queue.forget([row.id for row in found])
        return came

    @override
    def close(self, identities: Collection[str]) -> None:
        if identities:
            with self._written():
                self.queue.shut(self.identity, identities)

    @override
    def online(self) -> list[Node]:
        there = self.queue.online()
        if there is not None:
            self._gone = 0.0
            return cast(list[Node], there)
        self._gone = self._gone or time.monotonic()
        if time.monotonic() - self._gone > GONE_SECONDS:
            raise TransportError("the server is gone. Start `polyfed server` again; the same command goes on")
        self._away.clear()  # no device can reach a server that is gone: absences begin when it is back
        return []

    @override
    def device_of(self, node: Node) -> str:
        return self.renewed().get(str(node), str(node))

    @override
    def rest(self, seconds: float) -> None:
        self._bell.wait(seconds)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Turn an error of the disk into a sentence.

        Raises:
            TransportError: the queue cannot be written.
        """
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            why = f"the queue in {self.queue.folder} cannot be written: {error}"
            raise TransportError(
                f"{why}. Make room, and call the same command again, which continues the run"
            ) from None

    def end(self) -> None:
        """End all requests of this run."""
        self._bell.close()
        self.queue.tidy()
        self.queue.close()
