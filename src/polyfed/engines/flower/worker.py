"""The process that does a SuperNode's tasks with installed code, in place of Flower's `flwr-clientapp`.

Flower's own process installs the app that arrives with a task (the FAB, a zip file) and imports its code. This one
reads the app as data: two texts in a zip file in memory. Nothing of it is written where Python finds modules, and
nothing of it is imported.
"""

import io
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable
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
from polyfed.core.parsing import parse_toml
from polyfed.engines.flower.apps import Handler, client_app

PROJECT = "pyproject.toml"
LONGEST_TEXT = 2**20
"""Most bytes of a text that is read from an app."""

LOOK_SECONDS = 0.2
"""Between looks for a task, and for the end of the SuperNode."""

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class AppTexts(NamedTuple):
    """What a device reads of an app.

    Attributes:
        client: what the app names as its ClientApp, `module:attribute`.
        recipe: the text of its recipe.
    """

    client: str
    recipe: str


def read_app(fab: bytes, recipe: str) -> AppTexts:
    """Read an app without running or installing any of it.

    Args:
        fab: the zip file.
        recipe: name of the recipe in it.

    Raises:
        BadReply: it is not a whole app of polyfed's.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as archive:
            project = parse_toml(_text(archive, PROJECT))
            client = project["tool"]["flwr"]["app"]["components"]["clientapp"]
            return AppTexts(str(client), _text(archive, recipe))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, KeyError, TypeError, ValueError) as error:
        raise BadReply(f"is not an app that polyfed wrote ({error})") from None


def _text(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as file:
        text = file.read(LONGEST_TEXT + 1)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{name} is longer than {LONGEST_TEXT} bytes")
    return text.decode("utf-8")


def work(address: str, secret: bytes, handler_for: Callable[[bytes], Handler], note: Callable[[str], None]) -> None:
    """Do the tasks of a SuperNode, each in a process of its own, until the SuperNode has ended.

    A task's process is a copy of this one (`fork`), so that PyTorch is imported once and a crash ends one task only.

    Args:
        address: where the SuperNode's interface for such processes listens, `host:port` on this machine.
        secret: what the SuperNode knows this process by.
        handler_for: what answers, given the bytes of an app; raises `BadReply` to refuse the app.
        note: writes a line to the device's log.
    """
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the SuperNode is asked to end, and this process ends with it
    client = _client(address, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={_ACQUIRE}), None)
    request = AcquireTaskRequest(supported_task_types=list(TaskType))
    while os.getppid() == parent:
        try:
            found = client.AcquireTask(request)
        except httpx.TransportError:  # the SuperNode does not listen yet, or no more
            found = None
        if found is None or not (found.HasField("task") and found.token):
            time.sleep(LOOK_SECONDS)
            continue
        child = os.fork()
        if child == 0:
            _perform_alone(address, found.token, found.task.type, handler_for, note, parent)
        while os.getppid() == parent and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(LOOK_SECONDS / 10)


def _perform_alone(
    address: str,
    token: str,
    kind: str,
    handler_for: Callable[[bytes], Handler],
    note: Callable[[str], None],
    supernode: int,
) -> None:
    """Do one task and end this process, whatever happens."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        start_parent_process_monitor(supernode)
        retry = make_simple_http_retry_invoker()
        perform(_client(address, RuntimeTokenHttpInterceptor(token), retry), kind, handler_for, note)
        code = 0
    except BaseException as error:  # what is raised here must not return to the loop of `work`
        note(f"a task was cut off: {type(error).__name__}: {error}")
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def perform(client: Any, kind: str, handler_for: Callable[[bytes], Handler], note: Callable[[str], None]) -> None:
    """Fetch a task's message, answer it, and hand the reply to the SuperNode.

    Args:
        client: the SuperNode's interface, for this task.
        kind: the kind of task; only a ClientApp's is done.
        handler_for: see `work`.
        note: see `work`.
    """
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    message, context, run, fab = pull_task_input(client)
    try:
        reply, failure = _answered(message, context, kind, lambda: handler_for(fab.content)), ""
    except BadReply as refusal:
        failure = f"this device refused the app of run {run.run_id}, which {refusal}"
        note(f"REFUSED: {failure}. Nothing of it was run")
        reply = Message(Error(code=ErrorCode.INVALID_FAB, reason=failure), reply_to=message)
    except Exception as error:  # Flower tells the server what a ClientApp raised; here only of which type
        failure = f"a task ended with {type(error).__name__}; the device's own log says why"
        note(f"{failure}: {error}")
        reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=failure), reply_to=message)
    push_message(client, reply, context)
    status = SubStatus.FAILED if failure else SubStatus.COMPLETED
    push_task_output(client=client, context=context, sub_status=status, details=failure)
    heartbeat.stop()
    client.close()


def _answered(message: Message, context: Any, kind: str, handler: Callable[[], Handler]) -> Message:
    if kind != TaskType.CLIENT_APP:
        raise BadReply(f"asks for a task of type '{kind}', and a device does those of a ClientApp only")
    app: ClientApp = client_app(handler())
    return app(message, context)


def _client(address: str, interceptor: Any, retry: Any) -> Any:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor],
        retry_invoker=retry,
    )
