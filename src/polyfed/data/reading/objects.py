"""Makes a table from objects in memory: tensors, arrays, data frames, and datasets of PyTorch and Hugging Face."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np
from torch import Tensor, strided
from torch.utils.data import Dataset

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.problems import Problems
from polyfed.data.column_rules import Feature
from polyfed.data.columns import Columns
from polyfed.data.reading.column_guess import UNNAMED, column_names, kind_of
from polyfed.data.reading.dataset_samples import drafted_samples
from polyfed.data.reading.draft import Draft, columns_of
from polyfed.data.reading.frames import Joined, drafted, joined
from polyfed.data.reading.given import ROLES, Given, with_masks
from polyfed.data.reading.row_facts import SPLITS, as_array, ordered_words, plain


def refuse_other_columns(data: Mapping[str, Any], modalities: object, named: Sequence[Any]) -> None:
    """Refuse splits that have different columns. Only columns that polyfed reads are compared.

    Args:
        data: split -> a data frame or another data set.
        modalities: the option `modalities`, with which the caller names the columns of each modality. If None, polyfed
            reads all columns of numbers.
        named: the options `labels` and `clients`. If one of them is the name of a column, polyfed reads this column
            too.

    Raises:
        DataError: a split has no rows, or lacks a column that other splits have. The message lists all faults.
    """
    problems = Problems()
    columns: dict[str, Counter[str]] = {}
    held: dict[str, set[str]] = {}
    for name, part in data.items():
        if not len(part):
            problems.add(DataError(f"data: split '{name}' has no rows. Leave it out, or check where it comes from"))
        elif is_frame(part):
            frame = part.rename(columns=str)
            columns[name] = Counter(frame.columns)
            kinds = {column: kind_of(frame[column]) for column, count in columns[name].items() if count == 1}
            roles = {word for word in ("label", "client", *named) if isinstance(word, str)}
            read = {column for column, kind in kinds.items() if kind != "text" and not UNNAMED.fullmatch(column)}
            held[name] = read | (roles & kinds.keys())
    if modalities is None:
        every = sorted(set().union(*held.values()))
        for name in held:
            if lacking := [column for column in every if column not in columns[name]]:
                other = next(part for part in held if lacking[0] in held[part])
                listed = ", ".join(map(repr, lacking[:5]))
                problems.add(
                    DataError(
                        f"data: split '{name}' has no column {listed}, and split '{other}' has. Give all splits the "
                        "same columns, or name the columns of each modality in modalities"
                    )
                )
    problems.raise_all()


def refuse_other_dictionaries(data: Mapping[str, Any], labels: Any) -> None:
    """Check that `data` maps each modality to an array, and that `labels` is not the name of a column.

    The function refuses `data` whose keys are splits, as in {'train': ..., 'test': ...}, if all values are paths of
    files or all values are dictionaries. If `data` holds arrays, `labels` must hold one label for each row, because
    arrays have no column that a name could select.

    Raises:
        RecipeError: `data` maps each split to the path of a file or to a dictionary, or `labels` is a name.
    """
    by_split = all(str(name).lower() in SPLITS for name in data)
    name, part = next(iter(data.items()))
    if by_split and all(isinstance(value, str | PathLike) for value in data.values()):
        raise RecipeError(
            f"data['{name}'] is the path of a file, but a split must be a data frame or a dataset. Read the files, as "
            f"in data={{'{name}': pandas.read_csv('{part}'), ...}}. Or give one file with a column `split`, as in "
            "data='all.csv', split='split'"
        )
    if by_split and all(isinstance(value, Mapping) for value in data.values()):
        raise RecipeError(
            f"data['{name}'] is a {type(part).__name__}, but a split must be a data frame or a dataset. Join the "
            "arrays of all splits, and give the split of each row, as in data={'image': x}, labels=y, split=['train', "
            "..., 'test']"
        )
    if isinstance(labels, str):
        raise RecipeError(
            f"labels = '{labels}' is a name, but data is arrays. Give one label for each row, as in labels=y"
        )


def same_order(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splits with their columns in the order of the first split, since features are read in this order."""
    parts = list(data.items())
    first = dict.fromkeys(getattr(parts[0][1], "columns" if is_frame(parts[0][1]) else "column_names", ()))
    result: dict[str, Any] = {}
    for name, part in parts:
        held = list(getattr(part, "columns" if is_frame(part) else "column_names", ()))
        known = set(held)
        if len(known) < len(held) or not first:
            result[name] = part
            continue
        order = [column for column in first if column in known] + [column for column in held if column not in first]
        result[name] = part[order] if is_frame(part) else part.select_columns(order) if held != order else part
    return result


def join_arrays(arrays: Sequence[Any], name: str, problems: Problems) -> Any:
    """Return the arrays of all splits, joined one after another.

    Time series (N, T, F) and token ids (N, T) may differ in length between the splits. They are padded with zeros at
    the end to the longest, as `array_of` pads the samples of one split.
    """
    held = [np.asarray(array) for array in arrays]
    shapes = {array.shape[1:] for array in held}
    if len(shapes) > 1:
        ranks, whole = {len(shape) for shape in shapes}, all(array.dtype.kind in "iu" for array in held)
        if len({shape[1:] for shape in shapes}) > 1 or not (ranks == {2} or (ranks == {1} and whole)):
            found = " and ".join(map(str, sorted(shapes)))
            text = f"data: modality '{name}' has samples of shape {found} in different splits"
            problems.add(DataError(f"{text}. Bring the samples of all splits to one shape"))
            return arrays[0]
        longest = max(shape[0] for shape in shapes)
        rest = [(0, 0)] * (held[0].ndim - 2)
        held = [np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in held]
    return np.concatenate(held)


def has_columns(data: Any) -> bool:
    """Whether data in memory is a table with columns, or consists of such tables, one for each split."""
    parts = list(data.values()) if isinstance(data, Mapping) else [data]
    return bool(parts) and all(is_frame(part) or is_hugging_face(part) for part in parts)


def is_frame(data: Any) -> bool:
    """Whether an object is a pandas data frame."""
    return type(data).__name__ == "DataFrame" and hasattr(data, "iloc")


def is_hugging_face(data: Any) -> bool:
    """Whether an object is a `Dataset` of the library `datasets` by Hugging Face."""
    return hasattr(data, "to_pandas") and hasattr(data, "features") and hasattr(data, "column_names")


def has_rows(values: Any) -> bool:
    """Whether a value can hold one entry for each row: it has a length, and is not a text, a mapping or a set."""
    try:
        return not isinstance(values, str | bytes | Mapping | Set) and len(values) >= 0
    except TypeError:  # None, a number, an array or a tensor without axes
        return False


def shown(value: Any) -> str:
    """Return a value for an error text: itself if it is a word or a number, or else its type."""
    return repr(value) if value is None or np.isscalar(value) else f"a {type(value).__name__}"


ALLOWED = (
    "a dictionary of tensors or arrays by modality, a pandas data frame, a torch.utils.data.Dataset, a data set of the "
    "Hugging Face library datasets, polyfed.data.Columns, or the path of a file"
)


def table_of(data: Any, given: Given) -> Columns:
    """Make a table from data in memory.

    Args:
        data: one of `ALLOWED`, except a path; or a dictionary with one such object for each split (`train`, `test`,
            `validation`).
        given: labels, natural clients, splits, and how they are read.

    Raises:
        DataError: the data has faults; the message lists all of them.
        RecipeError: `data` has a type that is not allowed, or an argument does not apply to its type.
    """
    if isinstance(data, Columns):
        facts = ("ids", "modalities", "present", "class_names", "layout")
        given_too = [name for name in (*ROLES, *facts) if getattr(given, name) is not None]
        options = ("partial", "standardise", "test_share")
        given_too += [name for name in options if getattr(given, name) != getattr(Given, name)]
        if given_too:
            raise RecipeError(f"{given_too[0]} is given, but `Columns` hold labels, clients, splits and more already")
        return data
    given = given.options_checked()
    if (ordered := ordered_words(given.labels)) is not None:
        words, levels = ordered
        given = replace(given, labels=words, class_names=given.class_names or levels)
    problems = Problems()
    draft = _draft(data, given, problems)
    extra: dict[str, Any] = {
        name: value for name in ("layout", "class_names", "ids") if (value := getattr(given, name)) is not None
    }
    extra["present"] = with_masks(draft.present, given.present)
    extra["numeric"] = given.numeric
    if isinstance(given.ids, str) and given.ids != "rows":
        problems.add(
            RecipeError(f"ids = '{given.ids}': give an array with one integer or word for each row, or 'rows'")
        )
    if strange := [m for name in ("present", "layout") for m in extra.get(name, ()) if m not in draft.modalities]:
        problems.add(RecipeError(f"'{strange[0]}' is no modality of the data; it has {', '.join(draft.modalities)}"))
    return columns_of(replace(draft, **extra), given, problems)


def _draft(data: Any, given: Given, problems: Problems) -> Draft:
    if is_frame(data):
        return _of_frame(data, given, problems)
    if is_hugging_face(data):
        frame, names = _named(data, given)
        return _of_frame(frame, given if given.class_names is not None else replace(given, class_names=names), problems)
    if isinstance(data, Dataset):
        return drafted_samples(data, given, problems)
    if isinstance(data, Mapping):
        if not data:
            raise RecipeError("data is an empty dictionary: give at least one modality, as in data={'image': x}")
        parts = [part for part in data.values() if is_frame(part) or is_hugging_face(part) or isinstance(part, Dataset)]
        if len(parts) == len(data):
            return _of_splits(data, given, problems)
        return _of_arrays(data, given, problems)
    if isinstance(data, Tensor | np.ndarray):
        raise RecipeError("data is one array: name its modality, as in data={'image': x}")
    raise RecipeError(f"data is a {type(data).__name__}; allowed: {ALLOWED}")


def _of_arrays(data: Mapping[str, Any], given: Given, problems: Problems) -> Draft:
    refuse_other_dictionaries(data, given.labels)
    if given.labels is None and given.needs_labels:
        raise RecipeError("labels is missing: give one label for each row, as in labels=y")
    if given.modalities is not None and not isinstance(given.modalities, Mapping):
        raise RecipeError(
            "modalities is a list, and a dictionary names its modalities by its keys. To join arrays, write "
            "modalities={'person': ['sex', 'age']}"
        )
    parts = {str(name): values for name, values in data.items()}
    for name, values in parts.items():
        if isinstance(values, Tensor) and values.layout != strided:
            raise DataError(f"data['{name}'] is a sparse tensor. Give a dense one, as in x.to_dense()")
        if not has_rows(values):
            raise RecipeError(
                f"data['{name}'] is {shown(values)}: give an array, a tensor or a list with one sample for each row, "
                f"or leave '{name}' out"
            )
    made = Joined(modalities=parts)
    if given.columns or given.modalities is not None:
        modalities = None if given.modalities is None else column_names(given.modalities)
        made = joined(
            parts,
            given.without_roles(modalities),
            "data",
            problems,
        )
    return Draft(
        name="data",
        where="data",
        **vars(made),
        labels=given.labels,
        clients=given.clients,
        split=given.split,
        split_personal=given.split_personal,
        person=given.person,
        ids=None,  # arrays of different origin may be aligned or not
    )


USUAL = {
    "labels": "label",
    "clients": "client",
    "split": "split",
    "split_personal": "split_personal",
    "person": "",
}
"""Role -> the name of its column in a data frame, if the caller names none; "" for no column."""


def _of_frame(frame: Any, given: Given, problems: Problems) -> Draft:
    """Make a draft from a data frame. Labels, clients and splits are names of columns, or arrays."""
    modalities = None if given.modalities is None else column_names(given.modalities)
    _refuse_other_index(frame, given, problems)
    arrays: dict[str, Any] = {} if given.class_names is None else {"class_names": given.class_names}
    words: dict[str, Any] = {}
    optional = ["ids"]
    for role, column in USUAL.items():
        value = getattr(given, role)
        if value is None:
            words[role] = column
            if role != "labels" or not given.needs_labels:
                optional.append(role)
        elif isinstance(value, str) or (role == "labels" and _are_columns(value, frame)):
            words[role] = value
        elif not has_rows(value):
            raise RecipeError(f"{role} is {shown(value)}: give one entry for each row, or the name of a column")
        else:
            array = as_array(value, f"data: {role}")
            if len(array) != len(frame):
                text = f"data has {len(frame)} rows, {role} has {len(array)}. Give one entry for each row"
                problems.add(DataError(text))
            elif array.ndim == 1 and column:
                words[role], frame = column, frame.assign(**{column: array})
                continue
            else:
                arrays[role] = array  # several targets for each row fit in no column, and persons need none
            words[role], frame = "", frame.drop(columns=column, errors="ignore")
    named = replace(given, modalities=modalities, ids="", optional=tuple(optional), **words)
    return drafted(frame, "data", "data", named, problems, **arrays)


def _refuse_other_index(frame: Any, given: Given, problems: Problems) -> None:
    """Add a fault for each pandas Series or frame whose index differs from the index of the data frame.

    polyfed pairs rows by their position, and pandas pairs them by the index. With different indices, the two disagree.
    """
    for role in (*ROLES, "ids"):
        value = getattr(given, role)
        if hasattr(value, "iloc") and len(value) == len(frame) and not value.index.equals(frame.index):
            problems.add(
                DataError(
                    f"data: {role} is a pandas {type(value).__name__} with another index than the data frame, so its "
                    f"rows may be in another order. Order it, as in {role}={role}.loc[frame.index]; or give "
                    f"{role}={role}.to_numpy(), which pairs the rows by position"
                )
            )


def _are_columns(value: Any, frame: Any) -> bool:
    if not (isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value)):
        return False
    return set(value) <= {str(column) for column in frame.columns}


def _of_splits(data: Mapping[str, Any], given: Given, problems: Problems) -> Draft:
    """Make a draft from one data frame or dataset for each split."""
    if strange := [name for name in data if str(name).lower() not in SPLITS]:
        raise RecipeError(f"data has a part '{strange[0]}', which is no split. Allowed: {', '.join(SPLITS)}")
    targets = list(given.labels) if isinstance(given.labels, list | tuple) else [given.labels]
    if not all(isinstance(value, str | None) for value in (*targets, given.clients, given.split, given.person)):
        raise RecipeError("data is given by split: name the columns or keys of labels, clients and persons, not arrays")
    refuse_other_columns(data, given.modalities, (*targets, given.clients, given.person))
    refuse_other_names(data, given)
    drafts = {name: _draft(part, given, problems) for name, part in same_order(data).items()}
    names = list(dict.fromkeys(name for draft in drafts.values() for name in draft.modalities))
    for name, draft in drafts.items():
        if lacking := [modality for modality in names if modality not in draft.modalities]:
            problems.add(DataError(f"data: split '{name}' has no modality '{lacking[0]}', which other splits have"))
    labelled = {name: draft for name, draft in drafts.items() if draft.labels is not None}
    _refuse_mixed_labels(labelled, problems)
    problems.raise_all()
    sizes = {name: len(next(iter(draft.modalities.values()))) for name, draft in drafts.items()}
    found = [np.asarray(draft.labels) for draft in labelled.values()]
    labels = np.concatenate(found) if len(labelled) == len(drafts) else None
    first, held = next(iter(drafts.values())), list(drafts.items())
    coded = _same_codes(drafts)
    drafts = {
        name: replace(draft, modalities={**draft.modalities, **values})
        for (name, draft), values in zip(drafts.items(), coded[1], strict=True)
    }
    joined_arrays = {
        name: join_arrays([draft.modalities[name] for draft in drafts.values()], name, problems) for name in names
    }
    present, cut = (
        {
            name: np.concatenate([np.asarray(getattr(d, role).get(name, np.full(sizes[n], rest))) for n, d in held])
            for name in names
            if any(name in getattr(draft, role) for draft in drafts.values())
        }
        for role, rest in (("present", True), ("cut", False))
    )
    problems.raise_all()
    return replace(
        first,
        modalities=joined_arrays,
        coded=coded[0],
        whole=first.whole,
        labels=labels,
        ids="rows",  # splits often number their rows separately
        clients=_of_all([draft.clients for draft in drafts.values()]),
        person=_of_all([draft.person for draft in drafts.values()]),
        unread_names={},
        split=np.concatenate([np.full(size, SPLITS[str(name).lower()]) for name, size in sizes.items()]),
        split_personal=_personal_splits(drafts.values(), sizes.values()),
        present=present,
        cut=cut,
        class_names=_all_names(drafts.values()),
        notes=(*first.notes, *_padded(drafts, joined_arrays)),
    )


def _of_all(parts: Sequence[Any]) -> Any:
    """Return the facts of the rows of all parts, or None if a part has none."""
    return None if any(part is None for part in parts) else np.concatenate([np.asarray(part) for part in parts])


def _personal_splits(drafts: Iterable[Draft], sizes: Iterable[int]) -> Any:
    """Return the splits within natural clients of all parts, in which only training rows count; None if none has any.

    Args:
        sizes: the number of rows of each part.
    """
    held = [draft.split_personal for draft in drafts]
    if all(part is None for part in held):
        return None
    rest = (np.zeros(size, np.int64) for size in sizes)
    return np.concatenate([zero if part is None else part for part, zero in zip(held, rest, strict=True)])


def _refuse_mixed_labels(labelled: Mapping[str, Draft], problems: Problems) -> None:
    """Add a fault if the labels are words in one split and numbers in another."""
    kinds: dict[str, str] = {}
    for name, draft in labelled.items():
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


def _same_codes(
    drafts: Mapping[str, Draft],
) -> tuple[dict[str, tuple[Feature, ...]], list[dict[str, Any]]]:
    """Return the columns with the words of all splits, and each split's modalities with the codes of these words."""
    features: dict[str, tuple[Feature, ...]] = {}
    values: list[dict[str, Any]] = [{} for _ in drafts]
    parts = list(drafts.values())
    for modality, first in parts[0].coded.items():
        if any(modality not in draft.coded for draft in parts):
            continue  # a fault of that split is known
        own = [draft.coded[modality] for draft in parts]
        features[modality] = tuple(
            replace(feature, words=tuple(sorted({word for one in own for word in one[place].words})))
            for place, feature in enumerate(first)
        )
        for draft, moved in zip(parts, values, strict=True):
            codes = np.array(draft.modalities[modality])
            for place, (before, after) in enumerate(zip(draft.coded[modality], features[modality], strict=True)):
                if after.of_words:
                    places = np.array([after.words.index(word) for word in before.words], np.float64)
                    codes[:, place] = places[codes[:, place].astype(np.int64)]
            moved[modality] = codes
    return features, values


def _padded(drafts: Mapping[str, Draft], joined: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each modality whose samples were padded to the length of another split."""
    for name, values in joined.items():
        if len({np.shape(draft.modalities[name])[1:] for draft in drafts.values()}) > 1:
            text = "samples differ in length between the splits; shorter ones are filled up with zeros to"
            yield f"modality '{name}': {text} {values.shape[1]}"


def _named(data: Any, given: Given) -> tuple[Any, tuple[str, ...] | None]:
    """Return a Hugging Face dataset as a data frame, and the class names that it stores with its label column.

    Numbers of labels, clients and splits become the names that they stand for, because another split may list the same
    names in another order.
    """
    frame, result = data.to_pandas(), None
    for role in ("labels", "clients", "split", "person"):
        value = getattr(given, role)
        column = value if isinstance(value, str) else USUAL[role]
        names = getattr(data.features.get(column), "names", None)
        renamed = role == "labels" and given.class_names is not None and set(given.class_names) != set(names or ())
        if names is not None and column in frame.columns and not renamed:
            words = [names[int(number)] if number == number and number >= 0 else None for number in frame[column]]
            frame[column] = np.array(words, dtype=object)
            result = tuple(names) if role == "labels" else result
    return frame, result


def refuse_other_names(data: Mapping[str, Any], given: Given) -> None:
    """Refuse Hugging Face datasets whose numbers stand for other names in other splits, where no name replaces them.

    Labels, clients and splits are read by their names. Features are numbers, and so are labels whose classes the caller
    names anew.

    Raises:
        DataError: the names of a column differ between two splits.
    """
    roles = [getattr(given, role) or USUAL[role] for role in ("clients", "split", "person")]
    roles += [given.labels or "label"] if given.class_names is None else []
    problems, first = Problems(), dict[str, tuple[str, list[str]]]()
    for split, part in data.items():
        for column, feature in part.features.items() if is_hugging_face(part) else ():
            names = getattr(feature, "names", None)
            if names is None or column in roles:
                continue
            other, wanted = first.setdefault(column, (split, names))
            if names != wanted and set(names) != set(given.class_names or ()):
                problems.add(
                    DataError(
                        f"data: column '{column}' stands for other names in split '{split}' than in split '{other}'. "
                        "Cast all splits to one list of names, as in split.cast_column(name, ClassLabel(names=[...]))"
                    )
                )
    problems.raise_all()


def _all_names(drafts: Iterable[Draft]) -> tuple[str, ...] | None:
    """Return the class names of all splits: those of the first one, then those that only others have."""
    listed = [tuple(draft.class_names) for draft in drafts if draft.class_names is not None]
    return tuple(dict.fromkeys(name for names in listed for name in names)) if listed else None
