"""Replies that are summed where their clients ran, so that only sums and a few numbers of each client travel.

`[engine] combine = "nodes"` does this for replies that are only summed and hold parameters or gradients. The sums, in
float64, follow a binary tree over the units of a request (the clients that an engine runs together): each half of the
units is summed first, then the two halves. A worker sums whole subtrees, so the bits depend neither on the number of
workers nor on which of them ran a client.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import BadReply
from polyfed.core.masked import sum_only
from polyfed.core.messages import OF_THE_MODEL, Message, tensors
from polyfed.core.request import Send
from polyfed.core.system.openmp import using_threads
from polyfed.core.system.tracing import traced
from polyfed.core.tree import Tree
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.message_validation import MessageValidator, foreign
from polyfed.federation.outliers import Block, OutlierCheck, Sizes
from polyfed.federation.replies import SMALL, Replies, ReplyStack
from polyfed.federation.secure_aggregation.cohort import Entry
from polyfed.federation.secure_aggregation.server import Summing
from polyfed.federation.secure_aggregation.sums import SummedReplies

Span = tuple[int, int]
"""The first unit of a subtree, and the one after its last."""


@dataclass(frozen=True)
class Combined:
    """The sum of the replies of some clients.

    Attributes:
        sent: client -> the names of the tensors of its trees, for each client whose reply is in the sums.
        missing: the clients whose reply cannot be used, each with the reason.
        numbers: 0-dimensional field -> client -> its value.
        sums: the weighted sum of each tensor of a tree, in float64; of whole numbers, such as counters, the maximum.
        bounds: what `OutlierCheck.harmless` needs of the replies.
    """

    sent: dict[int, tuple[Entry, ...]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, dict[int, float]] = field(default_factory=dict)
    sums: dict[Entry, Tensor] = field(default_factory=dict)
    bounds: dict[Block, NDArray[np.float64]] = field(default_factory=dict)

    def plus(self, other: "Combined") -> "Combined":
        """Return the sum of two sums over different clients. It may take the memory of this one."""
        assert not self.sent.keys() & other.sent.keys(), "no client counts twice"
        sums = dict(self.sums)
        for entry, value in other.sums.items():
            sums[entry] = _added(sums[entry], value) if entry in sums else value
        numbers = {
            name: self.numbers.get(name, {}) | other.numbers.get(name, {}) for name in self.numbers | other.numbers
        }
        bounds = {
            block: np.concatenate([one.bounds[block] for one in (self, other) if block in one.bounds], 1)
            for block in self.bounds | other.bounds
        }
        return Combined(self.sent | other.sent, self.missing | other.missing, numbers, sums, bounds)


def halves(span: Span) -> tuple[Span, Span]:
    """Return the two subtrees of a tree with several units."""
    middle = (span[0] + span[1]) // 2
    return (span[0], middle), (middle, span[1])


def summed(span: Span, of: Callable[[Span], Combined | None]) -> Combined:
    """Return the sum over a tree of units.

    Args:
        of: returns the sum over a subtree, or None to let its halves be summed first. It knows every single unit.
    """
    result = of(span)
    if result is not None:
        return result
    first, second = halves(span)
    return summed(first, of).plus(summed(second, of))


@dataclass(frozen=True)
class Combining:
    """How the replies to a request are checked and summed where the clients ran.

    Attributes:
        weighted: the fields that hold trees -> whether clients count by their rows in them, or all alike.
        forms: the shape and type of each tensor of the server's model, with which replies must agree.
        compared: whether the server looks for replies that are far larger than the others.
    """

    weighted: Mapping[str, bool]
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    compared: bool = True

    @classmethod
    def of(cls, kind: type[Message], method: Summing, template: Tree, *, compared: bool) -> "Combining | None":
        """Return how replies of this class are combined, or None if they are not."""
        if not combinable(kind):
            return None
        trees = [name for name, said in kind.declared.items() if not said.bare]
        weighted = {name: method.weight_of(name, kind) is not None for name in trees}
        return cls(weighted, {name: (tuple(value.shape), value.dtype) for name, value in template.items()}, compared)

    def weights(self, name: str, clients: Collection[int], registry: ClientRegistry) -> Mapping[int, int]:
        """Return the weight of each client in the sums of a field."""
        return registry.rows_of(clients) if self.weighted[name] else dict.fromkeys(clients, 1)

    def total(
        self, engine: Any, kind: type[Message], units: Sequence[Sequence[int]], parts: list[ReplyStack], send: Send
    ) -> Combined:
        """Return the sum of the usable replies.

        Args:
            engine: the engine that ran the clients.
            kind: the class of the replies.
            units: the units that are summed; neighbours in the tree of all units.
            parts: the replies of their clients.
            send: what the clients received.
        """
        template = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in self.forms.items()}
        registry, size = engine.registry, engine.population.columns.num_classes
        validator = MessageValidator(template, engine.model, registry.modalities, engine.objective, size)
        missing: dict[int, str] = {}
        places: dict[int, tuple[ReplyStack, int]] = {}
        known: dict[Block, list[NDArray[np.float64]]] = {}
        for part in parts:
            bad, found = _unusable(part, kind, validator, registry)
            missing |= bad
            kept = [place for place, client in enumerate(part.clients) if client not in bad]
            if (left := part.without(bad)) is None:
                continue
            places |= {client: (left, place) for place, client in enumerate(left.clients)}
            if self.compared:
                norms = {block: own[kept] for block, own in found.items()}
                for block, own in OutlierCheck(1.0, send).bounds(left, norms).items():
                    known.setdefault(block, []).append(own)

        def of(span: Span) -> Combined | None:
            if span[1] - span[0] > 1:
                return None
            return self._of_unit([client for client in units[span[0]] if client in places], places, registry)

        with using_threads(1):  # a sum over clients must not be divided among threads
            total = summed((0, len(units)), of)
        return replace(total, missing=missing, bounds={block: np.concatenate(own, 1) for block, own in known.items()})

    def _of_unit(
        self, clients: list[int], places: Mapping[int, tuple[ReplyStack, int]], registry: ClientRegistry
    ) -> Combined:
        """Return the sum over some clients, added in this order."""
        result, own = Combined(), [places[client] for client in clients]
        rows: dict[Entry, list[Tensor]] = {}
        entries: dict[int, tuple[Entry, ...]] = {}
        stack = own[0][0].message if own and own[0][0].clients == tuple(clients) else None
        for client, (part, place) in zip(clients, own, strict=True):
            named = tuple((name, key) for name, key, _ in tensors(part.message) if key is not None)
            result.sent[client] = entries.setdefault(id(part), named)  # the same object for the whole stack
            for name, said in part.message.declared.items():
                if said.bare:
                    result.numbers.setdefault(name, {})[client] = getattr(part.message, name)[place].item()
            for name, key in named if stack is None else ():
                rows.setdefault((name, key), []).append(getattr(part.message, name)[str(key)][place])
        values: Mapping[Entry, Tensor | list[Tensor]] = rows
        if stack is not None:
            values = {(name, key): value for name, key, value in tensors(stack) if key is not None}
        senders = _senders(result.sent)
        shares = {name: self.weights(name, clients, registry) for name in self.weighted}
        for entry, each in values.items():
            result.sums[entry] = _sum(each, [shares[entry[0]][client] for client in senders[entry]])
        return result


def combinable(kind: type[Message]) -> bool:
    """Return whether replies of this class are large and only summed: all fields are, and some hold a model's trees."""
    trees = [said for said in kind.declared.values() if not said.bare]
    of_the_model = bool(trees) and all(said.kind in OF_THE_MODEL and not said.stacked for said in trees)
    return of_the_model and sum_only(kind) and all(said.shape == () for said in kind.declared.values() if said.bare)


@dataclass(frozen=True)
class CombinedReplies(SummedReplies):
    """The sum of the replies to a request, which the clients' workers have computed, and the numbers of each client.

    Attributes:
        told: 0-dimensional field -> client -> its value.
    """

    told: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    because: ClassVar[str] = (
        "with [engine] combine = 'nodes' only sums of the replies travel, and the method reads a single one. Remove "
        "`combine`, or let the method say so in `single_replies`"
    )
    unequal: ClassVar[str] = (
        "with [engine] combine = 'nodes' the sum of '{name}' has the weights that its message declares, and the server "
        "would use other ones. Remove `combine`"
    )

    @classmethod
    def of(
        cls, found: Combined, how: Combining, template: Tree, registry: ClientRegistry, missing: dict[int, str]
    ) -> "CombinedReplies":
        """Return the replies of a whole request."""
        clients = tuple(sorted(found.sent))
        senders = {entry: tuple(own) for entry, own in _senders({c: found.sent[c] for c in clients}).items()}
        weights = {name: how.weights(name, clients, registry) for name in how.weighted}
        return cls([], missing, clients, found.sums, senders, weights, template, told=found.numbers)

    @override
    def numbers(self, name: str) -> dict[int, float]:
        return {client: self.told[name][client] for client in self.clients}

    @override
    def mean_number(self, name: str, weights: Mapping[int, float]) -> float:
        return Replies.mean_number(self, name, weights)

    @override
    @traced("aggregate")
    def mean(self, name: str, weights: Mapping[int, float]) -> Tree:
        whole = {
            str(key): value.to(self.template[str(key)].dtype)
            for (of, key), value in self.sums.items()
            if of == name and not value.is_floating_point() and any(weights[c] > 0 for c in self.senders[of, key])
        }
        return super().mean(name, weights) | whole

    @override
    def total(self, name: str) -> Any:
        if name in self.told:
            return torch.tensor(sum(self.told[name].values()))
        return {key: value for (of, key), value in self.sums.items() if of == name}


def _senders(sent: Mapping[int, tuple[Entry, ...]]) -> dict[Entry, list[int]]:
    """Return the clients that sent each tensor, in the order of `sent`."""
    result: dict[Entry, list[int]] = {}
    for client, entries in sent.items():
        for entry in entries:
            result.setdefault(entry, []).append(client)
    return result


def _unusable(
    part: ReplyStack, kind: type[Message], validator: MessageValidator, registry: ClientRegistry
) -> tuple[dict[int, str], Sizes]:
    """Return the clients of a stack whose reply the server could not use, each with the reason, and all sizes."""
    try:
        validator.check(part.message, kind)
    except BadReply as error:
        return dict.fromkeys(part.clients, str(error)), {}
    bad, result = validator.unusable(part)
    return foreign(part, registry) | bad, result


def _sum(values: Tensor | list[Tensor], weights: list[int]) -> Tensor:
    """Return the weighted sum of a tensor over K clients in float64; of whole numbers, the maximum.

    The result depends on the values and their order only, not on whether they lie in one stack.

    Args:
        values: (K, ...), or one tensor for each client.
    """
    one = values[0]
    if not (one.is_floating_point() or one.is_complex()):
        return (values if isinstance(values, Tensor) else torch.stack(values)).amax(0)
    wide = torch.promote_types(one.dtype, torch.float64)
    if one.nbytes <= SMALL:  # fewer operations
        stack = values if isinstance(values, Tensor) else torch.stack(values)
        share = torch.tensor(weights, dtype=wide, device=one.device)
        return (stack.to(wide) * share.view(-1, *(1 for _ in one.shape))).sum(0)
    total = one.to(wide).mul_(weights[0]) if wide != one.dtype else one * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total.add_(value.to(wide), alpha=weight)
    return total


def _added(one: Tensor, other: Tensor) -> Tensor:
    return one.add_(other) if one.is_floating_point() or one.is_complex() else torch.maximum(one, other)
