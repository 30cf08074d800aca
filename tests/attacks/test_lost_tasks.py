"""Tasks of a device whose process dies, or that nobody waits for any more. The tasks are those of this file."""

import hashlib
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[device] is not installed")

from polyfed.core.errors import RecipeError, TransportError
from polyfed.deploy.device import agent
from polyfed.deploy.device.agent import APPS, MESSAGES, Device, Tasks
from polyfed.transport.connection import TAKEN, TOO_LARGE

OFFER = {"id": "0123456789abcdef.0123456789abcdef", "header": "{}", "body": {"sha256": "", "size": 0}}
OFFER |= {"app": {"sha256": hashlib.sha256(b"app").hexdigest(), "size": 3}}


class Server:
    """A server with one request; after its reply, it refuses the device, which then ends.

    Attributes:
        replies: what it got.
        looks: how often a device may ask whether the request is open.
    """

    def __init__(self) -> None:
        self.replies, self.looks, self.asked = list[bytes](), 1000, 0
        self.offers = list[Any]()
        self.stop = Event()
        self.takes, self.fetched, self.partly = 2**20, 0, False
        self.key: Any = None  # signs the key of a log, and these tasks make no log
        self.certificate = ""  # without TLS there is none

    def next(self) -> Any:
        self.asked += 1
        if self.offers:
            return self.offers.pop(0)
        if self.replies or self.looks < 0 or self.asked > 1:
            raise TransportError("the end")
        return OFFER

    def is_open(self, request: str) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def fetch(self, request: str, part: str, sha256: str, size: int, path: Path) -> bool:
        self.fetched += 1
        path.write_bytes(b"ap" if self.partly else b"app")
        return not self.partly

    def send(self, request: str, path: Path) -> str:
        if path.stat().st_size > self.takes:
            return TOO_LARGE
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
    assert list((folder / MESSAGES).iterdir()) == [], "nothing of the request is left"
    return server, done


def test_a_task_whose_process_dies_runs_again(tasks: Tasks, tmp_path: Path) -> None:
    server, done = answered("dies once", tasks, tmp_path)
    assert server.replies == [b"reply"]
    assert done == [{}, {"verdict": "reply"}]


def test_a_task_that_always_dies_is_answered_with_the_reason(tasks: Tasks, tmp_path: Path) -> None:
    server, _ = answered("dies", tasks, tmp_path)
    assert server.replies == [agent.LOST.encode()]


def test_a_reply_that_is_too_large_is_answered_with_the_reason(tasks: Tasks, tmp_path: Path) -> None:
    """Else the device would run the task again and again until the deadline."""
    server = Server()
    server.takes = 1000
    Device(server, {"client": 0, "state": str(tmp_path), "how": "much"}, tasks, 2**20, lambda facts: None).run()  # type: ignore[arg-type]
    assert server.replies == [b"the reply is too large: 5000 bytes, more than [deployment] message_megabytes"]


def device_in(folder: Path, server: Server, tasks: Tasks, **config: Any) -> Device:
    return Device(server, {"client": 0, "state": str(folder), "how": "works", **config}, tasks, 2**20, lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", ["nothing", "policy", "configuration", "stamp lost"])
def test_a_reply_that_was_made_under_another_policy_does_not_leave(changed: str, tasks: Tasks, tmp_path: Path) -> None:
    """The device was killed while it sent its reply, and started again."""
    policy, server = tmp_path / "policy.toml", Server()
    policy.write_text("[egress.a]")
    device = device_in(tmp_path, server, tasks, policy=str(policy))
    place = tmp_path / MESSAGES / str(OFFER["id"])
    place.mkdir(parents=True)
    (place / "reply").write_text("old")
    (place / "stamp").write_text(device._stamp() if changed != "stamp lost" else "")
    if changed == "policy":
        policy.write_text("[egress.b]")
    if changed == "configuration":
        device = device_in(tmp_path, server, tasks, policy=str(policy), modalities="a")
    device.run()
    assert server.replies == ([b"old"] if changed == "nothing" else [b"reply"])


def test_recipes_that_never_come_whole_do_not_fill_the_disk(tasks: Tasks, tmp_path: Path) -> None:
    server = Server()
    server.partly = True
    server.offers = [OFFER | {"app": {"sha256": f"{number:064x}", "size": 3}} for number in range(20)]
    device_in(tmp_path, server, tasks).run()
    assert server.fetched == 20
    assert not list((tmp_path / APPS).iterdir())
    assert not list((tmp_path / MESSAGES).iterdir())


def test_a_damaged_recipe_on_the_disk_is_fetched_again(tasks: Tasks, tmp_path: Path) -> None:
    app, server = OFFER["app"]["sha256"], Server()  # type: ignore[index]
    (tmp_path / APPS).mkdir()
    (tmp_path / APPS / app).write_bytes(b"")  # the power failed after it had been named
    device_in(tmp_path, server, tasks).run()
    assert (server.fetched, server.replies) == (1, [b"reply"])
    server = Server()
    device_in(tmp_path, server, tasks).run()
    assert (server.fetched, server.replies) == (0, [b"reply"]), "a whole one is not"


@pytest.mark.parametrize("what", [MESSAGES, APPS, f"{MESSAGES}/{{id}}", f"{MESSAGES}/{{id}}/header", f"{APPS}/{{app}}"])
def test_a_link_in_the_state_folder_is_not_written_through(
    what: str, tasks: Tasks, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(agent, "PAUSE_SECONDS", 0.0)
    state, elsewhere, server = tmp_path / "state", tmp_path / "elsewhere", Server()
    link = state / what.format(id=OFFER["id"], app=OFFER["app"]["sha256"])  # type: ignore[index]
    link.parent.mkdir(parents=True)
    if what.count("/") == 2 or what.startswith(f"{APPS}/"):
        elsewhere.write_text("precious")
    else:
        elsewhere.mkdir()
    link.symlink_to(elsewhere)
    device_in(state, server, tasks).run()
    assert elsewhere.read_text() == "precious" if elsewhere.is_file() else not list(elsewhere.iterdir())


def test_only_its_user_reads_the_state_folder_and_one_process_uses_it(tasks: Tasks, tmp_path: Path) -> None:
    server, state = Server(), tmp_path / "new" / "state"
    device_in(state, server, tasks).run()
    assert [path.stat().st_mode & 0o077 for path in (state, state / MESSAGES, state / APPS)] == [0, 0, 0]
    with agent.alone_in(state):
        other = device_in(state, Server(), tasks)
        other.run()
    assert other.failed == RecipeError.exit_code
    (tmp_path / "link").symlink_to(state)
    other = device_in(tmp_path / "link", Server(), tasks)
    other.run()
    assert other.failed == RecipeError.exit_code


def test_no_name_of_a_run_is_that_of_a_folder_of_the_device(tasks: Tasks, tmp_path: Path) -> None:
    """Else a server could have the device delete the ledger of a run, by its name."""
    from polyfed.engines.protocol import RUN_NAME

    device_in(tmp_path, Server(), tasks).run()
    names = {path.name for path in tmp_path.iterdir()}
    assert {MESSAGES, APPS} < names
    assert [name for name in names if RUN_NAME.fullmatch(name)] == []


def test_no_fault_ends_a_device(tasks: Tasks, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(agent, "PAUSE_SECONDS", 0.0)
    server = Server()
    broken: list[Any] = [7, {}, OFFER | {"header": "\ud800"}, OFFER | {"id": "../.."}, OFFER]
    server.offers, send = broken, server.send
    answers = [RuntimeError("a fault of polyfed"), OSError("a full disk")]

    def failing(request: str, path: Path) -> str:
        if answers:
            raise answers.pop()
        return send(request, path)

    server.send = failing  # type: ignore[method-assign]
    server.offers += [OFFER, OFFER]
    device = device_in(tmp_path, server, tasks)
    device.run()
    assert server.replies == [b"reply"]
    assert device.failed == TransportError.exit_code


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


def told_by(host: Any, task: int, app: str) -> Any:
    """What a worker says about a task."""
    host._begin({"task": task, "app": f"/state/apps/{app}"})
    (worker,) = [worker for worker in host.workers.values() if worker.task]
    select.select([worker.up], [], [], 20)
    host._heard(worker)
    return json.loads(host.lines.getvalue().splitlines()[-1])


def test_no_task_finds_what_one_of_another_recipe_left(monkeypatch: Any) -> None:
    """Nor does a worker do tasks without end."""
    from polyfed.deploy.device import tasks as process

    left = list[int]()

    def answer(task: Any) -> dict[str, Any]:
        left.append(task["task"])
        return {"process": os.getpid(), "left": left}

    monkeypatch.setattr(process, "answer", answer)
    monkeypatch.setattr(process, "MOST_TASKS", 2)
    host = process.Host(io.StringIO())
    first, again = told_by(host, 1, "a"), told_by(host, 2, "a")
    assert (again["process"], again["left"]) == (first["process"], [1, 2])
    more, other = told_by(host, 3, "a"), told_by(host, 4, "b")
    assert [one["left"] for one in (more, other)] == [[3], [4]]
    assert len({one["process"] for one in (first, more, other)}) == 3
    for one in (first, more):
        with pytest.raises(ProcessLookupError):
            os.kill(one["process"], 0)
    for worker in list(host.workers.values()):
        host._end(worker)
    assert left == []


RECIPES = {
    "nothing": b"",
    "no length": b"\x01",
    "a length beyond the end": b"\xff\xff\xff\x7frounds = 1",
    "an empty recipe": b"\x00\x00\x00\x00model",
    "a long recipe": (2**20 + 1).to_bytes(4, "little") + b"#" * (2**20 + 1),
}


@pytest.mark.parametrize("how", RECIPES)
def test_an_app_that_polyfed_did_not_write_is_refused_with_a_reason(how: str, tmp_path: Path) -> None:
    from polyfed.deploy.device.tasks import answer
    from polyfed.federation.wire.wire_format import Packet, unframed

    (tmp_path / "app").write_bytes(RECIPES[how])
    (tmp_path / "header").write_text("{}")
    told = answer({"folder": str(tmp_path), "app": str(tmp_path / "app"), "config": {"client": 0}, "refusal": ""})
    reply = unframed((tmp_path / "reply").read_bytes())
    assert isinstance(reply, Packet)
    assert told["verdict"] == reply.header["verdict"] == "failed"
    assert "has no recipe, or one of more than 1048576 bytes" in reply.header["reason"]


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
        (folder / "reply").write_text(told["refusal"] or ("x" * 5000 if how == "much" else "reply"))
        print(json.dumps({"task": told["task"], "verdict": "reply"}), flush=True)


if __name__ == "__main__":
    main()
