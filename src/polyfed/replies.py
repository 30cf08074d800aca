"""What comes back from an ask: stacked replies, and their means per block."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.messages import Message, rebuilt, tensors, trimmed
from polyfed.tree import Tree

SMALL = 2**18
"""Bytes of a reply up to which copying it into a stack costs less than looking at it by itself (docs/performance.md)."""

MOST = 64
"""Replies of such a stack: what is done once for all of them hardly counts any more, and the copy stays below 16 MiB."""


@dataclass(frozen=True)
class Part:
    """Replies of some clients, stacked: every tensor of `message` has a leading axis in the order of `clients`."""

    clients: tuple[int, ...]
    message: Message

    def without(self, dropped: Collection[int]) -> "Part | None":
        """The part without these clients; None when nobody is left."""
        wanted = [i for i, client in enumerate(self.clients) if client not in dropped]
        if len(wanted) == len(self.clients):
            return self
        index = torch.tensor(wanted)
        clients = tuple(self.clients[i] for i in wanted)
        return Part(clients, rebuilt(self.message, lambda t: t[index.to(t.device)])) if wanted else None


def stacked(replies: dict[int, Message]) -> Iterator[Part]:
    """Replies that came one by one, as parts: small ones of one form together, so that checking and averaging them
    takes one operation for many. Takes them out of `replies` on its way, so that nothing is held twice for long."""
    alike: dict[Hashable, list[int]] = {}
    for client, reply in replies.items():
        found = [(name, key, value.shape, value.dtype, value.nbytes) for name, key, value in tensors(reply)]
        alone = client if sum(entry[-1] for entry in found) > SMALL else None
        alike.setdefault((type(reply), alone, *found), []).append(client)
    for group in alike.values():
        for start in range(0, len(group), MOST):
            clients = tuple(group[start : start + MOST])
            yield Part(clients, _stack([replies.pop(client) for client in clients]))


def _stack(messages: Sequence[Any]) -> Any:
    """One message with a leading axis for messages of one form."""
    first, fields = messages[0], dict[str, Any]()
    with torch.no_grad():
        if len(messages) == 1:
            return rebuilt(first, lambda tensor: tensor.unsqueeze(0))
        for name in first.kinds:
            values = [getattr(msg, name) for msg in messages]
            if isinstance(values[0], Tensor):
                fields[name] = torch.stack(values)
            else:
                fields[name] = {key: torch.stack([tree[key] for tree in values]) for key in values[0]}
    return type(first)(**fields)


@dataclass(frozen=True)
class Answer:
    """What an engine brings back: parts in ascending order of their first client, and who is missing, and why."""

    parts: list[Part]
    missing: dict[int, str]


@dataclass(frozen=True)
class Replies(Mapping[int, Any]):
    """Replies by client, kept stacked; a single client's reply is a view made on demand.

    Attributes:
        parts: the stacks.
        missing: clients that were asked and gave nothing usable, with the reason.
    """

    parts: list[Part]
    missing: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the clients."""
        place = {c: (part, i) for part in self.parts for i, c in enumerate(part.clients)}
        object.__setattr__(self, "_place", dict(sorted(place.items())))

    def __getitem__(self, client: int) -> Any:
        part, i = self._place[client]  # type: ignore[attr-defined]
        return trimmed(rebuilt(part.message, lambda t: t[i]))

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

        Names that nobody sent are absent. Integers (counters) take the maximum, never a mean (algorithms.md 0.4).
        """
        totals: dict[str, float] = {}
        for part in self.parts:
            share = sum(weights[c] for c in part.clients)
            for key in getattr(part.message, name):
                totals[key] = totals.get(key, 0.0) + share
        alike: dict[float, list[str]] = {}
        for key, total in totals.items():
            if total > 0:
                alike.setdefault(total, []).append(key)
        mean: Tree = {}
        for part in self.parts:
            tree = getattr(part.message, name)
            for total, keys in alike.items():
                sent = {key: tree[key] for key in keys if key in tree}
                _accumulate(mean, sent, [weights[c] / total for c in part.clients])
        return {key: value[0] for key, value in mean.items()}


def joined(asks: Iterable[Replies]) -> Replies:
    """The replies of several asks, which went to different clients, as if of one."""
    asked = list(asks)
    missing = {client: why for replies in asked for client, why in replies.missing.items()}
    return Replies([part for replies in asked for part in replies.parts], missing)


def _accumulate(mean: Tree, sent: Tree, share_K: list[float]) -> None:
    """Adds the weighted sum over the clients of a part to `mean`, in place; both keep a leading axis."""
    counters = {key: value for key, value in sent.items() if not value.is_floating_point()}
    for key, value in counters.items():
        top = value.amax(0, keepdim=True)
        mean[key] = torch.maximum(mean[key], top) if key in mean else top
    sums = {key: value for key, value in sent.items() if key not in counters}
    if len(share_K) > 1:
        weight = torch.tensor([share_K])
        sums = {key: torch.tensordot(weight.to(value), value, 1) for key, value in sums.items()}
    mean.update({key: torch.zeros_like(value) for key, value in sums.items() if key not in mean})
    if sums:  # all tensors in one call
        alpha = share_K[0] if len(share_K) == 1 else 1.0
        torch._foreach_add_([mean[key] for key in sums], list(sums.values()), alpha=alpha)
