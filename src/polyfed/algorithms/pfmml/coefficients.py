"""The server's steps: choose the devices that upload, mix their personalised copies, and learn the coefficients.

A device's copy of a block is a mixture of the uploaded blocks, and the aggregation coefficients are the weights of this
mixture. This file computes the paper's Eq. 4 to 7 for all devices at once; see docs/algorithms/pfmml.md.

Shape letters: `K` devices, `S` devices that uploaded in a round, `P` entries of a block. Of the P entries of a
block, the first `num_trainable` are parameters. The uploading devices are processed in groups: all personalised
copies of a group were built in the same round. `G` is the number of devices in a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.tree import keep_on_host

PIECE = 16384
"""The number of entries of a block that are processed together. For 333 devices they take 22 MB, which fits into 32 MiB
of cache."""


@dataclass(frozen=True)
class Record:
    """One aggregation of a block (step 6). The server keeps it while it holds the newest copy of at least one device.

    Attributes:
        members: the S devices that uploaded, ascending, int64 (S,).
        uploads: the uploaded blocks, one row for each of these devices, (S, P).
        mix: the coefficients xi of the mixtures, float64 (S, S). Row k holds the coefficients of member k's copy.
        copies: the personalised copies W, (S, P).
    """

    members: Tensor
    uploads: Tensor
    mix: Tensor
    copies: Tensor

    def __post_init__(self) -> None:
        """Move everything except the blocks to the CPU."""
        keep_on_host(self, "members", "mix")

    def rows(self, devices: Tensor) -> Tensor:
        """Return the positions of these devices among the members."""
        return torch.searchsorted(self.members, devices)


@dataclass(frozen=True)
class BlockState:
    """The server's knowledge about one block.

    Attributes:
        owners: devices that have this block and rows to train it on, bool (K,).
        logits: Xi, float64 (K, K). The softmax of a row gives coefficients. The row itself, before the softmax, sums
            to 1 at the start, and no update changes this sum.
        ages: A, the number of rounds since the last upload, int64 (K,).
        built: the round in which a device's newest copy was built, int64 (K,). It is 0 if the device has the initial
            block.
        sent: devices that uploaded this block in the last finished round, bool (K,). In that round, the server built a
            new personalised copy of the block for each of these devices. The next round sends them the copies.
        records: aggregations by round.
    """

    owners: Tensor
    logits: Tensor
    ages: Tensor
    built: Tensor
    sent: Tensor
    records: dict[int, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Move the facts about the devices to the CPU."""
        keep_on_host(self, "owners", "logits", "ages", "built", "sent")

    @classmethod
    def start(cls, owners: Tensor) -> "BlockState":
        """Return the state before the first round, in which all logits are 1/K."""
        size, zeros = len(owners), torch.zeros_like(owners, dtype=torch.int64)
        logits = torch.full((size, size), 1.0 / size, dtype=torch.float64)
        return cls(owners, logits, zeros, zeros, zeros.bool())

    def copy_of(self, device: int) -> Tensor | None:
        """Return a device's newest copy (P,), or None before the first copy."""
        if not (number := int(self.built[device])):
            return None
        record = self.records[number]
        return record.copies[int(record.rows(torch.tensor(device)))]


@dataclass(frozen=True)
class Step:
    """Settings of one update of the coefficients.

    Attributes:
        rate: factor of the update, with its sign: -`grad_sign` * eta-hat. eta-hat is the learning rate of the
            coefficients, and `grad_sign` is an option of pfmml.
        oldest: the first round whose copies the update uses.
        divisors: divisor of each device's drift, (K,). If None, drifts are not divided.
        normalised: whether inner products are divided by the lengths of drift and differences; see `learned`.
    """

    rate: float
    oldest: int = 0
    divisors: Tensor | None = None
    normalised: bool = False


def aggregate(logits: Tensor, members: Tensor, uploads: Tensor) -> Record:
    """Run step 4: for each device that uploaded, build its personalised copy, a mixture of all uploads (Eq. 5).

    The weights of a device's mixture are the softmax of the device's row of `logits`, taken over the uploading devices.
    """
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
    """Run step 5: update Xi from the drift of each device, and return the new Xi (Eq. 6, 7).

    In this round, device k uploads the block upload_k. The device trained it from its personalised copy W_k, which the
    server built in an earlier round. W_k is a mixture of the blocks w_j that were uploaded in that earlier round, with
    the coefficients xi_kj. The drift of device k is upload_k - W_k. Let p_kj be the inner product
    <w_j - W_k, upload_k - W_k>. The update adds rate * xi_kj * p_kj to Xi_kj.

    All devices whose copies were built in the same earlier round are updated together, with one matrix product. The
    number of these earlier rounds is at most the largest age.

    If `step.normalised`, the update adds rate * (c_kj - mean over j of c_kj) instead. Here c_kj = p_kj / (a_k * b_k),
    where a_k is the length of the drift, and b_k is the largest length of w_j - W_k over all j. The change then does
    not depend on the size of the block, the learning rate or the number of devices. No logit changes by more than
    2 * rate.

    Args:
        logits: Xi before the update, (K, K).
        built: the round of every device's newest copy, (K,).
        records: aggregations by round.
        now: the devices that uploaded in this round, (S,), and their blocks, (S, P).
        num_trainable: how many entries of a block are parameters.
        step: settings of the update.
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
        dots, lengths = _dots(uploads, mine, record, rows, num_trainable)
        dots_GS = dots.to(logits)
        # W is the mixture of the w, so <W, drift> needs no extra product, and the changes of a row sum to zero
        centred_GS = dots_GS - (mix_GS * dots_GS).sum(1, keepdim=True)
        if step.normalised:
            scale = lengths.to(logits).unsqueeze(1) * _longest(record, rows, num_trainable).to(logits).unsqueeze(1)
            part_GS = torch.where(scale > 0, centred_GS / scale.clamp(min=1e-300), 0.0).clamp(-1, 1)
            change = step.rate * (part_GS - part_GS.mean(1, keepdim=True))
        else:
            change = step.rate * mix_GS * centred_GS
        if step.divisors is not None:
            change = change / step.divisors[members[mine]].unsqueeze(1)
        after[members[mine].unsqueeze(1), record.members] += change
    return after


def _dots(uploads: Tensor, mine: Tensor, record: Record, rows: Tensor, num_trainable: int) -> tuple[Tensor, Tensor]:
    """Return the inner products (G, S) of the devices' drifts with the record's uploads, and the drifts' lengths (G,).

    The inner products and the squared lengths are sums over slices of `PIECE` entries. Writing the whole drifts of a
    thousand devices to memory and reading them again would take longer than the products.
    """
    mine, rows = mine.to(uploads.device), rows.to(uploads.device)
    dots, squares = uploads.new_zeros(len(mine), len(record.members)), uploads.new_zeros(len(mine))
    for start in range(0, num_trainable, PIECE):
        piece = slice(start, min(start + PIECE, num_trainable))
        drift = uploads[:, piece].index_select(0, mine) - record.copies[:, piece].index_select(0, rows)
        dots.addmm_(drift, record.uploads[:, piece].T)
        squares += drift.square().sum(1)
    return dots, squares.sqrt()


def _longest(record: Record, rows: Tensor, num_trainable: int) -> Tensor:
    """Return the length of the longest w_j - W_k in the record for each device, (G,).

    The lengths follow from the inner products of the centred uploads, because W_k is a mixture of the uploads.
    """
    size = len(record.members)
    gram = torch.zeros(size, size, dtype=torch.float64)
    for start in range(0, num_trainable, PIECE):
        piece = record.uploads[:, start : min(start + PIECE, num_trainable)]
        centred = piece - piece.mean(0)
        gram += (centred @ centred.T).to(gram)
    mix = record.mix[rows].to(gram)
    cross = mix @ gram
    squares = gram.diagonal() - 2 * cross + (cross * mix).sum(1, keepdim=True)
    return squares.clamp(min=0).amax(1).sqrt()


def shuffled(logits: Tensor, key: int) -> Tensor:
    """Return the logits (K, K) of the control `shuffled`, which permutes entries within each row.

    Row k holds the logit of device k for every device. The permutation exchanges the logits for the K - 1 other devices
    at random. The logit of device k for itself, on the diagonal, does not move.
    """
    after, size = logits.clone(), len(logits)
    for k in range(size):
        others = torch.tensor([j for j in range(size) if j != k], dtype=torch.int64)
        after[k, others] = logits[k, others[keys.permutation(keys.fold_in(key, k), size - 1)]]
    return after


def own_coefficients(logits: Tensor, among: Tensor) -> Tensor:
    """Return each device's coefficient for itself, (K,): the softmax of its row over the devices `among` (Eq. 4)."""
    total = logits.masked_fill(~among, -torch.inf).logsumexp(1)
    return (logits.diagonal() - total).exp()
