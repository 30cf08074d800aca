"""Rows of one person are never divided: every share that is held out and every partition takes or leaves them whole."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import DataError, RecipeError, counted
from polyfed.data.columns import TEST, TRAIN, Columns
from polyfed.data.partitions.base import Partition
from polyfed.data.partitions.by_client import ByClient
from polyfed.data.partitions.shards import Rows, Shards, share_of


def whole_persons(person: Rows, owner: Rows, label: Rows, share: float, key: int) -> NDArray[np.bool_]:
    """Draw whole persons with about `share` of the rows of every owner, and of every class of it as far as possible.

    Persons come in random order, three times. One is taken if that brings the rows of its owners nearer to the share,
    and first those of the classes too, then both together, then whatever the classes. Each owner and class keeps a row.

    Args:
        person: the person of each row, int64 (n,), of any numbers.
        owner: the client of each row, int64 (n,). Rows of a person may belong to several.
        label: the class of each row, int64 (n,).
        share: the share of each owner's rows.
        key: key of the draw.

    Returns:
        bool (n,), the rows that are held out.

    Raises:
        DataError: nobody can be held out.
    """
    people, who = np.unique(person, return_inverse=True)
    owners, classes = _Counts.of(who, owner), _Counts.of(who, label)
    cells = _Counts.of(who, owners.codes * len(classes.rest) + classes.codes)
    owners.left = share_of(share, np.array(owners.rest)).tolist()
    cells.left = [share * size for size in cells.rest]
    order, taken = keys.generator(key).permutation(len(people)).tolist(), set[int]()
    for weight in (0.0, 1.0, math.inf):  # how many rows of an owner make up for a row too much of a class
        for one in order:
            gain = owners.gain(one)
            if one in taken or gain <= 0 or weight * gain + cells.gain(one) <= 0:
                continue
            if owners.keeps_some(one) and classes.keeps_some(one):
                taken.add(one)
                for group in (owners, classes, cells):
                    group.take(one)
    if not taken and share_of(share, np.bincount(owners.codes)).any():
        rows, persons = counted(len(person), "row", "rows"), counted(len(people), "person", "persons")
        raise DataError(
            f"no share of {share:g} can be held out without dividing a person ([data] person): of {rows} of {persons}, "
            "each client and class keeps one. Raise the share (test_share, validation, personal_validation, "
            "personal_test), or set it to 0 and hold out whole clients ([clients] test_clients, validation_clients)"
        )
    result: NDArray[np.bool_] = np.isin(who, sorted(taken))
    return result


@dataclass
class _Counts:
    """How many rows each person has in each group of rows, and how many are still to be taken or left over.

    Attributes:
        codes: the group of each row, int64 (n,), from 0.
        parts: for each person, its groups, each with the number of its rows in it.
        rest: the rows of each group that are not taken.
        left: the rows of each group that are still to be taken; below 0 if too many are.
    """

    codes: Rows
    parts: list[list[tuple[int, int]]]
    rest: list[int]
    left: list[float]

    @classmethod
    def of(cls, who: Rows, group: Rows) -> "_Counts":
        """Count the rows of each person, int64 (n,) from 0, in each group, int64 (n,)."""
        codes = np.unique(group, return_inverse=True)[1]
        sizes = np.bincount(codes)
        parts: list[list[tuple[int, int]]] = [[] for _ in range(int(who.max(initial=-1)) + 1)]
        pairs, counts = np.unique(who * max(1, len(sizes)) + codes, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            parts[pair // len(sizes)].append((pair % len(sizes), count))
        return cls(codes, parts, sizes.tolist(), [0.0] * len(sizes))

    def gain(self, one: int) -> float:
        """Return by how much the squared distance to the wanted rows falls if a person is taken."""
        return sum(count * (2 * self.left[group] - count) for group, count in self.parts[one])

    def keeps_some(self, one: int) -> bool:
        """Return whether each group of a person keeps a row without it."""
        return all(self.rest[group] > count for group, count in self.parts[one])

    def take(self, one: int) -> None:
        """Take the rows of a person."""
        for group, count in self.parts[one]:
            self.rest[group] -= count
            self.left[group] -= count


def classes_of(label: Tensor) -> Rows:
    """Return the class of each row, or 0 for all if the labels are targets."""
    result: Rows = (
        np.zeros(len(label), np.int64) if label.is_floating_point() or label.dim() > 1 else label.cpu().numpy()
    )
    return result


def hold_out(shards: Shards, columns: Columns, share: float, key: int) -> tuple[Shards, Shards]:
    """Remove a random share of every client's rows, whole persons if the data names them; see `Shards.held_out`.

    Returns:
        The rows that remain, and the rows that were removed.
    """
    if columns.person is None or share == 0.0 or not len(shards.rows):
        return shards.held_out(share, key)
    rows = shards.rows.numpy()
    person, label = columns.person.numpy()[rows], classes_of(columns.label)[rows]
    off = torch.from_numpy(whole_persons(person, shards.owner.numpy(), label, share, key))
    return shards.where(~off), shards.where(off)


@dataclass(frozen=True)
class Units:
    """The rows of persons, of which a partition sees one each.

    Attributes:
        columns: the table, in which the row that stands for a person has the person's most frequent class.
        rows: the rows that stand for a person, int64 (P,), ascending.
        order: all rows, person by person, int64 (n,).
        bounds: int64 (P + 1,): the person of `rows[i]` has `order[bounds[i] : bounds[i + 1]]`.
    """

    columns: Columns
    rows: Rows
    order: Rows
    bounds: Rows

    @classmethod
    def of(cls, columns: Columns, rows: Rows, partition: Partition) -> "Units | None":
        """Return the units of a partition, or None if it deals single rows: without persons, or by natural clients.

        A partition that cuts natural clients keeps the rows together that a person has at one of them.

        Raises:
            RecipeError: the partition promises numbers that whole persons cannot give.
        """
        if columns.person is None or not len(rows):
            return None
        person = np.unique(columns.person.numpy()[rows], return_inverse=True)[1]
        if isinstance(partition, ByClient) and columns.client is not None:
            if partition.shards == 1:
                return None
            client = np.unique(columns.client.cpu().numpy()[rows], return_inverse=True)[1]
            person = np.unique(client * (person.max() + 1) + person, return_inverse=True)[1]
        order = np.lexsort((rows, person))
        bounds = np.searchsorted(person[order], np.arange(person.max() + 2))
        first, label = rows[order[bounds[:-1]]], classes_of(columns.label)
        most = _most_frequent(person, label[rows])
        _refuse_exact(partition, person, label[rows])
        if not columns.label.is_floating_point() and columns.label.dim() == 1:
            label = label.copy()
            label[first] = most
            columns = replace(columns, label=torch.from_numpy(label))
        by_row = np.argsort(first)
        sizes = np.diff(bounds)[by_row]
        gathered = np.concatenate([rows[order[bounds[i] : bounds[i + 1]]] for i in by_row.tolist()])
        return cls(columns, first[by_row], gathered, np.concatenate(([0], np.cumsum(sizes))))

    def expanded(self, shards: Shards) -> Shards:
        """Return shards of `rows` with all rows of each person."""
        place = np.searchsorted(self.rows, shards.rows.numpy())
        sizes = np.diff(self.bounds)[place]
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = self.order[np.repeat(self.bounds[:-1][place], sizes) + inside]
        ends = np.concatenate(([0], np.cumsum(sizes)))[shards.offsets.numpy()]
        return Shards(torch.from_numpy(ends), torch.from_numpy(rows))


def _most_frequent(person: Rows, label: Rows) -> Rows:
    """Return the most frequent class of each person, of several the lowest."""
    pairs, counts = np.unique(np.stack([person, label]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    first = np.unique(pairs[0][order], return_index=True)[1]
    result: Rows = pairs[1][order][first]
    return result


def _refuse_exact(partition: Partition, person: Rows, label: Rows) -> None:
    """Refuse a partition whose clients have exact numbers of rows or classes that whole persons would change."""
    name, what = type(partition).__name__, partition.EXACT
    several = np.unique(np.stack([person, label]), axis=1).shape[1] - int(person.max()) - 1
    if (what == "rows" and len(person) > person.max() + 1) or (what == "classes" and several):
        raise RecipeError(
            f"[clients] partition: {name} gives each client exact {what}, and [data] person keeps the rows of a person "
            f"in one client, of whom some have several {what}. Use iid, dirichlet or by-client, or remove person",
            ("clients", "partition"),
        )


def dealt_units(person: Tensor | None, rows: Rows) -> Rows:
    """Return the unit in which each row is dealt, int64 (n,), from 0: its person, or the row itself."""
    if person is None:
        return np.arange(len(rows))
    result: Rows = np.unique(person.numpy()[rows], return_inverse=True)[1]
    return result


def divided_persons(person: Tensor, side: Tensor) -> tuple[int, int]:
    """Return how many persons have rows on several sides, and how many of their rows are on the last of these.

    Args:
        person: the person of each row, int64 (N,).
        side: the side of each row (N,), in ascending order of what a person should not be on; -1 for no side.
    """
    known = side >= 0
    who, at = np.unique(person[known].numpy(), return_inverse=True)[1], side[known].numpy()
    low, high = np.full(int(who.max(initial=-1)) + 1, 127), np.full(int(who.max(initial=-1)) + 1, -1)
    np.minimum.at(low, who, at)
    np.maximum.at(high, who, at)
    both = low < high
    return int(both.sum()), int((both[who] & (at == high[who])).sum())


def told_of_persons(columns: Columns) -> list[str]:
    """Return a sentence for each column that nothing reads and that seems to name persons with rows on both sides."""
    split, notes = columns.split.cpu(), []
    for name, codes in columns.unread_names.items():
        train, test = (torch.unique(codes[(split == side) & (codes >= 0)]) for side in (TRAIN, TEST))
        if both := int(torch.isin(train, test).sum()):
            total = int(codes.max()) + 1
            notes.append(
                f"{name}: {both:,} of {total:,} values are in training and test rows; if they name persons, "
                f'[data] person = "{name}" keeps them together'
            )
    return notes
