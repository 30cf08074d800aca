"""Reads the samples of a PyTorch dataset: the modalities of each sample, and its label, natural client and split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.errors import DataError, RecipeError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """The meaning of the parts of a sample.

    A sample is (x, label), (x1, ..., label), a dictionary, or (dictionary, label).

    Attributes:
        modalities: names of the modalities. For a tuple, one name for each part except the label, in order. For a
            dictionary, the keys to read. If None, every key of a dictionary that has no other meaning is read.
        keys: role -> the dictionary key under which a sample holds this fact of its row. The roles are `labels`,
            `clients` and `split`.
        labelled: whether the samples have a label.
    """

    modalities: tuple[str, ...] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    labelled: bool = True

    @classmethod
    def of(cls, modalities: Any, keys: Mapping[str, str], labelled: bool) -> "SampleForm":
        """Check the `modalities` that the caller gave, and return the form.

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
    """Return the cells of each modality and the cells of each fact of the rows, all in the order of the samples.

    Args:
        samples: the samples, at least one.
        form: the meaning of the parts of a sample.

    Returns:
        Two dictionaries. The first is modality -> cells, where a cell is None if the sample lacks the modality. The
        second is role -> cells, where a cell is None if the label is not read.

    Raises:
        DataError: no sample has one of the named modalities, or a sample lacks the key of a fact.
        RecipeError: the samples do not have a form that `SampleForm` describes, or their parts need names.
    """
    rows = [_read(sample, form, row) for row, sample in enumerate(samples)]
    held = dict.fromkeys(name for parts, _ in rows for name in parts)
    names = list(held) if form.modalities is None else list(form.modalities)
    if lacking := [name for name in names if name not in held]:
        parts = samples[0] if isinstance(samples[0], Mapping) else samples[0][0]
        keys = [str(key) for key in parts if str(key) not in form.keys.values()]
        raise DataError(f"data: no sample has the modality '{lacking[0]}'; {did_you_mean(lacking[0], keys)}")
    cells = {name: [parts.get(name) for parts, _ in rows] for name in names}
    return cells, {role: [facts[role] for _, facts in rows] for role in rows[0][1]}


def _read(sample: Any, form: SampleForm, row: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the modalities of one sample by name, and the facts of its row by role."""
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
    """Return the modalities that a dictionary holds, and the facts that are stored under `keys`, by role."""
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
