"""Finds answers that leak: features that copy the labels, and test rows that also stand in training."""

import math
import warnings
from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning, counted
from polyfed.core.problems import Problems
from polyfed.data.columns import Column, Columns

_PIECE = 16
"""Rows that are compared at a time (ours). Only features that agree in all earlier rows are compared further."""


def refuse_leaked_labels(columns: Columns) -> None:
    """Refuse a modality that is a copy of the labels, and warn about single features that are copies of them.

    Only rows that have the modality and a known label are compared. If all these rows have one label, nothing is
    compared, because a feature that is constant in these rows gives no answer away.

    Args:
        columns: the table, as it was read.

    Raises:
        DataError: a modality consists of the labels and nothing else. The message lists all such modalities.
    """
    problems = Problems()
    targets = columns.label.reshape(len(columns), -1)
    for name, column in columns.modalities.items():
        copies = _copies(column, targets, columns.present.get(name))
        where = f"data '{columns.name}': modality '{name}'"
        if len(copies) and len(copies) == column.values[0].numel():
            problems.add(
                DataError(
                    f"{where} is equal to the labels in every row, so it is both a label and a modality. Leave it out"
                )
            )
        elif len(copies):
            warnings.warn(
                f"{where}: feature {copies[0]} (counted from 0) is equal to the label in every row, so a model reads "
                "the answer there. Leave it out if it is a copy of the label",
                PolyfedWarning,
                stacklevel=2,
            )
    problems.raise_all()


def _copies(column: Column, targets: Tensor, there: Tensor | None) -> list[int]:
    """Return, in ascending order, the positions of features that copy a target: they equal this target in every row."""
    result: set[int] = set()
    for target in targets.unbind(1):
        usable = ~target.isnan() if there is None else ~target.isnan() & there
        rows = usable.nonzero()[:, 0]
        if len(rows) and bool((target[rows] != target[rows[0]]).any()):
            result |= set(_equal(column, target, rows))
    return sorted(result)


def _equal(column: Column, target: Tensor, rows: Tensor) -> list[int]:
    """Return the positions of the features that equal the target in all of these rows."""
    places = torch.arange(column.values[0].numel())
    for piece in torch.split(rows, _PIECE):
        values = column.raw(piece).reshape(len(piece), -1)[:, places].to(torch.float64)
        wanted = target[piece].unsqueeze(1)
        # targets are float32, so features of at least this precision are compared as float32
        values = values.to(torch.float32) if wanted.is_floating_point() else values
        places = places[(values == wanted).all(0)]
        if not len(places):
            break
    result: list[int] = places.tolist()
    return result


MOST_READ = 20_000_000
"""The most numbers that `repeated_rows` reads, which takes a fraction of a second; larger tables are not compared."""


def repeated_rows(columns: Columns, train: Tensor, test: Tensor) -> str:
    """Return a sentence about the test rows that equal a training row in every feature, or "" if there are none.

    Args:
        columns: the table.
        train: training rows, int64 (n,).
        test: test rows, int64 (m,).
    """
    size = sum(math.prod(column.shape) for column in columns.modalities.values())
    if size * (len(train) + len(test)) > MOST_READ or not len(test):
        return ""
    seen = {*_digests(columns, train)}
    if not (count := sum(digest in seen for digest in _digests(columns, test))):
        return ""
    return (
        f"{count:,} of {counted(len(test), 'test row', 'test rows')} {'is' if count == 1 else 'are'} equal to a "
        "training row in every feature, so the score is also about rows that were seen. Remove the copies "
        "(drop_duplicates in pandas), or keep them on one side with [data] split"
    )


def _digests(columns: Columns, rows: Tensor) -> Iterator[bytes]:
    """Yield a digest of the features of each row; a modality that it lacks is empty."""
    for piece in torch.split(rows, 4096):
        values = {
            name: column.raw(piece).reshape(len(piece), -1).contiguous().view(torch.uint8).numpy()
            for name, column in columns.modalities.items()
        }
        there = {name: mask.cpu()[piece].tolist() for name, mask in columns.present.items()}
        for place in range(len(piece)):
            digest = blake2b(digest_size=16)
            for name, taken in values.items():
                digest.update(taken[place].tobytes() if name not in there or there[name][place] else name.encode())
            yield digest.digest()
