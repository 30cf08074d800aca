"""A folder of extracted features: one memory-mapped `.npy` file for each array, and a manifest with checksums."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.data.columns import Column, Columns
from polyfed.data.media import Extractor
from polyfed.data.reading.array_files import Arrays

MANIFEST = "manifest.json"
FORMAT = 1  # version of the manifest


@dataclass(frozen=True)
class Prepared:
    """The manifest of a folder of features.

    Attributes:
        folder: The folder.
        source: Name of the data source.
        fingerprint: Fingerprint of the files that the features were made from, see `Listing.fingerprint`.
        extractors: Modality -> settings of its extractor.
        listing: Options of the source that determine its samples.
        classes: Class -> number of rows, in order of the class numbers.
        published: Class -> number of its samples in the complete data set, as published. The mapping may be empty.
        skipped: Samples that were left out, each with the keys "sample" and "reason".
        arrays: File name -> dtype, shape, bytes, sha256.
    """

    folder: Path
    source: str
    fingerprint: str
    extractors: Mapping[str, str]
    listing: Mapping[str, Any]
    classes: Mapping[str, int]
    published: Mapping[str, int]
    skipped: list[dict[str, str]]
    arrays: Mapping[str, Mapping[str, Any]]

    @property
    def num_rows(self) -> int:
        """Number of rows, the same for every array."""
        return sum(self.classes.values())

    def write(self) -> None:
        """Write the manifest into the folder. After an interruption, the file is either complete or does not exist."""
        content = {"polyfed_features": FORMAT} | {k: v for k, v in vars(self).items() if k != "folder"}
        replace_file(self.folder / MANIFEST, json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> "Prepared | None":
        """Read the manifest of a folder. Return None if there is no manifest. Use `require_arrays` to check the arrays.

        Raises:
            DataError: The file is not a manifest of this version of polyfed.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("polyfed_features") != FORMAT:
                raise ValueError("another format")
            result = cls(folder=folder, **content)
            if not all(Path(name).name == name and name.endswith(".npy") for name in result.arrays):
                raise ValueError("it lists a file that is not an array of this folder")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"'{path}' is not a manifest of this version of polyfed ({error}). Prepare into an empty folder"
            ) from error
        return result

    def incomplete(self) -> list[str]:
        """Return the files that are missing or differ in size from the manifest. This is quick: it opens no file."""
        sizes = {file.name: file.stat().st_size for file in self.folder.glob("*.npy") if file.is_file()}
        return [name for name, facts in self.arrays.items() if sizes.get(name) != facts["bytes"]]

    def require_arrays(self) -> None:
        """Raise DataError if an array is missing or its size differs from the manifest."""
        for name in self.incomplete():
            raise DataError(f"'{self.folder / name}' is missing or cut short: prepare again into the same folder")

    def damaged(self) -> list[str]:
        """Return the files that are missing, or whose checksum differs from the manifest."""
        lost = self.incomplete()
        sums = {name: facts["sha256"] for name, facts in self.arrays.items() if name not in lost}
        return lost + [name for name, found in sums.items() if sha256(self.folder / name) != found]

    def check(self, source: str, extractors: Mapping[str, Extractor], listing: Mapping[str, Any]) -> None:
        """Raise DataError if the features belong to another data set, or were made with other options.

        Args:
            source: Name of the data source that the recipe names.
            extractors: Modality -> extractor, as the recipe's options build them.
            listing: Options of the source that determine its samples, as in the recipe.
        """
        fix = "change the recipe, or prepare again into another folder"
        if self.source != source:
            raise DataError(f"'{self.folder}' holds features of '{self.source}', not of '{source}': {fix}")
        for name, extractor in extractors.items():
            if name not in self.extractors:
                raise DataError(
                    f"'{self.folder}' has no features of '{name}', only {', '.join(self.extractors)}: {fix}"
                )
            if self.extractors[name] != repr(extractor):
                raise DataError(
                    f"'{self.folder}': '{name}' was made by {self.extractors[name]}, the recipe says "
                    f"{extractor!r}: {fix}"
                )
        for option, value in listing.items():
            if self.listing.get(option) != value:
                raise DataError(
                    f"'{self.folder}' was made with {option} = {self.listing.get(option)!r}, the recipe says "
                    f"{value!r}: {fix}"
                )

    def columns(self, extractors: Mapping[str, Extractor]) -> Columns:
        """Return the table. Features stay on disk, and are read page by page when batches need them.

        Args:
            extractors: Modality -> extractor, for the modalities to read. Each extractor gives the shift and scale of
                its column.
        """
        arrays = Arrays(self.folder)
        clients = np.unique(arrays["client"], return_inverse=True)[1].astype(np.int64)
        return Columns(
            name=self.source,
            modalities={
                name: Column(arrays.features(name), *(extractor.norm or (None, None)))
                for name, extractor in extractors.items()
            },
            label=arrays.integers("label"),
            num_classes=len(self.classes),
            split=arrays.integers("split").to(torch.int8),
            ids=arrays.integers("id"),
            class_names=tuple(self.classes),
            present={
                name: arrays.integers(f"{name}_present").bool()
                for name in extractors
                if f"{name}_present.npy" in self.arrays
            },
            client=torch.from_numpy(clients) if self.has_clients(arrays) else None,
        )

    def has_clients(self, arrays: Arrays) -> bool:
        """Whether every row belongs to a natural client."""
        return bool((arrays["client"] != "").all())

    def groups(self) -> Tensor:
        """Group (session) of every row, int64."""
        return Arrays(self.folder).integers("group")

    def clients(self) -> list[str]:
        """Name of the natural client of every row."""
        return [str(name) for name in Arrays(self.folder)["client"]]


def replace_file(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that an interruption never leaves an incomplete file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
