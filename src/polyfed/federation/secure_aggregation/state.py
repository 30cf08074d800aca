"""The secrets of a client during a request of secure aggregation, in its local state."""

import hashlib
import secrets
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.tree import Tree, under
from polyfed.federation.context import ClientContext
from polyfed.federation.secure_aggregation.cohort import Cohort
from polyfed.privacy import masks
from polyfed.training import ClientData

SECRETS = "secure_aggregation"
"""The block of a client's local state that holds its secrets of the current request."""

ADVERTISED, DIVIDED, DELIVERED, MASKED = range(1, 5)
"""The steps of a request. The local state holds the last step that the client has completed."""


class Refusal(ValueError):
    """A client refuses to continue a request of secure aggregation, because its reply might not stay secret."""


def fresh_seeds(context: ClientContext, data: ClientData, request: int) -> list[bytes]:
    """Return three new seeds. A device draws them from the system's secure generator.

    A simulation derives them from the key of the client dataset, so that a repeated run has the same seeds.

    Args:
        data: the client dataset. Its attribute `key`, a number, is different in every round.
        request: a number that is different for every request of the round.
    """
    if context.on_device:
        return [secrets.token_bytes(masks.SEED) for _ in range(3)]
    drawn = [keys.key(int(data.key), SECRETS, request, number) for number in range(3)]
    return [hashlib.blake2b(str(key).encode(), digest_size=masks.SEED).digest() for key in drawn]


def state_of(local: Tree, step: int) -> Tree:
    """Return the secrets in a local state, and check that the client has just completed this step.

    Raises:
        Refusal: the client is in another step, because the server repeats a step or changes the order of the steps.
    """
    state = under(SECRETS, local)
    now = int(state["step"]) if state else 0
    if now != step:
        raise Refusal(f"the server asks for step {step + 1} of secure aggregation after step {now}; keys serve once")
    return state


def without_secrets(local: Tree) -> Tree:
    """Return the local state without the secrets of a request."""
    return {name: value for name, value in local.items() if not name.startswith(f"{SECRETS}.")}


def seeds_of(state: Tree) -> tuple[bytes, bytes, bytes]:
    """Return three seeds: for the key pair that encrypts shares, for the mask key, and for the self-masks."""
    enc, mask, root = (bytes_of(row) for row in state["seeds"])
    return enc, mask, root


def cohort_of(public: Tensor, members: Mapping[str, Tensor]) -> Cohort:
    """Read a cohort from the public keys and members that the server sent.

    Raises:
        Refusal: the keys or members have a wrong type or shape.
    """
    fine = public.dtype == torch.uint8 and public.dim() == 3 and public.shape[1:] == (2, masks.KEY)
    if not fine:
        raise Refusal("the list of public keys cannot be read")
    num = len(public)
    return Cohort(public.cpu().numpy(), {block: flags(value, num, block) for block, value in members.items()})


def cohort_in(state: Tree) -> Cohort:
    """Return the cohort that the client keeps in its local state."""
    return cohort_of(state["keys"], under("members", state))


def flags(value: Tensor, num: int, what: str) -> np.ndarray:
    """Read a list of clients, bool (n,), that the server sent.

    Raises:
        Refusal: the list has a wrong type or shape.
    """
    if value.dtype != torch.bool or value.shape != (num,):
        raise Refusal(f"the list of {what} cannot be read")
    flags: np.ndarray = value.cpu().numpy()
    return flags


def way(cohort: Cohort, sender: int, receiver: int) -> tuple[bytes, ...]:
    """Return cohort, sender and receiver of a ciphertext as bytes, for the argument `about` of `masks.seal`."""
    return cohort.transcript, sender.to_bytes(4, "little"), receiver.to_bytes(4, "little")


def tensor_of(content: bytes, *shape: int) -> Tensor:
    """Return bytes as a uint8 tensor of this shape."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(shape)


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return value.cpu().contiguous().numpy().tobytes()
