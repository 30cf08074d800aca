"""Reads the label, the natural client and the split of each row of a table. All of them may be numbers or words."""

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import DataError, PolyfedWarning, counted
from polyfed.core.system.json_and_toml import toml_key
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.reading.values import digits, is_missing, option, unmasked

MANY_CLASSES = 1000
"""Labels with more classes than rows, and more classes than this, are refused, because they cannot be classes
(inferred)."""

TARGET_STEPS = 256
"""A target must span at least this many steps of float32 (ours)."""

WHOLE_WORD = re.compile(r"0|-?[1-9]\d{0,17}")
"""A whole number that is written in the one usual way."""

_UNEQUAL = (
    "{}: the rows differ in length. Give one entry for each row; or several targets, the same number for each row"
)

SPLITS: Mapping[str, int] = {
    "train": TRAIN,
    "training": TRAIN,
    "test": TEST,
    "validation": VALIDATION,
    "valid": VALIDATION,
    "val": VALIDATION,
    "dev": VALIDATION,
}
"""The words for the codes of `Columns.split`."""


@dataclass(frozen=True)
class Labels:
    """The labels of a table.

    Attributes:
        values: int64 (N,) for class numbers; float32 (N,) or (N, T), unchanged, for targets.
        names: names of the classes: those that the caller gave or, without them, the words in the labels. None if the
            labels are numbers and the caller gave no names.
        num_classes: number of classes, or of targets T.
        words_sorted: whether the labels were words that polyfed numbered in sorted order.
        note: a sentence that lists the classes, if the labels were words and no class names were given. Otherwise, the
            note is empty.
    """

    values: Tensor
    names: tuple[str, ...] | None
    num_classes: int
    words_sorted: bool = False
    note: str = ""


def labels_of(values: Any, where: str, names: Sequence[str] | None = None, *, numeric: bool = False) -> Labels:
    """Read labels.

    Words become class numbers in sorted order, and the words are kept as names. Whole numbers and booleans are class
    numbers. Floats, and arrays with several targets for each row, become float32, with NaN for unknown targets.

    Args:
        values: (N,) or (N, T). Words, whole numbers and booleans of the shape (N, 1) are read like (N,).
        where: the name of the labels, for error messages.
        names: names of the classes in order of their numbers; None if they are not known.
        numeric: whether whole numbers are targets and not class numbers.

    Raises:
        DataError: The labels are neither numbers nor words, are mixed, or some are missing.
    """
    array = plain(values, where)
    if array.ndim == 2 and array.shape[1] == 1 and array.dtype.kind in "iubU":
        array = array[:, 0]
    if array.dtype.kind == "U":
        return _words(array, where, names)
    if array.dtype.kind not in "iubf":
        raise DataError(f"{where} holds {array.dtype}: labels must be whole numbers from 0, words, or float targets")
    if array.ndim not in (1, 2):
        raise DataError(f"{where} has shape {array.shape}: give one label a row, or one row of targets")
    if array.dtype.kind == "f" or array.ndim > 1 or numeric:
        target = torch.from_numpy(array.astype(np.float32))
        _refuse_collapsed(array, where)
        return Labels(target, None if names is None else tuple(names), 1 if array.ndim == 1 else int(array.shape[1]))
    label = torch.from_numpy(array.astype(np.int64))
    if names is None:
        check_numbering(label, where)
    count = max(int(label.max()) + 1 if len(label) else 0, 1) if names is None else len(names)
    return Labels(label, None if names is None else tuple(names), count)


def _refuse_collapsed(array: NDArray[Any], where: str) -> None:
    """Refuse a target that varies by only a few steps of float32, in which targets are stored.

    Raises:
        DataError: there is such a target.
    """
    for place, target in enumerate(array.reshape(len(array), -1).T.astype(np.float64)):
        known = target[np.isfinite(target)]
        low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
        if 0 < high - low < TARGET_STEPS * np.finfo(np.float32).eps * max(-low, high):
            raise DataError(
                f"{where}: target {place} (counted from 0) lies from {low!r} to {high!r}, where float32 cannot tell "
                "its values apart. Subtract a constant, as in values - values.min()"
            )


def unlabelled(num_rows: int) -> Labels:
    """Return the labels of a table without labels: the class 0 for each row."""
    return Labels(torch.zeros(num_rows, dtype=torch.int64), None, 1)


def clients_of(values: Any, where: str, column: str = "client") -> tuple[Tensor, tuple[str, ...]]:
    """Return the natural client of each row, int64 (N,), and their names, sorted and numbered from 0.

    Words that are all whole numbers without leading zeros are sorted by their value, as numbers are, so that a client
    has the same number whether a file holds numbers or text.

    Args:
        values: the clients.
        where: the beginning of an error text.
        column: their column, for the advice how to join two of them.

    Raises:
        DataError: The values are neither words nor whole numbers, or some are missing.
    """
    array = _whole(plain(values, where), where, "integers or strings")
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise DataError(f"{where} must hold integers or strings, one a row; it is {array.dtype} {array.shape}")
    words, number = np.unique(array, return_inverse=True)
    if array.dtype.kind == "U":
        tell_alike(words, where, "clients", Counter(array.tolist()), column)
        if all(WHOLE_WORD.fullmatch(word) for word in words.tolist()):
            order = np.argsort(words.astype(np.int64))
            words, number = words[order], np.argsort(order)[number]
    return torch.from_numpy(number.astype(np.int64)), tuple(map(str, words.tolist()))


def persons_of(values: Any, where: str) -> Tensor:
    """Return the number of each row's person, int64 (N,). Words that differ only by case or blanks are one person.

    A person that is taken for another costs a little freedom of the split, and one that is taken for two leaks.

    Raises:
        DataError: The values are neither words nor whole numbers, or some are missing.
    """
    array = _whole(plain(values, where), where, "words or whole numbers")
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise DataError(f"{where} must hold words or whole numbers, one a row; it is {array.dtype} {array.shape}")
    if array.dtype.kind == "U":
        array = np.array([" ".join(word.split()).casefold() for word in array.tolist()], dtype=np.str_)
        if (gone := array == "").any():
            raise missing(gone, where)
    return torch.from_numpy(np.unique(array, return_inverse=True)[1].astype(np.int64))


def tell_alike(words: NDArray[Any], where: str, what: str, counts: Mapping[str, int], column: str = "") -> None:
    """Warn of distinct words that differ only by case or by blanks.

    Args:
        words: the distinct words.
        where: the beginning of an error text.
        what: what the words are.
        counts: how often each word occurs; the most frequent one is suggested for those like it.
        column: the column of the words, unless they are labels.

    Raises:
        DataError: the words are classes, and some differ only by blanks, which nobody sees.
    """
    groups: dict[str, list[str]] = {}
    for word in words.tolist():
        groups.setdefault(" ".join(word.split()).casefold(), []).append(word)
    alike = [group for group in groups.values() if len(group) > 1]
    if not alike:
        return
    listed = "; ".join(" and ".join(map(repr, group)) for group in alike[:5]) + ("; ..." if len(alike) > 5 else "")
    blanks = [group for group in alike if any(word != " ".join(word.split()) for word in group)]
    text = f"{where} holds {listed}, which differ only by case or blanks and count as different {what}"
    same = {word: kept for group in alike for kept in [_plainest(group, counts)] for word in group if word != kept}
    name = f"relabel.{toml_key(column)}" if column else "relabel"
    cure = f"of a table's file, {option(name, same)} does"
    if blanks and what == "classes":
        raise DataError(f"{text}. Write them the same way; {cure}")
    warnings.warn(f"{text}. Write them the same way if they are one; {cure}", PolyfedWarning, stacklevel=4)


def _plainest(group: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return the most frequent of these words that has no needless blanks, or the first without its own."""
    plain = [word for word in group if word == " ".join(word.split())]
    return max(plain, key=lambda word: counts.get(word, 0)) if plain else " ".join(group[0].split())


def ids_of(values: Any, where: str) -> Tensor:
    """Return the id of each row, int64 (N,). A word becomes a number that is the same on every machine.

    Raises:
        DataError: The values are neither whole numbers nor words, some are missing, or two rows have the same id.
    """
    array = _whole(plain(values, where), where)
    if array.dtype.kind not in "iuU" or array.ndim != 1:
        raise DataError(f"{where} must hold one whole number or word for each row; it is {array.dtype} {array.shape}")
    if array.dtype.kind == "U":
        array = np.char.strip(array)
        if (gone := array == "").any():
            raise missing(gone, where)
    distinct, counts = np.unique(array, return_counts=True)
    if len(distinct) < len(array):
        again = distinct[counts > 1][0]
        raise DataError(
            f"{where} repeats some ids, such as {again}; every row needs its own. If it names the client of a row, "
            "name it as client. If it is a feature, name it among the columns of a modality. Otherwise, rename it"
        )
    if array.dtype.kind == "U":
        array = np.array([_id_of(word) for word in array.tolist()], np.int64)
        if len({*array.tolist()}) < len(array):
            raise DataError(f"two words of {where} become the same number, by chance; change one of them everywhere")
    return torch.from_numpy(array.astype(np.int64))


def _id_of(word: str) -> int:
    """Return a number that every machine makes of a word: the number that it writes, or else one of its digest."""
    return int(word) if WHOLE_WORD.fullmatch(word) else number_of(hashlib.sha256(word.encode()))


def number_of(digest: Any) -> int:
    """Return the first 63 bits of a digest of `hashlib` or `hmac`. Of a million, two are equal with odds of 1e-7."""
    return int.from_bytes(digest.digest()[:8]) >> 1


def splits_of(values: Any, where: str) -> Tensor:
    """Return split codes, int8 (N,), from an array of codes or of the words in `SPLITS`.

    Raises:
        DataError: The array holds an unknown word, or values of another type.
    """
    array = plain(values, where)
    if array.dtype.kind == "U" and array.ndim == 1:
        if all(word in ("0", "1", "2", "3") for word in np.unique(array).tolist()):
            return torch.from_numpy(array.astype(np.int64)).to(torch.int8)
        unknown = [word for word in np.unique(array).tolist() if word.lower() not in SPLITS]
        if unknown:
            raise DataError(f"{where} holds {unknown[0][:40]!r}; allowed: {', '.join(SPLITS)}, or codes from 0 to 3")
        return torch.tensor([SPLITS[word.lower()] for word in array.tolist()], dtype=torch.int8)
    array = _whole(array, where)
    if array.dtype.kind not in "iub" or array.ndim != 1:
        raise DataError(f"{where} must hold 0 train, 1 test, 2 validation or 3 left out, or words such as 'train'")
    return torch.from_numpy(array.astype(np.int64)).clamp(-1, 127).to(torch.int8)


def codes_of(values: Any, where: str) -> Tensor:
    """Return codes, int8 (N,), from whole numbers; `Columns` checks their range.

    Raises:
        DataError: The values are not whole numbers.
    """
    array = _whole(plain(values, where), where)
    if array.dtype.kind not in "iub" or array.ndim != 1:
        raise DataError(f"{where} must hold integers, one a row; it is {array.dtype} {array.shape}")
    return torch.from_numpy(array.astype(np.int64)).clamp(-1, 127).to(torch.int8)


def _whole(array: NDArray[Any], where: str, wanted: str = "integers") -> NDArray[Any]:
    """Return the array, or raise an error that tells the user how to correct a column of floats.

    Raises:
        DataError: Entries are NaN, or all entries are whole numbers of a float type.
    """
    if array.dtype.kind == "f" and array.ndim == 1:
        if (gone := np.isnan(array)).any():
            raise missing(gone, where)
        if (array == np.round(array)).all():
            raise DataError(
                f"{where} must hold {wanted}, and its whole numbers are of the type {array.dtype}. Convert them to "
                "integers, as in values.astype(int)"
            )
    return array


def ordered_words(values: Any) -> tuple[NDArray[Any], tuple[str, ...]] | None:
    """Return the words (N,) and the levels of an ordered pandas Categorical; None for other values.

    An empty entry is None. The levels are the names of the classes in order.

    Args:
        values: a Categorical, or a column or index of this type.
    """
    kind: Any = getattr(values, "dtype", None)
    if not getattr(kind, "ordered", False) or not hasattr(kind, "categories"):
        return None
    words = [None if is_missing(cell) else str(cell) for cell in values]
    return np.array(words, dtype=object), tuple(map(str, kind.categories))


def as_array(values: Any, where: str) -> NDArray[Any]:
    """Return a tensor, an array or a list as an array. A list that contains words keeps the type of each entry.

    Raises:
        DataError: The rows of a list differ in length.
    """
    try:
        values = unmasked(values)
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        # NumPy would turn the numbers of a list that mixes numbers and words into words
        keeps = array.dtype.kind == "U" and isinstance(values, list | tuple)
        return np.array(values, dtype=object) if keeps else array
    except ValueError:
        raise DataError(_UNEQUAL.format(where)) from None


def plain(values: Any, where: str) -> NDArray[Any]:
    """Return an array of one plain type: booleans, whole numbers, floats or words. Rows may be lists of equal length.

    Raises:
        DataError: Entries are missing, words and numbers are mixed, or the rows differ in length.
    """
    array = as_array(values, where)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8", "replace")
    if array.dtype.kind not in "OT":
        return array
    entries = array.reshape(-1).tolist()
    gone = np.array([is_missing(entry) for entry in entries])
    if gone.any():
        raise missing(gone, where)
    kinds = {"words" if isinstance(entry, str) else "numbers" for entry in entries}
    if len(kinds) > 1:
        word = next(row for row, entry in enumerate(entries) if isinstance(entry, str))
        number = next(row for row, entry in enumerate(entries) if not isinstance(entry, str))
        raise DataError(
            f"{where} mixes words and numbers: '{entries[word]}' at row {word}, {entries[number]!r} at row {number}. "
            "Write all of them as words, or all as numbers"
        )
    for row, entry in enumerate(entries):
        if isinstance(entry, int) and not -(2**63) <= entry < 2**63:
            raise DataError(
                f"{where} holds a whole number of about {digits(entry)} digits at row {row}. The largest one is "
                f"{2**63 - 1:,}. Correct it, or give words"
            )
    try:
        result = np.asarray(entries)
    except ValueError:
        raise DataError(_UNEQUAL.format(where)) from None
    return result if array.ndim == 1 else result.reshape(array.shape)


def _words(array: NDArray[Any], where: str, names: Sequence[str] | None) -> Labels:
    if array.ndim != 1:
        raise DataError(f"{where} holds words of shape {array.shape}: give one word a row, or a number for each target")
    if (empty := np.char.strip(array) == "").any():
        raise missing(empty, where)
    found = np.unique(array) if names is None else np.array(tuple(names))
    if names is None:
        tell_alike(found, where, "classes", Counter(array.tolist()))
    number = {str(word): place for place, word in enumerate(found.tolist())}
    if strange := [word for word in np.unique(array).tolist() if word not in number]:
        raise DataError(f"{where} holds '{strange[0]}', which is none of the class names {', '.join(number)}")
    if len(number) > max(len(array) // 2, 1) and len(number) > 2:
        raise DataError(
            f"{where} holds {len(number)} different words in {len(array)} rows, such as '{array[0]}': these look like "
            "texts or ids, not classes. Name the column of the labels"
        )
    values = torch.tensor([number[word] for word in array.tolist()], dtype=torch.int64)
    listed = ", ".join([*list(number)[:5], *(["..."] if len(number) > 5 else [])])
    note = f"the labels are words: {len(number)} classes, {listed}" if names is None else ""
    return Labels(values, tuple(number), len(number), names is None, note)


def without_label(values: Any, where: str) -> NDArray[np.bool_]:
    """Return the rows whose class is empty, bool (N,), if the labels are words or objects (N,); else no row."""
    array = as_array(values, where)
    if array.ndim != 1 or array.dtype.kind not in "OUS":
        return np.zeros(len(array) if array.ndim else 0, np.bool_)
    empty = (is_missing(cell) or (isinstance(cell, str | bytes) and not cell.strip()) for cell in array.tolist())
    return np.fromiter(empty, np.bool_, len(array))


def missing(gone: NDArray[np.bool_], where: str, cure: str = "leave the rows out") -> DataError:
    """Return the error for facts that are missing in some rows.

    Args:
        gone: bool (N,), these rows.
        where: the name of the facts.
        cure: what to do, other than to fill the cells in.
    """
    return DataError(
        f"{where} is empty in {int(gone.sum())} of {gone.size} rows, first row {int(np.flatnonzero(gone)[0])}. "
        f"Fill these cells in, or {cure}"
    )


def check_numbering(label: Tensor, where: str) -> None:
    """Check class labels without names. The number of classes is then known only from the largest label.

    Raises:
        DataError: The largest label implies far more classes than there are rows.
    """
    if not len(label) or int(label.min()) < 0:
        return  # `Columns` refuses these labels
    num_classes, seen = int(label.max()) + 1, torch.unique(label)
    if num_classes > max(len(label), MANY_CLASSES):
        raise DataError(
            f"{where} holds {num_classes - 1}, which makes {num_classes} classes of {len(label)} rows. Number the "
            "classes from 0, and leave out rows without a label"
        )
    if len(seen) < num_classes:
        absent = sorted(set(range(num_classes)) - set(seen.tolist()))
        listed = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        count = counted(len(absent), "class has", "classes have")
        warnings.warn(
            f"{where}: classes run from 0 to {num_classes - 1}, and {count} no row ({listed}). "
            f"{'Subtract 1 if they are counted from 1, as in MATLAB. ' if absent == [0] else ''}"
            "Number the classes from 0 without gaps, or name them all in an array 'label_name' of an .npz. If the "
            'numbers are quantities, write [task] name = "regression"',
            PolyfedWarning,
            stacklevel=6,
        )
