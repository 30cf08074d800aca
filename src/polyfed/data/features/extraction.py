"""Extracts the features of a listing once, with several workers. A stopped extraction can continue.

A worker is a thread. Decoders, Fourier transforms and models release the interpreter lock during their work, and
nothing has to be copied between processes. The features of a clip are cached in a file under `parts/`. The name of this
file is a hash of the clip's content and of the extractor's settings. A stopped extraction therefore continues at the
same place. If media files change later, only the changed files are read again. `parts/` may be deleted after the
manifest exists.

Every file is written under another name and then renamed, so no half-written file is ever read.
"""

import hashlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from polyfed.core.errors import DataError
from polyfed.data.features.listing import Listing, Sample
from polyfed.data.features.prepared import MANIFEST, Prepared, replace_file, sha256
from polyfed.data.media import Clip, Extractor
from polyfed.data.media.clip import Array
from polyfed.data.reading.array_files import read_npy

Listener = Callable[..., None]
"""Called as `listener(event, **facts)`; events are prepare-started, clip-done, clip-skipped and prepare-finished."""

OnCorrupt = Literal["skip", "fail"]

_EPS = 1e-5  # added to a speaker's deviation, as in public code for IEMOCAP (docs/data.md)


@dataclass
class Extraction:
    """Extracts the features of every clip of a listing, and writes one array for each modality.

    Attributes:
        listing: The samples of the data set.
        extractors: Modality -> extractor of its features.
        target: Folder for the features; it must exist.
        workers: Number of threads that extract at the same time.
        on_corrupt: "skip" leaves out and reports a sample with an unusable clip; "fail" stops at the first such sample.
        listener: Called with progress events, see `Listener`.
    """

    listing: Listing
    extractors: Mapping[str, Extractor]
    target: Path
    workers: int = 1
    on_corrupt: OnCorrupt = "fail"
    listener: Listener = field(default=lambda event, **facts: None)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _done: int = 0
    _cached: int = 0

    def run(self, source: str, options: Mapping[str, Any]) -> Prepared:
        """Extract the features and write the arrays. The manifest comes last: a folder without it is unfinished.

        Args:
            source: Name of the data source, which the manifest records.
            options: Options of the source that determine its samples; the manifest records them.

        Raises:
            DataError: A clip is unusable (with "fail"), no sample is usable, or features differ in shape.
        """
        began = time.monotonic()
        total = sum(len(sample.media) for sample in self.listing.samples)
        self.listener("prepare-started", name=source, total=total, workers=self.workers)
        kept, skipped = self._extract(total)
        if not kept:
            raise DataError(
                f"{source}: none of the {len(self.listing.samples)} samples can be used: {skipped[0]['reason']}"
            )
        self._remove_previous()
        arrays = self._assemble(kept)
        names = self.listing.class_names
        counts = np.bincount([sample.label for sample, _ in kept], minlength=len(names))
        prepared = Prepared(
            folder=self.target,
            source=source,
            fingerprint=self.listing.fingerprint(),
            extractors={name: repr(extractor) for name, extractor in self.extractors.items()},
            listing=dict(options),
            classes={name: int(count) for name, count in zip(names, counts, strict=True)},
            published=dict(self.listing.published),
            skipped=skipped,
            arrays=arrays,
        )
        prepared.write()
        facts = {"rows": len(kept), "skipped": len(skipped), "cached": self._cached}
        self.listener("prepare-finished", name=source, seconds=time.monotonic() - began, **facts)
        return prepared

    def _remove_previous(self) -> None:
        """Delete the arrays of an earlier extraction, then its manifest, so that no array remains unlisted.

        The marks `<modality>_present` are deleted even if no manifest lists them, because an extraction may have
        stopped after it wrote them. The manifest is deleted last. If the deletion is interrupted, the manifest still
        lists the remaining arrays.
        """
        previous = Prepared.read(self.target)
        names = set(previous.arrays if previous else ()) | {f"{name}_present.npy" for name in self.extractors}
        for name in names:
            (self.target / name).unlink(missing_ok=True)
        (self.target / MANIFEST).unlink(missing_ok=True)

    def _extract(self, total: int) -> tuple[list["Kept"], list[dict[str, str]]]:
        """Return the usable samples with the cache files of their clips, in listing order, and the skipped samples."""
        found: dict[int, dict[str, Path]] = {}
        skipped: dict[int, dict[str, str]] = {}
        samples = self.listing.samples
        with ThreadPoolExecutor(self.workers) as pool:
            jobs = {pool.submit(self._sample, sample, total): row for row, sample in enumerate(samples)}
            try:
                for job in as_completed(jobs):
                    self._collect(job, jobs[job], found, skipped)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        kept = [(samples[row], found[row]) for row in sorted(found)]
        return kept, [skipped[row] for row in sorted(skipped)]

    def _collect(
        self,
        job: "Future[dict[str, Path]]",
        row: int,
        found: dict[int, dict[str, Path]],
        skipped: dict[int, dict[str, str]],
    ) -> None:
        try:
            found[row] = job.result()
        except DataError as error:
            if self.on_corrupt == "fail":
                raise
            name = self.listing.samples[row].name
            skipped[row] = {"sample": name, "reason": str(error)}
            self.listener("clip-skipped", name=name, reason=str(error))

    def _sample(self, sample: Sample, total: int) -> dict[str, Path]:
        parts = {}
        for modality, clip in sample.media.items():
            part, is_cached = self._part(modality, clip)
            parts[modality] = part
            with self._lock:
                self._done, self._cached = self._done + 1, self._cached + is_cached
                self.listener("clip-done", done=self._done, total=total, cached=self._cached, name=clip.name)
        return parts

    def _part(self, modality: str, clip: Clip) -> tuple[Path, bool]:
        """Return the cache file with the features of a clip, and whether it existed already."""
        extractor = self.extractors[modality]
        key = hashlib.blake2b(f"{clip.digest()} {extractor!r}".encode(), digest_size=16).hexdigest()
        part = self.target / "parts" / modality / key[:2] / f"{key}.npy"
        if part.is_file():
            return part, True
        content = io.BytesIO()
        np.save(content, extractor(clip), allow_pickle=False)
        part.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:  # two samples may share a clip, and would write the same temporary file
            replace_file(part, content.getvalue())
        return part, False

    def _assemble(self, kept: Sequence["Kept"]) -> dict[str, dict[str, Any]]:
        """Write one file for each array. Return file name -> dtype, shape, size and checksum of the array."""
        arrays = self._records(kept)
        for modality in self.extractors:
            have = np.array([modality in parts for _, parts in kept])
            if not have.any():
                raise DataError(f"no sample has the modality '{modality}'; leave it out of data.modalities")
            if not have.all():
                arrays[f"{modality}_present"] = have
        written = {f"{name}.npy": self._write(name, array) for name, array in arrays.items()}
        return written | {f"{name}.npy": self._features(name, kept) for name in self.extractors}

    def _records(self, kept: Sequence["Kept"]) -> dict[str, Array]:
        """Return one array for each fact about the rows, by name. The features are not among these facts."""
        samples = [sample for sample, _ in kept]
        return {
            "id": np.array([_id(sample.name) for sample in samples]),
            "label": np.array([sample.label for sample in samples], np.int64),
            "split": np.array([sample.split for sample in samples], np.int8),
            "group": np.array([sample.group for sample in samples], np.int64),
            "client": np.array([sample.client for sample in samples], np.str_),
            "sample": np.array([sample.name for sample in samples], np.str_),
            "label_name": np.array(self.listing.class_names, np.str_),
        }

    def _features(self, modality: str, kept: Sequence["Kept"]) -> dict[str, Any]:
        """Write the features of a modality as one array, row by row, so that only one clip is in memory at a time."""
        first = next(read_npy(parts[modality]) for _, parts in kept if modality in parts)
        by_client = self.extractors[modality].by_client
        moments = _moments(modality, kept) if by_client else {}
        path = self.target / f".{modality}.partial"
        array = np.lib.format.open_memmap(path, "w+", first.dtype, (len(kept), *first.shape))
        for row, (sample, parts) in enumerate(kept):
            if modality not in parts:
                continue
            part = read_npy(parts[modality])
            if part.shape != first.shape:
                clip = sample.media[modality].name
                raise DataError(
                    f"'{clip}': '{modality}' has shape {part.shape}, other samples have {first.shape}. "
                    "Remove this file, or prepare it into another folder"
                )
            array[row] = _standardised(part, *moments[sample.client]) if by_client else part
        array.flush()
        del array
        return self._placed(path, modality)

    def _write(self, name: str, array: Array) -> dict[str, Any]:
        path = self.target / f".{name}.partial"
        with path.open("wb") as file:
            np.save(file, array, allow_pickle=False)
        return self._placed(path, name)

    def _placed(self, partial: Path, name: str) -> dict[str, Any]:
        path = self.target / f"{name}.npy"
        os.replace(partial, path)
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        shape = {"dtype": str(array.dtype), "shape": list(array.shape)}
        return shape | {"bytes": path.stat().st_size, "sha256": sha256(path)}


Kept = tuple[Sample, dict[str, Path]]
"""A sample, and for each of its modalities the cache file with the features."""


def _moments(modality: str, kept: Sequence[Kept]) -> dict[str, tuple[Array, Array]]:
    """For each natural client, the mean and deviation of each feature over all frames that are not padding.

    Both are float64 (features,).
    """
    sums: dict[str, list[Any]] = {}
    for client, x in _frames(modality, kept):
        entry = sums.setdefault(client, [0, 0.0, 0.0])
        entry[0] += len(x)
        entry[1] = entry[1] + x.sum(0)
        entry[2] = entry[2] + np.square(x).sum(0)
    means = {client: total / num for client, (num, total, _) in sums.items()}
    return {
        client: (means[client], np.sqrt(np.maximum(0.0, squares / num - np.square(means[client]))))
        for client, (num, _, squares) in sums.items()
    }


def _frames(modality: str, kept: Sequence[Kept]) -> Iterator[tuple[str, Array]]:
    for sample, parts in kept:
        if modality in parts:
            x = read_npy(parts[modality]).astype(np.float64)
            yield sample.client, x[(x != 0).any(-1)]


def _standardised(x: Array, mean: Array, deviation: Array) -> Array:
    real = (x != 0).any(-1, keepdims=True)
    return np.asarray(np.where(real, (x - mean) / (deviation + _EPS), 0.0))


def _id(name: str) -> int:
    """Return a 63-bit number for a name. Of a million samples, two get the same number with probability 5e-8."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
