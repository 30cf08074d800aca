"""Marking the methods that run on clients.

A task is pure: `(context, data, local, got) -> (reply, local)`, with no input but these and the frozen hyper-parameters
of the object it belongs to. That is what lets the same text run in a loop, under `vmap`, in another process and on a
real device. The mark also declares what the task sends, so that `polyfed check` can say what a recipe will let leave
before anything runs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class TaskInfo:
    """What `@task` knows.

    Attributes:
        scope: how far its replies may travel: `server` or `silo`.
        loop_because: why it cannot run under vmap; empty when it can.
    """

    scope: str = "server"
    loop_because: str = ""


def task(*, scope: str = "server", loop_because: str = "") -> Callable[[_F], _F]:
    """Mark a method as a client task.

    Args:
        scope: `silo` lets replies reach the silo's edge but not the server.
        loop_because: a reason why the vectorised engine must run clients one by one; it says so in an event.
    """

    def mark(method: _F) -> _F:
        method.__polyfed_task__ = TaskInfo(scope, loop_because)  # type: ignore[attr-defined]
        return method

    return mark


def parts(algorithm: Any) -> Iterator[tuple[str, Any]]:
    """The algorithm and its parts that may own tasks (a selector), with the prefix of their tasks' names."""
    yield "", algorithm
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{field.name}.", value


def tasks_of(algorithm: Any) -> dict[str, Callable[..., Any]]:
    """All tasks of an algorithm by name, its parts' included."""
    found: dict[str, Callable[..., Any]] = {}
    for prefix, owner in parts(algorithm):
        for name in dir(type(owner)):
            if is_task(getattr(type(owner), name)):
                found[prefix + name] = getattr(owner, name)
    return found


def is_task(method: Any) -> bool:
    """Whether a method is marked."""
    return hasattr(method, "__polyfed_task__")


def info_of(task: Callable[..., Any]) -> TaskInfo:
    """What its mark says of a task."""
    info: TaskInfo = task.__polyfed_task__  # type: ignore[attr-defined]
    return info


def types_of(task: Callable[..., Any]) -> tuple[type[Message], type[Message]]:
    """The message types a bound task receives and answers with.

    They are read off the annotations; a template's task, annotated with bare `Message`, leaves them to its owner's
    class attributes `sends` and `replies`.

    Raises:
        RecipeError: they name no message, or more than one: nobody could tell then what the task can send.
    """
    hints = get_type_hints(task)
    answer = get_args(hints.get("return")) or (None,)
    owner = task.__self__  # type: ignore[attr-defined]
    found: list[type[Message]] = []
    for kind, attribute in ((hints.get("got"), "sends"), (answer[0], "replies")):
        if kind is Message:
            kind = getattr(owner, attribute, None)
        if not (isinstance(kind, type) and issubclass(kind, Message) and kind is not Message):
            raise RecipeError(
                f"task {task.__qualname__} does not say which message it receives and which one it answers with. "
                "Annotate it with one message for each: (..., got: Question) -> tuple[Answer, Tree]"
            )
        found.append(kind)
    return found[0], found[1]


def answers_of(algorithm: Any) -> dict[str, tuple[type[Message], str]]:
    """The message that each task of an algorithm answers with, and where that may go, by the task's name."""
    return {name: (types_of(task)[1], info_of(task).scope) for name, task in tasks_of(algorithm).items()}


def path_of(task: Callable[..., Any], algorithm: Any) -> str:
    """The name of a bound task as seen from the algorithm: `update`, or `selector.score`.

    Raises:
        RecipeError: it is none of the algorithm's tasks, so `polyfed check` knew nothing of what it sends.
    """
    owner, function = getattr(task, "__self__", None), getattr(task, "__func__", None)
    for prefix, part in parts(algorithm):
        if part is owner:
            if getattr(type(part), task.__name__, None) is function and is_task(function):
                return f"{prefix}{task.__name__}"
            for name in dir(type(part)):  # a task may have another name than its function
                if getattr(type(part), name) is function and is_task(function):
                    return f"{prefix}{name}"
    raise RecipeError(
        f"{getattr(task, '__qualname__', task)} is no task of {type(algorithm).__name__}. Clients are asked for methods"
        " marked @task(), of the algorithm or of a dataclass in one of its fields"
    )
