"""Windows of motion sensors, and electrocardiograms."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import DataError
from polyfed.data.media.clip import Clip, PlainExtractor, corrupt

Floats = NDArray[np.float32]

_EPS = 1e-5  # added to the deviation of a window, as in FedMultimodal


@dataclass(frozen=True, kw_only=True)
class SensorWindow(PlainExtractor):
    """Selected columns of some lines of a table of numbers: float32 (steps, columns).

    The `Clip` of a sample says which lines are read: those from `start` up to, but not including, `end`.

    Attributes:
        columns: Numbers of the columns to take, from 0.
        width: Number of columns that the table must have.
        stride: Distance between the lines that are used: 2 uses every second line.
        normalise: "window" shifts and scales every column by its mean and deviation (+ 1e-5) over the window; "none"
            does not change the numbers.
    """

    columns: tuple[int, ...]
    width: int
    stride: int = 1
    normalise: Literal["window", "none"] = "window"

    def __call__(self, clip: Clip) -> Floats:
        """Return the features of a part of a table.

        Raises:
            DataError: The file is missing, or is not a table of `width` columns of finite numbers.
        """
        assert clip.path is not None
        table = _numbers(clip.path, self.width, clip.path.stat().st_mtime_ns if clip.path.is_file() else 0)
        part = table[int(clip.start) : None if clip.end is None else int(clip.end) : self.stride, list(self.columns)]
        return _by_window(part) if self.normalise == "window" else part


@lru_cache(maxsize=8)  # the windows of a file are read one after another
def _numbers(path: Path, width: int, changed: int) -> Floats:
    """The numbers of a csv file without a header, float32 (lines, width).

    Args:
        width: Number of columns that the file must have.
        changed: Time of the file's last change, so that the cache notices a change.
    """
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error}). Copy it from the data set") from error
    except ValueError as error:
        raise DataError(f"'{path}' is not a table of numbers ({error}). Unpack the archive again") from error
    if table.shape[1] != width:
        raise DataError(f"'{path}' has {table.shape[1]} columns, expected {width}. Unpack the archive again")
    if not np.isfinite(table).all():
        raise DataError(f"'{path}' holds values that are not finite. Unpack the archive again")
    return table


@dataclass(frozen=True, kw_only=True)
class Ecg(PlainExtractor):
    """Leads of a WFDB record (`<name>.hea` beside `<name>.dat`, format 16): float32 (samples, leads), in millivolts.

    Attributes:
        leads: Names of the leads, as in the header, in upper or lower case.
        samples: Length that a record must have.
        normalise: "window" standardises every lead over the record (FedMultimodal); "none" keeps millivolts.
    """

    leads: tuple[str, ...]
    samples: int = 1000
    normalise: Literal["window", "none"] = "window"

    def __call__(self, clip: Clip) -> Floats:
        """Features of a record; the clip is its `.dat` file.

        Raises:
            DataError: A file is missing or damaged, the length is wrong, or a lead is missing.
        """
        assert clip.path is not None
        signals, names = _record(clip)
        if len(signals) != self.samples:
            raise corrupt(clip, f"has {len(signals)} samples a lead, expected {self.samples}")
        missing = [lead for lead in self.leads if lead.upper() not in names]
        if missing:
            raise corrupt(clip, f"lacks the lead {missing[0]}; its header names {', '.join(names)}")
        part = signals[:, [names.index(lead.upper()) for lead in self.leads]]
        return _by_window(part) if self.normalise == "window" else part


def _record(clip: Clip) -> tuple[Floats, list[str]]:
    """Return the signals in millivolts, float32 (samples, leads), and the names of the leads in upper case.

    The clip must be a WFDB record with signal format 16.
    """
    assert clip.path is not None
    header = clip.path.with_suffix(".hea")
    if not header.is_file():
        raise DataError(f"'{header}' does not exist. Copy it from the data set, or prepare with on_corrupt='skip'")
    lines = [line.split() for line in header.read_text().splitlines() if line and not line.startswith("#")]
    try:
        num, samples = int(lines[0][1]), int(lines[0][3])
        rows = lines[1 : 1 + num]
        scales = np.array([_gain(row[2], row[4]) for row in rows], np.float32)
        formats, names = {row[1] for row in rows}, [row[8].upper() for row in rows]
    except (IndexError, ValueError) as error:
        raise DataError(f"'{header}' is not a WFDB header ({error}). Fetch it again") from error
    if formats != {"16"} or len(rows) != num:
        raise DataError(f"'{header}': signals of format {sorted(formats)}, expected 16. Fetch the published records")
    raw = clip.content()
    if len(raw) != 2 * num * samples:
        raise corrupt(clip, f"is cut short or too long: {len(raw)} bytes, its header says {2 * num * samples}")
    counts = np.frombuffer(raw, "<i2").reshape(samples, num).astype(np.float32)
    signals: Floats = (counts - scales[:, 1]) / scales[:, 0]
    return signals, names


def _gain(gain: str, zero: str) -> tuple[float, float]:
    """Read a gain such as `1000.0(0)/mV`: the counts per millivolt, and the optional count at 0 mV in the bracket."""
    number, _, rest = gain.partition("/")[0].partition("(")
    return float(number), float(rest.rstrip(")") or zero)


def _by_window(part: Floats) -> Floats:
    shifted: Floats = (part - part.mean(0)) / (part.std(0) + _EPS)
    return shifted
