"""What comes back from an ask: stacked replies, and their means per block."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from polyfed.messages import Message, rebuilt, trimmed
from polyfed.tree import Tree


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
