"""Aggregation coefficients of personalised copies: mixing by them, and learning them in closed form.

Equations of algorithms.md 4.4 over whole matrices. Shape letters: `K` devices, `S` devices that uploaded, `G` of these
whose copies were built in the same round, `P` numbers of a block, of which the first `num_trainable` are parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.core.tree import keep_on_host

PIECE = 16384
"""Numbers of a block that are looked at together: 333 rows of them, 22 MB, stay within 32 MiB of last-level cache."""


@dataclass(frozen=True)
class Record:
    """One aggregation of a block (step 6), kept while it made the newest copy of some device.

    Attributes:
        members: devices that uploaded, ascending int64 (S,).
        uploads: their blocks, (S, P).
        mix: coefficients, row k mixes the copy of member k; float64 (S, S).
        copies: the copies, (S, P).
    """

    members: Tensor
    uploads: Tensor
    mix: Tensor
    copies: Tensor

    def __post_init__(self) -> None:
        """Only blocks live where they are computed with."""
        keep_on_host(self, "members", "mix")

    def rows(self, devices: Tensor) -> Tensor:
        """Places of these devices among the members."""
        return torch.searchsorted(self.members, devices)


@dataclass(frozen=True)
class BlockState:
    """What the server knows of one block.

    Attributes:
        owners: who has this block and rows to train it on, bool (K,).
        logits: Xi, float64 (K, K); a row sums to 1 for ever.
        ages: A, rounds since the last upload, int64 (K,).
        built: round of a device's newest copy, int64 (K,); 0 while it still has the initial block.
        sent: whose newest copy was built in the last round and is on its way, bool (K,).
        records: aggregations by round.
    """

    owners: Tensor
    logits: Tensor
    ages: Tensor
    built: Tensor
    sent: Tensor
    records: dict[int, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """What is known of devices is the server's own."""
        keep_on_host(self, "owners", "logits", "ages", "built", "sent")

    @classmethod
    def start(cls, owners: Tensor) -> "BlockState":
        """Before the first round: all logits 1/K."""
        size, zeros = len(owners), torch.zeros_like(owners, dtype=torch.int64)
        logits = torch.full((size, size), 1.0 / size, dtype=torch.float64)
        return cls(owners, logits, zeros, zeros, zeros.bool())

    def copy_of(self, device: int) -> Tensor | None:
        """A device's newest copy (P,), or None while there is none."""
        if not (number := int(self.built[device])):
            return None
        record = self.records[number]
        return record.copies[int(record.rows(torch.tensor(device)))]


@dataclass(frozen=True)
class Step:
    """How coefficients learn.

    Attributes:
        rate: eta-hat times minus the sign of the gradient's estimate.
        oldest: copies built before this round teach nothing.
        divisors: the drift of a device is divided by this, (K,); None leaves it raw.
    """

    rate: float
    oldest: int = 0
    divisors: Tensor | None = None


def aggregate(logits: Tensor, members: Tensor, uploads: Tensor) -> Record:
    """Step 4: a copy for every device that uploaded, by the softmax of its row over those that did (Eq. 5)."""
    mix = torch.softmax(logits[members][:, members], 1)
    return Record(members, uploads, mix, mix.to(uploads) @ uploads)


def learned(
    logits: Tensor,
    built: Tensor,
    records: Mapping[int, Record],
    now: tuple[Tensor, Tensor],
    num_trainable: int,
    step: Step,
) -> Tensor:
    """Step 5: Xi after the devices in `now`, (members (S,), uploads (S, P)), have shown where their copies drifted.

    Xi_kj += rate * xi_kj * <w_j - W_k, upload_k - W_k> with w, W, xi of the round in which k's copy was built: one
    matrix product per such round, of which there are at most as many as the oldest age.
    """
    members, uploads = now
    after = logits.clone()
    for number in torch.unique(built[members]).tolist():
        if number < max(step.oldest, 1):
            continue
        record = records[number]
        mine = (built[members] == number).nonzero().flatten()
        rows = record.rows(members[mine])
        mix_GS = record.mix[rows]
        dots_GS = _dots(uploads, mine, record, rows, num_trainable).to(logits)
        # W is the mixture of the w, so <W, drift> needs no product of its own, and a row's changes cancel exactly
        change = step.rate * mix_GS * (dots_GS - (mix_GS * dots_GS).sum(1, keepdim=True))
        if step.divisors is not None:
            change = change / step.divisors[members[mine]].unsqueeze(1)
        after[members[mine].unsqueeze(1), record.members] += change
    return after


def _dots(uploads: Tensor, mine: Tensor, record: Record, rows: Tensor, num_trainable: int) -> Tensor:
    """Inner products (G, S) of the devices' drifts with the record's uploads, piece by piece: drifts of a thousand
    devices at once would be written to memory and read back, which takes longer than the products."""
    mine, rows = mine.to(uploads.device), rows.to(uploads.device)
    dots = uploads.new_zeros(len(mine), len(record.members))
    for start in range(0, num_trainable, PIECE):
        piece = slice(start, min(start + PIECE, num_trainable))
        drift = uploads[:, piece].index_select(0, mine) - record.copies[:, piece].index_select(0, rows)
        dots.addmm_(drift, record.uploads[:, piece].T)
    return dots


def own_coefficients(logits: Tensor, among: Tensor) -> Tensor:
    """A device's coefficient for itself, (K,): the softmax of its row over the columns `among`, bool (K,) (Eq. 4)."""
    total = logits.masked_fill(~among, -torch.inf).logsumexp(1)
    return (logits.diagonal() - total).exp()


def scheduled(scores: Tensor, able: Tensor, ages: Tensor, count: int, max_age: int) -> Tensor:
    """Step 2: who uploads, bool (K,): the `count` best of those able, ties to the lowest number, and the overdue;
    no block is ever overdue with `max_age` 0.
    """
    order = scores.masked_fill(~able, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(able)
    chosen[order[:count]] = True
    if max_age:
        chosen |= ages + 1 >= max_age
    return chosen & able
