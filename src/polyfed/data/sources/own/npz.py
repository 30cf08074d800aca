"""npz: your own named arrays, in one `.npz` file or in a folder of `.npy` files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
from typing_extensions import override

from polyfed.core.errors import DataError, RecipeError, require
from polyfed.core.option_checks import BELOW_ONE, check_ranges
from polyfed.core.problems import Problems
from polyfed.core.scaling import Scaling
from polyfed.data.column_rules import Feature, rules_of
from polyfed.data.columns import Column, Columns, Standardise
from polyfed.data.reading.array_files import Arrays, stored_name
from polyfed.data.reading.draft import Draft, columns_of
from polyfed.data.reading.frames import Joined, joined, origin_of
from polyfed.data.reading.given import EmptyRows, Given, Unmeasured
from polyfed.data.reading.person_columns import names_in
from polyfed.data.reading.values import Layout
from polyfed.data.sources.base import Facts, Source

ROWS = "rows"
"""The value of `ids` that declares row numbers as sample ids."""


@dataclass(frozen=True, kw_only=True)
class Npz(Source):
    """Your own data, without code: an array for each modality, an array of labels, and optional arrays named below.

    A folder of `<array>.npy` files can replace an `.npz`. Its arrays are memory-mapped, for data larger than memory. A
    boolean array `<modality>_present` marks the rows that have the modality; without this array, all rows have it. A
    row whose values are all NaN lacks the modality too. The arrays `<modality>_shift` and `<modality>_scale` together
    state how values become inputs, (value - shift) / scale, in place of `standardise`.

    Attributes:
        path: The `.npz` file, or the folder of `.npy` files.
        modalities: Names of the arrays that are modalities, in this order; or modality -> arrays (N,) that form it.
        columns: Array (N,) -> how its words, missing numbers or dates become numbers, as in the source `table`.
        label: Array of the labels: class numbers 0..C-1 or words (N,); or targets (N,) or (N, T), floats with NaN for
            an unknown one, or integers with T of at least 2. A boolean array `<label>_known` may mark the known
            targets. "" if the task needs no labels.
        client: Array of the natural client of each row, integers or strings.
        split: Array of the splits: 0 train, 1 test, 2 validation, 3 left out, or the words train, test, validation.
        split_personal: Array of splits within each natural client: 0 train, 1 test, 2 guard row.
        person: Array of the person of each row, words or whole numbers: random splits and partitions keep the rows of a
            person together. It is no feature, and its words are kept nowhere. By default the array `person`, unless it
            is read as something else; "" for none.
        class_names: Array with the name of each class, or of each of the T targets.
        ids: Array of sample ids, distinct integers or words; or "rows": row i of every array is the same sample.
            Algorithms for silos need one of the two.
        layout: Modality -> axes of a sample, if this rule guesses wrong: one axis is a vector (F); two are an image (H,
            W) if the type is uint8, else a sequence (T, F); three are (H, W, C) if the last has 1, 3 or 4 entries, else
            (C, H, W). "FT" has the features first.
        standardise: Bring every feature to mean 0 and deviation 1 over the rows that train: true for all modalities, a
            list for some, "uneven" for those whose features differ in size, false for none. Other uint8 images are
            scaled to [0, 1].
        empty_rows: A row without any modality, or without its class: "refuse" it, or "leave-out" (it is counted).
        unmeasured: A row in which every cell of a modality is empty although [data.columns] fills each: it lacks the
            modality ("absent"), or has it, with means and empty words ("fill"). A modality of one column is filled.
        test_share: Share of every class (of targets: of all rows) that is the test set if the file has no splits.
        seed: Seed for drawing that test set; the run's own seed has no effect.
    """

    path: str
    modalities: tuple[str, ...] | Mapping[str, str | list[str]] = ()
    columns: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    label: str = "label"
    client: str = "client"
    split: str = "split"
    split_personal: str = "split_personal"
    person: str = "person"
    class_names: str = "label_name"
    ids: str = "id"
    layout: Mapping[str, Layout] = field(default_factory=dict)
    empty_rows: EmptyRows = "refuse"
    unmeasured: Unmeasured = "absent"
    standardise: Standardise = "uneven"
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        rules_of("[data.columns]", self.columns)
        require(
            len(set(self.modalities)) == len(self.modalities),
            "data.modalities",
            self.modalities,
            "distinct names",
        )
        named = {*self.modalities, *self.arrays}
        for role in ("label", "client", "split", *(() if self.person == Npz.person else ("person",))):
            name = getattr(self, role)
            require(name not in named, f"data.{role}", name, "an array that is not in data.modalities too")
        require(
            self.known not in named,
            "data.modalities",
            self.modalities,
            f"modalities only; '{self.known}' says which labels are known",
        )

    @property
    def arrays(self) -> tuple[str, ...]:
        """Return the arrays that the modalities consist of."""
        if not isinstance(self.modalities, Mapping):
            return tuple(self.modalities)
        groups = ([group] if isinstance(group, str) else group for group in self.modalities.values())
        return tuple(name for group in groups for name in group)

    @property
    def groups(self) -> dict[str, list[str]]:
        """Return modality -> the arrays that form it."""
        said = self.modalities if isinstance(self.modalities, Mapping) else {name: name for name in self.modalities}
        return {name: [group] if isinstance(group, str) else list(group) for name, group in said.items()}

    @property
    def features(self) -> dict[str, tuple[Feature, ...]]:
        """Return the columns, before the fit, of each modality of whose arrays `columns` speaks."""
        rules = rules_of("[data.columns]", self.columns)
        result = {name: group for name, group in self.groups.items() if any(array in rules for array in group)}
        return {
            name: tuple(Feature(column=array, rule=rules.get(array)) for array in group)
            for name, group in result.items()
        }

    @property
    def known(self) -> str:
        """Name of the array that says which labels are known."""
        return f"{self.label}_known" if self.label else ""

    @override
    def load(self) -> Columns:
        arrays, problems = Arrays(self.path), Problems()
        self._check_names(arrays)
        held = {role: self._named(arrays, role) for role in ("client", "split", "split_personal", "class_names")}
        held["person"] = self._person(arrays)
        held["ids"] = None if self.ids == ROWS and ROWS not in arrays else self._named(arrays, "ids")
        read: dict[str, Any] = {
            "labels": problems.attempt(lambda: arrays[self.label]) if self.label else None,
            "clients": self._read(held["client"], arrays.__getitem__, problems),
            "split": self._read(held["split"], arrays.__getitem__, problems),
            "split_personal": self._read(held["split_personal"], arrays.integers, problems),
            "person": self._read(held["person"], arrays.__getitem__, problems),
            "class_names": self._read(held["class_names"], arrays.strings, problems),
            "ids": self._read(held["ids"], arrays.__getitem__, problems),
            "known": self._read(self.known if self.known in arrays else None, arrays.__getitem__, problems),
        }
        masks = {name: f"{name}_present" for name in self.modalities if f"{name}_present" in arrays}
        features = {name: self._read(name, arrays.features, problems) for name in self.whole(arrays)}
        made = self._joined(arrays, features, problems)
        present = {name: self._read(mask, arrays.integers, problems) for name, mask in masks.items()}
        if read["ids"] is None and self.ids == ROWS:
            read["ids"] = ROWS
        roles = {"label": self.label, "known": self.known, "ids": held["ids"]} | {
            role: held[role] for role in ("client", "split", "split_personal", "person")
        }
        present = {name: mask for name, mask in present.items() if mask is not None}
        origin = origin_of(self.groups, (self.label,) if self.label else (), arrays.names)
        if held["person"] is None and self.person:
            rest = [name for name in origin[""] if name not in {*roles.values(), *masks.values(), self.class_names}]
            read["unread_names"] = names_in(arrays, rest)
        draft = Draft(
            name=stored_name(arrays.path),
            where=f"'{arrays.path}'",
            modalities={name: values for name, values in made.modalities.items() if values is not None},
            present={
                **present,
                **{name: there & _true(present.get(name), there) for name, there in made.present.items()},
            },
            coded=made.coded,
            whole=made.whole,
            names=made.names,
            cut=made.cut,
            notes=made.notes,
            layout=self.layout,
            faulty=tuple(name for name in self.modalities if made.modalities.get(name) is None),
            declared=True,
            owned=True,
            origin=origin,
            called={role: f"array '{name}'" for role, name in ({n: n for n in self.modalities} | roles).items()},
            **read,
        )
        given = Given(
            test_share=self.test_share,
            seed=self.seed,
            standardise=self.standardise,
            empty_rows=self.empty_rows,
            unmeasured=self.unmeasured,
        )
        return self._with_scaling(columns_of(draft, given, problems), arrays)

    def _with_scaling(self, columns: Columns, arrays: Arrays) -> Columns:
        """Return the table with the shift and the scale that the file states, of modalities that are arrays of it.

        Raises:
            DataError: they do not fit the samples.
        """
        stated, problems = dict[str, Column](), Problems()
        for name, column in columns.modalities.items():
            names = scaling_names(name)
            if any(part not in arrays or part in self.arrays for part in names):
                continue
            try:
                numbers = (torch.from_numpy(np.array(arrays[part])) for part in names)
                own = Scaling.read(dict(zip(Scaling._fields, numbers, strict=True)), column.shape)
                stated[name] = replace(column, shift=own.shift, scale=own.scale)
            except (TypeError, ValueError) as error:
                problems.add(DataError(f"'{arrays.path}': {' and '.join(names)}: {error}. Leave both arrays out"))
        problems.raise_all()
        rest = tuple(name for name in columns.modalities if name not in stated)
        asked: Standardise = rest if columns.standardise is True else columns.standardise
        asked = tuple(name for name in asked if name in rest) if isinstance(asked, tuple) else asked
        return replace(columns, modalities={**columns.modalities, **stated}, standardise=asked) if stated else columns

    def whole(self, arrays: Arrays) -> tuple[str, ...]:
        """Return the arrays that are a modality of their own, and hold numbers (N, ...)."""
        if not isinstance(self.modalities, Mapping):
            return tuple(name for name in self.modalities if name not in self.columns)
        groups = [[group] if isinstance(group, str) else group for group in self.modalities.values()]
        alone = [group[0] for group in groups if len(group) == 1]
        return tuple(name for name in alone if name not in self.columns and name in arrays and arrays[name].ndim > 1)

    def _joined(self, arrays: Arrays, features: Mapping[str, Any], problems: Problems) -> Joined:
        """Return the modalities, of which some are joined arrays, or arrays of words."""
        if not isinstance(self.modalities, Mapping) and not self.columns:
            return Joined(modalities=dict(features), names={name: (name,) for name in features})
        said = self.modalities if isinstance(self.modalities, Mapping) else {name: name for name in self.modalities}
        read = {n: features[n] if n in features else self._read(n, arrays.__getitem__, problems) for n in self.arrays}
        folder = arrays.path if arrays.path.is_dir() else arrays.path.parent
        rules, unmeasured = rules_of("[data.columns]", self.columns), self.unmeasured
        given = Given(modalities=said, columns=rules, unmeasured=unmeasured, folder=folder)
        return joined(
            {name: values for name, values in read.items() if values is not None}, given, f"'{arrays.path}'", problems
        )

    @staticmethod
    def _read(name: str | None, read: Callable[[str], Any], problems: Problems) -> Any:
        """Return the array of this name, or None if there is none or if it cannot be read."""
        return None if name is None else problems.attempt(lambda: read(name))

    def _check_names(self, arrays: Arrays) -> None:
        if not self.modalities:
            special = {getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), str)}
            special.add(self.known)
            found = ", ".join(name for name in arrays.names if name not in special)
            raise RecipeError(f"data.modalities is empty; name some of the arrays of '{arrays.path}': {found}")
        for name in self.layout:
            require(name in self.modalities, "data.layout", name, ", ".join(self.modalities))

    def _person(self, arrays: Arrays) -> str | None:
        """Return the name of the array of persons. One of the default name that holds something else is not read."""
        name = self._named(arrays, "person")
        if name is None or self.person != Npz.person:
            return name
        other = name in self.arrays or name in (self.label, self.client, self.split, self.ids)
        shape, kind = arrays.form(name)
        return None if other or len(shape) != 1 or kind.kind not in "iuUS" else name

    def _named(self, arrays: Arrays, key: str) -> str | None:
        """Return the name of the array that the option `key` gives.

        Return None if the option is empty, or if it has its default value and the file has no array of this name.
        """
        name: str = getattr(self, key)
        if name in arrays:
            return name
        default = next(f.default for f in fields(self) if f.name == key)
        if name not in ("", default):
            arrays[name]  # raises an error that names the file and the nearest array
        return None

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data npz` prints them."""
        return Facts(
            title="your own arrays, no code needed",
            modalities={"<array>": "(N, ...) numbers, one sample a row"},
            licence="yours",
            obtain="numpy.savez('mine.npz', audio=..., text=..., label=..., client=..., split=...)",
            layout="one .npz file, or a folder of <array>.npy files (memory mapped)",
        )


def scaling_names(modality: str) -> tuple[str, str]:
    """Return the names of the arrays that hold the shift and the scale of a modality."""
    return f"{modality}_shift", f"{modality}_scale"


def _true(mask: Any, there: Any) -> Any:
    """Return the mask of the file as an array, or the other one if there is none."""
    return there if mask is None else np.asarray(mask, dtype=bool)
