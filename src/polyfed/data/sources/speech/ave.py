"""AVE: audio-visual events in videos, as spectrogram and frames (docs/data.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import AT_LEAST_ONE, check_ranges
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, class_of, folder, lines
from polyfed.data.media import Clip, Extractor, Frames, LogSpectrogram
from polyfed.data.media.video import Pick
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities

_FILES = (("trainSet.txt", TRAIN), ("valSet.txt", VALIDATION), ("testSet.txt", TEST))
_FIELDS = "category&id&quality&start&end"


@dataclass(frozen=True, kw_only=True)
class Ave(MediaSet):
    """`audio` (1, 257, 1004) and `visual` (3, 4, 224, 224) of the part of each video in which an event happens.

    There are 28 classes, numbered in order of their names, and an official split of 3,339 / 402 / 402 samples. There
    are no natural clients. A sample is a segment (id, start, end); some videos have several segments.

    Attributes:
        path: Folder AVE_Dataset, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "audio", "visual".
        frames: Number of frames in a sample, chosen from one frame per second; 4 in CMSFed.
        frame_pick: Which of the frames (one per second) are used: "even" uses evenly spaced ones, "first" the first
            ones, "random" distinct ones, drawn once for each clip.
        size: Height and width of a frame.
    """

    NAME: ClassVar[str] = "ave"

    modalities: tuple[str, ...] = ("audio", "visual")
    frames: Annotated[int, AT_LEAST_ONE] = 4
    frame_pick: Pick = "even"
    size: Annotated[int, AT_LEAST_ONE] = 224

    def __post_init__(self) -> None:
        check_modalities(self.modalities, ("audio", "visual"))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        every: dict[str, Extractor] = {
            "audio": LogSpectrogram(seconds=10.0),
            "visual": Frames(count=self.frames, pick=self.frame_pick, least=1, size=self.size),
        }
        return {name: every[name] for name in self.modalities}

    @override
    def listing(self, root: Path) -> Listing:
        folder(root, "AVE", self.NAME)
        categories = sorted({_fields(root / "Annotations.txt", line)[0] for line in _annotations(root)})
        samples = []
        for name, code in _FILES:
            for line in lines(root / name, self.NAME):
                category, video, start, end = _fields(root / name, line)
                clip = Clip.at(root / "AVE" / f"{video}.mp4", start, end)
                label = class_of(category, categories, f"'{root / name}', {video}")
                media = {"audio": clip, "visual": clip}
                samples.append(Sample(f"{video} {start:g}-{end:g}", label, media, code))
        return Listing(samples, tuple(categories))

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data ave` prints them."""
        return Facts(
            title="audio-visual events in videos, 28 classes, 3,339 / 402 / 402 segments of at most 10 s",
            modalities={"audio": "(1, 257, 1004) log-spectrogram", "visual": "(3, 4, 224, 224) frames, bytes"},
            licence="annotations: research use as the authors state; the videos belong to their YouTube uploaders",
            obtain="github.com/YapengTian/AVE-ECCV18 (Tian et al. 2018)",
            layout=f"AVE/<id>.mp4, Annotations.txt, trainSet.txt, valSet.txt, testSet.txt; lines {_FIELDS}",
        )


def _annotations(root: Path) -> list[str]:
    result = lines(root / "Annotations.txt", "ave")
    return result[1:] if result[0].startswith("Category&") else result


def _fields(file: Path, line: str) -> tuple[str, str, float, float]:
    parts = line.strip().split("&")
    try:
        category, video, _, start, end = parts
        begin, finish = float(start), float(end)
    except ValueError:
        raise DataError(
            f"'{file}': malformed line '{line[:80]}': expected {_FIELDS}. Restore the published file"
        ) from None
    if not 0.0 <= begin < finish:
        raise DataError(f"'{file}', {video}: the event ends ({finish:g} s) before it begins ({begin:g} s)")
    return category, video, begin, finish
