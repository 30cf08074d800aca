"""Links that lose packets, break in the middle of a message, fall silent or are slow, and full disks at either end."""

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from starlette.requests import Request

from attacks.test_own_transport import BODY, Federation, reply_in
from engines.rough_link import Line, Proxy
from engines.test_own_processes import PATIENCE, RECIPE, OwnFederation
from polyfed.algorithms.averaging import Update
from polyfed.core.errors import BadReply, TransportError
from polyfed.core.system.mapping import mapped
from polyfed.deploy.device import agent
from polyfed.engines.queued import QueueTransport
from polyfed.federation.replies import Replies, stacked
from polyfed.federation.wire.wire_format import Packet, decode, encode, frames, unframed
from polyfed.transport import connection, web
from polyfed.transport.connection import Connection
from polyfed.transport.logins import PrivateKey
from polyfed.transport.queue import OPEN, Queue
from refusals import refuses

LARGE = os.urandom(3 * 2**20)


class Far:
    """A server, and a device behind a proxy, which has been asked for something."""

    def __init__(self, folder: Path) -> None:
        self.federation = Federation(folder)
        self.proxy = Proxy(self.federation.port)
        self.notes: list[str] = []
        key = PrivateKey(self.federation.folder / "node-0.key")
        self.device = Connection(
            f"127.0.0.1:{self.proxy.port}",
            self.federation.folder / "ca.pem",
            key,
            self.federation.stop,
            self.notes.append,
        )
        self.federation.devices.append(self.device)
        self.name = self.federation.asked(body=LARGE, most=2 * len(LARGE))
        assert self.device.next() is not None

    def fetch(self, path: Path) -> bool:
        return self.device.fetch(self.name, "body", hashlib.sha256(LARGE).hexdigest(), len(LARGE), path)

    def close(self) -> None:
        self.proxy.close()
        self.federation.close()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    made = Far(tmp_path)
    yield made
    made.close()


def test_after_a_cut_in_the_middle_of_a_request_only_the_rest_is_sent_again(far: Far, tmp_path: Path) -> None:
    before, far.proxy.cut_after = far.proxy.passed["down"], {"down": len(LARGE) // 2}
    assert far.fetch(tmp_path / "body")
    assert (tmp_path / "body").read_bytes() == LARGE
    assert far.proxy.cuts == 1
    assert len(LARGE) < far.proxy.passed["down"] - before < 1.2 * len(LARGE)


def test_after_a_cut_in_the_middle_of_a_reply_only_the_rest_is_sent_again(far: Far, tmp_path: Path) -> None:
    before, far.proxy.cut_after = far.proxy.passed["up"], {"up": len(LARGE) // 2}
    assert far.device.send(far.name, reply_in(tmp_path, LARGE)) == connection.TAKEN
    assert far.federation.queue.reply(far.name).read_bytes() == LARGE
    assert far.proxy.cuts == 1
    assert len(LARGE) < far.proxy.passed["up"] - before < 1.2 * len(LARGE)


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_line_that_is_slow_is_not_taken_for_a_dead_one(way: str, far: Far, tmp_path: Path, monkeypatch: Any) -> None:
    """Each block has its own time, however long the whole takes."""
    monkeypatch.setattr(connection, "SECONDS", 1.0)
    far.device.close()
    far.proxy.rate = len(LARGE) / 2.5
    begun, before = time.monotonic(), far.proxy.passed[way]
    if way == "down":
        assert far.fetch(tmp_path / "body")
    else:
        assert far.device.send(far.name, reply_in(tmp_path, LARGE)) == connection.TAKEN
    assert time.monotonic() - begun > 2.0
    assert far.proxy.passed[way] - before < 1.2 * len(LARGE), "nothing was sent twice"


def test_a_line_that_falls_silent_in_the_middle_is_given_up_and_the_fetch_goes_on(
    far: Far, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connection, "SECONDS", 0.3)
    far.proxy.rate, done = len(LARGE) / 1.0, list[bool]()
    thread = Thread(target=lambda: done.append(far.fetch(tmp_path / "body")))
    thread.start()
    while not (tmp_path / "body").exists() or (tmp_path / "body").stat().st_size < len(LARGE) // 4:
        time.sleep(0.01)
    far.proxy.held = True
    time.sleep(1.0)
    far.proxy.held, far.proxy.rate = False, 0.0
    thread.join(30)
    assert done == [True]
    assert (tmp_path / "body").read_bytes() == LARGE


def vanished(far: Far, work: Callable[[], Any], reached: Callable[[], bool]) -> None:
    """Let the device work until it has reached something, then it is gone, and nobody tells the server.

    The other end of the server's connection stays open, as with a proxy that holds it.
    """
    far.device.stop = Event()

    def worked() -> None:
        with contextlib.suppress(InterruptedError):
            work()

    thread = Thread(target=worked)
    thread.start()
    while not reached():
        time.sleep(0.01)
    far.proxy.held = True
    far.device.stop.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["a reply", "a request", "a wait"])
def test_a_device_that_vanishes_in_the_middle_is_noticed_and_served_on_its_new_connection(
    where: str, far: Far, tmp_path: Path, monkeypatch: Any
) -> None:
    """The peer of the server's connection still acknowledges probes, so TCP alone does not notice."""
    monkeypatch.setattr(web, "SILENT_SECONDS", 6)
    monkeypatch.setattr(web, "HEAD_SECONDS", 3)
    monkeypatch.setattr(connection, "SECONDS", 0.5)
    monkeypatch.setattr(connection, "LONGEST_WAIT", 0.5)
    hub, name = far.federation.server.hub, far.federation.names[0]
    far.device.close()
    before, far.proxy.rate = dict(far.proxy.passed), len(LARGE) / 2.0
    if where == "a reply":
        path = reply_in(tmp_path, LARGE)
        vanished(far, lambda: far.device.send(far.name, path), lambda: far.proxy.passed["up"] > before["up"] + 2**20)
    elif where == "a request":
        huge = os.urandom(2**25)  # more than the kernel takes over from the server
        name_of_huge, digest = far.federation.asked(body=huge), hashlib.sha256(huge).hexdigest()
        way = (name_of_huge, "body", digest, len(huge), tmp_path / "part")
        vanished(far, lambda: far.device.fetch(*way), lambda: far.proxy.passed["down"] > before["down"] + 2**20)
    else:
        assert far.device.send(far.name, reply_in(tmp_path, LARGE)) == connection.TAKEN
        vanished(far, far.device.next, lambda: name in hub._wake)
    begun = time.monotonic()
    assert hub._calls[name] == 1, "the server does not know yet"
    (old,) = [peer for peer, made in far.federation.server.socket._open.items()]
    back = far.federation.device(0)
    if where == "a wait":
        Timer(1.0, far.federation.asked).start()  # while both calls wait
    told = back.next()
    assert told is not None
    asked = told["id"]
    assert back.send(asked, reply_in(tmp_path, BODY)) == connection.TAKEN
    assert far.federation.queue.reply(asked).read_bytes() == BODY
    assert time.monotonic() - begun < web.SILENT_SECONDS, "the device was served before its old connection ended"
    while hub._calls[name] or old in far.federation.server.socket._open:
        assert time.monotonic() - begun < web.SILENT_SECONDS + web.HEAD_SECONDS + 4.0, "a call hangs"
        time.sleep(0.05)


def test_a_body_that_the_server_reads_slowly_is_not_taken_for_a_silent_one(
    far: Far, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(web, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(web, "_notice_silence", lambda made: None)
    stream, slow = Request.stream, [True]

    async def slowly(self: Request) -> AsyncIterator[bytes]:
        async for piece in stream(self):
            if slow:
                slow.pop()
                await asyncio.sleep(1.0)
            yield piece

    monkeypatch.setattr(Request, "stream", slowly)
    far.device.close()
    before = far.proxy.passed["up"]
    assert far.device.send(far.name, reply_in(tmp_path, LARGE)) == connection.TAKEN
    assert far.proxy.passed["up"] - before < 1.2 * len(LARGE), "nothing was sent twice"


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes."""
    folder.mkdir(parents=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, spare: int) -> Path:
    """Fill a disk up to so many bytes."""
    free = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(free.f_bavail * free.f_frsize - spare, 0)))
    return folder / "filler"


def test_a_full_disk_of_the_server_is_told_to_the_device_and_the_reply_comes_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 12 * 2**20) as disk:
        far = Far(disk)
        filler, sent = fill(disk, 2**20), list[str]()
        thread = Thread(target=lambda: sent.append(far.device.send(far.name, reply_in(tmp_path, LARGE))))
        thread.start()
        end = time.monotonic() + 30
        while not far.notes and time.monotonic() < end:
            time.sleep(0.05)
        assert "the disk of the server is full" in far.notes[0]
        assert far.federation.state(far.name) == OPEN
        filler.unlink()
        thread.join(60)
        assert sent == [connection.TAKEN]
        assert far.federation.queue.reply(far.name).read_bytes() == LARGE
        far.close()


def test_a_full_disk_of_the_device_is_no_lost_contact_and_the_fetch_goes_on_when_there_is_room(
    far: Far, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 8 * 2**20) as disk:
        filler = fill(disk, 2**20)
        with refuses(BadReply, "disk of this"):
            far.fetch(disk / "body")
        assert far.notes == []
        filler.unlink()
        assert far.fetch(disk / "body")
        assert (disk / "body").read_bytes() == LARGE


def test_a_full_disk_ends_a_run_with_a_sentence_and_the_queue_stays_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        queue = Queue(disk / "queue")
        transport = QueueTransport(queue=queue, app=b"app")
        filler = fill(disk, 2**20)
        with refuses(TransportError, "Make room"):
            transport.push([("0" * 64, Packet({"want": "ask"}, LARGE))], 10.0, enrols=False)
        assert queue.next_for("0" * 64) is None
        filler.unlink()
        for old in disk.glob("queue/*.draft"):
            old.unlink()
        assert len(transport.push([("0" * 64, Packet({"want": "ask"}, LARGE[: 2**20]))], 10.0, enrols=False)) == 1
        transport.end()


@pytest.mark.slow  # it imports PyTorch
def test_a_task_whose_log_is_on_a_full_disk_is_answered(tmp_path: Path) -> None:
    """`/dev/full` takes no byte."""
    (tmp_path / "header").write_text(json.dumps({"want": "ask"}))
    (tmp_path / "app").write_bytes(b"\0" * 8)
    task = {"task": 1, "folder": str(tmp_path), "app": str(tmp_path / "app"), "config": {"client": 0}, "refusal": ""}
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", agent.TASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=full
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
        told = json.loads(process.stdout.readline())
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()
    assert told["task"] == 1
    assert told["verdict"] == "failed"
    assert (tmp_path / "reply").exists()


# packets


class Apart(OwnFederation):
    """A federation whose devices reach the server over a rough line."""

    address = "10.118.0.1"
    line: Line

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.line.space("device" if name.startswith("device") else "server")]


def apart(folder: Path, line: Line, recipe: str) -> Apart:
    try:
        line.up()
    except (OSError, subprocess.CalledProcessError) as error:
        line.close()
        pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)}")
    Apart.line = line
    return Apart(folder, 0, together=True, recipe=recipe)


WIDE = RECIPE.replace("hidden = [8]", "hidden = [400, 400]").replace('"scaffold"', '"fedavg"')
"""A model of about 700 kB a client."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["30 % loss", "a slow link", "a cut"])
def test_a_run_over_a_rough_line_ends_with_the_bits_of_a_simulation(how: str, tmp_path: Path) -> None:
    line = {
        "30 % loss": Line(loss=0.3, delay=0.01),
        "a slow link": Line(delay=0.1, rate=250_000.0),
        "a cut": Line(delay=0.01),
    }[how]
    seconds = float(os.environ.get("POLYFED_CUT_SECONDS", "60"))
    text = (WIDE if how == "a slow link" else RECIPE).format(rounds=2 if how == "30 % loss" else 3)
    federation = apart(tmp_path, line, text)
    try:
        federation.began()
        federation.until(lambda: "3 devices are ready" in federation.log("devices"), "the devices")
        begun = time.monotonic()
        run = federation.start("run")
        if how == "a cut":
            federation.until(lambda: "round 1:" in federation.log("run"), "round 1")
            line.down = True
            time.sleep(seconds)
            line.down = False
        assert run.wait(4 * PATIENCE) == 0, federation.log("run") + federation.log("devices")
        print(f"{how}: {time.monotonic() - begun:.0f} s; {line.lost} packets lost, {line.carried} carried")
        assert federation.outcome() == federation.undisturbed()
    finally:
        federation.stop()
        line.close()


# memory


def anonymous() -> int:
    """Bytes of this process's memory that belong to no file."""
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def test_replies_to_a_large_request_stay_on_disk_until_they_are_used(tmp_path: Path) -> None:
    size = 2**23
    model = {"shared.w": torch.arange(size, dtype=torch.float32)}
    update = Update(model, torch.tensor(1.0), torch.tensor(3))
    torch.arange(4.0).to(torch.float32).mul(2.0)  # so that what PyTorch takes once is not counted
    before = anonymous()
    packet = encode(update)
    for client in range(4):
        with open(tmp_path / f"{client}", "wb") as file:
            file.writelines(frames(packet))
    assert anonymous() - before < 0.2 * 4 * size, "a message is sent from the memory of its tensors"
    found = {}
    for client in range(4):
        one = unframed(mapped(tmp_path / f"{client}"))
        assert isinstance(one, Packet)
        found[client] = decode(one, Update, limit=2**30, shared=True)
        (tmp_path / f"{client}").unlink()
    assert anonymous() - before < 0.2 * 4 * size, "four replies stay in their files"
    mean = Replies(list(stacked(found))).mean("params", dict.fromkeys(range(4), 1.0))
    assert anonymous() - before < 2.2 * 4 * size + 32e6, "only the mean is in memory, and one tensor of a reply"
    assert torch.equal(mean["shared.w"], model["shared.w"])
