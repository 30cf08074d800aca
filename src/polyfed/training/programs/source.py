"""What a training step reads: the values that decide which operations it runs, and the tensors that it closes over.

Two local training runs perform the same operations under two conditions: their functions have the same code, and the
variables that these functions close over hold equal values or tensors of the same layout. A program from an earlier
round can then run on the tensors of the current round.
"""

import functools
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from polyfed.model import Model
from polyfed.training.client_data import ClientData

VALUES = {bool, int, float, complex, str, bytes, torch.dtype, torch.device, types.NoneType, types.EllipsisType}
"""Types of values that are compared by type and `repr`, because 1 == 1.0 == True in Python."""

FIXED = (type, Enum, types.CodeType, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType)
"""Types of objects that stay the same in a run. They are compared by identity."""

PYTHON_CLASS, BUILT_IN = 1 << 9, 1 << 8
"""Flags of a class: `Py_TPFLAGS_HEAPTYPE` and `Py_TPFLAGS_IMMUTABLETYPE` of CPython."""

_numbers: "WeakKeyDictionary[Model, int]" = WeakKeyDictionary()
_next = count()


def _named(held: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return the keys and values of a mapping, in turn."""
    return tuple(entry for item in held.items() for entry in item)


def _sorted(held: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(held, key=repr))


NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
"""Classes whose objects are compared by their `repr`. Objects of subclasses are compared by their attributes too."""

ENTRIES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    dict: _named,
    list: tuple,
    tuple: tuple,
    set: _sorted,
    frozenset: _sorted,
    Mapping: _named,
}
"""Classes whose objects are compared by their entries, with functions that return the entries. Objects of subclasses
are compared by their attributes too."""


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
        if type(value) in VALUES:
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
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return value.__code__, *cells, value.__defaults__, value.__kwdefaults__, *_named(value.__dict__)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if type(value) is functools.partial:
        return value.func, value.args, value.keywords
    facts = _class_facts(type(value))  # type: ignore[arg-type]  # a class is hashable
    entries: tuple[Any, ...] = ()
    if facts.base in ENTRIES:
        entries = ENTRIES[facts.base](value)
    elif facts.base in NUMBERS_AND_TEXTS:
        entries = (facts.base.__repr__(value),)  # not the `repr` that a subclass may define
    elif not facts.readable:
        raise Unreadable
    held: dict[str, Any] = {}
    for name, slot in facts.slots.items():
        with suppress(AttributeError):  # the slot is empty
            held[name] = slot.__get__(value)
    held |= {name: inner for name, inner in _attributes(value).items() if name not in facts.computed}
    return (*entries, *_named(held))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object, even if its class hides it. Empty if the object has none."""
    try:
        result: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return result


class _ClassFacts(NamedTuple):
    """Facts about the objects of a class.

    Attributes:
        base: the class of `NUMBERS_AND_TEXTS` or `ENTRIES` from which the class inherits; `object` if there is none.
        readable: whether Python code can read all that these objects hold.
        slots: the slots by name.
        computed: names of cached properties. Their values follow from the rest, and exist only after their first use.
    """

    base: Any
    readable: bool
    slots: dict[str, types.MemberDescriptorType]
    computed: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _class_facts(kind: type) -> _ClassFacts:
    """Return facts about the objects of a class. They leave out what the class inherits from its `base`."""
    base = next((each for each in (*NUMBERS_AND_TEXTS, *ENTRIES) if issubclass(kind, each)), object)
    own = [each for each in reversed(kind.__mro__) if each not in base.__mro__]
    named = {name: value for each in own for name, value in vars(each).items()}
    return _ClassFacts(
        base,
        all(each.__flags__ & PYTHON_CLASS and not each.__flags__ & BUILT_IN for each in own),
        {name: value for name, value in named.items() if isinstance(value, types.MemberDescriptorType)},
        frozenset(name for name, value in named.items() if isinstance(value, functools.cached_property)),
    )
