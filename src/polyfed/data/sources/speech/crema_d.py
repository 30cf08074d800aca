"""CREMA-D: acted emotions of 91 actors, as spectrogram and frames, in the settings of two papers (docs/data.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import AT_LEAST_ONE, between, check_ranges
from polyfed.data.columns import TEST, TRAIN
from polyfed.data.features.listing import Listing, Sample, class_of, folder, records
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Clip, Extractor, Frames, LogSpectrogram, StftMagnitude
from polyfed.data.media.video import Pick
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities, fold_of_clients

CLASSES = ("NEU", "HAP", "SAD", "FEA", "DIS", "ANG")
COUNTS = {"NEU": 1087, "HAP": 1271, "SAD": 1271, "FEA": 1271, "DIS": 1271, "ANG": 1271}
"""Clips of the whole data set, by class: the sum over the released train.csv and test.csv."""

_SPECTRA: Mapping[str, Extractor] = {"257x299": LogSpectrogram(), "257x188": StftMagnitude()}
_FOLDS = 5  # folds of actors, as in FedMultimodal


@dataclass(frozen=True, kw_only=True)
class CremaD(MediaSet):
    """`audio`, a log-spectrogram (1, 257, 299) or (1, 257, 188), and `visual`, frames (3, count, size, size).

    The data set has 7,442 clips of 6 acted emotions. The label is the third field of a clip's name. The 91 actors are
    the natural clients. CMSFed, OGM-GE and PMR release the files train.csv and test.csv. These files split the clips at
    random, so an actor can be in both. `split = "actors"` keeps training and test actors apart.

    Attributes:
        path: Folder with AudioWAV/ and VideoFlash/, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "audio", "visual".
        spectrogram: "257x299" of CMSFed, each clip normalised; "257x188" of FMML, not normalised.
        frames: Number of frames in a sample; 3 in CMSFed, 1 (the middle one) in FMML.
        frame_pick: Which of the frames (one per second) are used: "even" uses evenly spaced ones, "first" the first
            ones, "random" distinct ones, drawn once for each clip.
        size: Height and width of a frame.
        split: "files" reads train.csv and test.csv (lines `name,EMO`). "actors" tests a fifth of the actors.
        fold: With `split = "actors"`, the fifth that is tested.
    """

    NAME: ClassVar[str] = "crema-d"
    CHOOSES: ClassVar[tuple[str, ...]] = ("split",)

    modalities: tuple[str, ...] = ("audio", "visual")
    spectrogram: Literal["257x299", "257x188"] = "257x299"
    frames: Annotated[int, AT_LEAST_ONE] = 3
    frame_pick: Pick = "even"
    size: Annotated[int, AT_LEAST_ONE] = 224
    split: Literal["files", "actors"] = "files"
    fold: Annotated[int, between(1, _FOLDS)] = 1

    def __post_init__(self) -> None:
        check_modalities(self.modalities, ("audio", "visual"))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        every: dict[str, Extractor] = {
            "audio": _SPECTRA[self.spectrogram],
            "visual": Frames(count=self.frames, pick=self.frame_pick, size=self.size),
        }
        return {name: every[name] for name in self.modalities}

    @override
    def listing(self, root: Path) -> Listing:
        sound, film = folder(root, "AudioWAV", self.NAME), root / "VideoFlash"
        if "visual" in self.modalities:
            folder(root, "VideoFlash", self.NAME)
        names = (
            _listed(root)
            if self.split == "files"
            else dict.fromkeys(sorted(f.stem for f in sound.glob("*.wav")), TRAIN)
        )
        samples = []
        for name, code in names.items():
            actor, label = _fields(name, root)
            media = {"audio": Clip.at(sound / f"{name}.wav"), "visual": Clip.at(film / f"{name}.flv")}
            samples.append(Sample(name, label, media, code, client=actor))
        return Listing(samples, CLASSES, COUNTS)

    @override
    def split_of(self, prepared: Prepared, split: Tensor) -> Tensor:
        """Return the split code of every row.

        With `split = "files"`, the released train.csv and test.csv say whether a row belongs to the training set or to
        the test set. With `split = "actors"`, the test set consists of all rows of a fifth of the actors.
        """
        return split if self.split == "files" else fold_of_clients(prepared.clients(), _FOLDS, self.fold)

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data crema-d` prints them."""
        return Facts(
            title="acted emotions of 91 actors, 6 classes, 7,442 clips; 6,698 train and 744 test by the released files",
            modalities={
                "audio": "(1, 257, 299) or (1, 257, 188) log-spectrogram",
                "visual": "(3, 3, 224, 224) frames, bytes, ImageNet norm",
            },
            licence="Open Database License 1.0",
            obtain="github.com/CheyneyComputerScience/CREMA-D (Cao et al. 2014); train.csv, test.csv: OGM-GE",
            layout="AudioWAV/1001_DFA_ANG_XX.wav, VideoFlash/1001_DFA_ANG_XX.flv; train.csv, test.csv: lines name,EMO",
        )


def _listed(root: Path) -> dict[str, int]:
    """Names of the clips in the released files, each with its split code."""
    names: dict[str, int] = {}
    for file, code in ((root / "train.csv", TRAIN), (root / "test.csv", TEST)):
        if not file.is_file():
            raise DataError(
                f"crema-d: '{file}' is missing: copy it from a release that has it, or set data.split = 'actors'"
            )
        for name, label in records(file, "crema-d", width=2):
            if name in names:
                raise DataError(f"'{file}' names '{name}' again. Restore the published file")
            if name.split("_")[2:3] != [label]:
                raise DataError(f"'{file}': label '{label}' of '{name}' is not the third field of the name")
            names[name] = code
    return names


def _fields(name: str, root: Path) -> tuple[str, int]:
    parts = name.split("_")
    if len(parts) != 4 or not parts[0].isdigit():
        raise DataError(f"'{root}': malformed clip name '{name}': expected <actor>_<sentence>_<emotion>_<level>")
    return parts[0], class_of(parts[2], CLASSES, f"'{name}'")
