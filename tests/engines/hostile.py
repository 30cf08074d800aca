"""A hostile device: how the processes of one device are tampered with, without polyfed knowing.

`surroundings` gives that device a `sitecustomize.py`, which Python runs at the start of each process: in that of the
tasks it changes replies, in that of the connection it delivers replies twice. What to do in which round is read
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
    """The environment of a hostile device.

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
    programs = set(sys.orig_argv[1:4])
    if "polyfed.deploy.device.tasks" in programs:
        _tamper_with_replies()
    elif "polyfed.deploy.device.agent" in programs:
        _deliver_twice()


def _tamper_with_replies() -> None:
    from polyfed.deploy.handlers import Deployed

    answer = Deployed.__call__

    def tampered(self: Any, packet: Any, config: Any) -> Any:
        names = _misdeeds(packet.header)
        if "full disk" in names:
            _fill(Path(os.environ[DISK]))
        try:
            reply = answer(self, packet, config)
        finally:
            if DISK in os.environ:
                (Path(os.environ[DISK]) / "filler").unlink(missing_ok=True)
        for name in names:
            reply = MISDEEDS[name](packet, reply)
        return reply

    Deployed.__call__ = tampered  # type: ignore[method-assign]


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


def _fill(disk: Path) -> None:
    """Leave `SPARE` bytes on the disk."""
    status = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
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
    """Have the device deliver a reply whole, then the same again, then once more as the reply to another request."""
    from polyfed.transport.connection import Connection

    send = Connection.send

    def twice(self: Any, request: str, path: Path) -> bool:
        done = send(self, request, path)
        wish = _folder() / TWICE
        if wish.exists():
            wish.unlink()
            other = request.partition(".")[0] + "." + "f" * 16
            with (_folder() / TOLD).open("a") as file:
                for name in (request, other):
                    file.write(json.dumps({"request": name, "taken": send(self, name, path)}) + "\n")
        return done

    Connection.send = twice  # type: ignore[method-assign]
