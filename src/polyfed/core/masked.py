"""Masked messages, which clients send instead of sum-only messages under secure aggregation.

A message is sum-only if every one of its fields is declared with `sum_only=True`. `masked_class(Update)` returns
a message class named `MaskedUpdate`. It has the same fields and kinds of data as `Update`, and the tensors have the
same names. But the tensors of `MaskedUpdate` are integers that look random. Only their sum over several clients can be
read (docs/secure-aggregation.md).
"""

import dataclasses
from functools import cache
from typing import get_type_hints

import torch

from polyfed.core.messages import OF_THE_MODEL, Declared, Message, message
from polyfed.core.tree import SHARED, block_of

LONG = "statistic"
"""The kind that is masked modulo 2**64, because statistics are few numbers with a wide range. All other kinds use the
number of bits that the recipe sets."""


def sum_only(kind: type[Message]) -> bool:
    """Return whether the server needs only sums of a message.

    For a message without fields, the result is True, because such a message contains no data.
    """
    return all(said.sum_only for said in kind.declared.values())


@cache
def masked_class(kind: type[Message]) -> type[Message]:
    """Return the message class that replaces the sum-only class `kind` under secure aggregation.

    Each tensor has the shape of the original tensor. Statistics are int64, and all other kinds are int32 or int64.
    """
    assert kind.declared, f"{kind.__name__} has no fields to mask"
    assert sum_only(kind), f"{kind.__name__} is not sum-only"
    weights = {said.weight for said in kind.declared.values() if said.weight is not None}
    assert weights <= set(kind.declared), f"{kind.__name__} is weighted by a field that it does not have"
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.declared}
    body = {"__doc__": f"A masked {kind.__name__}.", "__module__": __name__, "__annotations__": hints}
    fields = {name: dataclasses.field(metadata={"carries": _hidden(said)}) for name, said in kind.declared.items()}
    made: type[Message] = message(type(f"Masked{kind.__name__}", (Message,), body | fields))
    made.masks = kind
    return made


def _hidden(said: Declared) -> Declared:
    """Return the declaration of a masked field. It declares no range, because masked values look random."""
    return dataclasses.replace(said, masked=True, within=None, sum_only=False, weight=None)


def owner(said: Declared, key: str | None) -> str:
    """Return the block of a tensor of a field. `key` is the tensor's name in a tree, or None for a tensor field."""
    if key is None:
        return said.of or SHARED
    return block_of(key) if said.kind in OF_THE_MODEL else key


def fits(said: Declared, dtype: torch.dtype) -> bool:
    """Return whether a masked field may have this data type."""
    return dtype == torch.int64 or (said.kind != LONG and dtype == torch.int32)
