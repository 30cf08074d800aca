"""A SuperNode sends only the reply to the message that it received last, whatever became of earlier runs."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from flwr.app import Message, RecordDict
from flwr.common.constant import Status
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from polyfed.engines.flower.device import supernode_process
from polyfed.engines.flower.device.supernode_process import OneMessage

DEAD, NEXT = 1, 2


class Device:
    """A SuperNode whose server and tasks are this test.

    Attributes:
        sent: the replies that the server has received: number of the run, and whether the reply is an error.
        ended: the runs that have ended.
    """

    def __init__(self) -> None:
        self.store = ObjectStoreFactory().store()
        self.state: Any = NodeStateFactory(SimpleNamespace(store=lambda: self.store)).state()
        self.state.set_node_id(7)
        self.sent: list[tuple[int, bool]] = []
        self.ended: set[int] = set()
        for run in (DEAD, NEXT):
            self.state.store_run(Run.create_empty(run))

    def message(self, run: int) -> Message:
        """A message of a run, as it lies at the server."""
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 1, 1
        made = Message(RecordDict(), 7, "train")
        made.metadata.__dict__["_message_id"] = made.object_id
        return made

    def receive(self, run: int, *, dies: str = "") -> int | None:
        """Let the SuperNode receive a message of a run, which may end at this call of the SuperNode: "pull_object" or
        "confirm_message_received"."""
        message = self.message(run)
        contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}

        def call(name: str, result: Any = None) -> Any:
            if name == dies:
                self.claimed = self.task()  # a task of the device has begun to wait for the message
                self.ended.add(run)
            if run in self.ended:
                raise RunNotRunningException
            return result

        received: int | None = start_client_internal._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda run_id: Run.create_empty(run_id),
            get_fab=lambda *_: None,  # type: ignore[arg-type, return-value]
            pull_object=lambda run_id, name: call("pull_object", contents.get(name)),
            confirm_message_received=lambda *_: call("confirm_message_received"),
            trusted_entities=None,
        )
        return received

    def task(self) -> tuple[int, Message]:
        """Begin the pending task, and return its number and its message."""
        (pending,) = self.state.get_tasks(statuses=[Status.PENDING])
        self.state.claim_task(pending.task_id)
        self.state.activate_task(pending.task_id)
        (message,) = self.state.get_messages_legacy(run_ids=[pending.run_id], is_reply=False)
        self.state.record_message_processing_start(message.metadata.message_id)
        return pending.task_id, message

    def reply(self, message: Message) -> None:
        reply = Message(RecordDict(), reply_to=message)
        self.state.record_message_processing_end(message.metadata.message_id)
        start_client_internal._insert_message(reply, self.state, self.store)

    def send(self) -> None:
        """Let the SuperNode send what it takes for the reply."""

        def sent(message: Message, *_: Any) -> tuple[set[str], str]:
            self.sent.append((message.metadata.run_id, message.has_error()))
            return set(), ""

        start_client_internal._push_messages(
            state=self.state, object_store=self.store, send=sent, push_object=lambda *_: None
        )

    def expire(self) -> None:
        """A minute without a sign of life of any task."""
        for record in self.state.task_token_store.values():
            record.active_until -= timedelta(seconds=3600)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device with polyfed's functions in Flower's module, whose clock runs an hour in a second."""
    begun = time.monotonic()
    monkeypatch.setattr(supernode_process, "time", SimpleNamespace(monotonic=lambda: 3600 * (time.monotonic() - begun)))
    whole = {name: vars(start_client_internal)[name] for name in ("_pull_and_store_message", "_push_messages")}
    made = Device()
    made.stuck = []  # type: ignore[attr-defined]

    def stuck() -> None:
        made.stuck.append(True)  # type: ignore[attr-defined]
        raise KeyboardInterrupt  # as the signal does

    OneMessage(start_client_internal, stuck)
    yield made
    vars(start_client_internal).update(whole)


@pytest.mark.parametrize("dies", ["pull_object", "confirm_message_received"])
def test_a_run_that_ended_while_its_message_arrived_leaves_no_reply_behind(device: Device, dies: str) -> None:
    assert device.receive(DEAD, dies=dies) is None
    assert device.receive(NEXT) == NEXT
    device.expire()
    _, message = device.task()
    device.reply(message)
    device.send()
    assert device.receive(NEXT) == NEXT
    _, message = device.task()
    device.reply(message)
    device.send()
    assert device.sent == [(NEXT, False)] * 2


def test_a_reply_of_another_run_that_still_comes_is_not_sent(device: Device) -> None:
    device.receive(DEAD, dies="confirm_message_received")
    device.receive(NEXT)
    device.reply(device.claimed[1])  # its process had the message and did not hear that the run has ended
    _, message = device.task()
    device.reply(message)
    device.send()
    assert device.sent == [(NEXT, False)]


def test_a_task_whose_run_ends_is_given_up_and_its_reply_goes_nowhere(device: Device) -> None:
    device.receive(DEAD)
    number, _ = device.task()
    device.ended.add(DEAD)
    device.send()
    assert device.sent == []
    assert device.state.get_tasks(task_ids=[number])[0].status.status == Status.FINISHED
    device.receive(NEXT)
    _, message = device.task()
    device.reply(message)
    device.send()
    assert device.sent == [(NEXT, False)]


def test_a_device_whose_reply_cannot_come_any_more_ends(device: Device) -> None:
    device.receive(NEXT)
    (pending,) = device.state.get_tasks(statuses=[Status.PENDING])
    device.state.finish_task(pending.task_id, "failed", "its process died before it read the message")
    with pytest.raises(KeyboardInterrupt):
        device.send()
    assert device.stuck == [True]  # type: ignore[attr-defined]


def test_a_long_task_is_not_disturbed(device: Device) -> None:
    """Half an hour on the device's clock, in which nothing is wrong."""
    device.receive(NEXT)
    _, message = device.task()
    Timer(0.7, device.reply, [message]).start()
    device.send()
    assert device.sent == [(NEXT, False)]
    assert device.stuck == []  # type: ignore[attr-defined]


def test_only_an_answer_that_does_what_was_asked_counts_as_a_contact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with (tmp_path / "contact").open("w") as file:
        os.utime(file.fileno(), (0, 0))
        monkeypatch.setenv(supernode_process.CONTACT, str(file.fileno()))
        ((hook,),) = supernode_process.contact_hooks()["event_hooks"].values()
        hook(SimpleNamespace(is_success=False))
        assert os.fstat(file.fileno()).st_mtime == 0.0
        hook(SimpleNamespace(is_success=True))
        assert 0.0 <= time.monotonic() - os.fstat(file.fileno()).st_mtime < 10.0
