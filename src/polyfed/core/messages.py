"""Messages: the only data that is sent between clients and the server.

A message is a frozen dataclass. Each field is a tensor or a Tree, and declares the kind of its data:

>>> @message
... class Update(Message):
...     params: Tree = carries("parameters")
...     num_rows: Tensor = carries("statistic")

A declaration leaves no form open: both sides compare every message with it and with the model.

Policy and ledger treat every block of a tree separately, so that a rule can name a modality, a kind and a destination.
Trees of parameters are split into blocks by the names of the model's tensors. In any other tree (prototypes,
embeddings), each key is the name of a block. `blocks=` lists the blocks that a tree may hold. No other block may leave
the client. An empty tree means that the sender sent nothing in this field.

A field with one entry per row names the field that counts the rows: `carries("embeddings", rows="num_rows",
shape=("features",))`. In a stack of clients, such a field is padded. A client removes the padding before it sends the
message.

The author of a message class declares the kinds. polyfed cannot check that the declarations are true (docs/egress.md).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_type_hints

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import Within
from polyfed.core.packing import Packing, Packings
from polyfed.core.tree import SHARED, Tree, block_of, select

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
"""The kinds of content. `gradients` are gradients of parameters; the gradient of an embedding has kind `embeddings`."""

HISTOGRAM = "how many rows of each class a client has"
"""The text for the option `tells` of a field that counts rows per class."""

LABELS = "labels"
"""The row of the policy that decides about kind `labels`. Labels belong to no modality, in whichever field they are."""

OF_THE_MODEL = ("parameters", "gradients")
"""Kinds whose trees have the names of the model's tensors as keys. Trees of other kinds have blocks as keys."""

MODALITIES, READ = "modalities", "read"
"""Words for the option `blocks`: `modalities` are all modalities of the client, `read` only those of the model."""

HELD_BY_DEFAULT = dict.fromkeys((*OF_THE_MODEL, "statistic"), (MODALITIES, SHARED)) | {
    "labels": (MODALITIES, SHARED, LABELS)
}
"""The default of the option `blocks` for trees, by kind. For kinds that are not listed, it is `modalities`."""

DESTINATIONS = ("server", "silo")
"""Where a client's reply may go. The ledger lists what a client receives under `client`; no policy refuses it."""

SUMMABLE = (*OF_THE_MODEL, "prototypes", "statistic")
"""Kinds whose fields may be declared as sum-only."""

COMMON = ("batch", "cohort", "subsets")
"""Words for a first size that is not known beforehand, but is the same for all tensors of a message."""

Sizes = tuple[str | int | None, ...]
"""The shape of a tensor: a number or a word for each size. `classes` is the number of classes, `features` the width of
a modality's embedding, and `joint` that of the embedding of all modalities together. `controls` is the number of
embedding controls of the fusion `controlled`. `own` stands for the sums that a client reports about its own test
rows. `label` stands for the label of a row: a class number or T targets. `encoded` stands for the shape of the
encoder's output, `sample` for the shape of a sample. `own`, `label`, `encoded` and `sample` may cover any number of
axes. The words of `COMMON`, as the first size, stand for a number of rows (`batch`), of clients (`cohort`), or of
evaluations of the same rows, each of which counts against the device's limit (`subsets`). None means any size; only
replies may have it, because a device compares every size that it receives."""


@dataclass(frozen=True)
class Declared:
    """The declaration of a field. The docstring of `carries` explains the other attributes.

    Attributes:
        bare: whether the field is annotated as a tensor, not as a tree.
        masked: whether the field holds masked integers in place of the declared values (`core/masked.py`).
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
    sum_only: bool = False
    weight: str | None = None
    masked: bool = False
    random: bool = False
    stacked: bool = False
    part: str = ""
    optional: bool = False
    dtype: str = ""
    counted: bool = False
    scored: bool = False


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
    sum_only: bool = False,
    weight: str | None = None,
    random: bool = False,
    stacked: bool = False,
    part: Literal["", "encoders", "head"] = "",
    optional: bool = False,
    dtype: Literal["", "float32", "sums", "int64", "bool", "uint8"] = "",
    counted: bool = False,
    scored: bool = False,
) -> Any:
    """Declare a field of a message.

    The egress gate refuses a reply with undeclared names. The server drops one of another shape, range or type.

    Args:
        kind: one of `KINDS`.
        of: for a tensor, the modality that it describes. Default: none.
        rows: for a field with one entry per row, the 0-dim field with the number of rows without padding.
        whole: whether a tree is sent with all its blocks, as a head over the embeddings of several parties needs. By
            default, a client receives only the blocks of its own modalities and may send no others.
        shape: shape of each tensor, without the axis of `rows`; see `Sizes`. Parameters and gradients have the shapes
            of the model, a `statistic` is one number by default, and labels of shape () are class numbers.
        partial: for parameters and gradients, whether a tree may hold only some tensors of a block.
        within: the range in which every entry must lie.
        tells: what the field reveals beyond its kind. `polyfed check` prints this text.
        blocks: for a tree, the blocks that it may hold. Allowed words: `modalities` (all modalities of the client or,
            if `whole` is set, all modalities of the federation), `read` (only the modalities that the model reads),
            `shared` and `labels`. Default: `HELD_BY_DEFAULT`.
        sum_only: whether the server needs only the sum of this field over the clients. If all fields of a message are
            sum-only, secure aggregation can mask the message (docs/secure-aggregation.md).
        weight: for a sum-only field, the 0-dim field by which each client multiplies it before the sum. Default: none.
        random: whether the field holds only random numbers, such as public keys, which leave without protection.
        stacked: for parameters and gradients, whether each tensor has one more leading axis, for several models.
        part: for parameters and gradients, the part of the model to which all names belong: its `encoders`, or its
            `head`, which is everything after them. Default: the whole model.
        optional: for a tree, whether a client may receive it without a block that the client has.
        dtype: for a statistic, its type; `float32` includes that of the model, and `sums` float64. Default: any.
        scored: whether the field is a statistic of own test or validation rows (`[require] score_noise`).
        counted: whether a scored field counts rows, so that one row changes it by at most 1, and noise can hide it.
    """
    assert kind in SUMMABLE or not sum_only, f"a field of kind {kind!r} cannot be sum-only; only {SUMMABLE} can"
    assert sum_only or weight is None, "weight= is for sum-only fields"
    assert kind in KINDS, f"kind {kind!r} is not one of {KINDS}"
    assert kind == "statistic" or not dtype, "dtype= is for statistics"
    shape = () if shape is None and kind == "statistic" else shape
    _check_shape(kind, shape)
    form = {"part": part, "optional": optional, "dtype": dtype, "sum_only": sum_only, "weight": weight}
    form |= {"random": random, "stacked": stacked, "counted": counted, "scored": scored or counted}
    declared = Declared(kind, of, rows, whole, shape, partial, within, tells, blocks, **form)  # type: ignore[arg-type]
    return dataclasses.field(metadata={"carries": declared})


def _check_shape(kind: str, shape: Sizes | None) -> None:
    """Check that a field has exactly one template: the model, or a shape."""
    if kind in OF_THE_MODEL:
        assert shape is None, f"a field of kind {kind!r} has the shapes of the model: leave out shape="
        return
    assert shape is not None, f"a field of kind {kind!r} needs shape=, such as ('features',)"
    assert not {*COMMON} & {*shape[1:]}, f"{' and '.join(COMMON)} can only be the first size"


class Message:
    """Base class of all messages. `@message` sets `declared`, and derives the other class attributes from it.

    Attributes:
        declared: the declaration of each field, by field name.
        kinds: the kind of each field.
        owners: the modality of each tensor field. None for trees and for tensors that belong to no modality.
        counts: for each field with one entry per row, the field that holds the number of rows.
        tells: for some fields, a text on what the field reveals in addition to what its kind suggests.
        whole: the fields that are sent with all their blocks.
        masks: for a class such as `MaskedUpdate` (`core/masked.py`), the unmasked class, here `Update`; else None.
    """

    declared: ClassVar[Mapping[str, Declared]] = {}
    kinds: ClassVar[Mapping[str, str]] = {}
    owners: ClassVar[Mapping[str, str | None]] = {}
    counts: ClassVar[Mapping[str, str]] = {}
    tells: ClassVar[Mapping[str, str]] = {}
    whole: ClassVar[frozenset[str]] = frozenset()
    masks: ClassVar["type[Message] | None"] = None


_M = TypeVar("_M", bound=type[Message])


@dataclass_transform(frozen_default=True, field_specifiers=(carries,))
def message(cls: _M) -> _M:
    """Make a class a frozen message. Every field must declare a kind.

    Raises:
        RecipeError: a field is neither a tensor nor a tree, or declares an option that its type does not allow.
    """
    dataclass(frozen=True)(cls)  # changes the class in place
    fields, hints = dataclasses.fields(cls), get_type_hints(cls)  # type: ignore[arg-type]
    for field in fields:
        assert "carries" in field.metadata, f"{cls.__name__}.{field.name} does not say what it carries"
    cls.declared = declared = {
        field.name: _completed(f"{cls.__name__}.{field.name}", field.metadata["carries"], hints[field.name])
        for field in fields
    }
    cls.kinds = {name: field.kind for name, field in declared.items()}
    cls.owners = {name: field.of for name, field in declared.items()}
    cls.counts = {name: field.rows for name, field in declared.items() if field.rows is not None}
    assert set(cls.counts.values()) <= set(cls.kinds), f"{cls.__name__} counts rows with a field it does not have"
    cls.tells = {name: field.tells for name, field in declared.items() if field.tells}
    cls.whole = frozenset(name for name, field in declared.items() if field.whole)
    return cls


def _completed(where: str, declared: Declared, hint: Any) -> Declared:
    """Return a field's declaration, completed with the facts that follow from its annotation."""
    if hint is not Tensor and hint != Tree:
        raise RecipeError(f"{where} is annotated {hint}; a field of a message is a Tensor or a Tree")
    if hint is Tensor:
        if declared.kind in OF_THE_MODEL:
            raise RecipeError(f"{where}: {declared.kind} come in a Tree, by the names of the model, not in a Tensor")
        if declared.blocks is not None:
            raise RecipeError(f"{where}: blocks= is for a Tree; a Tensor belongs to one block, which of= names")
        return dataclasses.replace(declared, bare=True)
    if declared.of is not None:
        raise RecipeError(
            f"{where}: of= is for a Tensor; the names in a Tree say which modality each tensor belongs to, and blocks= "
            "which of them are allowed"
        )
    blocks = HELD_BY_DEFAULT.get(declared.kind, (MODALITIES,)) if declared.blocks is None else declared.blocks
    allowed = (MODALITIES, READ, SHARED, *(() if declared.kind in OF_THE_MODEL else (LABELS,)))
    if isinstance(blocks, str) or not {*blocks} <= {*allowed}:
        raise RecipeError(f"{where}: blocks = {blocks!r}; it is a tuple of any of {', '.join(allowed)}")
    return dataclasses.replace(declared, blocks=tuple(blocks))


def map_fields(msg: Message, change: Callable[..., Any], *others: Message) -> Any:
    """Apply a function to every field of a message.

    Args:
        msg: the message; it is not changed.
        change: `change(name, value, *values)` returns the field's new value. `name` is the field's name, `value` its
            Tensor or Tree, and `values` are the values of the same field in `others`.
        others: more messages of the same type.

    Returns:
        A message of the same type; `msg` itself if `change` returned every value unchanged.
    """
    values: dict[str, Any] = {}
    changed = False
    for name in msg.kinds:
        value = getattr(msg, name)
        new = change(name, value, *(getattr(other, name) for other in others)) if others else change(name, value)
        values[name] = new
        changed |= new is not value
    return type(msg)(**values) if changed else msg


def map_value(value: Tensor | Tree, change: Callable[..., Any], *others: Any) -> Any:
    """Apply a function to a Tensor, or to every tensor of a Tree.

    Args:
        value: the Tensor or Tree.
        change: `change(tensor, *tensors)`, where `tensors` are the tensors of the same name in `others`.
        others: more values with the same structure as `value`.
    """
    if isinstance(value, Tensor):
        return change(value, *others)
    if others:
        return {key: change(tensor, *(other[key] for other in others)) for key, tensor in value.items()}
    return {key: change(tensor) for key, tensor in value.items()}


def map_tensors(msg: Message, change: Callable[..., Any], *others: Message) -> Any:
    """Apply a function to every tensor of a message.

    Args:
        msg: the message; it is not changed.
        change: `change(tensor, *tensors)`, where `tensors` are the corresponding tensors of `others`.
        others: more messages of the same type, whose trees have the same names.
    """
    return map_fields(msg, lambda _, value, *values: map_value(value, change, *values), *others)


def tensors(msg: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Iterate over every tensor of a message as (field, name in its tree or None, tensor)."""
    for name in msg.kinds:
        for key, tensor in _named(getattr(msg, name)):
            yield name, key, tensor


def _named(value: Tensor | Tree) -> Iterable[tuple[str | None, Tensor]]:
    """Return the tensors of a field with their names in its tree, or with None if the field is a tensor."""
    return ((None, value),) if isinstance(value, Tensor) else value.items()


def cut(msg: Message, blocks: frozenset[str]) -> Any:
    """Return the message for a client that owns `blocks`. Trees keep only these blocks; `whole` trees keep all."""

    def own(name: str, value: Tensor | Tree) -> Tensor | Tree:
        if name in msg.whole or isinstance(value, Tensor) or all(block_of(key) in blocks for key in value):
            return value
        return select(value, blocks)

    return map_fields(msg, own)


def trimmed(msg: Message) -> Any:
    """Return one client's message without the padding in fields that have one entry per row."""
    if not msg.counts:
        return msg

    rows = {name: int(getattr(msg, count)) for name, count in msg.counts.items()}
    return map_fields(msg, lambda name, v: map_value(v, lambda t: t[: rows[name]]) if name in rows else v)


@dataclass(frozen=True)
class Crossing:
    """One part of a message, as policy and ledger see it: a tensor field, or one block of a tree.

    Attributes:
        field: name of the field.
        kind: its kind.
        block: the modality that the part belongs to, or `shared` or `labels`.
        dtype: data type of the tensors; `mixed` if they have several.
        shape: shape of the tensor; if there are several tensors, their total number of entries.
        bytes: size of the tensors in bytes.
        names: names of the tensors in the tree. For parameters and gradients, only the name of the block; for a tensor
            field, empty.
        masked: whether the tensors are masked, so that only their sum over several clients can be read.
        compressed: how tensors are compressed, if some are. `bytes` then counts what is sent.
    """

    field: str
    kind: str
    block: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    names: frozenset[str] = frozenset()
    masked: bool = False
    compressed: str = ""


def crossings(
    msg: Message, *, stacked: bool = False, rows: Mapping[str, int] | None = None, packings: Packings | None = None
) -> tuple[Crossing, ...]:
    """Return the parts of a message. The policy has a verdict, and the ledger has a row, for each part.

    Args:
        msg: the message of one client, or a stack of messages.
        stacked: whether every tensor has a leading client axis. If so, the result is that of one client's message.
        rows: for each padded field, the number of rows without padding.
        packings: the tensors that are compressed.
    """
    packed = packings or {}
    form: list[_Form] = []
    for name in msg.kinds:
        real = None if rows is None else rows.get(name)
        named = _named(getattr(msg, name))
        form.append(tuple((key, _shape(t, stacked, real), t.dtype, packed.get((name, key))) for key, t in named))
    return _crossings(type(msg), tuple(form))  # type: ignore[arg-type]  # a class is hashable


_Entry = tuple[str | None, tuple[int, ...], torch.dtype, Packing | None]

_Form = tuple[_Entry, ...]
"""For each tensor of a field: its name in the tree (None for a tensor field), shape, data type and compression."""


def _shape(tensor: Tensor, stacked: bool, rows: int | None) -> tuple[int, ...]:
    shape = tensor.shape[1:] if stacked else tensor.shape
    return shape if rows is None else (rows, *shape[1:])


@functools.lru_cache(maxsize=1024)
def _crossings(kind_of_message: type[Message], form: tuple[_Form, ...]) -> tuple[Crossing, ...]:
    """Return the parts of a message of this class and form. Cached, because most messages have one of a few forms."""
    parts: list[Crossing] = []
    for (name, kind), tensors_ in zip(kind_of_message.kinds.items(), form, strict=True):
        groups: dict[str, list[_Entry]] = {}
        for entry in tensors_:
            key = entry[0]
            if key is None:
                owner = kind_of_message.owners[name] or SHARED
            else:
                owner = block_of(key) if kind in OF_THE_MODEL else key
            block = LABELS if kind == "labels" else owner
            groups.setdefault(block, []).append(entry)
        masked = kind_of_message.declared[name].masked
        parts.extend(_crossing(name, kind, block, tuple(group), masked) for block, group in groups.items())
    return tuple(parts)


def _crossing(field: str, kind: str, block: str, parts: _Form, masked: bool) -> Crossing:
    counts = [math.prod(shape) for _, shape, *_ in parts]
    dtypes = {str(dtype).removeprefix("torch.") for _, _, dtype, _ in parts}
    keys = {key for key, *_ in parts if key is not None}
    sizes = [
        count * dtype.itemsize if packing is None else packing.size(shape, dtype)
        for count, (_, shape, dtype, packing) in zip(counts, parts, strict=True)
    ]
    return Crossing(
        field=field,
        kind=kind,
        block=block,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        shape=tuple(parts[0][1]) if len(parts) == 1 else (sum(counts),),
        bytes=sum(sizes),
        names=frozenset(map(block_of, keys) if kind in OF_THE_MODEL else keys),
        masked=masked,
        compressed=next((packing.form for *_, packing in parts if packing is not None), ""),
    )
