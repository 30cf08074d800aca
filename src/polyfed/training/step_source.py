"""What a training step reads: the values that decide which operations it runs, and the tensors that it closes over.

Two local training runs perform the same operations under two conditions: their functions have the same code, and the
variables that these functions close over hold equal values or tensors of the same layout. A program from an earlier
round can then run on the tensors of the current round.
"""

import functools
import types
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polyfed.model import Model
from polyfed.training.client_data import ClientData

VALUES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, types.NoneType, types.EllipsisType)
"""Types of values that are compared by type and `repr`, because 1 == 1.0 == True in Python."""

FIXED = (type, Enum, types.CodeType, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType)
"""Types of objects that stay the same in a run. They are compared by identity."""

PYTHON_CLASS, BUILT_IN = 1 << 9, 1 << 8
"""Flags of a class: `Py_TPFLAGS_HEAPTYPE` and `Py_TPFLAGS_IMMUTABLETYPE` of CPython."""

_EXACT = frozenset(VALUES)

_numbers: "WeakKeyDictionary[Model, int]" = WeakKeyDictionary()
_next = count()


class Unreadable(Exception):
    """A function closes over an object whose contents cannot be compared, such as an iterator."""


class Source:
    """The values and tensors that a step reads.

    Args:
        read: everything that the step reads: options, models, tables, and functions such as the loss.
        classes: the tensor of class numbers among the tensors of `read`; None if the labels are not classes. No class
            number may be negative.

    Attributes:
        parts: the description of all values. If the steps of two training runs perform the same operations, the two
            runs have equal descriptions.
        tensors: the tensors that were found, in order. The same tensor may occur more than once.
        classes: index in `tensors` of the tensor of class numbers; None if the labels are not classes.
        named: objects, such as classes and modules, that `parts` describes only by their Python `id`. Code that stores
            `parts` must store these objects too, so that Python does not give the same id to another object.

    Raises:
        Unreadable: the contents of an object cannot be compared.
    """

    def __init__(self, *read: Any, classes: Tensor | None = None) -> None:
        self.parts: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self.named: list[Any] = []
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps `id` unique
        waiting: list[Any] = [read]
        while waiting:
            waiting.extend(reversed(self._add(waiting.pop())))
        places = {id(tensor): place for place, tensor in enumerate(self.tensors)}
        self.classes = None if classes is None else places[id(classes)]
        self.parts.append(self.classes)

    def _add(self, value: Any) -> Sequence[Any]:
        """Add the description of a value, and return the values inside of it, which are to be added next."""
        if type(value) in _EXACT or isinstance(value, VALUES):
            self.parts.append((type(value), repr(value)))
            return ()
        if isinstance(value, Tensor):
            self.parts.append(Tensor)
            self.tensors.append(value)
            return ()
        number = len(self._seen)
        seen = self._seen.setdefault(id(value), number)
        self.parts.append((type(value), seen))
        if seen < number:
            return ()
        self._alive.append(value)
        if isinstance(value, Model):
            held = value.held()
            self.parts += [_numbers.setdefault(value, next(_next)), len(held)]
            self.tensors += held
        elif isinstance(value, FIXED):
            self.parts.append(id(value))
            self.named.append(value)
        else:
            contents = _contents(value)
            self.parts.append(len(contents))
            return contents
        return ()


def _contents(value: Any) -> tuple[Any, ...]:
    """Return the values that an object contains and that determine what it computes.

    Raises:
        Unreadable: the object may hold values that Python code cannot read, such as those of a class written in C.
    """
    if isinstance(value, ClientData):  # its keys and its rows differ from round to round
        raise Unreadable
    if isinstance(value, Mapping):
        return tuple(entry for item in value.items() for entry in item)
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value, key=repr))
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return value.__code__, *cells, value.__defaults__, value.__kwdefaults__
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    readable, slots, computed = _class_facts(type(value))  # type: ignore[arg-type]  # a class is hashable
    if not readable:
        raise Unreadable
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return tuple(entry for name, inner in held.items() if name not in computed for entry in (name, inner))


@functools.lru_cache(maxsize=1024)
def _class_facts(kind: type) -> tuple[bool, tuple[str, ...], frozenset[str]]:
    """Return facts about the objects of a class.

    Returns:
        Whether Python code can read all that these objects hold, the names of their slots, and the names of their
        cached properties. The value of a cached property follows from the rest, and exists only after its first use.
    """
    readable = all(base.__flags__ & PYTHON_CLASS and not base.__flags__ & BUILT_IN for base in kind.__mro__[:-1])
    slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}
    attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    cached = {name for name, value in attributes.items() if isinstance(value, functools.cached_property)}
    return readable, tuple(sorted(slots)), frozenset(cached)
