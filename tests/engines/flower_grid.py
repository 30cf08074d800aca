"""A Flower grid that runs in this process."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Wire
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class DirectGrid(Grid):
    """Calls a ClientApp in this process and serialises every message as Flower does, so that tests do not need Ray.

    Args:
        app: the ClientApp that answers all messages.
        clients: number of Flower nodes. Node k + 1 has partition k, as in Flower's simulation.

    Attributes:
        bytes_down: bytes of all messages to clients, as Flower serialises them.
        bytes_up: bytes of all replies, as Flower serialises them.
    """

    def __init__(self, app: ClientApp, clients: int) -> None:
        self.app, self.clients = app, clients
        self.bytes_down = self.bytes_up = 0
        self._replies: dict[str, Message] = {}
        self._count = 0
        self._run = Run.create_empty(run_id=1)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0

    def set_run(self, run: Run) -> None:
        """Set the Flower run that this grid belongs to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The Flower run that this grid belongs to."""
        return self._run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message. The arguments are the same as for Flower's `Message`."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, from 1."""
        return range(1, self.clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the ClientApp on each message, keep the replies, and return the ids of the messages."""
        sent = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = str(self._count)
            self._replies[str(self._count)] = self._called(message)
            sent.append(str(self._count))
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each reply only once."""
        return [self._replies.pop(identity) for identity in message_ids if identity in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Call the ClientApp on each message and return the replies. `timeout` has no effect."""
        return self.pull_messages(self.push_messages(messages))

    def _called(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        config: UserConfig = {"partition-id": node - 1, "num-partitions": self.clients}
        context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        down = message_to_proto(message).SerializeToString()
        reply = self.app(message_from_proto(Wire.FromString(down)), context)
        up = message_to_proto(reply).SerializeToString()
        self.bytes_down, self.bytes_up = self.bytes_down + len(down), self.bytes_up + len(up)
        return message_from_proto(Wire.FromString(up))
