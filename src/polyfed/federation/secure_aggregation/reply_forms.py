"""The forms of masked replies and of public keys. The form of a block lists its tensors with their shapes and types.

The server cannot read any value of a masked reply, but it can see the form of every block. The form that most clients
sent is the right form, so no single client can make the server drop the replies of the others.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyfed.core.masked import LONG
from polyfed.core.messages import Message, tensors
from polyfed.federation.secure_aggregation.cohort import Entry, Numbers, by_block
from polyfed.federation.secure_aggregation.messages import PublicKeys
from polyfed.privacy import masks
from polyfed.privacy.fixed_point import UNSIGNED

Form = tuple[tuple[Entry, torch.Size, torch.dtype], ...]
"""The entries of one block, each with its shape and type, in the order in which they are masked."""


def alike(
    kind: type[Message], groups: Mapping[str, np.ndarray], replies: Mapping[int, Message], bits: int
) -> dict[int, Numbers]:
    """Return the masked integers of the replies that have the right form, by the client's place in the cohort.

    Args:
        kind: the class of the masked replies.
        groups: block -> bool (n,), which is True for each client that must send this block.
        replies: the replies by place.
        bits: number of bits of each masked integer. Statistics have 64 bits.
    """
    width = {name: 64 if carried == LONG else bits for name, carried in kind.kinds.items()}
    values: dict[int, dict[Entry, Tensor]] = {}
    for place, reply in replies.items():
        own = {(name, key): value for name, key, value in tensors(reply)}
        if all(value.dtype.itemsize * 8 == width[name] for (name, _), value in own.items()):
            values[place] = own
    forms = {place: _by_block(kind, own) for place, own in values.items()}
    usual = {block: _most_frequent(block, group, forms) for block, group in groups.items()}
    result: dict[int, Numbers] = {}
    for place, own in values.items():
        if forms[place] == {block: form for block, form in usual.items() if form and groups[block][place]}:
            result[place] = {e: value.cpu().numpy().view(UNSIGNED[width[e[0]]]) for e, value in own.items()}
    return result


def _by_block(kind: type[Message], values: Mapping[Entry, Tensor]) -> dict[str, Form]:
    listed = by_block(kind, values)
    return {block: tuple((e, values[e].shape, values[e].dtype) for e in entries) for block, entries in listed.items()}


def _most_frequent(block: str, group: np.ndarray, forms: Mapping[int, Mapping[str, Form]]) -> Form:
    """Return the form of a block that most of its clients sent, or () if they sent nothing."""
    counts = Counter(own.get(block, ()) for place, own in forms.items() if group[place])
    return counts.most_common(1)[0][0] if counts else ()


def flaw_of_keys(client: int, reply: PublicKeys) -> str:
    """Say what is wrong with public keys. This is an `accept` function for `Federation.ask`.

    One unusable key in the roster would make every other client refuse the roster.
    """
    usable = all(masks.is_usable(key.cpu().numpy().tobytes()) for key in reply.keys)
    return "" if usable else "sent a public key of small order or in an unusual encoding"
