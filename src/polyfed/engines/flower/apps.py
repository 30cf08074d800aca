"""Run a server's function and a client's handler in Flower's simulation runtime."""

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from polyfed.core.system.stop_signals import handling
from polyfed.engines.flower.codec import packet_of, records
from polyfed.engines.flower.transport import GridTransport
from polyfed.engines.protocol import FAILED
from polyfed.federation.wire.wire_format import Packet

Handler = Callable[[Packet, Mapping[str, Any]], Packet]
"""A client as a function: it takes a packet and the configuration of its node, and returns the reply."""


def client_app(handler: Handler) -> ClientApp:
    """Make a ClientApp that passes packets to a handler and sends the handler's replies."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        packet = packet_of(message.content)
        if isinstance(packet, str):
            reply = Packet({"verdict": FAILED, "reason": f"the message {packet}"})
        else:
            reply = handler(packet, dict(context.node_config))
        return Message(records(reply), reply_to=message)

    app.train()(answer)
    app.query()(answer)
    return app


def simulate(main: Callable[[GridTransport], None], handler: Handler, clients: int, cpus: float) -> None:
    """Run `main` against Flower's simulation runtime (Ray).

    Args:
        main: the server's function. `simulate` raises the exceptions that `main` raises.
        handler: the handler of all clients. Ray copies it to its processes on this machine or cluster.
        clients: number of clients.
        cpus: number of CPUs for each client. As many clients run at the same time as the CPUs allow.
    """
    stop = Event()
    app = ServerApp()
    interrupted = False

    @app.main()
    def start(grid: Grid, context: Context) -> None:
        nonlocal interrupted
        try:
            main(GridTransport(grid, stop))
        except KeyboardInterrupt:  # Flower forwards errors of the ServerApp's thread, but not this exception
            interrupted = True

    config: Any = {"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}}
    # a signal stops the server, which then ends the simulation. Interrupting the simulation itself would block it
    with _quiet(), handling(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM):
        try:
            run_simulation(app, client_app(handler), clients, backend_config=config)
        finally:
            stop.set()
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide Flower's log messages, except errors."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
