"""The messages of secure aggregation.

In the shapes, n is the number of clients in the cohort. A ciphertext has `SEALED` bytes.
"""

import torch
from torch import Tensor

from polyfed.core.messages import Message, carries, message, tensors
from polyfed.core.option_checks import NOT_NEGATIVE, between
from polyfed.core.request import Accept
from polyfed.core.tree import Tree
from polyfed.privacy.masks import KEY, SEED, TAG

SEALED = 2 * SEED + TAG
"""Bytes of two encrypted shares, one of each seed, with the tag of their encryption."""

TELLS = "nothing about data: random keys and shares"


@message
class Opening(Message):
    """Opens a request and asks for new public keys. `number`, int64 (), is different for every request of a round."""

    number: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE)


@message
class PublicKeys(Message):
    """A client's two public keys, uint8 (2, 32): for the encryption of shares, and for masks."""

    keys: Tensor = carries("statistic", dtype="uint8", shape=(2, KEY), tells=TELLS, random=True)


@message
class Roster(Message):
    """The cohort of n clients: their public keys, uint8 (n, 2, 32), and the members of each block, bool (n,)."""

    keys: Tensor = carries("statistic", dtype="uint8", shape=("cohort", 2, KEY))
    members: Tree = carries("statistic", dtype="bool", shape=("cohort",), whole=True)


@message
class EncryptedShares(Message):
    """A client's shares, each encrypted to its receiver, uint8 (n, SEALED). The client's own row is zero."""

    sealed: Tensor = carries("statistic", dtype="uint8", shape=("cohort", SEALED), tells=TELLS, random=True)


@message
class Delivery(Message):
    """The shares for one client, and a bound on the sum of the weights.

    `senders`, bool (n,), marks the clients that sent a share. `sealed`, uint8 (n, SEALED), holds the ciphertexts.
    `weight_bits`, int64 (), is the bound: the weights add up to at most 2^`weight_bits`.
    """

    senders: Tensor = carries("statistic", dtype="bool", shape=("cohort",))
    sealed: Tensor = carries("statistic", dtype="uint8", shape=("cohort", SEALED))
    weight_bits: Tensor = carries("statistic", dtype="int64", within=between(0, 62))


@message
class Ready(Message):
    """Confirms that the client can mask its reply. The message has no fields."""


@message
class Unmasking(Message):
    """Tells which clients sent a masked reply.

    `survivors`, bool (n,), marks the clients whose masked reply arrived. `dropped`, bool (n,), marks the clients that
    sent shares earlier (`senders` of `Delivery`), but whose masked reply did not arrive.
    """

    survivors: Tensor = carries("statistic", dtype="bool", shape=("cohort",))
    dropped: Tensor = carries("statistic", dtype="bool", shape=("cohort",))


@message
class RevealedShares(Message):
    """Shares of the mask keys of the dropped clients, and of the self-masks of the survivors, uint8 (n, 16) each.

    All other rows are zero.
    """

    of_keys: Tensor = carries("statistic", dtype="uint8", shape=("cohort", SEED), tells=TELLS, random=True)
    of_self_masks: Tensor = carries("statistic", dtype="uint8", shape=("cohort", SEED), tells=TELLS, random=True)


def bytes_of_shape(*shape: int) -> Accept:
    """Return an `accept` function for `Federation.ask`: each field of a reply must hold bytes of this shape."""

    def flaw(client: int, reply: Message) -> str:
        strange = [name for name, _, v in tensors(reply) if v.dtype != torch.uint8 or tuple(v.shape) != shape]
        return f"sent {strange[0]} in another form than {' x '.join(map(str, shape))} bytes" if strange else ""

    return flaw
