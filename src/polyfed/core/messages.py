"""Messages: the only things that cross between a client and the outside, each field with its declared kind.

A message is a frozen dataclass whose fields are tensors or trees:

>>> @message
... class Update(Message):
...     params: Tree = carries("parameters")
...     num_rows: Tensor = carries("statistic")

A tree is split by block when it crosses, so that policy and ledger speak of modality x kind x destination. Trees that
are not parameters (prototypes, embeddings, ...) are keyed by modality, so the same rule splits them; `blocks=` says
which blocks a tree may hold, and what it does not say neither leaves nor is announced. An empty tree is "nothing sent".
A field with an entry per row names the field that counts them, `carries("embeddings",
rows="num_rows")`: a stack of clients of unequal length pads such a field, and the padding never crosses. Kinds are
declared by the author of a message: a control, not a proof (docs/egress.md).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_type_hints

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.schema import Within
from polyfed.core.tree import SHARED, Tree, block_of

KINDS = (
    "parameters",
    "gradients",
    "embeddings",
    "prototypes",
    "predictions",
    "labels",
    "raw",
    "ids",
    "statistic",
)
"""What a field can be. `gradients` are gradients of parameters; a gradient of an embedding is `embeddings`."""

HISTOGRAM = "how many rows of each class a client has"
"""What counts of rows per class tell."""

LABELS = "labels"
"""The policy row of kind `labels`: labels belong to no modality, whichever field carries them."""

OF_THE_MODEL = ("parameters", "gradients")
"""Kinds whose trees are keyed by the names of the model; others are keyed by block."""

MODALITIES, READ = "modalities", "read"
"""Among the `blocks` of a tree: the modalities of the client, and those of them that the model reads; see `Holder`."""

HELD_BY_DEFAULT = dict.fromkeys((*OF_THE_MODEL, "statistic"), (MODALITIES, SHARED)) | {
    "labels": (MODALITIES, SHARED, LABELS)
}
"""The `blocks` of a tree that does not say them, by kind; `modalities` for every other kind."""

DESTINATIONS = ("server", "silo")
"""Where a client's reply may go. What a client receives is booked under `client` and is never refused."""


class Message:
    """Base of all messages; `@message` fills in `declared` by field, and from it the rest."""

    declared: ClassVar[Mapping[str, "Declared"]] = {}
    kinds: ClassVar[Mapping[str, str]] = {}
    owners: ClassVar[Mapping[str, str | None]] = {}
    counts: ClassVar[Mapping[str, str]] = {}
    tells: ClassVar[Mapping[str, str]] = {}
    whole: ClassVar[frozenset[str]] = frozenset()


Sizes = tuple[str | None, ...]
"""Sizes of a tensor: `classes`; `features`, a modality's embedding; `encoded`, its encoder's output, and `sample`, both
of which may be several; None for any."""


@dataclass(frozen=True)
class Declared:
    """What a field says of itself; `carries` has the words.

    Attributes:
        bare: whether it is annotated as a tensor, not as a tree.
    """

    kind: str
    of: str | None
    rows: str | None
    whole: bool
    shape: Sizes | None
    partial: bool
    within: Within | None
    tells: str
    blocks: tuple[str, ...] | None
    bare: bool = False


def carries(
    kind: str,
    *,
    of: str | None = None,
    rows: str | None = None,
    whole: bool = False,
    shape: Sizes | None = None,
    partial: bool = False,
    within: Within | None = None,
    tells: str = "",
    blocks: tuple[str, ...] | None = None,
) -> Any:
    """Declare a field. A reply with names that are not declared does not leave; one that is otherwise not as declared
    is dropped.

    Args:
        kind: one of `KINDS`.
        of: for a bare tensor, the modality it speaks of (default: none in particular).
        rows: for a field whose tensors have an entry per row, the 0-dim field that says how many rows are real.
        whole: for a tree that clients receive whole, or may send so. Otherwise what belongs to modalities a client
            does not own is left out on its way there, and refused on its way back; a head over the embeddings of
            several parties is of use only with all of its parts.
        shape: of each tensor, without the axis of `rows`, see `Sizes`. None: one number for a `statistic`; what the
            model says for parameters and gradients; anything for the rest. Labels of shape () are class numbers.
        partial: for parameters and gradients, whether a part of a block may come without the rest of it.
        within: the range of every entry.
        tells: what a reader of the kind alone would not expect it to give away; `polyfed check` says it.
        blocks: for a tree, which blocks it may hold: any of `modalities` (those of the client, or with `whole` of the
            federation), `read` (those of them that the model reads), `shared` and `labels`. Default: `HELD_BY_DEFAULT`.
    """
    assert kind in KINDS, f"kind {kind!r} is not one of {KINDS}"
    shape = () if shape is None and kind == "statistic" else shape
    said = Declared(kind, of, rows, whole, shape, partial, within, tells, blocks)
    return dataclasses.field(metadata={"carries": said})


_M = TypeVar("_M", bound=type[Message])


@dataclass_transform(frozen_default=True, field_specifiers=(carries,))
def message(cls: _M) -> _M:
    """Make a class a frozen message; every field must declare a kind.

    Raises:
        RecipeError: a field is neither a tensor nor a tree, or declares what such a field does not have.
    """
    dataclass(frozen=True)(cls)  # in place: it gives back the class it was given
    fields, hints = dataclasses.fields(cls), get_type_hints(cls)  # type: ignore[arg-type]
    for field in fields:
        assert "carries" in field.metadata, f"{cls.__name__}.{field.name} does not say what it carries"
    cls.declared = declared = {
        field.name: _completed(f"{cls.__name__}.{field.name}", field.metadata["carries"], hints[field.name])
        for field in fields
    }
    cls.kinds = {name: said.kind for name, said in declared.items()}
    cls.owners = {name: said.of for name, said in declared.items()}
    cls.counts = {name: said.rows for name, said in declared.items() if said.rows is not None}
    assert set(cls.counts.values()) <= set(cls.kinds), f"{cls.__name__} counts rows with a field it does not have"
    cls.tells = {name: said.tells for name, said in declared.items() if said.tells}
    cls.whole = frozenset(name for name, said in declared.items() if said.whole)
    return cls


def _completed(where: str, said: Declared, hint: Any) -> Declared:
    """What a field says of itself, with what follows from its annotation."""
    if hint is not Tensor and hint != Tree:
        raise RecipeError(f"{where} is annotated {hint}; a field of a message is a Tensor or a Tree")
    if hint is Tensor:
        if said.kind in OF_THE_MODEL:
            raise RecipeError(f"{where}: {said.kind} come in a Tree, by the names of the model, not in a Tensor")
        if said.blocks is not None:
            raise RecipeError(f"{where}: blocks= is for a Tree; a Tensor belongs to one block, which of= names")
        return dataclasses.replace(said, bare=True)
    if said.of is not None:
        raise RecipeError(f"{where}: of= is for a Tensor; the names in a Tree say whose it is, and blocks= which may")
    blocks = HELD_BY_DEFAULT.get(said.kind, (MODALITIES,)) if said.blocks is None else said.blocks
    allowed = (MODALITIES, READ, SHARED, *(() if said.kind in OF_THE_MODEL else (LABELS,)))
    if isinstance(blocks, str) or not {*blocks} <= {*allowed}:
        raise RecipeError(f"{where}: blocks = {blocks!r}; it is a tuple of any of {', '.join(allowed)}")
    return dataclasses.replace(said, blocks=tuple(blocks))


@dataclass(frozen=True)
class Crossing:
    """One part of a message, as policy and ledger see it: a field, or the part of a tree that lies in one block.

    Attributes:
        names: of its tensors in a tree, for parameters and gradients the block alone; none for a bare tensor.
    """

    field: str
    kind: str
    block: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    names: frozenset[str] = frozenset()


def crossings(msg: Message, *, stacked: bool = False, rows: Mapping[str, int] | None = None) -> tuple[Crossing, ...]:
    """The parts of a message.

    Args:
        msg: of one client, or of a stack.
        stacked: every tensor has a leading client axis, which is left out.
        rows: real rows of fields that are padded.
    """
    form: list[_Field] = []
    for name in msg.kinds:
        value: Tensor | Tree = getattr(msg, name)
        real = None if rows is None else rows.get(name)
        named = ((None, value),) if isinstance(value, Tensor) else value.items()
        form.append(tuple((key, _shape(tensor, stacked, real), tensor.dtype) for key, tensor in named))
    return _crossings(type(msg), tuple(form))  # type: ignore[arg-type]  # a class is hashable


def malformed(msg: Message) -> str:
    """The first field that is not the tensor or the tree it is annotated as, and what it is; empty if there is none."""
    for name, said in msg.declared.items():
        value = getattr(msg, name)
        if said.bare:
            fine = isinstance(value, Tensor)
        else:
            fine = isinstance(value, Mapping) and all(
                isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in value.items()
            )
        if not fine:
            wanted = "a Tensor" if said.bare else "a Tree, a dict of tensors by name"
            return f"{type(msg).__name__}.{name} is declared as {wanted}; it is a {type(value).__name__}"
    return ""


def tensors(msg: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Every tensor of a message as (field, name in its tree or None, tensor)."""
    for name in msg.kinds:
        value = getattr(msg, name)
        if isinstance(value, Tensor):
            yield name, None, value
        else:
            for key, tensor in value.items():
                yield name, key, tensor


def map_tensors(msg: Message, change: Any) -> Any:
    """The same message with `change(tensor)` in place of every tensor."""
    values: dict[str, Any] = {}
    for name in msg.kinds:
        value = getattr(msg, name)
        if isinstance(value, Tensor):
            values[name] = change(value)
        else:
            values[name] = {key: change(tensor) for key, tensor in value.items()}
    return type(msg)(**values)


def cut(msg: Message, blocks: frozenset[str]) -> Any:
    """The message a client of these blocks receives: what belongs to modalities it does not own is left out, unless
    the field is declared whole."""
    changed = {}
    for name in msg.kinds.keys() - msg.whole:
        value = getattr(msg, name)
        if not isinstance(value, Tensor) and any(block_of(key) not in blocks for key in value):
            changed[name] = {key: tensor for key, tensor in value.items() if block_of(key) in blocks}
    return dataclasses.replace(msg, **changed) if changed else msg  # type: ignore[type-var]


def trimmed(msg: Message) -> Any:
    """The message of one client without the padding of its fields with an entry per row."""
    changed: dict[str, Any] = {}
    for name, count in msg.counts.items():
        value, real = getattr(msg, name), int(getattr(msg, count))
        changed[name] = value[:real] if isinstance(value, Tensor) else {key: t[:real] for key, t in value.items()}
    return dataclasses.replace(msg, **changed) if changed else msg  # type: ignore[type-var]


_Field = tuple[tuple[str | None, tuple[int, ...], torch.dtype], ...]
"""Name in its tree (None for a bare tensor), shape and type of each tensor of a field."""


def _shape(tensor: Tensor, stacked: bool, rows: int | None) -> tuple[int, ...]:
    shape = tensor.shape[1:] if stacked else tensor.shape
    return shape if rows is None else (rows, *shape[1:])


@functools.lru_cache(maxsize=1024)
def _crossings(kind_of_message: type[Message], form: tuple[_Field, ...]) -> tuple[Crossing, ...]:
    """The parts of every message of this form: a round's messages have one form or a few, so they are kept."""
    parts: list[Crossing] = []
    for (name, kind), tensors_ in zip(kind_of_message.kinds.items(), form, strict=True):
        groups: dict[str, _Field] = {}
        for entry in tensors_:
            key = entry[0]
            if key is None:
                owner = kind_of_message.owners[name] or SHARED
            else:
                owner = block_of(key) if kind in OF_THE_MODEL else key
            block = LABELS if kind == "labels" else owner
            groups[block] = (*groups.get(block, ()), entry)
        parts.extend(_crossing(name, kind, block, group) for block, group in groups.items())
    return tuple(parts)


def _crossing(field: str, kind: str, block: str, parts: _Field) -> Crossing:
    counts = [math.prod(shape) for _, shape, _ in parts]
    dtypes = {str(dtype).removeprefix("torch.") for _, _, dtype in parts}
    keys = {key for key, _, _ in parts if key is not None}
    return Crossing(
        field=field,
        kind=kind,
        block=block,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        shape=tuple(parts[0][1]) if len(parts) == 1 else (sum(counts),),
        bytes=sum(count * dtype.itemsize for count, (_, _, dtype) in zip(counts, parts, strict=True)),
        names=frozenset(map(block_of, keys) if kind in OF_THE_MODEL else keys),
    )
