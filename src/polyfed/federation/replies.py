"""What comes back from an ask: stacked replies, and their means per block."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.messages import Message, map_tensors, tensors, trimmed
from polyfed.core.tree import Tree

SMALL = 2**18
"""Bytes of a reply up to which a copy in a stack costs less than a look at it by itself (docs/performance.md)."""

MOST = 64
"""Replies of such a stack: by then, what is done once for all of them hardly counts; a stack stays below 16 MiB."""

Piece = tuple[tuple[int, ...], Tensor]
"""Clients, and what they sent under one name of a tree: (K, ...)."""


@dataclass(frozen=True)
class ReplyStack:
    """Replies of some clients, stacked: every tensor of `message` has a leading axis in the order of `clients`."""

    clients: tuple[int, ...]
    message: Message

    def without(self, dropped: Collection[int]) -> "ReplyStack | None":
        """The part without these clients; None when nobody is left."""
        wanted = [i for i, client in enumerate(self.clients) if client not in dropped]
        if len(wanted) == len(self.clients):
            return self
        return self.at(wanted) if wanted else None

    def ascending(self) -> "ReplyStack":
        """The part with its clients in ascending order."""
        order = sorted(range(len(self.clients)), key=self.clients.__getitem__)
        return self if order == [*range(len(order))] else self.at(order)

    def at(self, places: Sequence[int]) -> "ReplyStack":
        """The replies at these places of the stack, in this order."""
        index = torch.tensor(places)
        clients = tuple(self.clients[i] for i in places)
        return ReplyStack(clients, map_tensors(self.message, lambda t: t[index.to(t.device)]))


def stacked(replies: dict[int, Message]) -> Iterator[ReplyStack]:
    """Replies that came one by one, as parts: small ones of one form together, so that checking and averaging them
    takes one operation for many. Takes them out of `replies` on its way, so that nothing is held twice for long."""
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
    """Stack messages of one form into one message whose tensors have a leading client axis."""
    first, *others = messages
    if not others:
        return map_tensors(first, lambda tensor: tensor.unsqueeze(0))
    return map_tensors(first, lambda *values: torch.stack(values), *others)


@dataclass(frozen=True)
class Answer:
    """What an engine brings back: parts in ascending order of their first client, and who is missing, and why."""

    parts: list[ReplyStack]
    missing: dict[int, str]

    @classmethod
    def of(cls, parts: Iterable[ReplyStack], missing: dict[int, str]) -> "Answer":
        """The answer with these parts, put into order; `missing` may still be filled while they come."""
        return cls(sorted(parts, key=lambda part: part.clients[0]), missing)


@dataclass(frozen=True)
class Replies(Mapping[int, Any]):
    """Replies by client, kept stacked; a single client's reply is a view made on demand.

    Attributes:
        parts: the stacks.
        missing: clients that were asked and gave nothing usable, with the reason.
    """

    parts: list[ReplyStack]
    missing: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the clients."""
        place = {c: (part, i) for part in self.parts for i, c in enumerate(part.clients)}
        object.__setattr__(self, "_place", dict(sorted(place.items())))

    def __getitem__(self, client: int) -> Any:
        """A client's reply: views of its stack, so clone what is to be kept for longer than the round."""
        part, i = self._place[client]  # type: ignore[attr-defined]
        return trimmed(map_tensors(part.message, lambda t: t[i]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._place)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._place)  # type: ignore[attr-defined]

    def numbers(self, name: str) -> dict[int, float]:
        """A 0-dim field of every reply as a plain number, by client."""
        found: dict[int, float] = {}
        for part in self.parts:
            found.update(zip(part.clients, getattr(part.message, name).tolist(), strict=True))
        return {client: found[client] for client in self}

    def mean(self, name: str, weights: Mapping[int, float]) -> Tree:
        """Per name of a tree, the weighted mean over the clients that sent it; weights are renormalised over those.

        Names that nobody sent are absent, and those whose senders all weigh nothing. Integers (counters) take the
        maximum of all that were sent, never a mean (algorithms.md 0.4). The bits of an entry of at most `SMALL` bytes
        do not depend on which clients came in one stack; those of a larger one do, by rounding.
        """
        pieces: dict[str, list[Piece]] = {}
        for part in self.parts:
            for key, stack in getattr(part.message, name).items():
                pieces.setdefault(key, []).append((part.clients, stack))
        totals = {key: sum(weights[c] for clients, _ in found for c in clients) for key, found in pieces.items()}
        assert all(total == total for total in totals.values()), "a weight is not a number"
        return {key: _mean(found, weights, totals[key]) for key, found in pieces.items() if totals[key] > 0}


def joined(requests: Iterable[Replies]) -> Replies:
    """The replies of several asks, which went to different clients, as if of one."""
    asked = list(requests)
    missing = {client: why for replies in asked for client, why in replies.missing.items()}
    return Replies([part for replies in asked for part in replies.parts], missing)


def _mean(pieces: list[Piece], weights: Mapping[int, float], total: float) -> Tensor:
    """The weighted mean over all clients of the pieces."""
    kinds = {stack.dtype for _, stack in pieces}
    if not any(kind.is_floating_point or kind.is_complex for kind in kinds):
        return torch.stack([stack.amax(0) for _, stack in pieces]).amax(0)
    one = pieces[0][1][0]
    wide = torch.promote_types(one.dtype, torch.float32)  # half of a type's digits are lost in a sum of hundreds
    mean = torch.zeros_like(one, dtype=wide)
    for clients, stack in _ascending(pieces) if one.nbytes <= SMALL else pieces:
        share_K = [weights[client] / total for client in clients]
        if len(clients) == 1:
            mean.add_(stack[0], alpha=share_K[0])
        else:
            share = torch.tensor(share_K, dtype=wide, device=stack.device)
            mean.add_(torch.tensordot(share, stack.to(wide), 1))
    return mean.to(one.dtype)


def _ascending(pieces: list[Piece]) -> list[Piece]:
    """The same, in ascending order of clients and at most `MOST` of them together, however they came."""
    clients = [client for group, _ in pieces for client in group]
    order = sorted(range(len(clients)), key=clients.__getitem__)
    whole = pieces[0][1] if len(pieces) == 1 else torch.cat([stack for _, stack in pieces])
    if order != list(range(len(order))):
        whole = whole[torch.tensor(order, device=whole.device)]
    starts = range(0, len(order), MOST)
    return [(tuple(clients[i] for i in order[s : s + MOST]), whole[s : s + MOST]) for s in starts]
