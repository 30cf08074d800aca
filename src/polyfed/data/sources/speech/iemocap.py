"""IEMOCAP: improvised dialogues of ten actors, as sound and transcript, with four emotions (docs/data.md)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import AT_LEAST_ONE, between, check_ranges
from polyfed.data.features.listing import Listing, Sample, class_of, folder, lines
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Clip, Extractor, LogMel, TextEmbedding
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities, fold_of_groups

CLASSES = ("ang", "neu", "sad", "hap")
COUNTS = {"ang": 289, "neu": 1099, "sad": 608, "hap": 947}
"""Utterances in improvised dialogues, with excitement counted as happiness (PartialFL, Table 1)."""

_MERGED = {"exc": "hap"}
_OTHER = ("dis", "fea", "fru", "oth", "sur", "xxx")  # labels in the data that are left out
_LABEL = re.compile(r"\[\d+\.\d+ - \d+\.\d+\]\t(Ses\d\d[FM]_\w+)\t(\w+)\t\[")
_SPOKEN = re.compile(r"(Ses\d\d[FM]_\w+) \[[\d.]+-[\d.]+\]:\s*(.*)")
_SESSIONS = (1, 2, 3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class Iemocap(MediaSet):
    """`audio` (frames, 80), a log-mel spectrogram, and `text` (768,), an embedding of the transcript; 4 classes.

    The spectrograms are standardised with the statistics of each speaker.

    Only improvised dialogues are used, and excitement counts as happiness: 2,943 utterances. The ten speakers are the
    natural clients, and one session is the test set.

    Attributes:
        path: Folder with Session1..5 (or with IEMOCAP_full_release), or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "audio", "text".
        test_session: The session that is the test set, 1 to 5.
        frames: Length of `audio`, in windows of 10 ms.
        text_model: Folder of the model that embeds the transcript, or its name in the hub's cache.
    """

    NAME: ClassVar[str] = "iemocap"

    modalities: tuple[str, ...] = ("audio", "text")
    test_session: Annotated[int, between(1, len(_SESSIONS))] = 5
    frames: Annotated[int, AT_LEAST_ONE] = 600
    text_model: str = "distilbert-base-uncased"

    def __post_init__(self) -> None:
        check_modalities(self.modalities, ("audio", "text"))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        every: dict[str, Extractor] = {
            "audio": LogMel(frames=self.frames),
            "text": TextEmbedding(model=self.text_model),
        }
        return {name: every[name] for name in self.modalities}

    @override
    def listing(self, root: Path) -> Listing:
        if (root / "IEMOCAP_full_release").is_dir():
            root = root / "IEMOCAP_full_release"
        samples = [
            sample
            for session in _SESSIONS
            for file in _improvised(folder(root, f"Session{session}/dialog/EmoEvaluation", self.NAME))
            for sample in _dialogue(file, root / f"Session{session}", session)
        ]
        return Listing(samples, CLASSES, COUNTS)

    @override
    def split_of(self, prepared: Prepared, split: Tensor) -> Tensor:
        return fold_of_groups(prepared.groups(), self.test_session, "session")

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data iemocap` prints them."""
        return Facts(
            title="improvised dialogues of 10 actors in 5 sessions, 4 emotions, 2,943 utterances",
            modalities={"audio": "(600, 80) log-mel, by-speaker norm", "text": "(768,) embedding of the transcript"},
            licence="research only, by signed agreement with USC SAIL; do not pass it on",
            obtain="request at sail.usc.edu/iemocap (Busso et al. 2008)",
            layout="IEMOCAP_full_release/Session{1..5}/dialog/{EmoEvaluation,transcriptions}/*.txt and "
            "Session{1..5}/sentences/wav/<dialog>/<utterance>.wav",
        )


def _improvised(labels: Path) -> list[Path]:
    # Apple's resource forks (`._name`) lie beside the real files in the published archive
    files = sorted(file for file in labels.glob("*impro*.txt") if not file.name.startswith("."))
    if not files:
        raise DataError(f"iemocap: '{labels}' holds no labels of improvised dialogues (*impro*.txt)")
    return files


def _dialogue(file: Path, session: Path, number: int) -> list[Sample]:
    spoken = _transcript(session / "dialog" / "transcriptions" / file.name)
    samples = []
    for line in lines(file, "iemocap"):
        found = _LABEL.match(line)
        if found is None:
            if line.startswith("["):
                _refuse_malformed(file, line)
            continue  # a vote of a single rater, or the header
        name, label = found.groups()
        if label in _OTHER:
            continue
        if name not in spoken:
            raise DataError(f"'{session}/dialog/transcriptions/{file.name}' lacks the utterance {name}. Copy it again")
        wav = session / "sentences" / "wav" / file.stem / f"{name}.wav"
        media = {"audio": Clip.at(wav), "text": Clip.of(f"transcript of {name}", spoken[name])}
        speaker = f"Ses{number:02d}{name.rsplit('_', 1)[1][0]}"  # Ses01F_impro01_M003 is spoken by M
        label = class_of(_MERGED.get(label, label), CLASSES, f"'{file}', {name}")
        samples.append(Sample(name, label, media, client=speaker, group=number))
    return samples


def _refuse_malformed(file: Path, line: str) -> None:
    if "\t" in line:
        raise DataError(
            f"'{file}': malformed label line '{line[:80]}': expected "
            "[start - end] TAB utterance TAB emotion TAB [V, A, D]. Restore the published file"
        )


def _transcript(file: Path) -> dict[str, str]:
    result = (_SPOKEN.match(line) for line in lines(file, "iemocap"))
    return {match[1]: match[2] for match in result if match}
