"""npz: your own named arrays, in one `.npz` file or in a folder of `.npy` files."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError, RecipeError, require
from polyfed.core.problems import Problems
from polyfed.core.schema import BELOW_ONE, check_ranges
from polyfed.data.columns import Column, Columns, Standardise
from polyfed.data.labels import num_targets
from polyfed.data.leaked_labels import refuse_leaked_labels
from polyfed.data.population.splits import drawn, drawn_note
from polyfed.data.reading.files import Arrays, stored_name
from polyfed.data.reading.layout import Layout, laid_out
from polyfed.data.reading.missing_rows import refuse_bare_rows, zero_nan_rows
from polyfed.data.reading.row_facts import Labels, clients_of, ids_of, labels_of, splits_of, unlabelled
from polyfed.data.sources.base import Facts, Source

ROWS = "rows"
"""The value of `ids` that declares row numbers as sample ids."""


@dataclass(frozen=True, kw_only=True)
class Npz(Source):
    """Your own data, without code: an array for each modality, an array of labels, and optional arrays named below.

    A folder of `<array>.npy` files can replace an `.npz`. Its arrays are memory-mapped, for data larger than memory. A
    boolean array `<modality>_present` marks the rows that have the modality; without this array, all rows have it. A
    row whose values are all NaN lacks the modality too.

    Attributes:
        path: The `.npz` file, or the folder of `.npy` files.
        modalities: Names of the arrays that are modalities, in this order.
        label: Array of the labels. It holds class numbers 0..C-1 (N,), words (N,), or targets (N,) or (N, T). Words are
            numbered in sorted order and kept as names. Targets are for objectives other than classification. They are
            floats, with NaN for an unknown target, or integers (N, T) with T of at least 2. A boolean array
            `<label>_known` of the same shape may mark the known targets. If the data has no labels and the task uses
            none, set this option to "".
        client: Array of the natural client of each row: integers or strings, numbered in sorted order.
        split: Array of split codes: 0 train, 1 test, 2 validation, 3 left out; or the words train, test, validation.
        split_personal: Array of split codes within each natural client: 0 train, 1 test, 2 guard row.
        class_names: Array with the name of each class, or of each of the T targets.
        ids: Array of sample ids, distinct integers. With "rows", the row numbers are the ids: row i of every array is
            the same sample. If there are neither ids nor "rows", the ids count as unknown, and algorithms for silos
            refuse the data.
        layout: Modality -> axes of a sample, if the following rule guesses wrong. A sample with one axis is a vector
            (F). A sample with two axes is an image (H, W) if its type is uint8, otherwise a sequence (T, F). A sample
            with three axes is (H, W, C) if the last axis has 1, 3 or 4 entries, otherwise (C, H, W). Samples
            are converted to (F), (T, F) or (C, H, W). Use "FT" for sequences whose first axis is the features.
        standardise: Shift and scale every feature by its mean and deviation over the rows that train: true for all
            modalities, a list for some, "uneven" for those whose features differ in size, false for none. In the
            others, uint8 images are scaled to [0, 1], and all other values are unchanged. A trained model scales new
            samples with the same numbers.
        test_share: Share of every class that is drawn as global test set if the file has no split array; 0 means no
            test set. If the labels are targets, it is a share of all rows.
        seed: Seed for drawing that test set; the run's own seed has no effect.
    """

    path: str
    modalities: tuple[str, ...] = ()
    label: str = "label"
    client: str = "client"
    split: str = "split"
    split_personal: str = "split_personal"
    class_names: str = "label_name"
    ids: str = "id"
    layout: Mapping[str, Layout] = field(default_factory=dict)
    standardise: Standardise = "uneven"
    test_share: Annotated[float, BELOW_ONE] = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)
        require(
            len(set(self.modalities)) == len(self.modalities),
            "data.modalities",
            self.modalities,
            "distinct names",
        )
        for role in ("label", "client", "split"):
            name = getattr(self, role)
            require(name not in self.modalities, f"data.{role}", name, "an array that is not in data.modalities too")
        require(
            self.known not in self.modalities,
            "data.modalities",
            self.modalities,
            f"modalities only; '{self.known}' says which labels are known",
        )

    @property
    def known(self) -> str:
        """Name of the array that says which labels are known."""
        return f"{self.label}_known" if self.label else ""

    def load(self) -> Columns:
        """Read and check the arrays."""
        arrays = Arrays(self.path)
        self._check_names(arrays)
        problems = Problems()
        label = problems.attempt(lambda: self._labels(arrays))
        found = {name: problems.attempt(lambda name=name: self._column(arrays, name)) for name in self.modalities}  # type: ignore[misc]
        columns_of = {name: made[0] for name, made in found.items() if made is not None}
        present = problems.attempt(
            lambda: self._presence(arrays, {name: made[1] for name, made in found.items() if made is not None})
        )
        client = problems.attempt(lambda: self._client(arrays))
        ids = problems.attempt(lambda: self._ids(arrays))
        codes = {key: problems.attempt(lambda key=key: self._codes(arrays, key)) for key in ("split", "split_personal")}  # type: ignore[misc]
        problems.raise_all()
        assert label is not None
        split = codes["split"]
        columns = Columns(
            name=stored_name(arrays.path),
            modalities=columns_of,
            label=label.values,
            num_classes=label.num_classes,
            split=drawn(label.values, self.test_share, self.seed) if split is None else split,
            ids=torch.arange(len(label.values)) if ids is None else ids,
            labelled=bool(self.label),
            numbered=ids is None and self.ids != ROWS,
            class_names=label.names,
            words_sorted=label.words_sorted,
            present=present or {},
            client=client,
            split_personal=codes["split_personal"],
            standardise=self.standardise,
            notes=(*((label.note,) if label.note else ()), *((drawn_note(self.test_share),) if split is None else ())),
        )
        refuse_leaked_labels(columns)
        return columns

    def _labels(self, arrays: Arrays) -> Labels:
        if not self.label:
            return unlabelled(len(arrays[self.modalities[0]]))
        where = f"'{arrays.path}': array '{self.label}'"
        names = self._named(arrays, "class_names")
        found = labels_of(arrays[self.label], where, None if names is None else arrays.strings(names))
        mask = self.known
        if mask not in arrays:
            return found
        known, shape = arrays[mask], tuple(found.values.shape)
        if known.shape == (*shape, 1):  # labels (N, 1) became (N,)
            known = known[:, 0]
        if known.dtype != np.bool_ or known.shape != shape:
            raise DataError(
                f"'{arrays.path}': array '{mask}' says which labels are known; it must be bool {shape}, "
                f"not {known.dtype} {known.shape}"
            )
        values = found.values.to(torch.float32).masked_fill(torch.from_numpy(~known), torch.nan)
        return replace(found, values=values, num_classes=num_targets(values))

    def _check_names(self, arrays: Arrays) -> None:
        if not self.modalities:
            special = {getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), str)}
            special.add(self.known)
            found = ", ".join(name for name in arrays.names if name not in special)
            raise RecipeError(f"data.modalities is empty; name some of the arrays of '{arrays.path}': {found}")
        for name in self.layout:
            require(name in self.modalities, "data.layout", name, ", ".join(self.modalities))

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

    def _ids(self, arrays: Arrays) -> Tensor | None:
        name = None if self.ids == ROWS and ROWS not in arrays else self._named(arrays, "ids")
        if name is None:
            return None
        return ids_of(arrays.integers(name), f"'{arrays.path}': array '{name}'")

    def _codes(self, arrays: Arrays, key: str) -> Tensor | None:
        name = self._named(arrays, key)
        if name is None:
            return None
        if key == "split":
            return splits_of(arrays[name], f"'{arrays.path}': array '{name}'")
        return arrays.integers(name).clamp(-1, 127).to(torch.int8)

    def _client(self, arrays: Arrays) -> Tensor | None:
        name = self._named(arrays, "client")
        return None if name is None else clients_of(arrays[name], f"'{arrays.path}': array '{name}'")

    def _presence(self, arrays: Arrays, held: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return which rows have each modality.

        A row has a modality if not all its values are NaN, and if the array `<modality>_present` does not mark the
        modality as missing.

        Raises:
            DataError: all values of a row are NaN, in all modalities, and no array `<modality>_present` marks one of
                the row's modalities as missing.
        """
        found = {name: there for name, there in held.items() if there is not None}
        undeclared = dict(found)
        for name in self.modalities:
            if f"{name}_present" in arrays:
                marked = arrays.integers(f"{name}_present").bool()
                there = found.get(name)
                if there is None or there.shape != marked.shape:  # `Columns` refuses another length
                    found[name] = marked
                else:
                    found[name], undeclared[name] = marked & there, there | ~marked
        lengths = {len(there) for there in undeclared.values()}
        if len(undeclared) == len(self.modalities) and len(lengths) == 1:
            refuse_bare_rows(undeclared, f"'{arrays.path}'", {})
        return found

    def _column(self, arrays: Arrays, name: str) -> tuple[Column, Tensor | None]:
        """Return the column of a modality, and which rows have it. The second result is None if all rows have it."""
        where, values = f"'{arrays.path}': array '{name}'", arrays.features(name)
        there = zero_nan_rows(values, where)
        return laid_out(values, self.layout.get(name), where), there

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
