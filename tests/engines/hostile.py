"""A hostile device: how the processes of one SuperNode are tampered with, without the app or polyfed knowing.

`surroundings` gives that SuperNode a `sitecustomize.py`, which Python runs at the start of each process: in a ClientApp
it changes what is packed into a reply, in the SuperNode it delivers replies twice. What to do in which round is read
from a plan that the test writes: client -> round -> names of misdeeds.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FOLDER, DISK = "HOSTILE_FOLDER", "HOSTILE_DISK"
PLAN, GO, TWICE, TOLD = "plan.json", "go", "deliver-twice", "told.jsonl"
SPARE = 16 * 2**10
"""Bytes left on a full disk: enough for the journal and the ledger, not for a state."""

HOLD_SECONDS = 900.0

Plan = Mapping[int, Mapping[int, tuple[str, ...]]]


def surroundings(folder: Path, disk: Path | None = None) -> dict[str, str]:
    """The environment of a hostile SuperNode.

    Args:
        folder: for the plan and what the processes note there.
        disk: the file system that the misdeed `full disk` fills.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from engines import hostile\nhostile.take_over()\n")
    paths = [str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(part for part in paths if part)
    return {"PYTHONPATH": path, FOLDER: str(folder)} | ({} if disk is None else {DISK: str(disk)})


def agree(folder: Path, plan: Plan) -> None:
    """Have the hostile processes follow a plan from now on."""
    for old in (GO, TWICE, TOLD):
        (folder / old).unlink(missing_ok=True)
    (folder / PLAN).write_text(json.dumps(plan))


def take_over() -> None:
    """Tamper with this process, if it is one of those that matter."""
    programs = {Path(word).name for word in sys.orig_argv[1:4]}
    if "polyfed.deploy.device.process" in programs:
        _tamper_with_replies()
    elif "supernode_process.py" in programs:
        _deliver_twice()


def _tamper_with_replies() -> None:
    from polyfed.engines.flower import apps

    read, pack = apps.packet_of, apps.records
    asked: list[Any] = []

    def before(content: Any) -> Any:
        packet = read(content)
        asked.append(packet)
        if DISK in os.environ:
            _fill(Path(os.environ[DISK]), full="full disk" in _misdeeds(packet.header))
        return packet

    def after(reply: Any) -> Any:
        for name in _misdeeds(asked[-1].header):
            reply = MISDEEDS[name](asked[-1], reply)
        return pack(reply)

    apps.packet_of, apps.records = before, after


def _misdeeds(header: Mapping[str, Any]) -> list[str]:
    """What to do about an ask; nothing about an enrolment."""
    request_id = header.get("request_id")
    if request_id is None:
        return []
    plan = json.loads((_folder() / PLAN).read_text())
    found: list[str] = plan.get(str(request_id["client"]), {}).get(str(request_id["round"]), [])
    return found


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _fill(disk: Path, full: bool) -> None:
    """Leave `SPARE` bytes on the disk, or all that the state does not take."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    if full:
        status = os.statvfs(disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - SPARE)


def _remembered(request: Any, reply: Any) -> Any:
    (_folder() / "old.json").write_text(json.dumps(reply.header))
    (_folder() / "old.bytes").write_bytes(reply.body)
    return reply


def _replayed(request: Any, reply: Any) -> Any:
    header = json.loads((_folder() / "old.json").read_text())
    return type(reply)(header, (_folder() / "old.bytes").read_bytes())


def _held(request: Any, reply: Any) -> Any:
    end = time.monotonic() + HOLD_SECONDS
    while not (_folder() / GO).exists() and time.monotonic() < end:
        time.sleep(0.2)
    return reply


def _twice(request: Any, reply: Any) -> Any:
    (_folder() / TWICE).touch()
    return reply


def _as_it_is(request: Any, reply: Any) -> Any:
    return reply


def _changed(name: str) -> Callable[[Any, Any], Any]:
    """A misdeed of `misdeeds`, which imports PyTorch: too slow for processes that need it not."""

    def change(request: Any, reply: Any) -> Any:
        from engines import misdeeds

        return getattr(misdeeds, name)(request, reply)

    return change


MISDEEDS: dict[str, Callable[[Any, Any], Any]] = {
    "NaN": _changed("not_a_number"),
    "unknown name": _changed("renamed"),
    "wrong shape": _changed("reshaped"),
    "too large": _changed("inflated"),
    "remembered": _remembered,
    "replayed": _replayed,
    "held": _held,
    "doubled": _twice,
    "full disk": _as_it_is,  # see `_fill`
}
"""What a client can do to a reply, given the ask."""


def _deliver_twice() -> None:
    """Have the SuperNode deliver a reply whole, then the same again, then once more as if it were another."""
    from flwr.supernode import start_client_internal as node

    push = node._push_messages

    def twice(*, send: Callable[..., Any], **rest: Any) -> None:
        letters: list[Any] = []

        def noted(*request_packet: Any) -> Any:
            letters.append(request_packet)
            return send(*request_packet)

        push(send=noted, **rest)
        wish = _folder() / TWICE
        if wish.exists():
            wish.unlink()
            for message, *more in letters:
                _again(send, message, more, message.metadata.message_id)
                _again(send, message, more, "f" * len(message.metadata.message_id))

    node._push_messages = twice


def _again(send: Callable[..., Any], message: Any, more: list[Any], identity: str) -> None:
    """Deliver a message under an identity, and note what the SuperLink wanted of it."""
    message.metadata.__dict__["_message_id"] = identity
    wanted, _ = send(message, *more)
    with (_folder() / TOLD).open("a") as file:
        file.write(json.dumps({"identity": identity, "wanted": sorted(wanted)}) + "\n")
