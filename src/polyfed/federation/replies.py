"""The replies to a request: stacks of replies, and their weighted means."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import Message, map_tensors, tensors, trimmed
from polyfed.core.system.openmp import threads_worth
from polyfed.core.system.tracing import traced
from polyfed.core.tree import Tree

SMALL = 2**18
"""Largest size in bytes of a reply that is copied into a stack. Up to this size, the copy costs less than processing
the reply alone (docs/performance.md)."""

MOST = 64
"""Largest number of small replies in one stack. With this number, a stack takes at most 16 MiB. Larger stacks would
hardly save time."""

Piece = tuple[tuple[int, ...], Tensor]
"""The numbers of K clients, and a tensor (K, ...). The tensor stacks the values that these clients sent under one name
of a tree."""


@dataclass(frozen=True)
class ReplyStack:
    """Stacked replies of several clients. The leading axis of every tensor in `message` has the order of `clients`.

    The clients are in ascending order, so that the order of sums over clients does not depend on how they are divided.
    """

    clients: tuple[int, ...]
    message: Message

    @property
    def num_bytes(self) -> int:
        """The size of the replies in bytes."""
        return sum(value.nbytes for *_, value in tensors(self.message))

    def without(self, dropped: Collection[int]) -> "ReplyStack | None":
        """Return the stack without these clients, or None if no client is left."""
        wanted = [i for i, client in enumerate(self.clients) if client not in dropped]
        if len(wanted) == len(self.clients):
            return self
        return self.at(wanted) if wanted else None

    def at(self, places: Sequence[int]) -> "ReplyStack":
        """Return the replies at these positions of the stack, in this order."""
        index = torch.tensor(places)
        clients = tuple(self.clients[i] for i in places)
        return ReplyStack(clients, map_tensors(self.message, lambda t: t.index_select(0, index.to(t.device))))


def stacked(replies: dict[int, Message]) -> Iterator[ReplyStack]:
    """Yield stacks of replies that arrived one by one.

    Small replies with the same shapes and types share a stack, so that one operation checks or averages many of them.
    The generator removes each reply from `replies` when it copies the reply into a stack, to save memory.
    """
    alike: dict[Hashable, list[int]] = {}
    for client, reply in sorted(replies.items()):
        found = list(tensors(reply))
        alone = client if sum(value.nbytes for _, _, value in found) > SMALL else None
        form = [(name, key, value.shape, value.dtype, value.device) for name, key, value in found]
        alike.setdefault((type(reply), alone, *form), []).append(client)
    for group in alike.values():
        for start in range(0, len(group), MOST):
            clients = tuple(group[start : start + MOST])
            yield ReplyStack(clients, _stack([replies.pop(client) for client in clients]))


def _stack(messages: Sequence[Message]) -> Any:
    """Stack messages with equal shapes and types into one message whose tensors have a leading client axis."""
    first, *others = messages
    if not others:
        return map_tensors(first, lambda tensor: tensor.unsqueeze(0))
    return map_tensors(first, lambda *values: torch.stack(values), *others)


@dataclass(frozen=True)
class Answer:
    """What an engine returns for a request.

    Attributes:
        parts: stacks of replies, in ascending order of their first client.
        missing: clients without a reply, each with the reason.
        combined: a `Combined`, the sum of the replies, in place of `parts`, if the engine has combined them.
    """

    parts: list[ReplyStack]
    missing: dict[int, str]
    combined: Any = None

    @classmethod
    def of(cls, parts: Iterable[ReplyStack], missing: dict[int, str]) -> "Answer":
        """Make an answer from parts, and sort them. If `parts` is a generator, it may fill `missing` while it runs."""
        return cls(sorted(parts, key=lambda part: part.clients[0]), missing)


@dataclass(frozen=True)
class Replies(Mapping[int, Any]):
    """The replies to a request, as a mapping from client to reply. Replies stay stacked, and indexing returns views.

    Attributes:
        parts: the stacks of replies.
        missing: clients that received the request but returned no usable reply, each with the reason.
    """

    parts: list[ReplyStack]
    missing: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Record the stack and the position of every client."""
        place = {c: (part, i) for part in self.parts for i, c in enumerate(part.clients)}
        object.__setattr__(self, "_place", dict(sorted(place.items())))

    def __getitem__(self, client: int) -> Any:
        """Return a client's reply as views of the stack. Clone the tensors that you keep for longer than the round."""
        part, i = self._place[client]  # type: ignore[attr-defined]
        return trimmed(map_tensors(part.message, lambda t: t[i]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._place)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._place)  # type: ignore[attr-defined]

    def numbers(self, name: str) -> dict[int, float]:
        """Return a 0-dimensional field of every reply as a Python number, by client."""
        result: dict[int, float] = {}
        for part in self.parts:
            result.update(zip(part.clients, getattr(part.message, name).tolist(), strict=True))
        return {client: result[client] for client in self}

    def mean_number(self, name: str, weights: Mapping[int, float]) -> float:
        """Return the weighted mean of a 0-dimensional field, or 0 if all weights are 0."""
        numbers = self.numbers(name)
        return sum(numbers[c] * weights[c] for c in self) / max(sum(weights[c] for c in self), 1)

    @traced("aggregate")
    def mean(self, name: str, weights: Mapping[int, float]) -> Tree:
        """Return the weighted mean of a tree. Each tensor is averaged over the clients that sent a tensor of its name.

        For each name, the weights of these clients are divided by their sum. The result lacks names that no client
        sent, and names whose senders all have weight 0. For integers, such as counters, the result is the maximum
        instead of the mean (docs/algorithms/conventions.md). For a tensor of at most `SMALL` bytes, the result does not
        depend on how the replies are stacked. For a larger tensor, the stacking changes the rounding.

        Args:
            name: a field of the message that holds a tree.
            weights: non-negative weight of each client.
        """
        pieces: dict[str, list[Piece]] = {}
        for part in self.parts:
            for key, stack in getattr(part.message, name).items():
                pieces.setdefault(key, []).append((part.clients, stack))
        senders = {key: tuple(clients for clients, _ in found) for key, found in pieces.items()}
        shares = {clients: Shares.of(clients, weights) for clients in dict.fromkeys(senders.values())}
        wanted = {key: shares[clients] for key, clients in senders.items() if shares[clients].total > 0}
        with threads_worth(sum(stack.nbytes for found in pieces.values() for _, stack in found)):
            return {key: _mean(pieces[key], share) for key, share in wanted.items()}


@dataclass(frozen=True)
class Shares:
    """The weights for the mean of one tensor, over the clients that sent this tensor.

    If several tensors of a tree come from the same clients, their means use the same `Shares` object.

    Attributes:
        pieces: for each stack of replies, the shares of its clients. A client's share is its weight divided by `total`.
        total: the sum of the weights.
        order: the positions of the clients in the stacks, sorted by client number. None if the clients in the stacks
            are already sorted by number.
        ascending: the shares, in ascending order of the clients' numbers.
    """

    pieces: tuple[tuple[float, ...], ...]
    total: float
    order: Tensor | None
    ascending: tuple[float, ...]

    @classmethod
    def of(cls, senders: Sequence[tuple[int, ...]], weights: Mapping[int, float]) -> "Shares":
        """Divide the clients' weights by their sum. `senders` holds the clients of each stack."""
        clients = [client for group in senders for client in group]
        total = sum(weights[client] for client in clients)
        assert total == total, "a weight is not a number"
        pieces = tuple(tuple(weights[client] / total if total else 0.0 for client in group) for group in senders)
        shares = [share for group in pieces for share in group]
        order = sorted(range(len(clients)), key=clients.__getitem__)
        sorted_already = order == list(range(len(order)))
        return cls(pieces, total, None if sorted_already else torch.tensor(order), tuple(shares[i] for i in order))


def joined(requests: Iterable[Replies]) -> Replies:
    """Merge the replies of several requests, as if one request had asked all clients. No client is in two requests."""
    asked = list(requests)
    missing = {client: why for replies in asked for client, why in replies.missing.items()}
    return Replies([part for replies in asked for part in replies.parts], missing)


def listed(reasons: Mapping[int, str]) -> str:
    """List the first three missing clients with their reasons.

    A negative number is no client: it stands for the server's evaluation on its own rows.
    """
    named = [
        (f"client {client}" if client >= 0 else "the server's test", why) for client, why in sorted(reasons.items())
    ]
    return "; ".join(f"{who}: {why}" for who, why in named[:3])


def _mean(pieces: list[Piece], shares: Shares) -> Tensor:
    """Return the weighted mean of one tensor over all clients in `pieces`. For integers, return the maximum instead."""
    kinds = {stack.dtype for _, stack in pieces}
    if not any(kind.is_floating_point or kind.is_complex for kind in kinds):
        return torch.stack([stack.amax(0) for _, stack in pieces]).amax(0)
    one = pieces[0][1][0]
    wide = torch.promote_types(one.dtype, torch.float32)  # in a 16-bit type, a sum of hundreds loses half of its digits
    stacks = [(share, stack) for share, (_, stack) in zip(shares.pieces, pieces, strict=True)]
    mean: Tensor | None = None
    for share_K, stack in _ascending(pieces, shares) if one.nbytes <= SMALL else stacks:
        if len(share_K) == 1:
            term = stack[0].to(wide) * share_K[0]
        else:
            row = _row(share_K, wide, stack.device)
            term = torch.mm(row, stack.to(wide).reshape(len(share_K), -1)).view(stack.shape[1:])
        mean = term if mean is None else mean.add_(term)
    assert mean is not None
    return mean.to(one.dtype)


@lru_cache(maxsize=8)
def _row(shares: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return these shares as a matrix with one row. All tensors of a mean have the same shares."""
    return torch.tensor([shares], dtype=dtype, device=device)


def _ascending(pieces: list[Piece], shares: Shares) -> Iterator[tuple[tuple[float, ...], Tensor]]:
    """Yield the shares and tensors of at most `MOST` clients at a time, with the clients in ascending order."""
    whole = pieces[0][1] if len(pieces) == 1 else torch.cat([stack for _, stack in pieces])
    if shares.order is not None:
        whole = whole.index_select(0, shares.order.to(whole.device))
    for start in range(0, len(whole), MOST):
        yield shares.ascending[start : start + MOST], whole[start : start + MOST]
