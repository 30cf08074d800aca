"""Makes a table from objects in memory: tensors, arrays, data frames, and datasets of PyTorch and Hugging Face."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.problems import Problems
from polyfed.data.cell_values import array_of
from polyfed.data.columns import Columns
from polyfed.data.frames import Modalities, Partial, Roles, drafted
from polyfed.data.row_facts import SPLITS, plain
from polyfed.data.table_draft import Draft, columns_of

ALLOWED = (
    "a dictionary of tensors or arrays by modality, a pandas data frame, a torch.utils.data.Dataset, a data set of the "
    "Hugging Face library datasets, polyfed.data.Columns, or the path of a file"
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The caller's description of data in memory.

    Attributes:
        labels: labels of the rows. For data frames and datasets, also the name of a column or key, by default `label`.
        clients: natural client of each row, or the name of a column.
        split: split of each row, or the name of a column.
        modalities: for data frames: modality -> a column, a pattern, or a list of these. For datasets: the names of the
            parts of a sample.
        present: modality -> bool (N,), False if a row lacks the modality.
        class_names: names of the classes in order of their numbers.
        ids: sample ids of the rows, distinct integers (N,); or `rows`, if row i of every array is the same sample.
        layout: modality -> axes of a sample, for modalities where the guess is wrong; see `laid_out`.
        partial: what to do with rows of a data frame that have only some cells of a modality.
    """

    labels: Any = None
    clients: Any = None
    split: Any = None
    modalities: Modalities | Sequence[str] | None = None
    present: Mapping[str, Any] | None = None
    class_names: Sequence[str] | None = None
    ids: Any = None
    layout: Mapping[str, str] | None = None
    partial: Partial = "refuse"


def table_of(
    data: Any, given: Given, *, test_share: float = 0.2, seed: int = 0, standardise: bool | Sequence[str] = False
) -> Columns:
    """Make a table from data in memory.

    Args:
        data: one of `ALLOWED`, except a path; or a dictionary with one such object for each split (`train`, `test`,
            `validation`).
        given: labels, natural clients, splits and more.
        test_share: share of every class that becomes the test set, if there is no split.
        seed: seed for drawing that test set.
        standardise: the modalities to standardise, or all of them.

    Raises:
        DataError: the data has faults; the message lists all of them.
        RecipeError: `data` has another type, or an argument does not apply to this type.
    """
    if isinstance(data, Columns):
        given_too = [name for name, value in vars(given).items() if value is not None and name != "partial"]
        if given_too:
            raise RecipeError(f"{given_too[0]} is given, but `Columns` hold labels, clients and splits already")
        return data
    problems = Problems()
    draft = _draft(data, given, problems)
    extra = {
        name: value
        for name in ("present", "layout", "class_names", "ids")
        if (value := getattr(given, name)) is not None
    }
    if isinstance(given.ids, str) and given.ids != "rows":
        problems.add(RecipeError(f"ids = '{given.ids}': give an array with one integer for each row, or 'rows'"))
    if strange := [m for name in ("present", "layout") for m in extra.get(name, ()) if m not in draft.modalities]:
        problems.add(RecipeError(f"'{strange[0]}' is no modality of the data; it has {', '.join(draft.modalities)}"))
    draft = replace(draft, **extra)
    return columns_of(draft, test_share=test_share, seed=seed, standardise=standardise, problems=problems)


def _draft(data: Any, given: Given, problems: Problems) -> Draft:
    if _is_frame(data):
        return _of_frame(data, given, problems)
    if _is_hugging_face(data):
        return _of_frame(
            data.to_pandas(), replace(given, class_names=given.class_names or _names(data, given)), problems
        )
    if isinstance(data, Dataset):
        return _of_dataset(data, given)
    if isinstance(data, Mapping) and data:
        parts = [
            part for part in data.values() if _is_frame(part) or _is_hugging_face(part) or isinstance(part, Dataset)
        ]
        if len(parts) == len(data):
            return _of_splits(data, given, problems)
        return _of_arrays(data, given)
    if isinstance(data, Tensor | np.ndarray):
        raise RecipeError("data is one array: name its modality, as in data={'image': x}")
    raise RecipeError(f"data is a {type(data).__name__}; allowed: {ALLOWED}")


def _of_arrays(data: Mapping[str, Any], given: Given) -> Draft:
    if given.labels is None or isinstance(given.labels, str):
        raise RecipeError("labels is missing: give one label for each row, as in labels=y")
    if given.modalities is not None:
        raise RecipeError("modalities is for data frames and datasets; a dictionary names its modalities by its keys")
    parts = {str(name): values for name, values in data.items()}
    return Draft(
        name="data",
        where="data",
        modalities=parts,
        labels=given.labels,
        clients=given.clients,
        split=given.split,
        ids=None,  # arrays of different origin may be aligned or not
    )


def _of_frame(frame: Any, given: Given, problems: Problems) -> Draft:
    """Make a draft from a data frame. Labels, clients and splits are names of columns, or arrays."""
    if given.modalities is not None and not isinstance(given.modalities, Mapping):
        raise RecipeError("modalities of a data frame is a dictionary, as in modalities={'audio': 'audio_*'}")
    arrays: dict[str, Any] = {}
    words: dict[str, Any] = {}
    optional = []
    for role, column in (("labels", "label"), ("clients", "client"), ("split", "split")):
        value = getattr(given, role)
        if value is None:
            words[column] = column
            optional.append(column)
        elif isinstance(value, str) or (role == "labels" and isinstance(value, list) and _are_columns(value, frame)):
            words[column] = value
        else:
            arrays[role] = value
            words[column] = column
            frame = frame.assign(**{column: np.asarray(value)}) if len(value) == len(frame) else frame
            if len(value) != len(frame):
                problems.add(
                    DataError(f"data has {len(frame)} rows, {role} has {len(value)}. Give one entry for each row")
                )
    roles = Roles(modalities=given.modalities, partial=given.partial, optional=tuple(optional), **words)
    more = {} if given.class_names is None else {"class_names": given.class_names}
    return drafted(frame, "data", "data", roles, problems, **more)


def _are_columns(value: Sequence[Any], frame: Any) -> bool:
    return all(isinstance(word, str) for word in value) and set(value) <= {str(column) for column in frame.columns}


def _of_dataset(data: Any, given: Given) -> Draft:
    """Make a draft from a PyTorch dataset whose samples are (x, label), (x1, ..., label) or a dictionary."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise RecipeError(
            f"data is a {type(data).__name__} without a length: give a Dataset with len(data) and data[i]"
        )
    if len(data) == 0:
        raise DataError("data has no rows. Check where it comes from")
    samples = [data[row] for row in range(len(data))]
    key = given.labels if isinstance(given.labels, str) else "label"
    labelled = given.labels is None or isinstance(given.labels, str)
    rows = [_parts(sample, key, labelled, given, row) for row, sample in enumerate(samples)]
    names = list(dict.fromkeys(name for parts, _ in rows for name in parts))
    found: dict[str, Any] = {}
    present = {name: value for name, value in (given.present or {}).items()}
    notes, problems = [], Problems()
    for name in names:
        with problems.noting():
            cells = [_cell(parts.get(name)) for parts, _ in rows]
            found[name], there, note = array_of(cells, f"data: modality '{name}'")
            notes += [f"modality '{name}': {note}"] if note else []
            if not there.all():
                present.setdefault(name, there)
    problems.raise_all()
    labels = np.array([_cell(label) for _, label in rows]) if labelled else given.labels
    return Draft(
        name="data",
        where="data",
        modalities=found,
        labels=labels,
        clients=given.clients,
        split=given.split,
        present=present,
        notes=tuple(notes),
    )


def _parts(sample: Any, key: str, labelled: bool, given: Given, row: int) -> tuple[dict[str, Any], Any]:
    """Return the modalities and the label of one sample."""
    label = None
    if isinstance(sample, Sequence) and not isinstance(sample, str):
        *inputs, label = sample if labelled else (*sample, None)
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            return dict(inputs[0]), label
        names = tuple(given.modalities) if given.modalities is not None else ("input",) if len(inputs) == 1 else ()
        if len(names) != len(inputs):
            raise RecipeError(
                f"a sample of data has {len(inputs)} parts beside its label: name them in their order, as in "
                f"modalities={[f'part{n}' for n in range(1, len(inputs) + 1)]}"
            )
        return dict(zip(names, inputs, strict=True)), label
    if isinstance(sample, Mapping):
        parts = dict(sample)
        if labelled and key not in parts:
            raise DataError(
                f"data: sample {row} has no '{key}'; it has {', '.join(map(str, parts))}. Name it in labels="
            )
        return parts, parts.pop(key, None)
    raise RecipeError(f"a sample of data is a {type(sample).__name__}: give (x, label) or a dictionary with '{key}'")


def _cell(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _of_splits(data: Mapping[str, Any], given: Given, problems: Problems) -> Draft:
    """Make a draft from one data frame or dataset for each split."""
    if strange := [name for name in data if str(name).lower() not in SPLITS]:
        raise RecipeError(f"data has a part '{strange[0]}', which is no split. Allowed: {', '.join(SPLITS)}")
    if any(isinstance(value, Tensor | np.ndarray | list) for value in (given.labels, given.clients, given.split)):
        raise RecipeError("data is given by split: name the columns or keys of labels and clients, not arrays")
    drafts = {name: _draft(part, given, problems) for name, part in data.items()}
    names = list(dict.fromkeys(name for draft in drafts.values() for name in draft.modalities))
    for name, draft in drafts.items():
        if lacking := [modality for modality in names if modality not in draft.modalities]:
            problems.add(DataError(f"data: split '{name}' has no modality '{lacking[0]}', which other splits have"))
    kinds: dict[str, str] = {}
    for name, draft in drafts.items():
        with problems.noting():
            kinds[name] = plain(draft.labels, f"data: the label column of '{name}'").dtype.kind
    words = [name for name, kind in kinds.items() if kind == "U"]
    if words and len(words) < len(kinds):
        other = next(name for name in kinds if name not in words)
        problems.add(
            DataError(
                f"data: the labels are words in split '{words[0]}' and numbers in split '{other}'. Write both the same "
                "way, as words or as class numbers"
            )
        )
    problems.raise_all()
    sizes = {name: len(draft.labels) for name, draft in drafts.items()}
    first = next(iter(drafts.values()))
    joined = {name: _joined([draft.modalities[name] for draft in drafts.values()], name, problems) for name in names}
    present = {
        name: np.concatenate([np.asarray(d.present.get(name, np.ones(len(d.labels), bool))) for d in drafts.values()])
        for name in names
        if any(name in draft.present for draft in drafts.values())
    }
    problems.raise_all()
    clients = [draft.clients for draft in drafts.values()]
    return replace(
        first,
        modalities=joined,
        labels=np.concatenate([np.asarray(draft.labels) for draft in drafts.values()]),
        clients=None if any(c is None for c in clients) else np.concatenate([np.asarray(c) for c in clients]),
        split=np.concatenate([np.full(size, SPLITS[str(name).lower()]) for name, size in sizes.items()]),
        present=present,
    )


def _joined(arrays: Sequence[Any], name: str, problems: Problems) -> Any:
    """Return the arrays of all splits, joined one after another."""
    shapes = {np.shape(array)[1:] for array in arrays}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        problems.add(DataError(f"data: modality '{name}' has samples of shape {found} in different splits"))
        return arrays[0]
    return np.concatenate([np.asarray(array) for array in arrays])


def _is_frame(data: Any) -> bool:
    return type(data).__name__ == "DataFrame" and hasattr(data, "iloc")


def _is_hugging_face(data: Any) -> bool:
    return hasattr(data, "to_pandas") and hasattr(data, "features") and hasattr(data, "column_names")


def _names(data: Any, given: Given) -> Sequence[str] | None:
    """Return the class names that a Hugging Face dataset stores with its label column."""
    label = given.labels if isinstance(given.labels, str) else "label"
    names = getattr(data.features.get(label), "names", None)
    return None if names is None else tuple(names)
