"""The process that does a SuperNode's tasks: what it tells of them, and that no task keeps it from the next one."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from polyfed.engines.flower.device import worker
from polyfed.engines.flower.device.worker import Duties, work


class Enough(Exception):
    """Ends the loop, which otherwise ends with the SuperNode."""


class Tasks:
    """A SuperNode that hands out tasks, and what a process does with each."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = list(kinds)
        self.done: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def AcquireTask(self, request: Any) -> Any:
        if not self.kinds:
            return SimpleNamespace(HasField=lambda name: False, token="")
        return SimpleNamespace(HasField=lambda name: True, token="t", task=SimpleNamespace(type=self.kinds.pop(0)))

    def perform(self, client: Any, kind: str, duties: Duties) -> dict[str, Any]:
        if kind == "waits for ever":
            time.sleep(600)
        if kind == "crashes":
            os._exit(9)
        return {"verdict": kind, "bytes_up": 3}

    def play(self, monkeypatch: pytest.MonkeyPatch, ended: int) -> None:
        """Work until so many tasks have ended."""
        monkeypatch.setattr(worker, "_client", lambda *_: self)
        monkeypatch.setattr(worker, "perform", self.perform)
        monkeypatch.setattr(worker.signal, "signal", lambda *_: None)  # these tests can be interrupted
        monkeypatch.setattr(worker, "start_parent_process_monitor", lambda pid: None)

        def done(facts: dict[str, Any]) -> None:
            self.done.append(facts)
            if len(self.done) == ended:
                raise Enough

        duties = Duties(lambda fab: lambda packet, config: packet, self.notes.append, done=done)
        with pytest.raises(Enough):
            work("127.0.0.1:1", b"", duties, os.getppid())


def test_a_worker_whose_supernode_has_ended_before_it_was_ready_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks("reply")
    monkeypatch.setattr(worker, "_client", lambda *_: tasks)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    gone = subprocess.Popen(["true"])
    gone.wait()
    work("127.0.0.1:1", b"", Duties(lambda fab: lambda packet, config: packet, tasks.notes.append), gone.pid)
    assert tasks.done == []


def test_what_became_of_each_task_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = Tasks("reply", "refused", "crashes")
    tasks.play(monkeypatch, 3)
    assert tasks.done == [{"verdict": "reply", "bytes_up": 3}, {"verdict": "refused", "bytes_up": 3}, {}]


def test_a_task_whose_message_never_comes_does_not_keep_a_device_from_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SuperLink that is killed while a device fetches a message leaves such a task."""
    monkeypatch.setattr(worker, "BUSY_SECONDS", 0.1)
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    tasks = Tasks("waits for ever", "reply")
    tasks.play(monkeypatch, 2)
    assert tasks.done == [{"verdict": "reply", "bytes_up": 3}, {}]
    assert tasks.notes == ["a task was given up: the SuperNode has gone on to the next one"]


def test_the_process_of_a_task_ends_although_its_log_is_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would go on as a second process that takes tasks, and delete the folder of the first one."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(worker, "_client", lambda *_: None)
    monkeypatch.setattr(worker, "perform", lambda *_: {"verdict": "reply"})
    monkeypatch.setattr(worker, "start_parent_process_monitor", lambda pid: None)
    duties = Duties(lambda fab: lambda packet, config: packet, lambda text: None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = SimpleNamespace(flush=full)  # type: ignore[assignment]
            worker._perform_alone("127.0.0.1:1", "t", "reply", duties, os.getppid(), writing)
        finally:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(writing)
    assert worker._told(reading) == {"verdict": "reply"}
