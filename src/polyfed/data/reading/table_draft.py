"""`Draft` holds the parts of a table before they are checked. `columns_of` checks them and makes `Columns` from them.

`columns_of` reports all faults of the parts at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, counted
from polyfed.core.problems import Problems
from polyfed.data.columns import Column, Columns, Standardise
from polyfed.data.leaked_labels import refuse_leaked_labels
from polyfed.data.population.splits import drawn, drawn_note
from polyfed.data.reading.cell_values import digits, unmasked
from polyfed.data.reading.layout import laid_out, tensor_of
from polyfed.data.reading.missing_rows import refuse_bare_rows, without_nan_rows
from polyfed.data.reading.row_facts import Labels, clients_of, ids_of, labels_of, splits_of, unlabelled


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The parts of a table as they were read.

    Attributes:
        name: Name of the data set.
        where: The name of the data in error messages, such as `'my.csv'`.
        modalities: Modality -> array or tensor (N, ...), or (N,), which becomes (N, 1). A row whose entries are all NaN
            lacks the modality.
        labels: (N,) or (N, T); see `labels_of`. None if there are no labels.
        clients: Natural client of each row (N,), or None.
        split: Split of each row (N,), or None.
        present: Modality -> bool (N,), for modalities that some rows lack.
        cut: Modality -> bool (N,), true for each row that has only some of the modality's values. These values were
            left out.
        faulty: Modalities that could not be read. Their faults are known.
        class_names: Names of the classes or targets, or None.
        ids: Sample ids of the rows, distinct integers (N,). If "rows", as in a data frame without ids, the row numbers
            are the ids. If None, the data has no ids.
        layout: Modality -> axes of a sample, for modalities where `laid_out` guesses wrong.
        notes: Sentences about what was guessed, converted or left out so far.
        numeric: Whether whole numbers among the labels are quantities and not class numbers.
    """

    name: str
    where: str
    modalities: Mapping[str, Any]
    labels: Any
    clients: Any = None
    split: Any = None
    present: Mapping[str, Any] = field(default_factory=dict)
    cut: Mapping[str, Any] = field(default_factory=dict)
    faulty: tuple[str, ...] = ()
    class_names: Sequence[str] | None = None
    ids: Any = "rows"
    layout: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    numeric: bool = False


def columns_of(
    draft: Draft,
    *,
    test_share: float = 0.2,
    seed: int = 0,
    standardise: Standardise = "uneven",
    problems: Problems | None = None,
) -> Columns:
    """Check a draft and make a table from it.

    Args:
        draft: The parts.
        test_share: Share of every class that becomes the test set, if the draft has no split.
        seed: Seed for drawing that test set.
        standardise: The modalities to standardise; see `Columns.standardise`.
        problems: Faults that were found while the draft was read. They are raised together with the faults found here.

    Raises:
        DataError: The draft has faults; the message lists all of them.
    """
    problems = problems or Problems()
    labels = problems.attempt(lambda: _labels(draft))
    found: dict[str, tuple[Column, Tensor | None]] = {}
    for name, values in draft.modalities.items():
        made = problems.attempt(partial(_modality, draft, name, values))
        if made is not None:
            found[name] = made
    readers: tuple[tuple[str, Any, Callable[[Any, str], Tensor]], ...] = (
        ("client", draft.clients, clients_of),
        ("split", draft.split, splits_of),
        ("ids", None if isinstance(draft.ids, str) else draft.ids, ids_of),
    )
    facts: dict[str, Tensor | None] = {
        name: None if given is None else problems.attempt(partial(read, given, f"{draft.where}: the {name} column"))
        for name, given, read in readers
    }
    if labels is not None:
        arrays = {name: column for name, (column, _) in found.items()} | facts
        _check_rows(draft, len(labels.values), arrays, {n: p for n, (_, p) in found.items() if p is not None}, problems)
    problems.raise_all()
    assert labels is not None
    columns = replace(_table(draft, labels, found, facts, test_share, seed), standardise=standardise)
    refuse_leaked_labels(columns)
    return columns


def _table(
    draft: Draft,
    labels: Labels,
    found: Mapping[str, tuple[Column, Tensor | None]],
    facts: Mapping[str, Tensor | None],
    test_share: float,
    seed: int,
) -> Columns:
    split, ids, notes = facts["split"], facts["ids"], list(draft.notes)
    notes += [labels.note] if labels.note else []
    if split is None:
        split = drawn(labels.values, test_share, seed)
        notes.append(drawn_note(test_share))
    return Columns(
        name=draft.name,
        modalities={name: column for name, (column, _) in found.items()},
        label=labels.values,
        num_classes=labels.num_classes,
        split=split,
        ids=torch.arange(len(labels.values)) if ids is None else ids,
        numbered=draft.ids is None,
        labelled=draft.labels is not None,
        class_names=labels.names,
        words_sorted=labels.words_sorted,
        present={name: there for name, (_, there) in found.items() if there is not None},
        client=facts["client"],
        notes=tuple(notes),
    )


def _labels(draft: Draft) -> Labels:
    """Return the labels of a draft, or zeros if the draft has no labels."""
    if draft.labels is not None:
        return labels_of(draft.labels, f"{draft.where}: the label column", draft.class_names, numeric=draft.numeric)
    return unlabelled(len(next(iter(draft.modalities.values()), ())))


def _modality(draft: Draft, name: str, values: Any) -> tuple[Column, Tensor | None]:
    """Return the column of a modality, and a mask of the rows that have it.

    The mask is None if all rows have the modality.
    """
    where = f"{draft.where}: modality '{name}'"
    tensor = _numbers(values, where)
    there = torch.ones(len(tensor), dtype=torch.bool)
    if name in draft.present:
        marked = torch.as_tensor(np.asarray(draft.present[name]), dtype=torch.bool)
        if marked.shape != there.shape:
            raise DataError(f"{where}: `present` has shape {tuple(marked.shape)}; it needs one entry for each row")
        there = marked
    tensor, there, partly = without_nan_rows(tensor, there)
    if bool(partly.any()):
        count = counted(int(partly.sum()), "row has", "rows have")
        raise DataError(
            f"{where}: {count} only some values (others are NaN), first row "
            f"{int(partly.nonzero()[0, 0])}. Fill these in, or make the whole sample NaN where it is missing"
        )
    if not bool(there.any()):
        raise DataError(f"{where} is missing in every row. Leave it out, or look for the file or column it comes from")
    return laid_out(tensor, draft.layout.get(name), where), None if bool(there.all()) else there


def _numbers(values: Any, where: str) -> Tensor:
    """Return a tensor (N, ...) on the CPU with at least two axes.

    Raises:
        DataError: The values are not numbers, or not of one shape.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    else:
        array = _dense(values, where)
        if array.dtype.kind not in "fiub":
            raise DataError(f"{where} holds {array.dtype}: a modality needs numbers, one sample a row")
        tensor = tensor_of(array)
    if tensor.is_complex() or tensor.dim() == 0:
        raise DataError(f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}: give real numbers (N, ...)")
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _dense(values: Any, where: str) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray) and np.ma.getmaskarray(values).any():
        values = unmasked(values.astype(np.float64) if values.dtype.kind in "iub" else values)
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different shapes
        array = np.empty(0, dtype=object)
    if array.dtype.kind != "O":
        return array
    for row, entry in enumerate(values):
        for number in np.ravel(np.array(entry, dtype=object)) if not isinstance(entry, str) else ():
            if isinstance(number, int) and abs(number) >= 2**1023:
                text = f"holds a whole number of about {digits(number)} digits at row {row}, which no float can hold"
                raise DataError(f"{where} {text}. Correct it")
    kinds = sorted({type(row).__name__ for row in values})
    shapes = sorted({np.shape(row) for row in values if not isinstance(row, str)}, key=str)
    if len(shapes) == 1 and not any(isinstance(row, str) for row in values):
        try:
            return np.stack([np.asarray(row, dtype=np.float64) for row in values])
        except (TypeError, ValueError):
            pass
    found = f"shapes {', '.join(map(str, shapes[:3]))}" if len(shapes) > 1 else f"types {', '.join(kinds[:3])}"
    raise DataError(f"{where}: rows differ in {found}. Bring all samples to numbers of one shape")


def _check_rows(
    draft: Draft, num: int, arrays: Mapping[str, Any], present: Mapping[str, Tensor], problems: Problems
) -> None:
    """Add a fault for arrays that are not as long as the labels, and for rows without any modality."""
    unequal = {name: len(array) for name, array in arrays.items() if array is not None and len(array) != num}
    for name, length in unequal.items():
        problems.add(
            DataError(
                f"{draft.where}: '{name}' has {counted(length, 'row', 'rows')}, the labels have {num}. Every array "
                "needs one row per sample, in the same order"
            )
        )
    if num == 0:
        problems.add(DataError(f"{draft.where} has no rows. Check where it comes from"))
    if not unequal and not draft.faulty and len(present) == len(draft.modalities):
        with problems.noting():
            refuse_bare_rows(present, draft.where, draft.cut)
