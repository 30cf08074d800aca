"""Reads frames of videos with PyAV."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from polyfed.core import keys
from polyfed.data.media.clip import Clip, Norm, PlainExtractor, corrupt, optional
from polyfed.data.media.image import bytes_norm, fitted

Pick = Literal["random", "even", "first"]

_SLACK = 1.5  # a file counts as cut short if it ends more than these seconds before the length in its header


@dataclass(frozen=True, kw_only=True)
class Frames(PlainExtractor):
    """Frames of a video in order of time, uint8 (3, count, size, size).

    The frames are stored as bytes. Each batch of frames is standardised with ImageNet's mean and standard deviation.

    Candidates are the first frame of every second of the clip. If there are fewer than `least`, evenly spaced frames
    are the candidates. A clip with fewer frames than `count` repeats its frames in order. These are CMSFed's rules, see
    docs/data.md.

    Attributes:
        count: Number of frames in a sample.
        pick: Which candidates are used. "even" uses evenly spaced candidates, and "first" uses the first candidates.
            "random" draws distinct candidates once for each clip and sorts them by time. The papers draw new frames at
            every step.
        least: Minimum number of candidates.
        size: Height and width; both sides are scaled.
    """

    count: int = 3
    pick: Pick = "even"
    least: int = 3
    size: int = 224

    @property
    @override
    def norm(self) -> Norm:
        return bytes_norm(4)

    def __call__(self, clip: Clip) -> NDArray[np.uint8]:
        """Frames of a video, uint8 (3, count, size, size).

        Raises:
            DataError: The file cannot be decoded, has no frame in this part, or is cut short.
        """
        times = _times(clip)
        chosen = self._chosen(_candidates(times, self.least), keys.key(clip.name.rpartition("/")[2], "frames"))
        wanted = set(chosen)
        result = {
            place: fitted(frame.to_image(), self.size, "stretch")
            for place, (_, frame) in enumerate(_decoded(clip))
            if place in wanted
        }
        return np.stack([result[place] for place in chosen], 1)

    def _chosen(self, candidates: list[int], key: int) -> list[int]:
        while len(candidates) < self.count:
            candidates = sorted(candidates + candidates[: self.count - len(candidates)])
        if self.pick == "first":
            return candidates[: self.count]
        if self.pick == "random":
            return [candidates[place] for place in keys.choice(key, len(candidates), self.count)]
        return [candidates[place] for place in _evenly(len(candidates), self.count)]


def _evenly(num: int, count: int) -> list[int]:
    """Return the middles of `count` equal parts of range(num). If the count is odd, the middle frame is one of them."""
    return [(2 * part + 1) * num // (2 * count) for part in range(count)]


def _candidates(times: list[float], least: int) -> list[int]:
    """Return the position of the first frame in each second of the clip.

    If these are fewer than `least` positions, return evenly spaced positions instead.
    """
    begun: dict[int, int] = {}
    for place, time in enumerate(times):
        begun.setdefault(int(time - times[0] + 1e-3), place)
    if len(begun) >= min(least, len(times)):
        return list(begun.values())
    return _evenly(len(times), min(least, len(times)))


def _times(clip: Clip) -> list[float]:
    """Time of every frame of the clip, in seconds."""
    times = [time for time, _ in _decoded(clip)]
    if not times:
        raise corrupt(clip, "holds no frames" if clip.part == (0.0, None) else f"holds no frames in {clip.part} s")
    return times


def _decoded(clip: Clip) -> Iterator[tuple[float, Any]]:
    av = optional("av", "video")
    try:
        with av.open(clip.stream()) as container:
            if not container.streams.video:
                raise corrupt(clip, "has no picture track")
            yield from _part(clip, container, av.time_base)
    except av.FFmpegError as error:
        raise corrupt(clip, f"cannot be decoded ({error})") from error


def _part(clip: Clip, container: Any, time_base: int) -> Iterator[tuple[float, Any]]:
    last = 0.0
    end = float("inf") if clip.end is None else clip.end
    for frame in container.decode(video=0):
        last = float(frame.time or 0.0)
        if last >= end:
            return
        if last >= clip.start:
            yield last, frame
    announced = (container.duration or 0) / time_base
    if last + _SLACK < min(announced, end):
        raise corrupt(clip, f"is cut short: it announces {announced:.1f} s and ends after {last:.1f} s")
