"""The process that runs a SuperNode's tasks with the code that is installed on the device.

It replaces Flower's `flwr-clientapp`. Flower's own process installs the app that arrives with a task (the FAB, a zip
file) and imports its code. Polyfed's process keeps the zip file in memory and reads only two texts from it. It imports
no code from the app, and writes no file of the app to a folder from which Python imports modules.
"""

import io
import json
import math
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from polyfed.core.errors import BadReply
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.engines.flower.apps import Handler, client_app
from polyfed.engines.flower.device.careful_http import careful_calls
from polyfed.engines.protocol import FAILED, REFUSED
from polyfed.federation.wire_format import Packet

PROJECT = "pyproject.toml"
LONGEST_TEXT = 2**20
"""Largest size in bytes of a text that this process reads from an app."""

LONGEST_MODEL = 2**24
"""Largest size in bytes of the text with the values of a warm start."""

LOOK_SECONDS, BUSY_SECONDS = 0.2, 1.0
"""Seconds between two queries for a task, while no task runs and while a task runs."""

GRACE_SECONDS = 10.0
"""How long the process of a task may continue after the SuperNode has assigned the next task (inferred)."""

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class AppTexts(NamedTuple):
    """The texts that a device reads from an app.

    Attributes:
        client: the app's ClientApp, as `module:attribute`.
        recipe: the text of the app's recipe.
        model: the text with the values of a warm start; "" without one.
    """

    client: str
    recipe: str
    model: str = ""


def read_app(fab: bytes, recipe: str, model: str = "") -> AppTexts:
    """Read an app without running or installing its code.

    Args:
        fab: the bytes of the zip file.
        recipe: name of the recipe's file in the zip file.
        model: name of the file with the values of a warm start, which the zip file may lack.

    Raises:
        BadReply: the zip file is not a complete app that polyfed wrote.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            project = parse_toml(_text(archive, PROJECT))
            client = project["tool"]["flwr"]["app"]["components"]["clientapp"]
            given = _text(archive, model, LONGEST_MODEL) if model in archive.namelist() else ""
            return AppTexts(str(client), _text(archive, recipe), given)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
        raise BadReply(f"is not an app that polyfed wrote ({error})") from None


def _text(archive: zipfile.ZipFile, name: str, longest: int = LONGEST_TEXT) -> str:
    with archive.open(name) as file:
        text = file.read(longest + 1)
    if len(text) > longest:
        raise ValueError(f"{name} is longer than {longest} bytes")
    return text.decode("utf-8")


@dataclass(frozen=True)
class Duties:
    """The functions with which the process of a device handles a SuperNode's tasks.

    Attributes:
        handler_for: returns the handler for an app, given the app's bytes. To refuse the app, `handler_for` raises
            `BadReply`.
        note: writes a line to the device's log.
        wait: waits for some seconds, and serves other requests of this process meanwhile.
        done: called after every task. Its argument is a table with `verdict` and with `bytes_up`, the size of the
            reply's body. If the task's process was killed, the table is empty.
    """

    handler_for: Callable[[bytes], Handler]
    note: Callable[[str], None]
    wait: Callable[[float], None] = time.sleep
    done: Callable[[dict[str, Any]], None] = lambda facts: None


def work(address: str, secret: bytes, duties: Duties, supernode: int) -> None:
    """Run the tasks of a SuperNode, each in its own process, until the SuperNode has ended.

    A task's process is a fork of this process. So Python imports PyTorch only once, and a crash ends only one task. A
    SuperNode assigns one task at a time.

    Args:
        address: address of the SuperNode's interface for such processes, `host:port` on this machine.
        secret: the secret with which this process authenticates to the SuperNode.
        duties: the functions that handle the tasks.
        supernode: process id of the SuperNode, which is the parent of this process. If the SuperNode ends, the
            operating system gives this process another parent. This process then ends too, even if it was still
            importing PyTorch when the SuperNode ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the SuperNode handles the signal, and this process ends with it
    client = _client(address, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE}), None)
    tasks: list[_Task] = []
    while os.getppid() == supernode:
        found = _acquired(client)
        if found is not None:
            for task in tasks:
                task.end = min(task.end, time.monotonic() + GRACE_SECONDS)
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                _perform_alone(address, found.token, found.task.type, duties, supernode, writing)
            os.close(writing)
            tasks.append(_Task(child, reading))
        elif not tasks:
            duties.wait(LOOK_SECONDS)
        look = time.monotonic() + BUSY_SECONDS
        while tasks and os.getppid() == supernode and time.monotonic() < look:
            duties.wait(LOOK_SECONDS / 10)
            tasks = [task for task in tasks if not _ended(task, duties)]


@dataclass
class _Task:
    """The process of a task.

    Attributes:
        process: the process id.
        reading: file descriptor of the pipe from which this process reads the result of the task.
        end: the time at which the process is killed. A SuperNode assigns the next task when it has the reply, or when
            it has abandoned the task. A SuperNode abandons a task, for example, if the server died before the whole
            message had arrived. The process of an abandoned task would wait forever for the rest of the message.
    """

    process: int
    reading: int
    end: float = math.inf


def _acquired(client: Any) -> Any:
    """Return the next task of the SuperNode, or None if there is no task."""
    try:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=list(TaskType)))
    except httpx.TransportError:  # the SuperNode does not listen yet, or has ended
        return None
    return found if found.HasField("task") and found.token else None


def _ended(task: _Task, duties: Duties) -> bool:
    """Return whether the process of a task has ended. Kill the process if it is overdue."""
    if os.waitpid(task.process, os.WNOHANG) != (0, 0):
        duties.done(_told(task.reading))
        return True
    if time.monotonic() > task.end:
        duties.note("a task was given up: the SuperNode has gone on to the next one")
        os.kill(task.process, signal.SIGKILL)
        task.end = math.inf
    return False


def _told(reading: int) -> dict[str, Any]:
    """Return the table that the process of a task has written, or an empty table."""
    os.set_blocking(reading, False)
    with open(reading, "rb", buffering=0) as file:
        facts: dict[str, Any] = json.loads(file.read() or b"{}")
    return facts


def _perform_alone(address: str, token: str, kind: str, duties: Duties, supernode: int, writing: int) -> None:
    """Run one task, write the result to a pipe, and end this process even if an error occurs."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        start_parent_process_monitor(supernode)
        retry = make_simple_http_retry_invoker()
        facts = perform(_client(address, RuntimeTokenHttpInterceptor(token), retry), kind, duties)
        os.write(writing, json.dumps(facts).encode())
        code = 0
    except BaseException as error:  # this forked process must not return to the loop of `work`
        duties.note(f"a task was cut off: {type(error).__name__}: {error}")
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()  # this fails if the log is a file on a full disk
        finally:
            os._exit(code)


def perform(client: Any, kind: str, duties: Duties) -> dict[str, Any]:
    """Fetch a task's message, answer the message, and send the reply to the SuperNode.

    Args:
        client: the SuperNode's interface, for this task.
        kind: the type of the task. Only tasks of a ClientApp are accepted.
        duties: the functions that handle the task.

    Returns:
        The table for `Duties.done`.
    """
    facts: dict[str, Any] = {"verdict": FAILED, "bytes_up": 0}
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    message, context, run, fab = pull_task_input(client)
    try:
        reply, failure = _answered(message, context, kind, lambda: _noting(duties.handler_for(fab.content), facts)), ""
    except BadReply as refusal:
        failure = f"this device refused the app of run {run.run_id}, which {refusal}"
        duties.note(f"REFUSED: {failure}. Nothing of it was run")
        facts["verdict"] = REFUSED
        reply = Message(Error(code=ErrorCode.INVALID_FAB, reason=failure), reply_to=message)
    except Exception as error:  # Flower would send the whole error to the server, but this sends only its type
        failure = f"a task ended with {type(error).__name__}; the device's own log says why"
        duties.note(f"{failure}: {error}")
        reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=failure), reply_to=message)
    push_message(client, reply, context)
    status = SubStatus.FAILED if failure else SubStatus.COMPLETED
    push_task_output(client=client, context=context, sub_status=status, details=failure)
    heartbeat.stop()
    client.close()
    return facts


def _noting(handler: Handler, facts: dict[str, Any]) -> Handler:
    """Wrap the handler so that it also records the verdict and the size of the reply in `facts`."""

    def answer(packet: Packet, config: Mapping[str, Any]) -> Packet:
        reply = handler(packet, config)
        facts.update(verdict=str(reply.header.get("verdict")), bytes_up=len(reply.body))
        return reply

    return answer


def _answered(message: Message, context: Any, kind: str, handler: Callable[[], Handler]) -> Message:
    if kind != TaskType.CLIENT_APP:
        raise BadReply(f"asks for a task of type '{kind}', and a device does those of a ClientApp only")
    app: ClientApp = client_app(handler())
    return app(message, context)


def _client(address: str, interceptor: Any, retry: Any) -> Any:
    """Return a client of the SuperNode. It uses no proxy, although environment variables such as HTTP_PROXY name one.

    The SuperNode is on this machine, and the connection has no TLS. A proxy would read the messages, and it could give
    this process tasks of its own.
    """
    with careful_calls(limit=None, trust_env=False):
        return RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor],
            retry_invoker=retry,
        )
