"""MELD: utterances of a television series, as sound and transcript (FedMultimodal)."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from polyfed.core.option_checks import AT_LEAST_ONE, check_ranges
from polyfed.data.columns import LEFT_OUT, TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, class_of, folder, table
from polyfed.data.media import Clip, Extractor, LogMel
from polyfed.data.media.embedding import TextKind, text_extractor
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities

CLASSES = ("neutral", "sadness", "joy", "anger", "surprise", "fear", "disgust")
COUNTS = {
    "neutral": 6436,
    "sadness": 1002,
    "joy": 2308,
    "anger": 1607,
    "surprise": 1636,
    "fear": 358,
    "disgust": 361,
}
"""Utterances of the three csv files together, from the table in the release's README."""

_COLUMNS = ("Utterance", "Speaker", "Emotion", "Dialogue_ID", "Utterance_ID", "Season")
_PARTS = (
    ("train_sent_emo.csv", "train_splits", TRAIN),
    ("dev_sent_emo.csv", "dev_splits_complete", VALIDATION),
    ("test_sent_emo.csv", "output_repeated_splits_test", TEST),
)


@dataclass(frozen=True, kw_only=True)
class Meld(MediaSet):
    """`audio` (frames, 80), a log-mel standardised by speaker, and `text` (512,) of utterances; official split.

    The natural clients are the speakers of each season. FedMultimodal uses 80 MFCCs. This source uses 80 log-mel bands,
    which hold the same information and suit any encoder. A few videos of the release cannot be decoded, so prepare the
    release with `--on-corrupt skip`.

    Attributes:
        path: Folder MELD.Raw, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "audio", "text".
        classes: Number of classes: 4 (neutral, sadness, joy, anger, as in FedMultimodal) or all 7.
        min_utterances: A speaker with fewer utterances in a split is removed from that split; 11 in FedMultimodal.
        frames: Length of `audio`, in windows of 10 ms.
        text: "embedding" by `text_model`, or "tokens" (64,) for the encoder `hf`.
        text_model: Folder of the model, or its name in the hub's cache. MobileBERT, which FedMultimodal uses, gives 512
            numbers.
    """

    NAME: ClassVar[str] = "meld"
    CHOOSES: ClassVar[tuple[str, ...]] = ("classes", "min_utterances")

    modalities: tuple[str, ...] = ("audio", "text")
    classes: Literal[4, 7] = 4
    min_utterances: int = 11
    frames: Annotated[int, AT_LEAST_ONE] = 600
    text: TextKind = "embedding"
    text_model: str = "google/mobilebert-uncased"

    def __post_init__(self) -> None:
        check_modalities(self.modalities, ("audio", "text"))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        every: dict[str, Extractor] = {
            "audio": LogMel(frames=self.frames),
            "text": text_extractor(self.text, self.text_model),
        }
        return {name: every[name] for name in self.modalities}

    @override
    def listing(self, root: Path) -> Listing:
        kept = CLASSES[: self.classes]
        samples = [sample for part in _PARTS for sample in self._part(root, *part) if sample.label < self.classes]
        counts = Counter((sample.split, sample.client) for sample in samples)
        samples = [
            replace(s, split=LEFT_OUT) if counts[s.split, s.client] < self.min_utterances else s for s in samples
        ]
        return Listing(samples, kept, {name: COUNTS[name] for name in kept})

    def _part(self, root: Path, file: str, videos: str, code: int) -> list[Sample]:
        place = folder(root, videos, self.NAME) if "audio" in self.modalities else root / videos
        samples = []
        for row in table(root / file, _COLUMNS, self.NAME):
            name = f"dia{row['Dialogue_ID']}_utt{row['Utterance_ID']}"
            wav = place / "waves" / f"{name}.wav"
            media = {
                "audio": Clip.at(wav if wav.is_file() else place / f"{name}.mp4"),
                "text": Clip.of(f"transcript of {name}", row["Utterance"]),
            }
            label = class_of(row["Emotion"], CLASSES, f"'{root / file}', {name}")
            client = f"season {row['Season']} {row['Speaker']}"
            samples.append(Sample(f"{videos}/{name}", label, media, code, client))
        return samples

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data meld` prints them."""
        return Facts(
            title="13,708 utterances of a television series, 7 emotions, of which FedMultimodal uses 4",
            modalities={"audio": "(600, 80) log-mel, by-speaker norm", "text": "(512,) MobileBERT, or tokens"},
            licence="annotations: GPL-3.0; the videos belong to the producers of the series",
            obtain="github.com/declare-lab/MELD, archive MELD.Raw (Poria et al. 2019)",
            layout="{train,dev,test}_sent_emo.csv; train_splits, dev_splits_complete, output_repeated_splits_test with "
            "dia<d>_utt<u>.mp4, or the sound alone in waves/ inside them",
        )
