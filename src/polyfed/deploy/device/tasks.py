"""The process in which the tasks of devices run. It imports PyTorch once, and forks a process for each task.

The process of the connection (`polyfed.deploy.device.agent`) starts it when a task comes, and ends it by closing its
standard input when no task has come for a while. It reads one JSON object per line: `{"task": ..., "folder": ...,
"app": ..., "config": ..., "refusal": ...}` begins a task, and `{"cancel": ...}` ends one. For each task that has ended,
it writes one line with what `DeviceMonitor.done` counts.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply
from polyfed.deploy.app_folder import RECIPE
from polyfed.deploy.faults import log_problem
from polyfed.deploy.handlers import Deployed
from polyfed.engines.protocol import FAILED, RequestId, reason
from polyfed.experiment.running.warm_start import APP_COPY
from polyfed.federation.wire_format import Packet, framed, header_of

HEADER, BODY, REPLY = "header", "body", "reply"
"""The files in the folder of a task."""

KILLED = "the process of its task was killed, for example because the device has too little memory"


def main() -> None:
    """Run tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the connection handles it, and closes the pipe
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a task prints is no line of ours
    tasks: dict[int, tuple[int, dict[str, Any]]] = {}  # the pipe from each process -> its id, and its task
    rest, ended = b"", False
    while not ended:
        ready, _, _ = select.select([0, *tasks], [], [])
        for pipe in ready:
            if pipe == 0:
                rest, ended = _commands(rest, tasks)
                continue
            process, task = tasks.pop(pipe)
            facts = json.loads(_all_of(pipe) or b"{}")
            os.waitpid(process, 0)
            if not facts and not task.get("cancelled"):
                facts = _answer({**task, "refusal": KILLED})
            lines.write(json.dumps({"task": task["task"], **facts}) + "\n")
    for process, _ in tasks.values():
        os.kill(process, signal.SIGKILL)


def _commands(rest: bytes, tasks: dict[int, tuple[int, dict[str, Any]]]) -> tuple[bytes, bool]:
    """Obey the lines that have come. Return the beginning of the next line, and whether there will be no other."""
    come = os.read(0, 2**16)
    *lines, rest = (rest + come).split(b"\n")
    for line in lines:
        told = json.loads(line)
        if "cancel" not in told:
            pipe, process = _begun(told, tasks)
            tasks[pipe] = process, told
            continue
        for process, task in tasks.values():
            if task["task"] == told["cancel"]:
                os.kill(process, signal.SIGKILL)
                task["cancelled"] = True
    return rest, not come


def _begun(task: Mapping[str, Any], others: Mapping[int, Any]) -> tuple[int, int]:
    """Begin a task in a process of its own. Return the pipe from the process, and its id."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return reading, process
    code = 1
    try:
        for pipe in (0, reading, *others):  # this process must not keep the pipes of others open
            os.close(pipe)
        os.write(writing, json.dumps(_answer(task)).encode())
        code = 0
    except BaseException as error:  # this process must not return to the loop of `main`
        log_problem(f"a task was cut off: {type(error).__name__}: {error}")
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()  # this fails if the log is a file on a full disk
        finally:
            os._exit(code)


def _answer(task: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the packet of a task, and write the reply to its folder."""
    folder = Path(task["folder"])
    header = header_of((folder / HEADER).read_text(encoding="utf-8"))
    body = folder / BODY
    if isinstance(header, str):
        reply = reason(FAILED, None, f"the message {header}")
    elif task.get("refusal"):
        reply = reason(FAILED, _request_id(header), f"client {task['config'].get('client')}: {task['refusal']}")
    else:
        packet = Packet(header, body.read_bytes() if body.exists() else b"")
        reply = Deployed(unpacked(Path(task["app"]), folder))(packet, task["config"])
    draft = folder / f"{REPLY}.draft"
    draft.write_bytes(framed(reply))
    draft.rename(folder / REPLY)
    return {"verdict": str(reply.header.get("verdict")), "bytes_up": len(reply.body)}


def packed(recipe: str, model: str) -> bytes:
    """Return what a device needs besides a request: the texts of the recipe and of the values of a warm start."""
    first = recipe.encode()
    return b"".join((len(first).to_bytes(4, "little"), first, model.encode()))


def unpacked(app: Path, folder: Path) -> Path:
    """Write what `packed` has joined to files in a folder, and return the path of the recipe."""
    content = app.read_bytes()
    end = 4 + int.from_bytes(content[:4], "little")
    (folder / RECIPE).write_bytes(content[4:end])
    if model := content[end:]:
        (folder / APP_COPY).write_bytes(model)
    return folder / RECIPE


def _request_id(header: dict[str, Any]) -> RequestId | None:
    try:
        return RequestId.read(header)
    except BadReply:
        return None


def _all_of(pipe: int) -> bytes:
    with open(pipe, "rb") as file:
        return file.read()


if __name__ == "__main__":
    main()
