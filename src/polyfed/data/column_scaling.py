"""The scaling of the columns of a table: which modalities are standardised, and by which numbers."""

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning
from polyfed.core.scaling import Scaling
from polyfed.data.columns import OWN_TRAIN, TEST, TRAIN, VALIDATION, Column, Columns, check_finite, chunks
from polyfed.data.token_ids import vocabulary_of

FAR, NARROW, SPREAD = 3.0, 1 / 3, 1000.0
"""Features are uneven if a mean or a deviation exceeds `FAR`, if no deviation reaches `NARROW`, or if the largest
deviation is more than `SPREAD` times the smallest one above 0 (ours)."""

STEPS = 1024
"""A feature keeps its resolution in float32 if its deviation spans at least this many of float32's steps (ours)."""

WIDE = (torch.float64, torch.int32, torch.int64)
"""Types that hold numbers which float32 cannot tell apart."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""Types whose values the model gets as they are."""

FEW_STEPS = 8
"""A feature whose values span fewer steps of the type in which they are stored is named in a warning (ours)."""


@dataclass(frozen=True)
class Moments:
    """Statistics of each feature of a modality over some rows, float64; all broadcast over a sample.

    Every feature has its own. In vectors (F,) and sequences (T, F), each position of the last axis is a feature; in
    images (C, H, W) and samples with more axes, each channel is (first axis). Time steps that are all zero are padding
    and do not count.
    """

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor

    @property
    def varies(self) -> Tensor:
        """Whether a feature has two different values."""
        return self.high > self.low

    @property
    def are_uneven(self) -> bool:
        """Whether these features hinder learning unless they are standardised; see `FAR`."""
        spread = self.deviation[self.varies]
        if not len(spread):
            return bool((self.mean.abs() > FAR).any())
        largest = float(spread.max())
        return (
            bool((self.mean.abs() > FAR).any())
            or not NARROW <= largest <= FAR
            or largest > SPREAD * float(spread.min().clamp(min=1e-300))
        )


def fitted(columns: Columns, rows: Tensor, numbers: Collection[str] = (), ids: Collection[str] = ()) -> Columns:
    """Return the table with features scaled to mean 0 and deviation 1 over `rows`, as `Columns.standardise` asks.

    A constant feature is shifted and not scaled. The statistics are summed in float64, chunk by chunk, so a
    memory-mapped column is never copied. Features whose values a float type cannot tell apart are named in a warning.

    Args:
        rows: the rows that train, int64 (n,).
        numbers: modalities whose whole numbers are quantities, whatever `vocabulary_of` guesses.
        ids: modalities whose whole numbers are token ids.

    Returns:
        The table. Its `standardise` names the modalities that were standardised.
    """
    modalities, changed = dict(columns.modalities), []
    for name, column in columns.modalities.items():
        wanted = asked(columns, name, numbers, ids)
        use = rows[columns.present[name].cpu()[rows]] if name in columns.present else rows
        if not len(use) or not (wanted or column.values.dtype in WIDE):
            continue
        found = _quantities(column, moments(column, use))
        if wanted and not found.mean.isfinite().all():
            check_finite(columns)
        if wanted and (columns.standardise != "uneven" or found.are_uneven):
            modalities[name] = _scaled(column, found, use)
            changed.append(name)
        if column.shift is None and not (name in ids or vocabulary_of(column) is not None):
            _warn_of_collapsed(f"data '{columns.name}': modality '{name}'", modalities[name], found)
    result = _told(changed) if columns.standardise == "uneven" else ()
    return replace(columns, modalities=modalities, notes=(*columns.notes, *result), standardise=tuple(changed))


def asked(columns: Columns, name: str, numbers: Collection[str] = (), ids: Collection[str] = ()) -> bool:
    """Whether `Columns.standardise` asks to standardise a modality, or leaves that to its numbers.

    With "uneven", token ids and modalities that their source has scaled, such as the bytes of images, stay as they are.
    """
    if isinstance(columns.standardise, bool | tuple):
        return columns.standardise is True or (columns.standardise is not False and name in columns.standardise)
    column = columns.modalities[name]
    is_ids = name in ids or (name not in numbers and vocabulary_of(column) is not None)
    return not is_ids and column.shift is None and column.scale is None


def uneven_modalities(columns: Columns, rows: Tensor) -> tuple[str, ...]:
    """Return the modalities that "uneven" standardises; see `fitted`. Nothing is said about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fitted(replace(columns, standardise="uneven"), rows)
    assert isinstance(result.standardise, tuple)
    return result.standardise


def standardised(columns: Columns) -> Columns:
    """Return the table with all modalities scaled over the training rows, for sources whose published form is scaled.

    Raises:
        DataError: there is no training row, or a feature is not finite.
    """
    train = columns.split == TRAIN
    if columns.split_personal is not None:
        train = train & (columns.split_personal == OWN_TRAIN)
    if not train.any():
        raise DataError(f"data '{columns.name}': no training rows to standardise with. Check the array of split codes")
    result = fitted(replace(columns, standardise=True), train.nonzero()[:, 0])
    return replace(result, standardise=False)


def _told(changed: list[str]) -> tuple[str, ...]:
    """Return the line about standardised modalities, and warn with it."""
    if not changed:
        return ()
    line = (
        f"{', '.join(changed)}: features differ in size, so they are shifted and scaled to mean 0 and deviation 1 over "
        "the training rows. `predict` does the same with new rows; standardise = false turns this off"
    )
    warnings.warn(f"data: {line}", PolyfedWarning, stacklevel=4)
    return (line,)


def _scaled(column: Column, found: Moments, rows: Tensor) -> Column:
    """Return the column with the shift and the scale that standardise it."""
    wide = column.values.dtype in WIDE and not _fits(found)
    if not wide and column.values.dtype != torch.float32:
        # the numbers of the float32 samples, so that files and arrays of either type give the same model
        found = _quantities(column, moments(column, rows, torch.float32))
    scale = torch.where(found.varies, found.deviation, 1.0).to(torch.float32)
    # a deviation below the range of float32 would divide by zero
    scale = torch.where(scale > 0, scale, 1.0)
    shift = torch.where(found.varies, found.mean, found.low)
    return replace(column, shift=shift.to(torch.float64 if wide else torch.float32), scale=scale)


def _quantities(column: Column, found: Moments) -> Moments:
    """Return the statistics with zeros for words and marks of empty cells, which stay 0 or 1."""
    if column.features is None or column.features[0].is_whole:
        return found
    kept = torch.tensor([number for feature in column.features for number in feature.numeric])
    parts = (torch.where(kept, part, 0.0) for part in (found.mean, found.deviation, found.low, found.high))
    return Moments(*parts)


def _fits(found: Moments) -> bool:
    """Whether float32 can tell the values of each feature apart."""
    largest = torch.maximum(found.low.abs(), found.high.abs())
    return not bool((found.varies & (found.deviation < STEPS * torch.finfo(torch.float32).eps * largest)).any())


def moments(column: Column, rows: Tensor, kind: torch.dtype = torch.float64) -> Moments:
    """Return the statistics of each feature over `rows`.

    Args:
        rows: int64 (n,), at least one.
        kind: the type to which the stored values are converted first.
    """
    kept = 0 if len(column.shape) > 2 else len(column.shape) - 1
    axes = [axis for axis in range(len(column.shape) + 1) if axis != kept + 1]
    mean, squares, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    low = high = None
    for part in chunks(rows, column.shape):
        x = column.raw(part).to(kind).to(torch.float64)
        real = torch.ones(x.shape[:-1], dtype=torch.bool) if len(column.shape) != 2 else x.ne(0).any(-1)
        if not bool(real.all()):
            if not bool(real.any()):
                continue
            x = x[real].unsqueeze(1)
        n = x.numel() // max(1, x.shape[kept + 1])
        part_mean = x.mean(axes, keepdim=True)
        # pairwise merge of moments (Chan, Golub, LeVeque 1979): no cancellation, whatever the offset
        delta, total = part_mean[0] - mean, count + n
        squares = squares + (x - part_mean).square().sum(axes, keepdim=True)[0] + delta.square() * count * n / total
        mean, count = mean + delta * n / total, total
        least, most = x.amin(axes, keepdim=True)[0], x.amax(axes, keepdim=True)[0]
        low, high = (least, most) if low is None or high is None else (low.minimum(least), high.maximum(most))
    if low is None or high is None:  # nothing but padding
        low = high = mean = squares = torch.zeros(_feature_shape(column), dtype=torch.float64)
    return Moments(mean, (squares / max(count, 1)).sqrt(), low, high)


def _feature_shape(column: Column) -> tuple[int, ...]:
    kept = 0 if len(column.shape) > 2 else len(column.shape) - 1
    return tuple(size if axis == kept else 1 for axis, size in enumerate(column.shape))


def _warn_of_collapsed(where: str, column: Column, found: Moments) -> None:
    """Warn of a feature that varies by only a few steps of the float type in which the model gets it."""
    stored = column.values.dtype
    wide = stored in WIDE
    if (wide and column.shift is not None) or not (wide or stored in FLOATS):
        return
    kind = torch.float32 if wide else stored
    largest = torch.maximum(found.low.abs(), found.high.abs())
    near = found.varies & ((found.high - found.low) < FEW_STEPS * torch.finfo(kind).eps * largest)
    if not bool(near.any()):
        return
    place = int(near.reshape(-1).nonzero()[0, 0])
    low, high = (float(edge.reshape(-1)[place]) for edge in (found.low, found.high))
    cure = (
        "Set standardise, which subtracts the mean first"
        if wide
        else "Store the values as float64, or subtract a constant before they are stored"
    )
    warnings.warn(
        f"{where}: feature {place} (counted from 0) lies from {low!r} to {high!r}, where "
        f"{str(kind).removeprefix('torch.')} cannot tell its values apart. {cure}",
        PolyfedWarning,
        stacklevel=4,
    )


def scaling_of(columns: Columns) -> dict[str, Scaling] | None:
    """Return the shift and the scale of each modality that has one of them, on the CPU.

    Returns:
        None if all rows are left out. This happens in a deployment in which the server has no data: its `columns` only
        give the shapes, and each device scales its own rows.
    """
    if not len(columns.rows(TRAIN, TEST, VALIDATION)):
        return None
    return {
        name: Scaling(
            torch.zeros(()) if column.shift is None else column.shift.detach().cpu(),
            torch.ones(()) if column.scale is None else column.scale.detach().float().cpu(),
        )
        for name, column in columns.modalities.items()
        if column.shift is not None or column.scale is not None
    }
