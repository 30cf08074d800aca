"""A recipe played by devices in this process: their packets pass through the queue of polyfed's own server.

In place of the web server and the devices, `Hub` takes each request from the queue, lets a handler answer it, and
delivers the reply. `engines/test_own_processes.py` has the real ones.
"""

import itertools
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from polyfed.deploy.handlers import Simulated
from polyfed.deploy.server.server import engine_by
from polyfed.engines.patience import Arrived, Node, PatientTransport
from polyfed.engines.queued import QueueTransport
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble, population_of
from polyfed.federation.wire.wire_format import Packet, framed, header_of
from polyfed.transport.queue import SERVER, Bell, Queue, Waiting

Handler = Callable[[Packet, Mapping[str, Any]], Packet]


class Hub:
    """The queue of a server, and devices in this process.

    Args:
        handler: answers the packets of all devices; it is told the device's place in `names` as `partition-id`.
        clients: number of devices.

    Attributes:
        names: the devices, as the server knows them.
        absent: devices that are not connected.
        bytes_up, bytes_down: bytes of all replies and of the bodies of all requests.
    """

    def __init__(self, handler: Handler, clients: int) -> None:
        self.handler, self.names = handler, [f"device {number}" for number in range(clients)]
        self.bytes_down = self.bytes_up = 0
        spare = tempfile.TemporaryDirectory(prefix="polyfed-hub-")
        self.queue = Queue(Path(spare.name))
        bell = Bell(self.queue.bell(SERVER))
        weakref.finalize(self, _ended, self.queue, bell, spare)
        self.absent: set[str] = set()

    @property
    def clients(self) -> int:
        return len(self.names)

    def online(self) -> list[str]:
        return [name for name in self.names if name not in self.absent]

    def work(self) -> None:
        """Answer the requests to the devices that are connected, each in the order in which they came."""
        for name in self.online():
            while (found := self.next_for(name)) is not None:
                self.deliver(found, self.answer(found))

    def next_for(self, name: str) -> Waiting | None:
        """The next request that a device answers."""
        return self.queue.next_for(name)

    def packet(self, found: Waiting) -> Packet:
        """What a request carries."""
        header = header_of(found.header)
        assert not isinstance(header, str), header
        body = self.queue.file(found.run, found.body).read_bytes() if found.body else b""
        self.bytes_down += len(found.header.encode()) + len(body)
        return Packet(header, body)

    def answer(self, found: Waiting) -> Packet:
        """Let the handler answer a request."""
        return self.handler(self.packet(found), {"partition-id": self.names.index(found.device)})

    def deliver(self, found: Waiting, reply: Packet) -> bool:
        """Deliver a reply as the web server does. Return whether the run still waits for it."""
        content = framed(reply)
        self.bytes_up += len(content)
        self.queue.reply(found.id, "part").write_bytes(content)
        if self.queue.deliver(found):
            return True
        self.queue.too_late(self.queue.find(found.id) or found)
        return False


def _ended(queue: Queue, bell: Bell, spare: Any) -> None:
    bell.close()
    queue.close()
    spare.cleanup()


_RUNS = itertools.count()


class HubTransport(QueueTransport):
    """The transport of a run, whose devices answer at once."""

    def __init__(self, hub: Hub, **options: Any) -> None:
        self.hub = hub
        super().__init__(queue=hub.queue, app=b"app", identity=f"{next(_RUNS):016x}", **options)
        weakref.finalize(self, self._bell.close)

    @override
    def push(self, packets: Sequence[tuple[Node, Packet]], seconds: float, *, enrols: bool) -> list[str]:
        sent = super().push(packets, seconds, enrols=enrols)
        self.hub.work()
        return sent

    @override
    def pull(self, identities: Sequence[str], limit: int) -> list[Arrived]:
        self.hub.work()
        return super().pull(identities, limit)

    @override
    def online(self) -> list[Node]:
        self.hub.queue.nobody_is_online()
        self.hub.queue.mark(dict.fromkeys(self.hub.online(), True))
        return super().online()


def over(handler: Handler, clients: int, **options: Any) -> HubTransport:
    """The transport of a run to so many devices."""
    return HubTransport(Hub(handler, clients), **options)


def hub_of(recipe: Recipe, folder: Path, wrap: Any = lambda handler: handler) -> Hub:
    """A hub whose devices are the recipe's clients; `wrap` may change what a handler answers."""
    return Hub(wrap(Simulated(recipe, folder)), population_of(recipe).num_clients)


def joined(recipe: Recipe, hub: Hub, run: str = "run") -> Assembly:
    """The server's parts, its clients enrolled."""
    return enrolled(recipe, HubTransport(hub), hub.clients, run)


def enrolled(recipe: Recipe, transport: PatientTransport, clients: int, run: str = "run") -> Assembly:
    """The server's parts over a transport, its clients enrolled."""
    assert len(transport.enrol(clients, 30)) == clients
    return assemble(recipe, run, population=population_of(recipe), engine=engine_by(transport, recipe))


def through(recipe: Recipe, transport: PatientTransport, clients: int, emit: Any = None) -> tuple[Any, list[Any]]:
    """All rounds over a transport: the final state, and the server's ledger."""
    parts = enrolled(recipe, transport, clients)
    if emit is not None:
        parts.fed.emit = emit
    return played(recipe, parts)


def played(recipe: Recipe, parts: Assembly) -> tuple[Any, list[dict[str, Any]]]:
    """All rounds: the final state, and the server's ledger."""
    fed, method = parts.fed, recipe.algorithm
    state: Any = parts.start()
    for round in range(1, recipe.rounds + 1):
        fed.begin(round)
        state = method.round(state, fed)
        parts.engine.saved(round)
    return state, list(parts.ledger.rows())
