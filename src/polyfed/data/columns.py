"""The table every data source gives: one column per modality, and what is known of each row.

Shape letters: `N` rows of the whole data set, `C` classes, `M` modalities.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError, did_you_mean

TRAIN, TEST, VALIDATION, LEFT_OUT = 0, 1, 2, 3
"""Codes of `Columns.split`."""

OWN_TRAIN, OWN_TEST, GUARD = 0, 1, 2
"""Codes of `Columns.split_personal`; a guard row overlaps a test row (as windows do) and is left out."""

_CHUNK = 1 << 22  # entries looked at in one go: 16 MiB as float32, whatever the size of the file behind

_LOOKED_AT = 256  # rows whose features make a fingerprint


@dataclass(frozen=True)
class Column:
    """The values of one modality: `take(rows)` is `(values[rows] - shift) / scale`, in float32.

    Attributes:
        values: (N, *shape), any real type; may be memory mapped. With `index`, (U, *shape) for U distinct
            samples.
        shift: broadcasts over one sample; None is 0.
        scale: broadcasts over one sample; None is 1.
        index: int64 (N,), the entry of `values` behind each row, where several rows share one; None: row i
            has entry i.
    """

    values: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None
    index: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values if self.index is None else self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.values.shape[1:])

    def raw(self, rows: Tensor) -> Tensor:
        """The stored values of these rows (...), before shift and scale: (..., *shape), stored type."""
        entries = rows if self.index is None else self.index[rows]
        if not self.values.is_contiguous():
            return self.values[entries]
        # an embedding copies whole rows; `values[entries]` walks them entry by entry and takes three times as long
        picked = torch.nn.functional.embedding(entries, self.values.view(len(self.values), math.prod(self.shape)))
        return picked.view((*entries.shape, *self.shape))

    def take(self, rows: Tensor) -> Tensor:
        """The samples of `rows` (...), int64, which `torch.func.vmap` may batch: float32 (..., *shape)."""
        x = self.raw(rows).to(torch.float32)
        if self.shift is not None:
            x = x - self.shift
        if self.scale is not None:
            x = x / self.scale
        return x

    def to(self, device: torch.device | str) -> "Column":
        """The same column on another device."""
        moved = (None if t is None else t.to(device) for t in (self.shift, self.scale, self.index))
        return Column(self.values.to(device), *moved)


@dataclass(frozen=True)
class Columns:
    """A data set as a table. Building one checks that its arrays fit together (DataError if not).

    Attributes:
        name: of the data set, as results show it.
        modalities: column of each modality; the order is the order of modalities everywhere.
        label: int64 (N,), in range(num_classes).
        num_classes: C, at least the largest label + 1.
        split: int8 (N,): 0 train, 1 test, 2 validation, 3 left out.
        ids: int64 (N,), stable and distinct sample ids, by which the parties of a silo align their rows.
        class_names: C names.
        present: bool (N,), only for a modality that some rows lack.
        client: int64 (N,), natural client (speaker, subject, video) of each row.
        split_personal: int8 (N,): 0 train, 1 test of the row's natural client, 2 guard row.
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
    split_personal: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.modalities:
            raise DataError(f"data '{self.name}': no modality. Name at least one in data.modalities")
        for name, column in self.modalities.items():
            if not isinstance(column, Column):
                kind = type(column).__name__
                raise DataError(f"data '{self.name}': modality '{name}' is a {kind}, not a Column; write Column(...)")
            if 0 in column.shape:
                raise DataError(
                    f"data '{self.name}': modality '{name}' has samples of shape {column.shape}, no numbers"
                )
        if len(self.label) == 0:
            raise DataError(f"data '{self.name}': no rows")
        self._check_lengths()
        self._check_labels()
        self._check_codes("split", self.split, LEFT_OUT, "0 train, 1 test, 2 validation, 3 left out")
        if self.split_personal is not None:
            self._check_codes("split_personal", self.split_personal, GUARD, "0 train, 1 test, 2 guard row")
        for modality in self.present:
            self.column(modality)

    def __len__(self) -> int:
        return len(self.label)

    def column(self, modality: str) -> Column:
        """The column of a modality; a DataError that names the nearest one if there is none."""
        if modality not in self.modalities:
            hint = did_you_mean(modality, self.modalities)
            raise DataError(f"data '{self.name}' has no modality '{modality}'; {hint}")
        return self.modalities[modality]

    def rows(self, *splits: int) -> Tensor:
        """Rows of these splits, ascending, int64 on the CPU."""
        codes = torch.tensor(splits, dtype=self.split.dtype)
        return torch.isin(self.split.cpu(), codes).nonzero()[:, 0]

    def fingerprint(self) -> str:
        """SHA-256 of what a run depends on: labels, splits and ids of all rows, features of some, evenly spaced.

        A look at every feature of a large set would take as long as a round of training.
        """
        some = torch.linspace(0, len(self) - 1, min(len(self), _LOOKED_AT), dtype=torch.float64).long()
        sha = hashlib.sha256(f"{self.name}|{self.num_classes}".encode())
        parts = {"label": self.label, "split": self.split, "ids": self.ids, "client": self.client}
        parts |= {f"{name}.present": mask for name, mask in self.present.items()}
        parts |= {f"{name}.x": column.take(some) for name, column in self.modalities.items()}
        for name, part in parts.items():
            if part is not None:
                sha.update(f"{name}|{part.dtype}|{tuple(part.shape)}|".encode())
                sha.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def to(self, device: torch.device | str) -> "Columns":
        """Features, labels and presence on another device; the book-keeping stays where it is."""
        return replace(
            self,
            modalities={name: column.to(device) for name, column in self.modalities.items()},
            label=self.label.to(device),
            present={name: mask.to(device) for name, mask in self.present.items()},
        )

    def _check_lengths(self) -> None:
        arrays: dict[str, Column | Tensor | None] = {
            **self.modalities,
            "split": self.split,
            "ids": self.ids,
            "client": self.client,
            "split_personal": self.split_personal,
            **{f"present of {name}": mask for name, mask in self.present.items()},
        }
        for name, array in arrays.items():
            if array is not None and len(array) != len(self.label):
                raise DataError(
                    f"data '{self.name}': array '{name}' has {len(array)} rows, the labels have "
                    f"{len(self.label)}. Every array needs one row per sample, in the same order"
                )

    def _check_labels(self) -> None:
        if self.label.dtype != torch.int64 or self.label.dim() != 1:
            found = f"{self.label.dtype} {tuple(self.label.shape)}"
            raise DataError(f"data '{self.name}': labels must be int64 of shape (N,), found {found}")
        outside = (self.label < 0) | (self.label >= self.num_classes)
        if outside.any():
            row = int(outside.nonzero()[0, 0])
            raise DataError(
                f"data '{self.name}': {int(outside.sum())} labels outside 0..{self.num_classes - 1}, "
                f"first {int(self.label[row])} at row {row}. Number the classes from 0, or "
                "give every class a name"
            )
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise DataError(f"data '{self.name}': {len(self.class_names)} names for {self.num_classes} classes")

    def _check_codes(self, array: str, codes: Tensor, largest: int, meaning: str) -> None:
        outside = (codes < 0) | (codes > largest)
        if outside.any():
            row = int(outside.nonzero()[0, 0])
            found = int(codes[row])
            raise DataError(f"data '{self.name}': '{array}' holds {found} at row {row}; allowed: {meaning}")


def check_finite(columns: Columns) -> None:
    """Raise DataError at the first modality that holds NaN or infinity (as float32) in a row that has it."""
    for name, column in columns.modalities.items():
        if not column.values.is_floating_point():
            continue
        bad = _bad_rows(column)
        if name in columns.present:
            bad &= columns.present[name]
        if bad.any():
            raise DataError(
                f"data '{columns.name}': modality '{name}' has {int(bad.sum())} rows with NaN or infinite "
                f"values, first row {int(bad.nonzero()[0, 0])}. Clean the array, or mark rows that lack the "
                f"modality in a boolean array '{name}_present'"
            )


def standardised(columns: Columns) -> Columns:
    """The same table, every modality shifted and scaled to mean 0 and deviation 1 over its *training* rows.

    Training rows are those of split 0 that are nobody's own test or guard row. Statistics are per feature:
    the last axis of vectors (F,) and sequences (T, F), the first of images (C, H, W) and anything larger.
    They are summed in float64, chunk by chunk, so a memory-mapped column is never copied. A constant feature
    is only centred.
    """
    train = columns.split == TRAIN
    if columns.split_personal is not None:
        train = train & (columns.split_personal == OWN_TRAIN)
    if not train.any():
        raise DataError(f"data '{columns.name}': no training rows to standardise with")
    modalities = {}
    for name, column in columns.modalities.items():
        use = train & columns.present[name] if name in columns.present else train
        mean, deviation = moments(column, use.nonzero()[:, 0])
        if not mean.isfinite().all():
            check_finite(columns)
        modalities[name] = replace(column, shift=mean.float(), scale=deviation.float())
    return replace(columns, modalities=modalities)


def moments(column: Column, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population deviation of each feature over `rows`, float64, broadcasting over a sample."""
    kept = 0 if len(column.shape) > 2 else len(column.shape) - 1
    axes = [axis for axis in range(len(column.shape) + 1) if axis != kept + 1]
    count, mean, squares = 0, torch.zeros(()), torch.zeros(())
    for part in _chunks(rows, column.shape):
        x = column.raw(part).to(torch.float64)
        n = x.numel() // max(1, x.shape[kept + 1])
        part_mean = x.mean(axes, keepdim=True)
        # pairwise merge of moments (Chan, Golub, LeVeque 1979): no cancellation, whatever the offset
        delta, total = part_mean[0] - mean, count + n
        squares = squares + (x - part_mean).square().sum(axes, keepdim=True)[0] + delta.square() * count * n / total
        mean, count = mean + delta * n / total, total
    deviation = (squares / max(count, 1)).sqrt()
    # below the spacing of float32 around the mean, a deviation is rounding and not signal
    constant = deviation <= 1e-6 * mean.abs().clamp(min=1e-30)
    return mean, torch.where(constant, torch.ones_like(deviation), deviation)


def _bad_rows(column: Column) -> Tensor:
    bad = torch.zeros(len(column.values), dtype=torch.bool)
    for part in _chunks(torch.arange(len(column.values)), column.shape):
        finite = column.values[part].to(torch.float32).isfinite()
        bad[part] = ~finite.reshape(len(part), -1).all(1)
    return bad if column.index is None else bad[column.index]


def _chunks(rows: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    yield from torch.split(rows, max(1, _CHUNK // max(1, math.prod(shape))))
