"""The client's part of secure aggregation, under which the server reads only sums of the clients' replies.

The protocol is Figure 4 of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
2017. It protects against a server that follows the protocol (semi-honest). The steps are tasks, so every engine can run
them:

1. `advertise`: every client makes two key pairs and sends both public keys.
2. `share`: every client splits two seeds into shares: the seed of its mask key and the seed of its self-masks. Each
   client of the cohort gets one share of each seed, encrypted for this client.
3. `deliver`: every client receives its shares, and checks them.
4. The clients run the method's own task, such as `update`. The engine masks the reply (`mask`) before the egress gate
   sees it.
5. `unmask`: for each client whose reply arrived, the others reveal their shares of its self-masks. For each client
   whose reply did not arrive, they reveal their shares of its mask key.

Masks are drawn for each block, over the clients of the cohort that have the block. `server.py` has the server's part.
docs/secure-aggregation.md describes what the protocol protects, and against whom.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.core.masked import LONG, masked_class
from polyfed.core.messages import Declared, Message, tensors
from polyfed.core.option_checks import AT_LEAST_TWO, POSITIVE, Within, check_ranges
from polyfed.core.tasks import task
from polyfed.core.tree import Tree, nested
from polyfed.federation.context import ClientContext
from polyfed.federation.secure_aggregation.cohort import Cohort, Numbers, Vector, by_block
from polyfed.federation.secure_aggregation.messages import (
    Delivery,
    EncryptedShares,
    Opening,
    PublicKeys,
    Ready,
    RevealedShares,
    Roster,
    Unmasking,
)
from polyfed.federation.secure_aggregation.state import (
    ADVERTISED,
    DELIVERED,
    DIVIDED,
    MASKED,
    SECRETS,
    Refusal,
    bytes_of,
    cohort_in,
    cohort_of,
    flags,
    fresh_seeds,
    seeds_of,
    state_of,
    tensor_of,
    way,
    without_secrets,
)
from polyfed.privacy import masks
from polyfed.privacy.fixed_point import SIGNED, STATISTIC_RANGE, Scale
from polyfed.training import ClientData

LOOP = "cryptography works on bytes, one client at a time"

OVER_HALF = Within(
    "above 0.5, at most 1, a share of the cohort and not a number of clients",
    lambda value: (value > 0.5) & (value <= 1),
)


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The [secure_aggregation] section of a recipe. If it is present, the server reads only sums over the clients.

    Attributes:
        min_clients: least number of clients in a sum. A block that fewer of the cohort have is not sent.
        threshold: share of the cohort that must stay until the end; the others may drop out. A server that follows the
            protocol cannot read a single reply, even with the secrets of clients whose share of the cohort is below
            `threshold`.
        range: largest absolute value of a parameter, gradient or prototype. A client refuses to send a larger value.
        bits: size of the integers that carry parameters, gradients and prototypes: 32 or 64.
    """

    min_clients: Annotated[int, AT_LEAST_TWO] = 3
    threshold: Annotated[float, OVER_HALF] = 0.6
    range: Annotated[float, POSITIVE] = 64.0
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        """Check that every option is in its range, and that the libraries are installed."""
        check_ranges("[secure_aggregation]", self)
        masks.require_libraries()

    def needed(self, num: int) -> int:
        """Return how many of `num` clients must stay until the end."""
        return max(2, math.ceil(self.threshold * num - 1e-9))

    def scale(self, said: Declared, weight_bits: int) -> Scale:
        """Return the rule that turns a field into integers. The weights must add up to at most 2^weight_bits.

        Raises:
            ValueError: the integers have too few bits.
        """
        long = said.kind == LONG
        return Scale.fitting(64 if long else self.bits, STATISTIC_RANGE if long else self.range, weight_bits)

    @task(loop_because=LOOP)
    def advertise(self, context: ClientContext, data: ClientData, local: Tree, got: Opening) -> tuple[PublicKeys, Tree]:
        """Draw a seed for each of two key pairs (shares, masks) and one for the self-masks. Send the public keys."""
        seeds = fresh_seeds(context, data, int(got.number))
        public = b"".join(masks.public_key(seed) for seed in seeds[:2])
        kept = {"step": torch.tensor(ADVERTISED), "seeds": tensor_of(b"".join(seeds), 3, masks.SEED)}
        return PublicKeys(tensor_of(public, 2, masks.KEY)), without_secrets(local) | nested(SECRETS, kept)

    @task(loop_because=LOOP, once=SECRETS)
    def share(self, context: ClientContext, data: ClientData, local: Tree, got: Roster) -> tuple[EncryptedShares, Tree]:
        """Check the cohort. Split two seeds, of the mask key and of the self-masks, into encrypted secret shares.

        Raises:
            Refusal: the cohort is too small, has a key twice or an unusable one, or lacks this client's keys or blocks.
        """
        state = state_of(local, ADVERTISED)
        cohort = cohort_of(got.keys, got.members)
        enc, mask, root = seeds_of(state)
        place = self._place(cohort, (enc, mask), context)
        num = len(cohort.keys)
        parts = [masks.split(seed, self.needed(num), num) for seed in (mask, root)]
        rows = [b"".join(part[peer] for part in parts) for peer in range(num)]
        sealed = [
            bytes(len(row) + masks.TAG)
            if peer == place
            else masks.seal(masks.agreed(enc, cohort.keys[peer, 0].tobytes()), row, *way(cohort, place, peer))
            for peer, row in enumerate(rows)
        ]
        kept = {"step": torch.tensor(DIVIDED), "seeds": state["seeds"], "keys": got.keys}
        kept |= {"place": torch.tensor(place), "own": tensor_of(rows[place], 1, -1)} | nested("members", got.members)
        return EncryptedShares(tensor_of(b"".join(sealed), num, -1)), without_secrets(local) | nested(SECRETS, kept)

    def _place(self, cohort: Cohort, seeds: tuple[bytes, bytes], context: ClientContext) -> int:
        """Return this client's place in the cohort.

        Raises:
            Refusal: see `share`.
        """
        listed = [key.tobytes() for key in cohort.keys.reshape(-1, masks.KEY)]
        if len(set(listed)) < len(listed):
            raise Refusal("the list of public keys holds a key twice")
        if not all(map(masks.is_usable, listed)):
            raise Refusal("the list of public keys holds a key of small order or in an unusual encoding")
        if len(cohort.keys) < self.min_clients:
            raise Refusal(f"the cohort has {len(cohort.keys)} clients, and a sum needs {self.min_clients}")
        own = [masks.public_key(seed) for seed in seeds]
        result = [i for i in range(len(cohort.keys)) if listed[2 * i : 2 * i + 2] == own]
        if not result:
            raise Refusal("the list of public keys does not hold the keys of this client")
        lacks = [
            block for block in context.blocks if block not in cohort.members or not cohort.members[block][result[0]]
        ]
        if lacks:
            raise Refusal(f"the list of the cohort says that this client lacks block '{min(lacks)}'")
        return result[0]

    @task(loop_because=LOOP, once=SECRETS)
    def deliver(self, context: ClientContext, data: ClientData, local: Tree, got: Delivery) -> tuple[Ready, Tree]:
        """Decrypt the shares that the other clients sent, and keep these shares.

        Raises:
            Refusal: a share was changed in transit, or too few clients sent shares.
        """
        state = state_of(local, DIVIDED)
        cohort, place = cohort_in(state), int(state["place"])
        enc, sent = seeds_of(state)[0], flags(got.senders, len(cohort.keys), "senders")
        self._refuse_few(sent, cohort, "sent shares")
        if not sent[place]:
            raise Refusal("the list of clients that sent shares does not hold this client")
        rows = [np.zeros(state["own"].numel(), np.uint8)] * len(cohort.keys)
        for peer in sent.nonzero()[0].tolist():
            if peer == place:
                rows[peer] = state["own"].cpu().numpy().reshape(-1)
                continue
            secret = masks.agreed(enc, cohort.keys[peer, 0].tobytes())
            text = _opened(secret, bytes_of(got.sealed[peer]), *way(cohort, peer, place))
            rows[peer] = np.frombuffer(text, np.uint8)
        kept = {name: value for name, value in state.items() if name != "own"}
        kept |= {"step": torch.tensor(DELIVERED), "senders": got.senders, "weight_bits": got.weight_bits}
        kept["shares"] = torch.from_numpy(np.stack(rows))
        return Ready(), without_secrets(local) | nested(SECRETS, kept)

    def _refuse_few(self, chosen: np.ndarray, cohort: Cohort, what: str) -> None:
        least = max(self.min_clients, self.needed(len(cohort.keys)))
        if chosen.sum() < least:
            raise Refusal(f"{chosen.sum()} of {len(cohort.keys)} clients {what}, and {least} are needed")

    def mask(self, reply: Message, weight_of: Callable[[str], str | None], local: Tree) -> tuple[Message, Tree]:
        """Return the masked reply and the client's new local state. The engine calls this before the egress gate.

        For each block, the client adds a self-mask. For each other client that has the block, there is one more mask,
        which both clients know. The client adds this mask if the other client has a later place in the cohort, and
        subtracts it if the other client has an earlier place (Bonawitz et al., Section 4, y_u). If fewer than
        `min_clients` clients have a block, the client leaves out this block.

        Args:
            reply: the sum-only reply of the method's task.
            weight_of: takes the name of a field, and returns the name of the field that holds its weight; None for
                weight 1.

        Raises:
            Refusal: there are no keys for this request, a value is beyond `range`, or a field that holds one tensor
                instead of a tree belongs to a block that too few clients have. The client can leave out entries of a
                tree, but not such a field.
        """
        state = state_of(local, DELIVERED)
        cohort, place = cohort_in(state), int(state["place"])
        sent, (_, seed, root) = state["senders"].cpu().numpy(), seeds_of(state)
        groups = cohort.summed(sent, self.min_clients)
        shared = {peer: cohort.shared(seed, peer) for peer in sent.nonzero()[0].tolist() if peer != place}
        numbers = self._integers(reply, weight_of, int(state["weight_bits"]), len(cohort.keys))
        for block, entries in by_block(reply, numbers).items():
            if block not in groups:
                for field, key in entries:
                    if key is None:
                        raise Refusal(f"{field} is of block '{block}', which too few clients of the cohort have")
                    del numbers[field, key]
                continue
            vector = Vector.of([numbers[entry] for entry in entries])
            vector.add(cohort.self_key(root, block), 1)
            for peer in groups[block].nonzero()[0].tolist():
                if peer != place:
                    vector.add(cohort.pair_key(shared[peer], block), 1 if place < peer else -1)
            numbers |= dict(zip(entries, vector.parts(), strict=True))
        kept = state | {"step": torch.tensor(MASKED)}
        return _rebuilt(reply, numbers), without_secrets(local) | nested(SECRETS, kept)

    def _integers(
        self, reply: Message, weight_of: Callable[[str], str | None], weight_bits: int, num: int
    ) -> "Numbers":
        """Return the reply's weighted tensors as unsigned integers.

        Raises:
            Refusal: a value cannot be summed.
        """
        result: Numbers = {}
        for field, key, value in tensors(reply):
            said, by = reply.declared[field], weight_of(field)
            where = field if key is None else f"{field}.{key}"
            if said.kind != LONG and not value.is_floating_point():
                raise Refusal(f"{where} holds integers, whose maximum the server needs. A sum does not tell it")
            weight = 1.0 if by is None else float(getattr(reply, by))
            if by is not None and not 0 <= weight <= 2**weight_bits:
                raise Refusal(f"{by} is {weight:g}, and the server says that all weights add up to 2^{weight_bits}")
            try:
                scale = self.scale(said, (num - 1).bit_length() if by is None else weight_bits)
                result[field, key] = scale.integers(value.detach().cpu().numpy(), weight, where)
            except ValueError as error:
                raise Refusal(str(error)) from None
        return result

    @task(loop_because=LOOP, once=SECRETS)
    def unmask(
        self, context: ClientContext, data: ClientData, local: Tree, got: Unmasking
    ) -> tuple[RevealedShares, Tree]:
        """Reveal one share for each client of the request, and delete all secrets of the request.

        For a survivor, the client reveals its share of the survivor's self-masks. For a dropped client, it reveals its
        share of that client's mask key. It never reveals both for one client.

        Raises:
            Refusal: the lists name a client twice or leave a client out, too few clients survived (in the cohort, or
                among the clients that have a certain block), or this client has masked no reply since it drew its
                keys.
        """
        state = state_of(local, MASKED)
        cohort, sent = cohort_in(state), state["senders"].cpu().numpy()
        survivors, dropped = (
            flags(value, len(cohort.keys), name)
            for value, name in ((got.survivors, "survivors"), (got.dropped, "dropped"))
        )
        if (survivors & dropped).any():
            raise Refusal("the server asks for both shares of one client, which would reveal its reply")
        if not np.array_equal(survivors | dropped, sent) or not survivors[int(state["place"])]:
            raise Refusal("the lists of survivors and dropped clients do not fit the clients that shared their keys")
        self._refuse_few(survivors, cohort, "sent a masked reply")
        for block, group in cohort.summed(sent, self.min_clients).items():
            if 0 < (left := (group & survivors).sum()) < self.min_clients:
                raise Refusal(f"a sum of block '{block}' has {left} clients left, and {self.min_clients} are needed")
        shares = state["shares"].cpu().reshape(len(cohort.keys), 2, masks.SEED)
        only = [torch.from_numpy(chosen).unsqueeze(1) for chosen in (dropped, survivors)]
        return RevealedShares(*(shares[:, i] * only[i] for i in range(2))), without_secrets(local)


def _opened(secret: bytes, sealed: bytes, *about: bytes) -> bytes:
    try:
        return masks.opened(secret, sealed, *about)
    except ValueError as error:
        raise Refusal(str(error)) from None


def _rebuilt(reply: Message, numbers: Numbers) -> Message:
    """Return the masked message, which has integers in place of the reply's tensors."""
    fields: dict[str, Tensor | Tree] = {}
    for name in reply.kinds:
        value = getattr(reply, name)
        if isinstance(value, Tensor):
            fields[name] = _signed(numbers[name, None], value)
        else:
            fields[name] = {key: _signed(numbers[name, key], t) for key, t in value.items() if (name, key) in numbers}
    kind = masked_class(type(reply))  # type: ignore[arg-type]  # a class is hashable
    return kind(**fields)


def _signed(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers.view(SIGNED[8 * numbers.itemsize]).copy()).to(like.device)
