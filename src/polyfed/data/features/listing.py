"""The list of a data set's samples, made before any media file is opened, and readers for its tables."""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.core.errors import DataError, did_you_mean
from polyfed.data.columns import TRAIN
from polyfed.data.media import Clip


@dataclass(frozen=True)
class Sample:
    """A sample of a data set, which becomes one row of the table.

    Attributes:
        name: Stable and distinct within the data set; the sample id is its hash.
        label: Class number.
        media: Modality -> clip with the sample's data; a modality that the sample lacks has no entry.
        split: Code of `Columns.split`.
        client: Natural client (speaker, subject, site), empty if there is none.
        group: Number that identifies the sample's group, such as session 3. Some data sets use the groups as folds, and
            `hf` as persons. 0 if there are no groups.
    """

    name: str
    label: int
    media: Mapping[str, Clip]
    split: int = TRAIN
    client: str = ""
    group: int = 0


@dataclass(frozen=True)
class Listing:
    """All samples of a data set, in a fixed order.

    Attributes:
        samples: The samples; their order is the order of the table's rows.
        class_names: Names of the classes, in order of their numbers.
        published: Class -> number of its samples in the complete data set, as published. These numbers are shown for
            comparison. The mapping may be empty.
    """

    samples: Sequence[Sample]
    class_names: tuple[str, ...]
    published: Mapping[str, int] = field(default_factory=dict)

    def checked(self, where: Path) -> "Listing":
        """Return this listing after checking that it has samples and distinct names.

        Args:
            where: Folder of the data set, for the message.

        Raises:
            DataError: The listing is empty, or two samples have the same name.
        """
        if not self.samples:
            raise DataError(f"'{where}': no sample is left after the labels and files that this data set uses")
        name, count = Counter(sample.name for sample in self.samples).most_common(1)[0]
        if count > 1:
            raise DataError(f"'{where}' names the sample '{name}' {count} times. Remove the copies")
        return self

    def fingerprint(self) -> str:
        """Return a hash of the class names, the samples and the media files of this listing.

        For a media file, the hash covers its size and the time of its last change, but not its content.
        """
        seen = hashlib.sha256(repr(self.class_names).encode())
        for sample in self.samples:
            seen.update(repr((sample.name, sample.label, sample.split, sample.client, sample.group)).encode())
            for modality, clip in sample.media.items():
                seen.update(repr((modality, clip.name, clip.part, clip.stamp, _stamp(clip.path))).encode())
        return seen.hexdigest()


def _stamp(path: Path | None) -> tuple[int, int] | None:
    if path is None or not path.exists():
        return None
    result = path.stat()
    return result.st_size, result.st_mtime_ns


def folder(path: Path, name: str, what: str) -> Path:
    """Return the folder `name` inside `path`, or `path` itself if `name` is empty.

    Raises:
        DataError: The folder is missing. `what` is the source's name, for the message.
    """
    result = path / name if name else path
    if not result.is_dir():
        raise DataError(f"{what}: folder '{result}' is missing. See the layout in `polyfed data {what}`")
    return result


def lines(path: Path, what: str) -> list[str]:
    """Return the lines of a text file that are not blank.

    Raises:
        DataError: The file is missing or empty. `what` is the source's name, for the message.
    """
    if not path.is_file():
        raise DataError(f"{what}: file '{path}' is missing. See the layout in `polyfed data {what}`")
    # published files contain a byte order mark and stray bytes of other encodings, but never in a name or a label
    # `splitlines` would also split a text at U+2028 or U+0085, which JSON allows inside of a string
    result = [line for line in path.read_text("utf-8-sig", errors="replace").split("\n") if line.strip()]
    if not result:
        raise DataError(f"'{path}' is empty. Copy it again from the data set")
    return result


def table(path: Path, columns: Sequence[str], what: str, delimiter: str = ",") -> list[dict[str, str]]:
    """Return the lines of a table that has a header. Each line is a dictionary from columns to values.

    Args:
        columns: Columns that must exist; the result also has all other columns.
        what: Name of the source, for messages.
        delimiter: The separator of fields; with a tab, quotation marks have no meaning.

    Raises:
        DataError: The file or a column is missing, or a line has more or fewer fields than the header.
    """
    result = records(path, what, delimiter)
    header = [name.strip() for name in result[0]]
    for name in columns:
        if name not in header:
            raise DataError(f"'{path}' has no column '{name}'; {did_you_mean(name, header)}")
    for number, record in enumerate(result[1:], 2):
        _check_width(path, number, record, len(header))
    return [dict(zip(header, record, strict=True)) for record in result[1:]]


def records(path: Path, what: str, delimiter: str = ",", width: int | None = None) -> list[list[str]]:
    """Return the lines of a table that has no header. Each line is a list of fields.

    Args:
        what: Name of the source, for messages.
        delimiter: The separator of fields; with a tab, quotation marks have no meaning.
        width: Number of fields that each line must have; None allows any number.

    Raises:
        DataError: The file is missing or empty, or a line does not have `width` fields.
    """
    if not path.is_file():
        raise DataError(f"{what}: file '{path}' is missing. See the layout in `polyfed data {what}`")
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        if delimiter == "\t":  # a quotation mark in a tweet does not begin a quoted field
            result = [record for record in csv.reader(file, delimiter=delimiter, quoting=csv.QUOTE_NONE) if record]
        else:
            result = [record for record in csv.reader(file, delimiter=delimiter) if record]
    if not result:
        raise DataError(f"'{path}' is empty. Copy it again from the data set")
    if width is not None:
        for number, record in enumerate(result, 1):
            _check_width(path, number, record, width)
    return result


def _check_width(path: Path, number: int, record: Sequence[str], width: int) -> None:
    if len(record) != width:
        raise DataError(
            f"'{path}', record {number}: {len(record)} columns, expected {width}: {' | '.join(record)[:80]}. "
            "Restore the published file"
        )


def class_of(label: str, classes: Iterable[str], where: str) -> int:
    """Return the number of a class, given its name.

    Raises:
        DataError: There is no such class. The message names the place (`where`) and the most similar class.
    """
    names = list(classes)
    if label not in names:
        raise DataError(f"{where}: unknown label '{label}'; {did_you_mean(label, names)}. Restore the published file")
    return names.index(label)
