"""Drops replies that are far larger than the others: one client alone must not carry the others' model away.

The check runs before every rule of `[server] aggregate`, `mean` included, and for every method, because it compares
messages and not models. docs/robustness.md states what it bounds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.messages import OF_THE_MODEL, Declared, Message
from polyfed.core.request import Send
from polyfed.core.tree import block_of
from polyfed.federation.replies import ReplyStack

COMPARED = (*OF_THE_MODEL, "embeddings", "prototypes", "predictions", "raw")
"""Kinds whose sizes are compared with `factor`. So are statistics of one number, such as a loss, with its square."""

OF_SENT = 3.0
"""A reply may always lie this many times the norm of what the client was sent away from it, whatever the others do. The
other clients may have converged, and this one may have data that the model has never seen."""

ALONE = 10.0
"""With one or two replies there is no median that a false reply could not set. An update may then have this many times
the norm of what the client was sent."""

Block = tuple[str, str]
"""The name of a field, and of a block or tensor in it ("" for a field that is a tensor)."""

Sizes = dict[Block, NDArray[np.float64]]
"""The norm of each block of a stack of replies, (K,). Infinite where the norm is too large for the type."""


def row_norms(part: ReplyStack, name: str, value: Tensor) -> Tensor:
    """Return the size of one tensor in each reply of a stack, (K,).

    It is the 2-norm. For a field with one entry for each row, it is the largest magnitude, because clients differ in
    their numbers of rows and a stack pads them.
    """
    order = torch.inf if part.message.declared[name].rows is not None else 2
    exact = torch.promote_types(value.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(value.reshape(len(value), -1), order, dim=1, dtype=exact)
    return norms


def sizes(part: ReplyStack, norms: Sequence[tuple[str, str | None]], values: NDArray[np.float64]) -> Sizes:
    """Group the norms of tensors by block.

    Args:
        part: the stack.
        norms: the field and the name of each tensor.
        values: the `row_norms` of these tensors, (tensors, K).
    """
    places: dict[Block, list[int]] = {}
    for place, (name, key) in enumerate(norms):
        said = part.message.declared[name]
        if (said.kind in COMPARED or _is_number(said)) and not said.masked:
            block = "" if key is None else block_of(key) if said.kind in OF_THE_MODEL else key
            places.setdefault((name, block), []).append(place)
    with np.errstate(over="ignore"):
        return {block: np.sqrt(np.square(values[own]).sum(0)) for block, own in places.items()}


@dataclass(frozen=True)
class OutlierCheck:
    """Compares the replies to one request, block by block.

    A reply is dropped if, in one block, its update is larger than `factor` times the median update of the replies, and
    larger than `OF_SENT` times the norm of what the client was sent. The update is the reply minus what was sent under
    the same name, or the whole reply if nothing was sent; then, 1 for each entry (root mean square) is always allowed.
    For an even number of replies the median is the upper one. As long as fewer than half of the replies are false, it
    lies among the sizes of honest updates. One or two replies are compared with what was sent (`ALONE`), if anything.

    A statistic of one number, such as the loss that steers a selector, may be `factor`^2 times the median, and
    `factor`^2 in any case: a squared error grows with the square of the targets, which differ between honest clients.

    Attributes:
        factor: the largest ratio; `[engine] outlier_factor`.
        send: the messages of the request.
    """

    factor: float
    send: Send

    def bad(self, parts: Sequence[ReplyStack], found: Mapping[int, Sizes]) -> dict[int, str]:
        """Return the clients to drop, each with the reason.

        Args:
            parts: the usable replies.
            found: the sizes of each stack, by its place in `parts`.
        """
        wrong: dict[int, str] = {}
        for block in dict.fromkeys(block for own in found.values() for block in own):
            held = [(parts[place], own[block]) for place, own in found.items() if block in own]
            for client, reason in self._of_block(block, [part for part, _ in held], [norms for _, norms in held]):
                wrong.setdefault(client, reason)
        return wrong

    def bounds(self, part: ReplyStack, found: Sizes) -> dict[Block, NDArray[np.float64]]:
        """Return what `harmless` needs of the replies of a stack, by block.

        Returns:
            (4, K): the least and the largest possible norm of the update, the norm of what was sent, and the number of
            entries. Both norms are exact if one of the replies is as large as one that the check could drop.
        """
        known: dict[Block, NDArray[np.float64]] = {}
        for block, norms in found.items():
            sent, entries = self._sent(part, block), _entries(part, block)
            least, most = np.abs(norms - sent), norms + sent
            if not bool((most <= _allowed(sent, entries)).all()):
                least = most = np.array(list(self._updates(part, block)))
            known[block] = np.stack([least, most, sent, entries])
        return known

    def harmless(self, kind: type[Message], known: Mapping[Block, NDArray[np.float64]]) -> bool:
        """Return whether the check surely drops none of the replies to a request.

        Args:
            kind: their class.
            known: the `bounds` of all stacks, side by side.
        """
        for (name, _), (least, most, sent, entries) in known.items():
            number, allowed = _is_number(kind.declared[name]), _allowed(sent, entries)
            factor, allowed = (self.factor**2, allowed * self.factor**2) if number else (self.factor, allowed)
            if len(least) > 2:
                allowed = np.maximum(factor * float(np.sort(least)[len(least) // 2]), allowed)
            else:
                allowed = np.where(sent > 0, ALONE * sent, np.inf)
            if not bool((most <= allowed).all()):
                return False
        return True

    def _of_block(
        self, block: Block, parts: list[ReplyStack], norms: list[NDArray[np.float64]]
    ) -> Iterator[tuple[int, str]]:
        of_all = np.concatenate(norms)
        sent = np.concatenate([self._sent(part, block) for part in parts])
        entries = np.concatenate([_entries(part, block) for part in parts])
        allowed = _allowed(sent, entries)
        if bool((of_all + sent <= allowed).all()):  # no update is larger than both norms together
            return
        number = _is_number(parts[0].message.declared[block[0]])
        factor, allowed = (self.factor**2, allowed * self.factor**2) if number else (self.factor, allowed)
        updates = of_all
        if bool(sent.any()) or not bool(np.isfinite(of_all).all()):
            updates = np.array([update for part in parts for update in self._updates(part, block)])
        if len(updates) > 2:
            median = float(np.sort(updates)[len(updates) // 2])
            allowed, beside = np.maximum(factor * median, allowed), f"the median of the replies is {median:.2g}"
        else:
            allowed = np.where(sent > 0, ALONE * sent, np.inf)
            beside = f"what was sent has the norm {float(sent.max()):.2g}"
        clients = [client for part in parts for client in part.clients]
        for place in np.flatnonzero(updates > allowed).tolist():
            (name, key), size = block, float(updates[place])
            where = f"{name} (block {key})" if key else name
            found = f"it is {size:.2g}" if number else f"its update has the norm {size:.2g}"
            text = f"{where} is too large: {found}, and {beside}"
            yield clients[place], f"{text} ([engine] outlier_factor = {self.factor:g})"

    def _sent(self, part: ReplyStack, block: Block) -> NDArray[np.float64]:
        """Return the norm of what each client of a stack was sent under the names of a block, (K,); 0 if nothing."""
        if part.message.declared[block[0]].rows is not None:
            return np.zeros(len(part.clients))
        if isinstance(self.send, Message):
            return np.full(len(part.clients), _norm(self._counterpart(part, block, self.send)))
        return np.array([_norm(self._counterpart(part, block, self.send[client])) for client in part.clients])

    def _counterpart(self, part: ReplyStack, block: Block, got: Message) -> dict[str, Tensor]:
        """Return what a client was sent under the names and in the shapes of a block of its reply."""
        stacks = _of(part.message, block)
        named = _of(got, block)
        return {key: value for key, value in named.items() if key in stacks and value.shape == stacks[key].shape[1:]}

    def _updates(self, part: ReplyStack, block: Block) -> Iterator[float]:
        """Yield the norm of each client's update. It is exact even where the norm of the reply overflows."""
        by_row, stacks = part.message.declared[block[0]].rows is not None, _of(part.message, block)
        for i, client in enumerate(part.clients):
            if by_row:
                yield max(float(stack[i].abs().amax()) for stack in stacks.values())
                continue
            got = self.send if isinstance(self.send, Message) else self.send[client]
            sent = self._counterpart(part, block, got)
            yield float(sum(_square(stack[i], sent.get(key)) for key, stack in stacks.items()) ** 0.5)


def too_far(tree: Mapping[str, Tensor], sent: Mapping[str, Tensor], factor: float = ALONE) -> str:
    """Return what is wrong with a tree that is not finite or lies more than `factor` times the norm of `sent` from it.

    A method uses this check where it trains with one client at a time, so that no other reply shows what is usual.

    Args:
        tree: the parameters after one client's contribution.
        sent: the same parameters before it.
        factor: the largest ratio.
    """
    far = sum(_square(value, sent.get(key)) for key, value in tree.items() if value.is_floating_point()) ** 0.5
    norm = _norm({key: value for key, value in sent.items() if key in tree and value.is_floating_point()})
    return (
        ""
        if far <= factor * norm or (not norm and far < np.inf)
        else (f"they move the parameters by {far:.2g}, and the norm of the parameters is {norm:.2g}")
    )


def _allowed(sent: NDArray[np.float64], entries: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the norm of an update that is always allowed, whatever the other replies are, (K,)."""
    allowed: NDArray[np.float64] = np.where(sent > 0, OF_SENT * sent, np.sqrt(entries))
    return allowed


def _is_number(said: Declared) -> bool:
    """Return whether a field holds one number, or one for each block: a loss, a ratio or another statistic."""
    return said.kind == "statistic" and said.shape == () and said.rows is None


def _entries(part: ReplyStack, block: Block) -> NDArray[np.float64]:
    """Return the number of entries of a block in each reply; 1 for a field whose size is its largest magnitude."""
    if part.message.declared[block[0]].rows is not None:
        return np.ones(len(part.clients))
    entries = sum(stack[0].numel() for stack in _of(part.message, block).values())
    return np.full(len(part.clients), float(entries))


def _of(msg: Message, block: Block) -> dict[str, Tensor]:
    """Return the tensors of one block of a message, without those of no entries."""
    name, wanted = block
    if name not in msg.declared:
        return {}
    value = getattr(msg, name)
    if isinstance(value, Tensor):
        return {"": value} if value.is_floating_point() and value.numel() else {}
    of_model = msg.declared[name].kind in OF_THE_MODEL
    return {
        key: stack
        for key, stack in value.items()
        if (block_of(key) if of_model else key) == wanted and stack.is_floating_point() and stack.numel()
    }


def _norm(tree: Mapping[str, Tensor]) -> float:
    by_device: dict[torch.device, list[Tensor]] = {}  # a message may hold tensors on the CPU and on a GPU
    for value in tree.values():
        by_device.setdefault(value.device, []).append(value)
    return math.hypot(*(float(torch.stack(torch._foreach_norm(values)).norm()) for values in by_device.values()))


def _square(value: Tensor, sent: Tensor | None) -> float:
    """Return the squared norm of an update, in float64, in which no two float32 vectors are infinitely far apart."""
    wide = value.double()
    return float((wide if sent is None else wide - sent.double()).square().sum())
