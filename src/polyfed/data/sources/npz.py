"""npz: your own arrays, named in one `.npz` file or in a folder of `.npy` files."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import DataError, PolyfedWarning, RecipeError
from polyfed.core.schema import BELOW_ONE, check_ranges
from polyfed.data.checks import require
from polyfed.data.columns import Column, Columns, standardised
from polyfed.data.files import Arrays, stored_name
from polyfed.data.labels import num_targets
from polyfed.data.sources.base import Facts, Source
from polyfed.data.splits import stratified

Layout = Literal["F", "TF", "FT", "HW", "HWC", "CHW"]


@dataclass(frozen=True, kw_only=True)
class Npz(Source):
    """Your own data, without code: an array for each modality, an array of labels, and optional arrays named below.

    A folder of `<array>.npy` files can take the place of an `.npz`; its arrays are memory mapped, for data larger than
    memory. A boolean array `<modality>_present` says which rows have that modality; without it, all rows have it.

    Attributes:
        path: The `.npz` file, or the folder of `.npy` files.
        modalities: Names of the arrays that are modalities, in this order.
        label: Array of the labels: integers 0..C-1 (N,), or targets (N,) or (N, T) for other tasks than classification:
            floats, with NaN where a target is unknown, or integers (N, T). A boolean array `<label>_known` of the same
            shape may say which targets are known.
        client: Array of the natural client of each row: integers or strings, numbered in sorted order.
        split: Array of split codes: 0 train, 1 test, 2 validation, 3 left out.
        split_personal: Array of split codes within each natural client: 0 train, 1 test, 2 guard row.
        class_names: Array with the name of each class, or of each of the T targets.
        ids: Array of sample ids, distinct integers; without it, the row numbers.
        layout: Modality -> axes of a sample, if the following rule guesses wrong. One axis is a vector (F). Two axes
            are an image (H, W) if uint8, otherwise a sequence (T, F). Three axes are (H, W, C) if the last has 1, 3 or
            4 entries, otherwise (C, H, W). Samples are converted to (F), (T, F) or (C, H, W); "FT" is for sequences
            that are stored features first.
        standardise: Shift and scale every feature by its mean and deviation over the training rows. Otherwise uint8
            images are scaled to [0, 1], and everything else is left as it is.
        test_share: Share of every class, or of all rows where labels are targets, that is drawn as global test set if
            the file has no split array; 0: no test set.
        seed: Seed of that draw; the run's own seed has no effect.
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
    standardise: bool = False
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

    def load(self) -> Columns:
        """Read and check the arrays."""
        arrays = Arrays(self.path)
        self._check_names(arrays)
        label = self._label(arrays)
        names, size = self._strings(arrays), num_targets(label)
        if not label.is_floating_point():
            size = max(int(label.max()) + 1 if len(label) else 0, 1) if names is None else len(names)
        if names is None and not label.is_floating_point():
            _check_numbering(label, f"'{self.label}' of '{arrays.path}'")
        columns = Columns(
            name=stored_name(arrays.path),
            modalities={name: self._column(arrays, name) for name in self.modalities},
            label=label,
            num_classes=size,
            split=self._split(arrays, label),
            ids=self._ids(arrays, len(label)),
            numbered=self._named(arrays, "ids") is None,
            class_names=names,
            present=self._presence(arrays),
            client=self._client(arrays),
            split_personal=self._codes(arrays, "split_personal"),
        )
        return standardised(columns) if self.standardise else columns

    def _check_names(self, arrays: Arrays) -> None:
        if not self.modalities:
            special = {getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), str)}
            found = ", ".join(name for name in arrays.names if name not in special)
            raise RecipeError(f"data.modalities is empty; name some of the arrays of '{arrays.path}': {found}")
        for name in self.layout:
            require(name in self.modalities, "data.layout", name, ", ".join(self.modalities))

    def _named(self, arrays: Arrays, key: str) -> str | None:
        """Name of the array that an option names; None if the file lacks it and the recipe did not name it."""
        name: str = getattr(self, key)
        if name in arrays:
            return name
        default = next(f.default for f in fields(self) if f.name == key)
        if name not in ("", default):
            arrays[name]  # raises, naming the file and the nearest array
        return None

    def _label(self, arrays: Arrays) -> Tensor:
        """The labels, with NaN for targets that are not known."""
        label, mask = arrays.labels(self.label), f"{self.label}_known"
        if mask not in arrays:
            return label
        known = arrays[mask]
        if known.dtype != np.bool_ or known.shape != tuple(label.shape):
            raise DataError(
                f"'{arrays.path}': array '{mask}' says which labels are known; it must be bool {tuple(label.shape)}, "
                f"not {known.dtype} {known.shape}"
            )
        return label.to(torch.float32).masked_fill(torch.from_numpy(~known), torch.nan)

    def _ids(self, arrays: Arrays, num: int) -> Tensor:
        name = self._named(arrays, "ids")
        if name is None:
            return torch.arange(num)
        ids = arrays.integers(name)
        if len(np.unique(ids.numpy())) != len(ids):
            raise DataError(f"'{arrays.path}': array '{name}' repeats some ids; every row needs its own")
        return ids

    def _codes(self, arrays: Arrays, key: str) -> Tensor | None:
        name = self._named(arrays, key)
        return None if name is None else arrays.integers(name).clamp(-1, 127).to(torch.int8)

    def _split(self, arrays: Arrays, label: Tensor) -> Tensor:
        codes = self._codes(arrays, "split")
        if codes is None:
            groups = torch.zeros(len(label), dtype=torch.int64) if label.is_floating_point() else label
            return stratified(groups, self.test_share, keys.key(self.seed, "npz", "split"))
        return codes

    def _client(self, arrays: Arrays) -> Tensor | None:
        name = self._named(arrays, "client")
        if name is None:
            return None
        array = arrays[name]
        if array.dtype.kind not in "iuUS" or array.ndim != 1:
            raise DataError(
                f"'{arrays.path}': array '{name}' must hold integers or strings, one a row; "
                f"it is {array.dtype} {array.shape}"
            )
        return torch.from_numpy(np.unique(array, return_inverse=True)[1].astype(np.int64))

    def _strings(self, arrays: Arrays) -> tuple[str, ...] | None:
        name = self._named(arrays, "class_names")
        return None if name is None else arrays.strings(name)

    def _presence(self, arrays: Arrays) -> dict[str, Tensor]:
        found = (name for name in self.modalities if f"{name}_present" in arrays)
        return {name: arrays.integers(f"{name}_present").bool() for name in found}

    def _column(self, arrays: Arrays, name: str) -> Column:
        values = arrays.features(name)
        layout = self.layout.get(name) or _guess(values)
        if layout not in _AXES:
            return Column(values)
        if values.dim() != len(layout) + 1:
            shape = tuple(values.shape[1:])
            raise DataError(f"'{arrays.path}': array '{name}' has samples of shape {shape}, not of layout '{layout}'")
        is_image = values.dtype == torch.uint8 and "H" in layout
        scale = torch.tensor(255.0) if is_image else None
        return Column(_AXES[layout](values), scale=scale)

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


_AXES: Mapping[str, Any] = {
    "F": lambda x: x,
    "TF": lambda x: x,
    "FT": lambda x: x.transpose(1, 2),
    "HW": lambda x: x.unsqueeze(1),
    "HWC": lambda x: x.permute(0, 3, 1, 2),
    "CHW": lambda x: x,
}


def _guess(values: Tensor) -> str:
    axes = values.dim() - 1
    if axes == 2:
        return "HW" if values.dtype == torch.uint8 else "TF"
    if axes == 3:
        return "HWC" if values.shape[-1] in (1, 3, 4) else "CHW"
    return "F" if axes == 1 else "other"


MANY_CLASSES = 1000
"""Labels that give more classes than rows, and more than this, are refused: they must be something else (inferred)."""


def _check_numbering(label: Tensor, where: str) -> None:
    """Check labels of classes without names, whose number is known from the largest label only."""
    if not len(label) or int(label.min()) < 0:
        return  # `Columns` refuses these
    num_classes, seen = int(label.max()) + 1, torch.unique(label)
    if num_classes > max(len(label), MANY_CLASSES):
        raise DataError(
            f"{where} holds {num_classes - 1}, which makes {num_classes} classes of {len(label)} rows. Number the "
            "classes from 0, and leave out rows without a label"
        )
    if len(seen) < num_classes:
        absent = sorted(set(range(num_classes)) - set(seen.tolist()))
        listed = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        warnings.warn(
            f"{where}: classes run from 0 to {num_classes - 1}, and {len(absent)} of them ({listed}) have no row. "
            "Number the classes from 0 without gaps, or name them all in an array 'label_name'",
            PolyfedWarning,
            stacklevel=5,
        )
