"""The process in which the tasks of devices run. It imports PyTorch once, and forks workers, which do the tasks.

The process of the connection (`polyfed.deploy.device.agent`) starts it when a task comes, and ends it by closing its
standard input when no task has come for a while. It reads one JSON object per line: `{"task": ..., "folder": ...,
"app": ..., "config": ..., "refusal": ...}` begins a task, and `{"cancel": ...}` ends one. For each task that has ended,
it writes one line with what `DeviceMonitor.done` counts.

A worker does one task after another of the same recipe, because a fork costs more than a small task. A crash ends only
the worker and its task.
"""

import json
import os
import select
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.core.errors import BadReply
from polyfed.core.system.mapping import mapped
from polyfed.core.system.tracing import PARENT, flush, span
from polyfed.deploy.app_folder import RECIPE
from polyfed.deploy.device.memory.trainings import forget_answered
from polyfed.deploy.edge.runtime import AtEdge
from polyfed.deploy.faults import log_problem
from polyfed.deploy.handlers import Deployed
from polyfed.engines.protocol import FAILED, RequestId, reason
from polyfed.experiment.running.warm_start import APP_COPY
from polyfed.federation.wire.wire_format import Packet, frames, header_of

HEADER, BODY, REPLY = "header", "body", "reply"
"""The files in the folder of a task."""

LARGEST_RECIPE = 2**20
"""Largest size in bytes of a recipe. Reading TOML of this size takes about a second, and 100 MB."""

MOST_TASKS = 200
"""A worker ends after so many tasks, so that what they leave in its memory does not grow."""


@dataclass
class Worker:
    """A forked process.

    Attributes:
        process: its id.
        down: the pipe that carries tasks to it.
        up: the pipe on which it says that a task has ended.
        app: SHA-256 of the recipe of its tasks.
        task: the task that it does now.
        count: how many it has begun.
    """

    process: int
    down: int
    up: int
    app: str
    task: dict[str, Any] = field(default_factory=dict)
    count: int = 0


class Host:
    """Hands tasks to workers.

    Args:
        lines: what reads the lines about tasks that have ended.
    """

    def __init__(self, lines: Any) -> None:
        self.lines, self.workers = lines, dict[int, Worker]()
        self._rest = b""

    def run(self) -> None:
        """Obey the lines of standard input until it ends, and then end all workers."""
        while True:
            ready, _, _ = select.select([0, *self.workers], [], [])
            for pipe in ready:
                if pipe:
                    self._heard(self.workers[pipe])
                elif not self._obeyed():
                    for worker in self.workers.values():
                        os.kill(worker.process, signal.SIGKILL)
                    return

    def _obeyed(self) -> bool:
        """Obey the lines that have come. Return False if there will be no more."""
        come = os.read(0, 2**16)
        *lines, self._rest = (self._rest + come).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "cancel" not in told:
                self._begin(told)
                continue
            for worker in self.workers.values():
                if worker.task.get("task") == told["cancel"]:
                    os.kill(worker.process, signal.SIGKILL)
        return bool(come)

    def _begin(self, task: dict[str, Any]) -> None:
        """Hand a task to an idle worker of its recipe, or to a new one. Idle workers of other recipes end."""
        app = Path(task["app"]).name  # the digest: the same recipe of several devices
        idle = [worker for worker in self.workers.values() if not worker.task]
        fit = [worker for worker in idle if worker.app == app and worker.count < MOST_TASKS]
        for worker in idle:
            if worker not in fit:
                self._end(worker)
        worker = fit[0] if fit else self._forked(app)
        worker.task, worker.count = task, worker.count + 1
        os.write(worker.down, json.dumps(task).encode() + b"\n")

    def _heard(self, worker: Worker) -> None:
        """Pass on what a worker says about its task: nothing if it has died, and then there is no reply."""
        said, task = os.read(worker.up, 2**12), worker.task
        worker.task = {}
        if not said:
            self._end(worker)
        if task:
            self.lines.write(json.dumps({"task": task["task"], **json.loads(said or b"{}")}) + "\n")

    def _end(self, worker: Worker) -> None:
        del self.workers[worker.up]
        os.close(worker.down)
        os.close(worker.up)
        os.waitpid(worker.process, 0)

    def _forked(self, app: str) -> Worker:
        (reading, down), (up, writing) = os.pipe(), os.pipe()
        process = os.fork()
        if process:
            os.close(reading)
            os.close(writing)
            self.workers[up] = Worker(process, down, up, app)
            return self.workers[up]
        try:
            others = [pipe for worker in self.workers.values() for pipe in (worker.down, worker.up)]
            for pipe in (0, down, up, *others):  # else a worker would outlive this process's parent
                os.close(pipe)
            with open(reading, "rb") as tasks:
                for line in tasks:
                    os.write(writing, json.dumps(answer(json.loads(line))).encode())
        except BaseException as error:  # this process must not return to the loop of its parent
            log_problem(f"a task was cut off: {type(error).__name__}: {error}")
        finally:
            flush()
            os._exit(0)


def main() -> None:
    """Run tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the connection handles it, and closes the pipe
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a task prints is no line of ours
    Host(lines).run()


def answer(task: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the packet of a task, and write the reply to its folder."""
    folder = Path(task["folder"])
    header = header_of((folder / HEADER).read_text(encoding="utf-8"))
    with span("device", _parent(header)) as facts:
        reply = _reply(task, folder, header)
        facts["verdict"] = str(reply.header.get("verdict"))
    draft = folder / f"{REPLY}.draft"
    with open(draft, "wb") as file:
        file.writelines(frames(reply))
    draft.rename(folder / REPLY)
    if "state" in task["config"] and (answered := _request_id(reply.header)) is not None:
        forget_answered(Path(task["config"]["state"]), answered, folder / REPLY)
    return {"verdict": str(reply.header.get("verdict")), "bytes_up": len(reply.body)}


def _parent(header: dict[str, Any] | str) -> str:
    """Take the span of the server's request out of a header, which is then as the server without traces sends it."""
    parent = header.pop(PARENT, "") if isinstance(header, dict) else ""
    return parent if isinstance(parent, str) else ""


def _reply(task: Mapping[str, Any], folder: Path, header: dict[str, Any] | str) -> Packet:
    """Return the reply to a packet, or the reason why there is none."""
    if isinstance(header, str):
        return reason(FAILED, None, f"the message {header}")
    if task.get("refusal"):
        return reason(FAILED, _request_id(header), f"client {task['config'].get('client')}: {task['refusal']}")
    body = folder / BODY
    packet = Packet(header, mapped(body) if body.exists() else b"")
    try:
        return _handler(task, folder)(packet, task["config"])
    except BadReply as error:
        return reason(FAILED, _request_id(header), f"the message {error}")


def _handler(task: Mapping[str, Any], folder: Path) -> Deployed | AtEdge:
    """Return what answers the packet of a device or of an edge."""
    app = Path(task["app"])
    recipe = unpacked(app, folder)
    return AtEdge(recipe, app.read_bytes()) if "edge" in task["config"] else Deployed(recipe)


def packed(recipe: str, model: str) -> bytes:
    """Return what a device needs besides a request: the texts of the recipe and of the values of a warm start."""
    first = recipe.encode()
    return b"".join((len(first).to_bytes(4, "little"), first, model.encode()))


def unpacked(app: Path, folder: Path) -> Path:
    """Write what `packed` has joined to files in a folder, and return the path of the recipe.

    Raises:
        BadReply: it is not what `packed` makes, or the recipe is too large.
    """
    content = app.read_bytes()
    end = 4 + int.from_bytes(content[:4], "little")
    if not 4 < end <= min(len(content), 4 + LARGEST_RECIPE):
        raise BadReply(f"has no recipe, or one of more than {LARGEST_RECIPE} bytes")
    (folder / RECIPE).write_bytes(content[4:end])
    if model := content[end:]:
        (folder / APP_COPY).write_bytes(model)
    return folder / RECIPE


def _request_id(header: dict[str, Any]) -> RequestId | None:
    try:
        return RequestId.read(header)
    except BadReply:
        return None


if __name__ == "__main__":
    main()
