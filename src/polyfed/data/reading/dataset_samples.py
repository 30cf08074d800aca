"""Reads the samples of a PyTorch dataset: the modalities of each sample, and its label, natural client and split."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from polyfed.core.errors import DataError, PolyfedWarning, RecipeError, did_you_mean
from polyfed.core.problems import Problems
from polyfed.data.reading.column_guess import column_names
from polyfed.data.reading.draft import Draft
from polyfed.data.reading.frames import Joined, joined
from polyfed.data.reading.given import ROLES, Given
from polyfed.data.reading.row_facts import as_array
from polyfed.data.reading.values import array_of
from polyfed.data.whole_columns import are_images, are_texts, as_cells


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """The meaning of the parts of a sample.

    A sample is (x, label), (x1, ..., label), a dictionary, or (dictionary, label).

    Attributes:
        modalities: names of the modalities. If the samples are tuples, these names belong to the parts of the tuple, in
            order; the label has no name. If the samples are dictionaries, the names are the keys to read. If None, all
            keys of the dictionary are modalities, except those that hold the label, the client or the split.
        keys: role -> the dictionary key under which a sample holds the value for this role. The roles are `labels`,
            `clients` and `split`.
        labelled: whether the samples have a label.
    """

    modalities: tuple[str, ...] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = True

    @classmethod
    def of(cls, modalities: Any, keys: Mapping[str, str], labelled: bool) -> "SampleForm":
        """Check the `modalities` that the caller gave, and return a `SampleForm` with them.

        Raises:
            RecipeError: `modalities` is not a list of distinct names.
        """
        if modalities is None:
            return cls(keys=keys, labelled=labelled)
        listed = modalities.tolist() if hasattr(modalities, "tolist") else modalities
        names = tuple(listed) if isinstance(listed, Iterable) and not isinstance(listed, str | Mapping) else ()
        if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
            raise RecipeError(
                f"modalities = {modalities!r}: for a dataset, give a list of distinct names, as in "
                "modalities=['image', 'audio']"
            )
        return cls(modalities=names, keys=keys, labelled=labelled)


def read_samples(samples: Sequence[Any], form: SampleForm) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the cells of each modality and of each role (labels, clients, split), in the order of the samples.

    Args:
        samples: the samples, at least one.
        form: the meaning of the parts of a sample.

    Returns:
        Two dictionaries. The first is modality -> cells, where a cell is None if the sample lacks the modality. The
        second is role -> cells. If the samples have no label, the cells of the role `labels` are None.

    Raises:
        DataError: a named modality occurs in no sample, or a sample lacks the key of a role.
        RecipeError: a sample has no form that `SampleForm` describes, or it is a tuple of several inputs and
            `form.modalities` does not give one name for each input.
    """
    rows = [_read(sample, form, row) for row, sample in enumerate(samples)]
    held = dict.fromkeys(name for parts, _ in rows for name in parts)
    names = list(held) if form.modalities is None else list(form.modalities)
    if lacking := [name for name in names if name not in held]:
        parts = samples[0] if isinstance(samples[0], Mapping) else samples[0][0]
        keys = [str(key) for key in parts if str(key) not in form.keys.values()]
        inner = {str(key): cell for key, cell in parts.items() if isinstance(cell, Mapping) and lacking[0] in cell}
        for key, cell in inner.items():
            raise DataError(f"data: no sample has the modality '{lacking[0]}': its '{key}' {_nested(cell)}")
        raise DataError(f"data: no sample has the modality '{lacking[0]}'; {did_you_mean(lacking[0], keys)}")
    cells = {name: [parts.get(name) for parts, _ in rows] for name in names}
    return cells, {role: [facts[role] for _, facts in rows] for role in rows[0][1]}


def _read(sample: Any, form: SampleForm, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the modalities of one sample by name, and its label, client and split by role."""
    if isinstance(sample, Mapping):
        return _of_keys(sample, form, form.keys, row)
    if not isinstance(sample, Sequence) or isinstance(sample, str | bytes) or len(sample) < 1 + form.labelled:
        raise RecipeError(
            f"sample {row} of data is a {type(sample).__name__}: give (x, label) or a dictionary with "
            f"'{form.keys['labels']}'"
        )
    *inputs, label = sample if form.labelled else (*sample, None)
    facts = {"labels": label}
    named = {role: key for role, key in form.keys.items() if role != "labels"}
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        parts, more = _of_keys(inputs[0], form, named, row)
        return parts, facts | more
    if named:
        role, key = next(iter(named.items()))
        raise RecipeError(
            f"{role} = '{key}' names a key, but sample {row} of data is no dictionary. Give one entry for each row, as "
            f"in {role}=array"
        )
    names = form.modalities or (("input",) if len(inputs) == 1 else ())
    if len(names) != len(inputs):
        raise RecipeError(
            f"a sample of data has {len(inputs)} parts beside its label: name them in their order, as in "
            f"modalities={[f'part{n}' for n in range(1, len(inputs) + 1)]}"
        )
    return dict(zip(names, inputs, strict=True)), facts


def _of_keys(
    sample: Mapping[str, Any], form: SampleForm, keys: Mapping[str, str], row: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the modalities that a dictionary holds, and the values under `keys` by role."""
    parts = {str(name): value for name, value in sample.items()}
    for role, key in keys.items():
        if key in (form.modalities or ()):
            raise RecipeError(
                f"'{key}' is the key of the {role} and also one of the modalities. Leave it out of the modalities, or "
                f"name another key in {role}="
            )
        if key not in parts and (role != "labels" or form.labelled):
            raise DataError(f"data: sample {row} has no '{key}'; it has {', '.join(parts)}. Name it in {role}=")
    facts = {role: parts.pop(key, None) for role, key in keys.items()}
    if form.modalities is not None:
        parts = {name: parts[name] for name in form.modalities if name in parts}
    return parts, facts


def drafted_samples(data: Any, given: Given, problems: Problems) -> Draft:
    """Make a draft from a PyTorch dataset whose samples are (x, label), (x1, ..., label) or a dictionary."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise RecipeError(
            f"data is a {type(data).__name__} without a length: give a Dataset with len(data) and data[i]"
        )
    if len(data) == 0:
        raise DataError("data has no rows. Check where it comes from")
    samples = [data[row] for row in range(len(data))]
    labelled = isinstance(given.labels, str) or (given.labels is None and _has_labels(samples[0], given))
    named = {role: value for role in ROLES if isinstance(value := getattr(given, role), str)}
    usual = _usual_keys(samples, given)
    groups = column_names(given.modalities) if isinstance(given.modalities, Mapping) else None
    listed = given.modalities
    if groups is not None:
        listed = [name for group in groups.values() for name in ([group] if isinstance(group, str) else group)]
    form = SampleForm.of(listed, {"labels": "label"} | usual | named, labelled)
    keys = named | {role: key for role, key in usual.items() if getattr(given, role) is None}
    modalities, facts = read_samples(samples, form)
    found: dict[str, Any] = {}
    present: dict[str, Any] = {}
    notes = _told({role: key for role, key in keys.items() if role not in named}, list(modalities))
    for name, cells in modalities.items():
        if name in given.columns:
            found[name] = as_cells([_single(cell) for cell in cells])
            continue
        with problems.noting():
            _refuse_other_cells(name, cells)
            found[name], there, note = array_of(list(map(_cell, cells)), f"data: modality '{name}'")
            notes += [f"modality '{name}': {note}"] if note else []
            if not there.all():
                present[name] = there
    problems.raise_all()
    roles = {**keys, **({"labels": ""} if labelled else {})}
    read = {role: as_array(list(map(_cell, facts[role])), f"data: the {role}") for role in roles}
    made = Joined(modalities=found)
    if groups is not None or given.columns:
        free = given.without_roles(groups)
        made = joined(_with_holes(found, present, groups), free, "data", problems)
        present = {name: there for name, there in present.items() if name in made.modalities} | made.present
    return Draft(
        name="data",
        where="data",
        modalities=made.modalities,
        coded=made.coded,
        whole=made.whole,
        cut=made.cut,
        labels=read.get("labels", given.labels),
        clients=read.get("clients", given.clients),
        split=read.get("split", given.split),
        split_personal=read.get("split_personal", given.split_personal),
        person=read.get("person", given.person),
        present=present,
        notes=(*notes, *made.notes),
    )


def _told(guessed: Mapping[str, str], modalities: Sequence[str]) -> list[str]:
    """Return a note for each key whose role was guessed, and warn of it."""
    notes = []
    for role, key in guessed.items():
        meaning = "the natural client" if role == "clients" else "the split"
        notes.append(f"the key '{key}' of the samples is {meaning} of each row, because {role}= names no other")
        warnings.warn(
            f"data: {notes[-1]}. To confirm this, write {role}='{key}'. If '{key}' is a modality, name all "
            f"modalities, as in modalities=[{', '.join(map(repr, [*modalities, key]))}]",
            PolyfedWarning,
            stacklevel=5,
        )
    return notes


def _with_holes(found: Mapping[str, Any], present: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """Return the arrays with NaN where a sample lacks a number that is joined with others."""
    alone = {group if isinstance(group, str) else group[0] for group in (groups or {}).values() if len(group) == 1}
    alone |= {*found} if groups is None else {group for group in groups.values() if isinstance(group, str)}
    holed = {name: np.where(there, found[name], np.nan) for name, there in present.items() if name not in alone}
    return dict(found) | holed


def _single(cell: Any) -> Any:
    """Return a cell of a column with a rule: a tensor or array of one entry becomes this entry."""
    value = _cell(cell)
    return value.item() if hasattr(value, "item") and getattr(value, "size", 0) == 1 else value


def _has_labels(sample: Any, given: Given) -> bool:
    """Whether the samples of a dataset have a label. The label may be missing only if the task needs no labels."""
    if given.needs_labels:
        return True
    if isinstance(sample, Mapping):
        return "label" in sample
    if isinstance(sample[0], Mapping):
        return len(sample) > 1
    return given.modalities is None or len(sample) != len(given.modalities)


def _usual_keys(samples: Sequence[Any], given: Given) -> dict[str, str]:
    """Find clients and splits under the usual keys `client` and `split` of the samples. Return role -> key.

    A role is skipped if the caller gives a key for it, or if its usual key is the name of a modality.
    """
    result = {}
    for role, key in (("clients", "client"), ("split", "split")):
        free = not isinstance(getattr(given, role), str) and key not in (given.modalities or ())
        if free and any(key in parts for sample in samples if isinstance(parts := _parts(sample), Mapping)):
            result[role] = key
    return result


def _parts(sample: Any) -> Any:
    """If a sample is a non-empty tuple or list, return its first part. Return any other sample unchanged."""
    return sample[0] if isinstance(sample, tuple | list) and sample else sample


def _refuse_other_cells(name: str, cells: Sequence[Any]) -> None:
    """Refuse cells of a modality that hold a word or a dictionary.

    Raises:
        DataError: a cell holds a word or a dictionary. The message says how to correct this.
    """
    for row, cell in enumerate(cells):
        where = f"data: modality '{name}', row {row}"
        if isinstance(cell, str):
            rule = "image" if are_images([cell]) else "words" if are_texts([cell]) else "one-hot"
            raise DataError(
                f"{where} holds {cell[:40]!r}, which is no number and no list of numbers. To make numbers of it, write "
                f"columns={{'{name}': '{rule}'}}. If '{name}' is the natural "
                f"client of a sample, write clients='{name}'. If it is the split, write split='{name}'. Otherwise, "
                "name the keys to read, as in modalities=['image', 'audio']"
            )
        if isinstance(cell, Mapping) and "bytes" not in cell:  # a picture of the library `datasets` holds bytes
            raise DataError(f"{where} {_nested(cell)}")


def _nested(cell: Mapping[str, Any]) -> str:
    """Return the part of an error text that says how to correct a dictionary inside a sample."""
    return (
        f"is a dictionary with the keys {', '.join(map(str, cell))}. A sample is one dictionary without others inside, "
        "as in {'audio': a, 'text': t, 'label': y}; or a dictionary of the modalities and a label, as in "
        "({'audio': a, 'text': t}, y)"
    )


def _cell(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
