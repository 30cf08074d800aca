"""Tasks of a device whose process dies, or that nobody waits for any more. The tasks are those of this file."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[device] is not installed")

from polyfed.core.errors import TransportError
from polyfed.deploy.device import agent
from polyfed.deploy.device.agent import Device, Tasks
from polyfed.transport.connection import TAKEN

OFFER = {"id": "0123456789abcdef.0123456789abcdef", "header": "{}", "body": {"sha256": "", "size": 0}}
OFFER |= {"app": {"sha256": "0" * 64, "size": 3}}


class Server:
    """A server with one request; after its reply, it refuses the device, which then ends.

    Attributes:
        replies: what it got.
        looks: how often a device may ask whether the request is open.
    """

    def __init__(self) -> None:
        self.replies, self.looks, self.asked = list[bytes](), 1000, 0

    def next(self) -> Any:
        self.asked += 1
        if self.replies or self.looks < 0:
            raise TransportError("the end")
        return OFFER

    def is_open(self, request: str) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def fetch(self, request: str, part: str, sha256: str, size: int, path: Path) -> bool:
        path.write_bytes(b"app")
        return True

    def send(self, request: str, path: Path) -> str:
        self.replies.append(path.read_bytes())
        return TAKEN

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def tasks(monkeypatch: Any) -> Iterator[Tasks]:
    monkeypatch.setattr(agent, "TASKS", Path(__file__).stem)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.05)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    made = Tasks(1)
    yield made
    made.close()
    for thread in enumerate_threads():
        if thread.name.endswith("(_listen)"):
            thread.join(20)


def answered(how: str, tasks: Tasks, folder: Path, looks: int = 1000) -> tuple[Server, list[Any]]:
    server, done = Server(), list[Any]()
    server.looks = looks
    Device(server, {"client": 0, "state": str(folder), "how": how}, tasks, 2**20, done.append).run()  # type: ignore[arg-type]
    assert list((folder / "messages").iterdir()) == [], "nothing of the request is left"
    return server, done


def test_a_task_whose_process_dies_runs_again(tasks: Tasks, tmp_path: Path) -> None:
    server, done = answered("dies once", tasks, tmp_path)
    assert server.replies == [b"reply"]
    assert done == [{}, {"verdict": "reply"}]


def test_a_task_that_always_dies_is_answered_with_the_reason(tasks: Tasks, tmp_path: Path) -> None:
    server, _ = answered("dies", tasks, tmp_path)
    assert server.replies == [agent.LOST.encode()]


def test_a_task_that_nobody_waits_for_is_cancelled(tasks: Tasks, tmp_path: Path) -> None:
    begun = time.monotonic()
    server, _ = answered("sleeps", tasks, tmp_path, looks=5)
    assert server.replies == []
    assert time.monotonic() - begun < 15


def test_the_process_of_tasks_ends_when_it_is_idle(tasks: Tasks, tmp_path: Path) -> None:
    answered("works", tasks, tmp_path)
    process = tasks._process
    assert process is not None
    tasks.rest()
    assert process.poll() is None, "it waits for the next task"
    tasks.idle_seconds = 0.0
    tasks.rest()
    end = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.poll() == 0


def main() -> None:
    """A process of tasks without PyTorch, which dies with its task."""
    for line in sys.stdin:
        told = json.loads(line)
        if "cancel" in told:
            print(json.dumps({"task": told["cancel"]}), flush=True)
            continue
        folder, how = Path(told["folder"]), told["config"]["how"]
        marked = folder.parents[1] / "died"
        if not told["refusal"] and (how == "dies" or (how == "dies once" and not marked.exists())):
            marked.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleeps":
            continue
        (folder / "reply").write_text(told["refusal"] or "reply")
        print(json.dumps({"task": told["task"], "verdict": "reply"}), flush=True)


if __name__ == "__main__":
    main()
