"""`@task`: marks the methods that run on clients.

A task is a pure function `(context, data, local, got) -> (reply, local)`. It depends only on these arguments and on the
frozen hyper-parameters of its object. The same code therefore runs in a loop, under `vmap`, in another process and on a
real device. The annotations of a task declare what it sends. Before anything runs, `polyfed check` uses these
annotations to list what will leave the clients.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

from polyfed.core.errors import RecipeError
from polyfed.core.masked import masked_class, sum_only
from polyfed.core.messages import Message

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class TaskInfo:
    """The options given to `@task`.

    Attributes:
        scope: who may receive the replies. With `server`, this is the server. With `silo`, it is only the edge of the
            client's silo, which is the place where the devices of a silo exchange messages.
        loop_because: why the task cannot run under vmap. Empty if the task can.
        once: name of the block of the local state in which the task keeps secrets that may be used only once. After a
            device has used its secrets to answer a message, it never uses the same secrets to answer a different
            message. Empty if the task has no such block.
        sends: name of the class attribute with the class of the message that the task receives, if its annotation is
            plain `Message`.
    """

    scope: str = "server"
    loop_because: str = ""
    once: str = ""
    sends: str = "sends"


def task(*, scope: str = "server", loop_because: str = "", once: str = "", sends: str = "sends") -> Callable[[_F], _F]:
    """Mark a method as a client task.

    Args:
        scope: who may receive the replies. With `server`, this is the server. With `silo`, it is only the edge of the
            client's silo, which is the place where the devices of a silo exchange messages.
        loop_because: why the task cannot run under vmap. The vectorised engine then runs the clients one after another,
            and reports this reason in an event.
        once: name of the block of the local state in which the task keeps secrets that may be used only once. After a
            device has used its secrets to answer a message, it never uses the same secrets to answer a different
            message. This also holds if a server goes back to an earlier round.
        sends: name of the class attribute with the class of the message that the task receives, if its annotation is
            plain `Message`, so that subclasses name another message without another task.
    """

    def mark(method: _F) -> _F:
        method.__polyfed_task__ = TaskInfo(scope, loop_because, once, sends)  # type: ignore[attr-defined]
        return method

    return mark


def parts(algorithm: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the algorithm and its parts that have tasks, such as a selector. Each comes with its task prefix."""
    yield "", algorithm
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{field.name}.", value


def tasks_of(algorithm: Any) -> dict[str, Callable[..., Any]]:
    """Return all tasks of an algorithm and of its parts, as bound methods by name."""
    result: dict[str, Callable[..., Any]] = {}
    for prefix, owner in parts(algorithm):
        for name in dir(type(owner)):
            if is_task(getattr(type(owner), name)):
                result[prefix + name] = getattr(owner, name)
    return result


def task_of(algorithm: Any, name: str) -> Callable[..., Any]:
    """Return one task by its name in `tasks_of`. The name must come from this program, not from another machine."""
    owner, _, method = name.rpartition(".")
    result: Callable[..., Any] = getattr(getattr(algorithm, owner) if owner else algorithm, method)
    assert is_task(result)
    return result


def is_task(method: Any) -> bool:
    """Whether a method is marked with `@task`."""
    return hasattr(method, "__polyfed_task__")


def info_of(task: Callable[..., Any]) -> TaskInfo:
    """The options of a task."""
    info: TaskInfo = task.__polyfed_task__  # type: ignore[attr-defined]
    return info


def types_of(task: Callable[..., Any]) -> tuple[type[Message], type[Message]]:
    """Return the types of the messages that a bound task receives and replies with.

    The types come from the task's annotations. An annotation may be plain `Message`, as in a base class. The type then
    comes from a class attribute of the task's object (`task.__self__`): `replies` for the reply, and for the received
    message the one that the task names (`TaskInfo.sends`). Under secure aggregation, the reply is masked if its type is
    sum-only (`core/masked.py`).

    Raises:
        RecipeError: a type is missing or is not a single message type, so polyfed cannot know what the task sends.
    """
    hints = _hints(getattr(task, "__func__", task))
    answer = get_args(hints.get("return")) or (None,)
    owner = task.__self__  # type: ignore[attr-defined]
    found: list[type[Message]] = []
    for kind, attribute in ((hints.get("got"), info_of(task).sends), (answer[0], "replies")):
        if kind is Message:
            kind = getattr(owner, attribute, None)
        if not (isinstance(kind, type) and issubclass(kind, Message) and kind is not Message):
            raise RecipeError(
                f"task {task.__qualname__} does not say which message it receives and which one it answers with. "
                "Annotate it with one message for each: (..., got: Question) -> tuple[Answer, Tree]"
            )
        found.append(kind)
    got, reply = found
    _check_template(got)  # type: ignore[arg-type]  # a class is hashable
    if masks(owner) and reply.declared and sum_only(reply):
        reply = masked_class(reply)  # type: ignore[arg-type]  # a class is hashable
    return got, reply


@lru_cache(maxsize=256)
def _check_template(got: type[Message]) -> None:
    """Check that a message to clients states every size and type, which a device compares with what it receives."""
    for name, said in got.declared.items():
        where = f"{got.__name__}.{name} goes to clients, so"
        assert None not in (said.shape or ()), f"{where} its shape cannot hold None"
        assert said.kind != "statistic" or said.dtype, f"{where} it needs dtype=, such as 'float32'"


@lru_cache(maxsize=256)
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's type annotations. They are computed once, because every request reads those of its task."""
    return get_type_hints(function)


def masks(owner: object) -> bool:
    """Return whether an object has a section [secure_aggregation], so that its tasks send masked messages."""
    return getattr(owner, "secure_aggregation", None) is not None


def answers_of(algorithm: Any) -> dict[str, tuple[type[Message], str]]:
    """Return, by task name, the type of the task's reply and who may receive the reply (`scope` in `TaskInfo`)."""
    return {name: (types_of(task)[1], info_of(task).scope) for name, task in tasks_of(algorithm).items()}


def path_of(task: Callable[..., Any], algorithm: Any) -> str:
    """Return the name of a bound task as seen from the algorithm, such as `update` or `selector.score`.

    Raises:
        RecipeError: the algorithm has no such task, so `polyfed check` has not listed what it sends.
    """
    owner, function = getattr(task, "__self__", None), getattr(task, "__func__", None)
    for prefix, part in parts(algorithm):
        if part is owner:
            if getattr(type(part), task.__name__, None) is function and is_task(function):
                return f"{prefix}{task.__name__}"
            for name in dir(type(part)):  # the attribute may have another name than the function
                if getattr(type(part), name) is function and is_task(function):
                    return f"{prefix}{name}"
    raise RecipeError(
        f"{getattr(task, '__qualname__', task)} is not a task of {type(algorithm).__name__}. Clients run only methods "
        "that are marked with @task() and belong to the algorithm or to a dataclass in one of its fields"
    )
