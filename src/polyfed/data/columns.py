"""The table that every data source loads: a column of features for each modality, and facts about each row.

Shapes: N rows of the whole data set, C classes, M modalities.
"""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from polyfed.core.errors import DataError, counted, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data.column_rules import Feature
from polyfed.data.labels import check_labels

TRAIN, TEST, VALIDATION, LEFT_OUT = 0, 1, 2, 3
"""Codes of `Columns.split`."""

OWN_TRAIN, OWN_TEST, GUARD = 0, 1, 2
"""Codes of `Columns.split_personal`. A guard row is left out because it overlaps a test row, as in sliding windows."""

Standardise = bool | Literal["uneven"] | tuple[str, ...]
"""Which modalities are standardised; see `Columns.standardise`."""

_CHUNK = 1 << 22  # entries read at a time: 16 MiB as float32, whatever the size of the file

_FINGERPRINT_ROWS = 256  # rows whose features are part of a fingerprint


@dataclass(frozen=True)
class Column:
    """The values of one modality: `take(rows)` is `(values[rows] - shift) / scale`, in float32.

    Attributes:
        values: (N, *shape), of any real type; may be memory-mapped. With `index`, (U, *shape) for U distinct samples.
        shift: This tensor is subtracted from the values. It broadcasts over one sample. None means 0.
        scale: The shifted values are divided by this tensor, which broadcasts over one sample. None means 1.
        index: int64 (N,), for each row, the position of its entry in `values`, if several rows share an entry. None
            means that row i uses entry i.
        blank: bool (N,), rows that read as zeros, whatever their entry is. None means that there are no such rows. It
            takes the modality from rows without a copy of the values, which may be memory-mapped.
        coded: the columns of a table of which [data.columns] speaks, before their fit: `values` (N, columns) are then
            codes, in which NaN is an empty cell; see `column_rules.py`. Otherwise None.
        features: these columns after the fit. None if `values` are the numbers that the data holds.
        names: the columns of the table, or the arrays, that hold the modality, in order. Empty if they have no names.
        layout: the axes of a sample in the data, where `values` have others; see `values.laid_out`.
    """

    values: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None
    index: Tensor | None = None
    blank: Tensor | None = None
    coded: tuple[Feature, ...] | None = None
    features: tuple[Feature, ...] | None = None
    names: tuple[str, ...] = ()
    layout: str = ""

    def __len__(self) -> int:
        return len(self.values if self.index is None else self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.values.shape[1:])

    @property
    def size_bytes(self) -> int:
        """Size of the stored values and of the index in bytes."""
        return self.values.nbytes + (0 if self.index is None else self.index.nbytes)

    def raw(self, rows: Tensor | Sequence[int]) -> Tensor:
        """The stored values of `rows`, before shift and scale, and zeros for blank rows.

        Args:
            rows: int64 (...), on any device; or a list or an array of row numbers.

        Returns:
            (..., *shape) in the stored type, on the device of `rows`.
        """
        if not isinstance(rows, Tensor):
            rows = torch.as_tensor(rows, dtype=torch.int64)
        own = rows.to(self.values.device)
        entries = own if self.index is None else self.index[own]
        if not self.values.is_contiguous():
            picked = self.values[entries].to(rows.device)
        else:
            # `embedding` copies whole rows; `values[entries]` copies number by number and takes three times as long
            flat = torch.nn.functional.embedding(entries, self.values.view(len(self.values), math.prod(self.shape)))
            picked = flat.view((*entries.shape, *self.shape)).to(rows.device)
        if self.blank is None:
            return picked
        blank = self.blank[rows.to(self.blank.device)].to(rows.device)
        return picked.masked_fill(blank.view(*rows.shape, *(1,) * len(self.shape)), 0)

    def take(self, rows: Tensor) -> Tensor:
        """Return the samples of `rows`, shifted and scaled.

        Args:
            rows: int64 (...); `torch.func.vmap` may batch it.

        Returns:
            float32 (..., *shape). In sequences (T, F), time steps that are all zero are padding and stay zero.
        """
        raw = self.raw(rows)
        if self.shift is None:
            x = raw.to(torch.float32)
        else:
            # a shift is float64 where float32 could not tell the values apart: the rounding comes after it
            x = (raw.to(self.shift.dtype) - self.shift).to(torch.float32)
            if len(self.shape) == 2:
                x = torch.where(raw.ne(0).any(-1, keepdim=True), x, 0.0)
        return x if self.scale is None else x / self.scale

    def to(self, device: torch.device | str, *, features: bool = True) -> "Column":
        """Return the same column for rows on another device.

        Args:
            device: the device on which `take` is to return samples.
            features: whether the stored values move there. If not, `raw` copies the values of its rows in each call.
        """
        names = ("shift", "scale", "blank", *(("values", "index") if features else ()))
        result = {name: getattr(self, name) for name in names}
        return replace(self, **{name: t.to(device) for name, t in result.items() if t is not None})

    def without(self, rows: Tensor) -> "Column":
        """Return the same column, in which the rows that are true in `rows`, bool (N,), read as zeros."""
        return replace(self, blank=rows if self.blank is None else self.blank | rows)


@dataclass(frozen=True)
class Columns:
    """A data set as a table. The constructor checks that its arrays match each other.

    Attributes:
        name: Name of the data set in results.
        modalities: The column of each modality. Their order here is the order of modalities in all of polyfed.
        label: int64 (N,), class numbers in range(num_classes). For T targets in each row, float32 (N,) or (N, T); NaN
            means that a target is unknown.
        num_classes: C, which is at least the largest label + 1. For targets, T.
        split: int8 (N,): 0 train, 1 test, 2 validation, 3 left out.
        ids: int64 (N,), stable and distinct sample ids. The devices of a silo use them to align their rows.
        class_names: The names of the C classes, or of the T targets.
        present: By modality, whether each row has it, bool (N,). `present` omits modalities that all rows have.
        client: int64 (N,), the natural client (speaker, subject, video) of each row.
        client_names: The names of the natural clients, by number; None if the data has none.
        person: int64 (N,), the person of each row, of whose rows no random split divides any. Their names are kept
            nowhere. `populate` drops the numbers once the rows are divided.
        unread_names: By column that nothing reads and that seems to name persons, the number of each row's value, int64
            (N,), -1 for an empty cell. `populate` drops them too.
        split_personal: int8 (N,): 0 training row of its natural client, 1 test row of that client, 2 guard row.
        words_sorted: Whether the labels were words that polyfed numbered in sorted order. The order of the classes then
            has no meaning.
        labelled: Whether `label` holds labels that the model learns to predict. If not, only partitions by class read
            `label`. If there are no labels at all, `label` is 0 everywhere.
        numbered: Whether `ids` are only row numbers, because the source has no ids. They mean nothing in other tables.
        groups: By column, the group of each row, int64 (N,): the position of its value among the values that an
            evaluation job names, or a number from their number on for any other value.
        origin: Modality, or `labels` -> the columns or arrays of the file that it reads, where the source knows them.
            The entry "" lists those that nothing reads.
        notes: Sentences about what was guessed, converted or left out during reading; `polyfed check` prints them.
        standardise: The modalities whose features `populate` is to standardise over the rows that train: True for all,
            False for none, a tuple of their names, or "uneven" for those whose features differ in size; see `fitted`.

    Raises:
        DataError: There is no modality or no row, lengths differ, or a label or code is out of range.
    """

    name: str
    modalities: Mapping[str, Column]
    label: Tensor
    num_classes: int
    split: Tensor
    ids: Tensor
    class_names: tuple[str, ...] | None = None
    present: Mapping[str, Tensor] = field(default_factory=dict)
    client: Tensor | None = None
    client_names: tuple[str, ...] | None = None
    split_personal: Tensor | None = None
    words_sorted: bool = False
    labelled: bool = True
    numbered: bool = False
    notes: tuple[str, ...] = ()
    groups: Mapping[str, Tensor] = field(default_factory=dict)
    person: Tensor | None = None
    unread_names: Mapping[str, Tensor] = field(default_factory=dict)
    origin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    standardise: Standardise = False

    def __post_init__(self) -> None:
        if not self.modalities:
            raise DataError(f"data '{self.name}' has no modality. Name at least one in data.modalities")
        for name, column in self.modalities.items():
            if not isinstance(column, Column):
                kind = type(column).__name__
                raise DataError(f"data '{self.name}': modality '{name}' is a {kind}, not a Column; write Column(...)")
            if 0 in column.shape:
                raise DataError(
                    f"data '{self.name}': modality '{name}' has samples of shape {column.shape}, which hold no numbers"
                )
        if len(self.label) == 0:
            raise DataError(f"data '{self.name}' has no rows. Check the path and the files behind it")
        self._check_lengths()
        check_labels(self.name, self.label, self.num_classes, self.class_names)
        self._check_codes("split", self.split, LEFT_OUT, "0 train, 1 test, 2 validation, 3 left out")
        if self.split_personal is not None:
            self._check_codes("split_personal", self.split_personal, GUARD, "0 train, 1 test, 2 guard row")
        for modality in (*self.present, *(self.standardise if isinstance(self.standardise, tuple) else ())):
            self.column(modality)

    def __len__(self) -> int:
        return len(self.label)

    def name_of_client(self, client: int) -> str:
        """Return the name of a natural client, or its number if the data has no names."""
        return str(client) if self.client_names is None else self.client_names[client]

    def column(self, modality: str) -> Column:
        """Return the column of a modality.

        Raises:
            DataError: There is no such modality; the message suggests the one with the most similar name.
        """
        if modality not in self.modalities:
            hint = did_you_mean(modality, self.modalities)
            raise DataError(f"data '{self.name}' has no modality '{modality}'; {hint}")
        return self.modalities[modality]

    def rows(self, *splits: int) -> Tensor:
        """Return the positions of the rows whose split code is in `splits`, in ascending order, int64 on the CPU."""
        codes = torch.tensor(splits, dtype=self.split.dtype)
        return torch.isin(self.split.cpu(), codes).nonzero()[:, 0]

    def fingerprint(self) -> str:
        """Return the SHA-256 of the labels, splits, ids and presence of all rows, and of the features of some rows.

        The fingerprint covers the values on which a run depends. It covers the features of only some rows, because
        reading all features of a large data set would take as long as a round of training. These rows are evenly
        spaced. Modalities that `without` took from rows count as held, because the seed of a run decides which these
        are, and runs that differ in their seed have the same data.
        """
        blank = {name: column.blank for name, column in self.modalities.items() if column.blank is not None}
        present = {name: mask | blank[name] if name in blank else mask for name, mask in self.present.items()}
        present = {name: mask for name, mask in present.items() if name not in blank or not bool(mask.all())}
        some = torch.linspace(0, len(self) - 1, min(len(self), _FINGERPRINT_ROWS), dtype=torch.float64).long()
        sha = hashlib.sha256(f"{self.name}|{self.num_classes}".encode())
        parts = {"label": self.label, "split": self.split, "ids": self.ids, "client": self.client}
        parts |= {f"{name}.present": mask for name, mask in present.items()}
        parts |= {f"{name}.x": replace(column, blank=None).raw(some) for name, column in self.modalities.items()}
        for name, part in parts.items():
            if part is not None:
                sha.update(f"{name}|{part.dtype}|{tuple(part.shape)}|".encode())
                sha.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def to(self, device: torch.device | str, *, features: bool = True) -> "Columns":
        """Return the table with features, labels and presence on another device; the other tensors are not moved.

        Args:
            features: see `Column.to`.
        """
        return replace(
            self,
            modalities={name: column.to(device, features=features) for name, column in self.modalities.items()},
            label=self.label.to(device),
            present={name: mask.to(device) for name, mask in self.present.items()},
        )

    def without(self, lost: Mapping[str, Tensor]) -> "Columns":
        """Return the table after rows lost modalities.

        Args:
            lost: modality -> bool (N,), the rows that lose it.
        """
        there = {name: ~rows for name, rows in lost.items()}
        there = {name: self.present[name] & kept if name in self.present else kept for name, kept in there.items()}
        fewer = {name: self.modalities[name].without(rows) for name, rows in lost.items()}
        return replace(self, modalities={**self.modalities, **fewer}, present={**self.present, **there})

    def with_modalities(self, modalities: Mapping[str, Column]) -> "Columns":
        """Return the same table with these columns. They may hold only some rows, and in other memory."""
        made = copy.copy(self)  # the constructor would check all rows again
        object.__setattr__(made, "modalities", modalities)
        return made

    def _check_lengths(self) -> None:
        arrays: dict[str, Column | Tensor | None] = {
            **self.modalities,
            "split": self.split,
            "ids": self.ids,
            "client": self.client,
            "person": self.person,
            "split_personal": self.split_personal,
            **{f"present of {name}": mask for name, mask in self.present.items()},
        }
        problems = Problems()
        for name, array in arrays.items():
            if array is not None and len(array) != len(self.label):
                text = (
                    f"data '{self.name}': array '{name}' has {len(array)} rows, the labels have "
                    f"{len(self.label)}. Every array needs one row per sample, in the same order"
                )
                problems.add(DataError(text))
        problems.raise_all()

    def _check_codes(self, array: str, codes: Tensor, largest: int, meaning: str) -> None:
        outside = (codes < 0) | (codes > largest)
        if outside.any():
            row = int(outside.nonzero()[0, 0])
            found = int(codes[row])
            raise DataError(f"data '{self.name}': '{array}' holds {found} at row {row}; allowed: {meaning}")


def check_finite(columns: Columns) -> None:
    """Raise DataError if a row that has the modality holds NaN or infinity, or a number beyond the range of float32."""
    problems = Problems()
    for name, column in columns.modalities.items():
        if not column.values.is_floating_point():
            continue
        bad = _bad_rows(column)
        if name in columns.present:
            bad &= columns.present[name]
        if bad.any():
            count, row = counted(int(bad.sum()), "row", "rows"), int(bad.nonzero()[0, 0])
            sample = (
                column.raw(torch.tensor([row]))[0].nan_to_num() if column.coded else column.raw(torch.tensor([row]))[0]
            )
            place = tuple((~sample.to(torch.float32).isfinite()).nonzero()[0].tolist())
            text = (
                f"data '{columns.name}': modality '{name}' has {count} with NaN or infinite "
                f"values, first row {row}, whose entry {', '.join(map(str, place))} is {float(sample[place]):g} (the "
                f"largest number is {torch.finfo(torch.float32).max:.4g}). Clean the array, or mark rows that lack the "
                f"modality in a boolean array '{name}_present'"
            )
            problems.add(DataError(text))
    problems.raise_all()


def _bad_rows(column: Column) -> Tensor:
    bad = torch.zeros(len(column.values), dtype=torch.bool)
    for part in chunks(torch.arange(len(column.values)), column.shape):
        taken = column.values[part].to(torch.float32)
        finite = ~taken.isinf() if column.coded is not None else taken.isfinite()
        bad[part] = ~finite.reshape(len(part), -1).all(1)
    return bad if column.index is None else bad[column.index]


def chunks(rows: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the rows in pieces of at most `_CHUNK` numbers, or of one row if a sample has more.

    Args:
        rows: (n,).
        shape: shape of a sample.
    """
    yield from torch.split(rows, max(1, _CHUNK // max(1, math.prod(shape))))
