"""The server's part of secure aggregation: it runs the steps of the protocol and reads the sums.

The server trusts no client. It drops a client whose keys, shares or masked reply have the wrong form. A wrong share
gives a wrong mask, and therefore a sum that is far out of range. The server then abandons the request.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.request import Send, Task
from polyfed.core.tasks import types_of
from polyfed.core.tree import SHARED
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.replies import Replies
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.secure_aggregation.cohort import Cohort, Entry, Numbers, Vector, by_block
from polyfed.federation.secure_aggregation.messages import (
    SEALED,
    Delivery,
    Opening,
    Roster,
    Unmasking,
    bytes_of_shape,
)
from polyfed.federation.secure_aggregation.reply_forms import alike, flaw_of_keys
from polyfed.federation.secure_aggregation.sums import SummedReplies
from polyfed.privacy import masks


class Summing(Protocol):
    """The part of a method that secure aggregation uses."""

    secure_aggregation: SecureAggregation | None

    def weight_of(self, field: str, kind: type[Message]) -> str | None:
        """Return which field of a sum-only message holds the weight of `field`. None means that the weight is 1."""


class Abandoned(Exception):
    """The server abandons a request of secure aggregation, because too few clients are left or a sum is wrong."""


@dataclass
class Session:
    """What the server knows about one request. A client's place is its index in `clients`.

    Attributes:
        cohort: the public keys and blocks of the clients.
        clients: the numbers of the clients, ascending.
        sent: the clients that sent shares, bool (n,). Only these clients add masks.
        survivors: the clients whose replies are in the sums, bool (n,).
        numbers: the masked integers of each client, by its place.
        weight_bits: a bound: the weights of the cohort add up to at most 2^weight_bits.
    """

    cohort: Cohort
    clients: list[int]
    numbers: dict[int, Numbers] = field(default_factory=dict)
    weight_bits: int = 0
    sent: np.ndarray = field(init=False)
    survivors: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Set `sent` and `survivors` to False for all clients, because no client has sent anything yet."""
        self.sent, self.survivors = (np.zeros(len(self.clients), bool) for _ in range(2))

    def chosen(self, places: np.ndarray) -> list[int]:
        """Return the numbers of the clients at the places where `places`, bool (n,), is True."""
        return [client for client, inside in zip(self.clients, places, strict=True) if inside]


@dataclass(frozen=True)
class SecureSum:
    """One request under secure aggregation.

    Attributes:
        ask: `Federation.ask` with `secure = False`.
        method: the method.
        registry: the client registry.
        template: the model's tree.
        emit: a function that is called with the name and the fields of each event.
        number: number of earlier requests in this round.
        withheld: a function that returns whether clients fill a field of a reply with zeros. [privacy] can cause this.
    """

    ask: Callable[..., Replies]
    method: Summing
    registry: ClientRegistry
    template: Mapping[str, Tensor]
    emit: Callable[..., None]
    number: int
    withheld: Callable[[str], bool] = lambda _: False

    @property
    def options(self) -> SecureAggregation:
        """The section [secure_aggregation]."""
        assert self.method.secure_aggregation is not None
        return self.method.secure_aggregation

    def of(self, task: Task, clients: Sequence[int], send: Send, **options: Any) -> Replies:
        """Ask the clients for masked replies to a task, and return their sum.

        Args:
            send: the message to the clients.
            options: `turn`, `enough` and `held_out` of `Federation.ask`.

        Returns:
            The sums, or an empty `Replies` if the server abandoned the request.

        Raises:
            RecipeError: the server cannot sum these replies with the recipe's options.
        """
        missing: dict[int, str] = {}
        kind = types_of(task)[1].masks
        assert kind is not None, "the replies of this task are not masked"
        try:
            return self._sum(task, kind, clients, send, missing, options)
        except Abandoned as reason:
            text = f"secure aggregation was given up: {reason}"
            self.emit("note", text=text)
            rest = dict.fromkeys(clients, text)
            return Replies([], rest | missing)

    def _sum(
        self,
        task: Task,
        kind: type[Message],
        clients: Sequence[int],
        send: Send,
        missing: dict[int, str],
        options: Mapping[str, Any],
    ) -> Replies:
        secure = self.options
        opening = Opening(torch.tensor(self.number))
        keys = self._step(secure.advertise, clients, opening, missing, accept=flaw_of_keys)
        here = self._session(keys)
        num, members = len(here.clients), here.cohort.members
        self._require(num, num, "sent keys")
        roster = Roster(torch.from_numpy(here.cohort.keys), {b: torch.from_numpy(held) for b, held in members.items()})
        form = bytes_of_shape(num, SEALED)
        shares = self._step(secure.share, here.clients, roster, missing, accept=form)
        self._require(len(shares), num, "sent shares")
        delivered = self._step(secure.deliver, list(shares), self._deliveries(here, shares), missing)
        self._require(len(delivered), num, "confirmed their shares")
        replies = self._step(task, list(delivered), send, missing, **options)
        self._numbers(kind, here, replies, missing)
        here.survivors[list(here.numbers)] = True
        self._leave_out_small(here)
        self._require(int(here.survivors.sum()), num, "sent a masked reply")
        lists = Unmasking(torch.from_numpy(here.survivors), torch.from_numpy(here.sent & ~here.survivors))
        alive, form = here.chosen(here.survivors), bytes_of_shape(num, masks.SEED)
        revealed = self._step(secure.unmask, alive, lists, missing, accept=form)
        self._require(len(revealed), num, "revealed their shares")
        sums = self._unmasked(kind, here, self._seeds(here, revealed))
        return self._result(kind, here, sums, {c: why for c, why in missing.items() if c not in alive})

    def _step(self, task: Task, clients: Sequence[int], send: Send, missing: dict[int, str], **options: Any) -> Replies:
        """Send one request of the protocol, and record the clients that gave no usable reply."""
        replies = self.ask(task, clients, send, quorum=False, **options)
        missing |= replies.missing
        return replies

    def _require(self, have: int, num: int, what: str) -> None:
        least = max(self.options.min_clients, self.options.needed(num))
        if have < least:
            raise Abandoned(f"{have} clients {what}, and {least} are needed")

    def _session(self, replies: Replies) -> Session:
        """Return the cohort of the clients that sent keys, without clients that sent the same key as another client."""
        found = {client: reply.keys.cpu().numpy() for client, reply in replies.items()}
        counts = Counter(key.tobytes() for keys in found.values() for key in keys)
        clients = [client for client in sorted(found) if all(counts[key.tobytes()] == 1 for key in found[client])]
        owned = [self.registry[client].blocks for client in clients]
        members = {b: np.array([b in held for held in owned], bool) for b in (*self.registry.modalities, SHARED)}
        keys = np.array([found[client] for client in clients], np.uint8).reshape(-1, 2, masks.KEY)
        return Session(Cohort(keys, members), clients)

    def _deliveries(self, here: Session, shares: Replies) -> dict[int, Message]:
        """Return, for each client that sent shares, the shares that the others have encrypted for this client."""
        here.sent[[here.clients.index(client) for client in shares]] = True
        here.weight_bits = max(sum(self.registry.rows_of(shares).values()) - 1, 0).bit_length()
        sealed = {client: reply.sealed for client, reply in shares.items()}
        empty = torch.zeros_like(next(iter(sealed.values())))
        every = torch.stack([sealed.get(client, empty) for client in here.clients])
        senders, bits = torch.from_numpy(here.sent), torch.tensor(here.weight_bits)
        places = {client: here.clients.index(client) for client in shares}
        return {client: Delivery(senders, every[:, place].contiguous(), bits) for client, place in places.items()}

    def _numbers(self, kind: type[Message], here: Session, replies: Replies, missing: dict[int, str]) -> None:
        """Keep the masked integers of each client. Drop a client whose reply differs in form from most replies."""
        groups = here.cohort.summed(here.sent, self.options.min_clients)
        places = {client: here.clients.index(client) for client in replies}
        sent = {places[client]: reply for client, reply in replies.items()}
        here.numbers |= alike(kind, groups, sent, self.options.bits)
        for client, place in places.items():
            if place not in here.numbers:
                missing[client] = "sent a masked reply of another form than the other clients"

    def _leave_out_small(self, here: Session) -> None:
        """Leave out all clients that hold a block if, after drop-outs, they are too few for a sum of this block.

        These clients count as dropped. Their self-masks stay secret, so nobody can read their replies.
        """
        before = -1
        while here.survivors.sum() != before:
            before = int(here.survivors.sum())
            for block, group in here.cohort.summed(here.sent, self.options.min_clients).items():
                if 0 < (num := int((group & here.survivors).sum())) < self.options.min_clients:
                    text = f"secure aggregation leaves {num} clients out: nobody else is left with block '{block}'"
                    self.emit("note", text=text)
                    here.survivors &= ~group

    def _seeds(self, here: Session, revealed: Replies) -> dict[int, bytes]:
        """Return, for each client's place, the seed that the clients revealed together.

        For a survivor, this is the seed of its self-mask. For a dropped client, it is the seed of its mask key.

        Raises:
            Abandoned: the shares of a mask key are wrong.
        """
        givers = [(here.clients.index(client), reply) for client, reply in revealed.items()]
        givers = givers[: self.options.needed(len(here.clients))]
        result: dict[int, bytes] = {}
        for place in here.sent.nonzero()[0].tolist():
            name = "of_self_masks" if here.survivors[place] else "of_keys"
            shares = [(giver, getattr(reply, name)[place].cpu().numpy().tobytes()) for giver, reply in givers]
            result[place] = masks.combined(shares)
            lost = not here.survivors[place]
            if lost and masks.public_key(result[place]) != here.cohort.keys[place, 1].tobytes():
                raise Abandoned(f"the shares of the key of client {here.clients[place]} do not give this key")
        return result

    def _unmasked(self, kind: type[Message], here: Session, seeds: Mapping[int, bytes]) -> dict[str, Numbers]:
        """Add the masked integers of the survivors for each block, and remove the masks that are left in the sums.

        The remaining masks are the self-masks of the survivors, and the masks that a survivor shares with a dropped
        client (Bonawitz et al., Section 4).
        """
        left, gone = here.survivors.nonzero()[0].tolist(), (here.sent & ~here.survivors).nonzero()[0].tolist()
        secrets = {(lost, place): here.cohort.shared(seeds[lost], place) for lost in gone for place in left}
        sums: dict[str, Numbers] = {}
        for block, group in here.cohort.summed(here.sent, self.options.min_clients).items():
            inside = [place for place in left if group[place]]
            listed = by_block(kind, here.numbers[inside[0]]).get(block, []) if inside else []
            if not listed:
                continue
            first, *others = (Vector.of([here.numbers[place][entry] for entry in listed]) for place in inside)
            for other in others:
                first.short += other.short
                first.long += other.long
            for place in inside:
                first.add(here.cohort.self_key(seeds[place], block), -1)
                for lost in gone:
                    if group[lost]:
                        first.add(here.cohort.pair_key(secrets[lost, place], block), -1 if place < lost else 1)
            sums[block] = dict(zip(listed, first.parts(), strict=True))
        return sums

    def _result(
        self, kind: type[Message], here: Session, sums: Mapping[str, Numbers], missing: dict[int, str]
    ) -> SummedReplies:
        """Return the sums as real numbers.

        Raises:
            Abandoned: a sum is out of range, because a client revealed a wrong share. Or the clients' weights differ
                from the weights in the client registry; see `_check_weights`.
            RecipeError: the sum of the weights is too large; see `_check_weights`.
        """
        alive = here.chosen(here.survivors)
        rows = self.registry.rows_of(alive)
        weighed = {name: self.method.weight_of(name, kind) for name in kind.declared}
        weights = {name: rows if by else dict.fromkeys(alive, 1) for name, by in weighed.items()}
        bits = {True: here.weight_bits, False: (len(here.clients) - 1).bit_length()}
        device = next((value.device for value in self.template.values()), torch.device("cpu"))
        real: dict[Entry, Tensor] = {}
        senders: dict[Entry, tuple[int, ...]] = {}
        errors: dict[Entry, float] = {}
        for block, numbers in sums.items():
            inside = tuple(here.chosen(here.survivors & here.cohort.members[block]))
            for (name, key), total in numbers.items():
                scale = self.options.scale(kind.declared[name], bits[weighed[name] is not None])
                value = torch.from_numpy(scale.real(total))
                most = scale.limit * sum(weights[name][client] for client in inside) + scale.error(len(inside))
                if bool((value.abs() > most).any()):
                    raise Abandoned(f"the sum of {name} is out of range, so a client has revealed a wrong share")
                real[name, key], senders[name, key], errors[name, key] = value.to(device), inside, scale.error(1)
        self._check_weights(weighed, real, rows)
        return SummedReplies([], missing, tuple(alive), real, senders, weights, self.template, errors)

    def _check_weights(
        self, weighed: Mapping[str, str | None], real: Mapping[Entry, Tensor], rows: Mapping[int, int]
    ) -> None:
        """Check that the clients used the weights in the client registry.

        The clients multiply their values by weights, and the server divides the sums by the weights in the registry.
        The server knows only the sum of the weights that the clients used, so it compares this sum with the sum in the
        registry.

        Raises:
            RecipeError: the clients' sum is larger than the registry's sum, because [deployment] rows_cap has lowered a
                weight in the registry.
            Abandoned: the two sums differ, but not because of rows_cap. One client can cause this.
        """
        for by in {by for by in weighed.values() if by is not None and not self.withheld(by)}:
            told, known, limited = round(float(real[by, None])), sum(rows.values()), self.registry.limited & rows.keys()
            text = f"the clients' weights ({by}) add up to {told}, and those of the client registry to {known}"
            if told > known and limited:
                raise RecipeError(
                    f"{text}, where [deployment] rows_cap limits client {min(limited)}. It cannot limit weights that "
                    "the server does not see: set it to 0, or leave out this client",
                    ("deployment", "rows_cap"),
                )
            if told != known:
                raise Abandoned(f"{text}. A client lies, or its data has changed since it enrolled: start again")
