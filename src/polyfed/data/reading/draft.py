"""`Draft` holds the parts of a table as they were read; `columns_of` checks them, all at once, and makes `Columns`."""

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
from polyfed.data.column_rules import Feature
from polyfed.data.columns import LEFT_OUT, Column, Columns
from polyfed.data.labels import num_targets
from polyfed.data.leaked_labels import refuse_leaked_labels
from polyfed.data.population.splits import drawn, drawn_note
from polyfed.data.reading.given import Given
from polyfed.data.reading.row_facts import (
    Labels,
    as_array,
    clients_of,
    codes_of,
    ids_of,
    labels_of,
    missing,
    persons_of,
    splits_of,
    unlabelled,
    without_label,
)
from polyfed.data.reading.values import (
    bare_rows,
    digits,
    laid_out,
    option,
    refuse_bare_rows,
    tensor_of,
    unmasked,
    without_nan_rows,
    zero_nan_rows,
)


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
        cures: Modality -> the rules of [data.columns] that would fill in the empty cells of the rows in `cut`.
        faulty: Modalities that could not be read. Their faults are known.
        class_names: Names of the classes or targets, or None.
        ids: Sample ids of the rows, distinct integers (N,). If "rows", as in a data frame without ids, the row numbers
            are the ids. If None, the data has no ids.
        layout: Modality -> axes of a sample, for modalities where `laid_out` guesses wrong.
        notes: Sentences about what was guessed, converted or left out so far.
        numeric: Whether whole numbers among the labels are quantities and not class numbers.
        split_personal: Split of each row within its natural client (N,), or None.
        person: Person of each row (N,), or None.
        unread_names: see `Columns`.
        known: bool, which labels are known, in the shape of the labels; None if all are.
        declared: Whether a row may lack all modalities, because `present` says so.
        owned: Whether the arrays belong to polyfed, so that rows of NaN are set to zero in place.
        called: Part -> its name in error messages, where it is not the usual one.
        origin: see `Columns`.
        coded: Modality -> its columns, if [data.columns] speaks of one. The array of the modality then holds codes.
        whole: Modality -> its only column, if [data.columns] made images or token ids of it.
        names: Modality -> the columns of the table, or the arrays, that hold it, in order.
    """

    name: str
    where: str
    modalities: Mapping[str, Any]
    labels: Any
    clients: Any = None
    split: Any = None
    present: Mapping[str, Any] = field(default_factory=dict)
    cut: Mapping[str, Any] = field(default_factory=dict)
    cures: Mapping[str, str] = field(default_factory=dict)
    faulty: tuple[str, ...] = ()
    class_names: Sequence[str] | None = None
    ids: Any = "rows"
    layout: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    numeric: bool = False
    split_personal: Any = None
    person: Any = None
    unread_names: Mapping[str, Tensor] = field(default_factory=dict)
    known: Any = None
    declared: bool = False
    owned: bool = False
    called: Mapping[str, str] = field(default_factory=dict)
    coded: Mapping[str, tuple[Feature, ...]] = field(default_factory=dict)
    whole: Mapping[str, Feature] = field(default_factory=dict)
    origin: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def place(self, part: str) -> str:
        """Return the name of a modality or of another part for the beginning of an error message."""
        usual = f"modality '{part}'" if part in self.modalities else f"the {part} column"
        return f"{self.where}: {self.called.get(part, usual)}"


EMPTY = "such rows are left out (empty_rows)"
"""The end of the notes about rows that lack every modality, or their class."""


def columns_of(draft: Draft, given: Given, problems: Problems) -> Columns:
    """Check a draft and make a table from it.

    Args:
        draft: The parts.
        given: How the test set is drawn if the draft has no split, and what is standardised.
        problems: Faults that were found while the draft was read. They are raised together with the faults found here.

    Raises:
        DataError: The draft has faults; the message lists all of them.
    """
    gone = problems.attempt(lambda: _without_label(draft))
    labels = problems.attempt(lambda: _labels(draft, gone, given))
    made = {n: problems.attempt(partial(_modality, draft, n, values)) for n, values in draft.modalities.items()}
    found = {name: column for name, column in made.items() if column is not None}
    people = None
    if draft.clients is not None:
        named = given.clients if isinstance(given.clients, str) else "client"
        people = problems.attempt(lambda: clients_of(draft.clients, draft.place("client"), named))
    facts = _facts(draft, problems)
    present: dict[str, Tensor] = {}
    for name, (_, there) in found.items():
        with problems.noting():
            present[name] = there & _marked(draft, name, there)
    if labels is not None:
        arrays = {name: column for name, (column, _) in found.items()} | facts
        arrays |= {} if people is None else {"client": people[0]}
        held = {} if given.empty_rows == "leave-out" else _undeclared(draft, found, present)
        _check_rows(draft, len(labels.values), arrays, held, problems)
    problems.raise_all()
    assert labels is not None
    client, names = (None, None) if people is None else people
    split, notes = facts["split"], list(draft.notes)
    notes += [labels.note] if labels.note else []
    split, told = _split(split, labels, present, gone, given, facts["person"])
    notes += told
    if (person := facts["person"]) is not None:
        notes.append(f"{len(torch.unique(person)):,} persons, of whom no random split divides the rows (person)")
    columns = Columns(
        name=draft.name,
        modalities={n: replace(column, names=draft.names.get(n, ())) for n, (column, _) in found.items()},
        label=labels.values,
        num_classes=labels.num_classes,
        split=split,
        ids=torch.arange(len(labels.values)) if facts["ids"] is None else facts["ids"],
        numbered=draft.ids is None,
        labelled=draft.labels is not None,
        class_names=labels.names,
        words_sorted=labels.words_sorted,
        present={name: there for name, there in present.items() if not bool(there.all())},
        client=client,
        client_names=names,
        split_personal=facts["split_personal"],
        person=person,
        unread_names=draft.unread_names,
        notes=tuple(notes),
        origin=draft.origin,
        standardise=given.standardise,
    )
    refuse_leaked_labels(columns)
    return columns


def _facts(draft: Draft, problems: Problems) -> dict[str, Tensor | None]:
    """Return the facts of the rows that are not labels, (N,) each, or None where the draft has none."""
    readers: tuple[tuple[str, Any, Callable[[Any, str], Tensor]], ...] = (
        ("split", draft.split, splits_of),
        ("split_personal", draft.split_personal, codes_of),
        ("person", draft.person, persons_of),
        ("ids", None if isinstance(draft.ids, str) else draft.ids, ids_of),
    )
    return {
        name: None if values is None else problems.attempt(partial(read, values, draft.place(name)))
        for name, values, read in readers
    }


def _undeclared(
    draft: Draft, found: Mapping[str, tuple[Column, Tensor]], present: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the rows that have each modality, or whose lack of it the user has declared."""
    if not draft.declared:
        return present
    return {name: there | ~_marked(draft, name, there) for name, (_, there) in found.items() if name in present}


def _without_label(draft: Draft) -> NDArray[np.bool_] | None:
    """Return the rows whose class is empty, bool (N,), or None if the draft has no labels."""
    return None if draft.labels is None else without_label(draft.labels, draft.place("label"))


def _split(
    split: Tensor | None,
    labels: Labels,
    present: Mapping[str, Tensor],
    gone: NDArray[np.bool_] | None,
    given: Given,
    person: Tensor | None,
) -> tuple[Tensor, list[str]]:
    """Return the split of each row, drawn if there is none, and notes about it and about the rows left out.

    Args:
        split: split codes (N,), or None.
        labels: of all rows, by whose classes a test set is drawn.
        present: modality -> bool (N,), which rows have it.
        gone: bool (N,), the rows without a class.
        given: how the test set is drawn, and whether rows without any modality are left out.
        person: the person of each row, int64 (N,), or None.
    """
    notes = list[str]()
    if split is None:
        split = drawn(labels.values, given.test_share, given.seed, person)
        notes += [drawn_note(given.test_share)] if given.test_share else []
    if given.empty_rows == "leave-out" and (told := bare_rows(present)):
        split = split.masked_fill(~torch.stack(list(present.values())).any(0), LEFT_OUT)
        notes.append(f"{told}; {EMPTY}")
    if gone is not None and gone.any():
        split = split.masked_fill(torch.from_numpy(gone), LEFT_OUT)
        count = counted(int(gone.sum()), "row has", "rows have")
        notes.append(f"{count} no label, first row {int(gone.argmax())}; {EMPTY}")
    return split, notes


def _labels(draft: Draft, gone: NDArray[np.bool_] | None, given: Given) -> Labels:
    """Return the labels of a draft, or zeros if the draft has no labels. Rows in `gone` get the class of another one.

    Raises:
        DataError: the labels have faults, or some are empty and are not to be left out. The message lists all faults.
    """
    if draft.labels is None:
        return unlabelled(len(next(iter(draft.modalities.values()), ())))
    values, where = draft.labels, draft.place("label")
    if gone is not None and gone.any():
        array = as_array(values, where)
        if given.empty_rows == "refuse" or gone.all():
            problems = Problems()
            problems.add(missing(gone, where, f"leave the rows out, as {option('empty_rows', 'leave-out')} does"))
            rest = array[~gone]
            if len(rest):
                problems.attempt(lambda: labels_of(rest, where, draft.class_names, numeric=draft.numeric))
            problems.raise_all()
        values = np.where(gone, array[~gone][:1], array)
    result = labels_of(values, draft.place("label"), draft.class_names, numeric=draft.numeric)
    if draft.known is None:
        return result
    known, shape = np.asarray(draft.known), tuple(result.values.shape)
    if known.shape == (*shape, 1):  # labels (N, 1) became (N,)
        known = known[:, 0]
    if known.dtype != np.bool_ or known.shape != shape:
        raise DataError(
            f"{draft.place('known')} says which labels are known; it must be bool {shape}, not {known.dtype} "
            f"{known.shape}"
        )
    values = result.values.to(torch.float32).masked_fill(torch.from_numpy(~known), torch.nan)
    return replace(result, values=values, num_classes=num_targets(values))


def _marked(draft: Draft, name: str, there: Tensor) -> Tensor:
    """Return which rows have a modality according to the user, bool (N,)."""
    if name not in draft.present:
        return torch.ones_like(there)
    marked = torch.as_tensor(np.asarray(draft.present[name]), dtype=torch.bool)
    if marked.shape != there.shape:
        where = f"{draft.place(name)}: `present` has shape {tuple(marked.shape)}"
        raise DataError(f"{where}; it needs one entry for each row, {len(there)} in all")
    return marked


def _modality(draft: Draft, name: str, values: Any) -> tuple[Column, Tensor]:
    """Return the column of a modality, and which rows have it according to its values, bool (N,)."""
    where = draft.place(name)
    tensor = _numbers(values, where)
    there = torch.ones(len(tensor), dtype=torch.bool)
    if name in draft.coded or name in draft.whole:
        if name in draft.layout:
            raise DataError(
                f"{where} has columns in [data.columns], which say its shape: give it no shape and no layout"
            )
        if name in draft.whole:
            scale = torch.tensor(255.0) if tensor.dtype == torch.uint8 else None
            return Column(tensor, scale=scale, features=(draft.whole[name],)), there
        return Column(tensor.to(torch.float64), coded=draft.coded[name]), there
    if draft.owned:  # nobody else uses the values, so a memory-mapped array need not be copied
        kept = zero_nan_rows(tensor, where)
        there = there if kept is None else kept
    else:
        tensor, there, partly = without_nan_rows(tensor, _marked(draft, name, there))
        if bool(partly.any()):
            count = counted(int(partly.sum()), "row has", "rows have")
            raise DataError(
                f"{where}: {count} only some values (others are NaN), first row "
                f"{int(partly.nonzero()[0, 0])}. Fill these in, or make the whole sample NaN where it is missing"
            )
    if len(there) and not bool(there.any()):
        raise DataError(f"{where} is missing in every row. Leave it out, or look for the file or column it comes from")
    return laid_out(tensor, draft.layout.get(name), where), there


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
            dates = " Give a number for each date, such as the days since a start" if array.dtype.kind in "mM" else ""
            raise DataError(f"{where} holds {array.dtype}: a modality needs numbers, one sample a row.{dates}")
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
    if not unequal and not draft.faulty and len(present) == len(draft.modalities) and num:
        with problems.noting():
            refuse_bare_rows(present, draft.where, draft.cut, draft.cures)
