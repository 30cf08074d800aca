"""What a training step reads: the values that decide which operations it runs, and the tensors that it closes over.

Two local training runs perform the same operations under two conditions: their functions have the same code, and the
variables that these functions close over hold equal values or tensors of the same layout. A program from an earlier
round can then run on the tensors of the current round.
"""

import functools
import types
from collections.abc import Hashable, Mapping
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
        self._add(read)
        places = {id(tensor): place for place, tensor in enumerate(self.tensors)}
        self.classes = None if classes is None else places[id(classes)]
        self.parts.append(self.classes)

    def _add(self, value: Any) -> None:
        if isinstance(value, VALUES):
            self.parts.append((type(value), repr(value)))
            return
        if isinstance(value, Tensor):
            self.parts.append(Tensor)
            self.tensors.append(value)
            return
        number = len(self._seen)
        seen = self._seen.setdefault(id(value), number)
        self.parts.append((type(value), seen))
        if seen < number:
            return
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
            for entry in contents:
                self._add(entry)


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
    if any(not kind.__flags__ & PYTHON_CLASS or kind.__flags__ & BUILT_IN for kind in type(value).__mro__[:-1]):
        raise Unreadable
    slots = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    held = {name: getattr(value, name) for name in sorted(slots) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    computed = (name for name in held if isinstance(getattr(type(value), name, None), functools.cached_property))
    for name in list(computed):
        del held[name]  # follows from the rest, and is there only after its first use
    return tuple(entry for item in held.items() for entry in item)
