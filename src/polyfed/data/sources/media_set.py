"""Base class of data sets of media files: it lists the files, extracts their features once, then reads the features."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError, require, require_one_of
from polyfed.data.columns import TEST, TRAIN, Columns
from polyfed.data.features.extraction import Extraction, Listener, OnCorrupt
from polyfed.data.features.listing import Listing
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Extractor
from polyfed.data.reading.array_files import existing
from polyfed.data.sources.base import Source


@dataclass(frozen=True, kw_only=True)
class MediaSet(Source):
    """A published data set on disk, or the folder that `polyfed data prepare` made from it.

    If `path` is the published folder, features are extracted at the first use and stored in the cache. Any unusable
    file stops the extraction. `polyfed data prepare` does the same with a progress bar and several workers, and it can
    skip such files.

    A subclass names itself (`NAME`), lists its samples (`listing`) and chooses the extractors (`extractors`).

    Attributes:
        path: The data set's folder, or a folder of prepared features.
        cache: Folder for the features of the data set. If empty, the folder is `$XDG_CACHE_HOME/polyfed`, or
            `~/.cache/polyfed` if this variable is not set.
    """

    NAME: ClassVar[str]
    """Name of the source, as in `[data] name`."""

    CHOOSES: ClassVar[tuple[str, ...]] = ()
    """Options that determine which samples there are, or how they are labelled and split."""

    path: str
    cache: str = ""

    def listing(self, root: Path) -> Listing:
        """Return all samples of the data set in the folder `root`.

        Raises:
            DataError: A file is missing or malformed. The message names the file.
        """
        raise NotImplementedError

    def extractors(self) -> dict[str, Extractor]:
        """Modality -> extractor of its features, in the order of the modalities."""
        raise NotImplementedError

    def split_of(self, prepared: Prepared, split: Tensor) -> Tensor:
        """Return split codes, int8 (N,): the stored `split`, unless an option of the recipe chooses the test fold.

        Args:
            prepared: The folder of features.
            split: Stored split codes, int8 (N,).
        """
        return split

    def person_of(self, prepared: Prepared) -> Tensor | None:
        """Return the person of each row, int64 (N,), whom no random split divides, or None if the data names none."""
        return None

    @override
    def load(self) -> Columns:
        root = existing(self.path, self.NAME)
        prepared = Prepared.read(root) or self._cached(root)
        prepared.require_arrays()
        extractors = self.extractors()
        prepared.check(self.NAME, extractors, self.chosen())
        columns = prepared.columns(extractors)
        return replace(columns, split=self.split_of(prepared, columns.split), person=self.person_of(prepared))

    def prepare(
        self, target: Path, *, workers: int = 1, on_corrupt: OnCorrupt = "fail", listener: Listener | None = None
    ) -> Prepared:
        """Extract the features into the folder `target`; see `polyfed.data.features.prepare.prepare`."""
        root = existing(self.path, self.NAME)
        target.mkdir(parents=True, exist_ok=True)
        work = Extraction(self._used(root), self.extractors(), target, workers, on_corrupt)
        if listener is not None:
            work.listener = listener
        return work.run(self.NAME, self.chosen())

    def _used(self, root: Path) -> Listing:
        """Return the listing with only the modalities that are extracted."""
        listing = self.listing(root).checked(root)
        used = set(self.extractors())
        samples = [
            replace(sample, media={name: clip for name, clip in sample.media.items() if name in used})
            for sample in listing.samples
        ]
        return replace(listing, samples=samples)

    def matches(self, prepared: Prepared) -> bool:
        """Whether the features were made from exactly the current files in the data set's folder."""
        return prepared.fingerprint == self._used(existing(self.path, self.NAME)).fingerprint()

    def chosen(self) -> Mapping[str, Any]:
        """Return the values of the options in `CHOOSES`, in a form that JSON can hold."""
        values = {name: getattr(self, name) for name in self.CHOOSES}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def _cached(self, root: Path) -> Prepared:
        settings = repr((str(root.resolve()), sorted(self.chosen().items()), self.extractors()))
        digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        folder = _cache(self.cache) / f"{self.NAME}-{digest}"
        result = Prepared.read(folder)
        if result is not None and self.matches(result) and not result.incomplete():
            return result
        return self.prepare(folder)


def check_modalities(given: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    """Raise RecipeError unless `given` has at least one name, and all its names are distinct and in `allowed`."""
    require(bool(given), "data.modalities", given, ", ".join(allowed))
    for name in given:
        require_one_of("data.modalities", name, allowed)
    require(len(set(given)) == len(given), "data.modalities", given, "distinct names")


def fold_of_groups(groups: Tensor, test: int, what: str) -> Tensor:
    """Return split codes, int8 (N,): the rows of one group are the test set, and all others train.

    Args:
        groups: Group of every row, int64 (N,).
        test: The group that is the test set.
        what: The name of a group in the message, such as "session".

    Raises:
        DataError: No row is in that group, or all rows are in it.
    """
    is_test = groups == test
    if not is_test.any() or is_test.all():
        found = ", ".join(str(group) for group in sorted(set(groups.tolist())))
        raise DataError(f"{what} {test} cannot be the test set: the data has {what} {found}, and some must train")
    return torch.where(is_test, TEST, TRAIN).to(torch.int8)


def fold_of_clients(clients: Sequence[str], folds: int, fold: int) -> Tensor:
    """Return split codes, int8 (N,): the natural clients of one fold are the test set, and all others train.

    A fold is a range of the clients in order of their names. If the number of clients is not divisible by the number of
    folds, the first folds have one client more, as in scikit-learn's `KFold`.

    Args:
        clients: Natural client of every row.
        folds: Number of folds.
        fold: Number of the fold that is the test set, from 1.

    Raises:
        DataError: There are fewer clients than folds.
    """
    names = sorted(set(clients))
    if len(names) < folds:
        raise DataError(f"{len(names)} natural clients cannot make {folds} folds. Give the whole data set")
    held = set(np.array_split(np.array(names), folds)[fold - 1].tolist())
    return torch.tensor([TEST if name in held else TRAIN for name in clients], dtype=torch.int8)


def _cache(given: str) -> Path:
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "polyfed"
