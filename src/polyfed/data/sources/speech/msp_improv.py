"""MSP-Improv: improvised turns of twelve actors, as sound and, if given, transcripts (docs/data.md)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from torch import Tensor
from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.core.option_checks import AT_LEAST_ONE, between, check_ranges
from polyfed.data.features.listing import Listing, Sample, class_of, folder, lines, table
from polyfed.data.features.prepared import Prepared
from polyfed.data.media import Clip, Extractor, LogMel, TextEmbedding
from polyfed.data.sources.base import Facts
from polyfed.data.sources.media_set import MediaSet, check_modalities, fold_of_groups

CLASSES = ("N", "H", "S", "A")
COUNTS = {"N": 2072, "H": 1184, "S": 739, "A": 585}
"""Turns of the types S and T (PartialFL, Table 1)."""

LABELS = "Evalution.txt"  # spelt like this in the release
_KINDS = ("S", "T")  # types of recording; P (natural interaction) and R (read) are left out
_OTHER = ("X", "O")  # labels that are left out: no agreement, other


@dataclass(frozen=True, kw_only=True)
class MspImprov(MediaSet):
    """`audio` (frames, 80), a log-mel standardised by speaker, and `text` (768,); 4 classes, 4,580 turns.

    The twelve speakers are the natural clients, and one session is the test set. The release has transcripts of only
    some turns, so `text` needs a csv file. A turn without a line in this file lacks the modality `text`.

    Attributes:
        path: Folder with Audio/ and Evalution.txt (sic), or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "audio", "text".
        test_session: The session that is the test set, 1 to 6.
        frames: Length of `audio`, in windows of 10 ms.
        transcripts: A csv file with the columns utt,text; required for "text".
        text_model: Folder of the model that embeds the transcript, or its name in the hub's cache.
    """

    NAME: ClassVar[str] = "msp-improv"

    modalities: tuple[str, ...] = ("audio",)
    test_session: Annotated[int, between(1, 6)] = 6
    frames: Annotated[int, AT_LEAST_ONE] = 600
    transcripts: str = ""
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
        folder(root, "Audio", self.NAME)
        spoken = self._spoken()
        samples = []
        for line in lines(root / LABELS, self.NAME):
            if not line.startswith("UTD-IMPROV-"):
                continue  # a vote of a single rater
            name, label = _labelled(root / LABELS, line)
            scenario, speaker, kind, _ = _fields(root / LABELS, name)
            if kind not in _KINDS or label in _OTHER:
                continue
            number = class_of(label, CLASSES, f"'{root / LABELS}', {name}")
            session = int(speaker[1:])
            wav = root / "Audio" / f"session{session}" / scenario / kind / f"MSP-IMPROV-{name}.wav"
            media = {"audio": Clip.at(wav)}
            if name in spoken:
                media["text"] = Clip.of(f"transcript of {name}", spoken[name])
            samples.append(Sample(name, number, media, client=speaker, group=session))
        return Listing(samples, CLASSES, COUNTS)

    @override
    def split_of(self, prepared: Prepared, split: Tensor) -> Tensor:
        return fold_of_groups(prepared.groups(), self.test_session, "session")

    def _spoken(self) -> dict[str, str]:
        if "text" not in self.modalities:
            return {}
        if not self.transcripts:
            raise DataError("msp-improv: 'text' needs data.transcripts, a csv file with the columns utt,text")
        result = table(Path(self.transcripts).expanduser(), ("utt", "text"), self.NAME)
        return {row["utt"].removeprefix("MSP-IMPROV-"): row["text"] for row in result}

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data msp-improv` prints them."""
        return Facts(
            title="improvised turns of 12 actors in 6 sessions, 4 emotions, 4,580 turns",
            modalities={"audio": "(600, 80) log-mel, by-speaker norm", "text": "(768,), from a csv of transcripts"},
            licence="academic use, by signed agreement with UT Dallas; do not pass it on",
            obtain="request at the MSP lab of UT Dallas (Busso et al. 2017)",
            layout="Audio/session{1..6}/<scenario>/{S,T}/MSP-IMPROV-<scenario>-<speaker>-<type>-<pair>.wav, "
            f"{LABELS} (sic)",
        )


def _labelled(file: Path, line: str) -> tuple[str, str]:
    parts = [part.strip() for part in line.split(";")]
    if len(parts) < 2 or not parts[0].endswith(".avi"):
        raise DataError(f"'{file}': malformed label line '{line[:80]}': expected UTD-IMPROV-<turn>.avi; <letter>; ...")
    return parts[0].removeprefix("UTD-IMPROV-").removesuffix(".avi"), parts[1]


def _fields(file: Path, name: str) -> list[str]:
    parts = name.split("-")
    if len(parts) != 4 or parts[1][:1] not in ("F", "M") or not parts[1][1:].isdigit():
        raise DataError(
            f"'{file}': malformed name '{name}': expected <scenario>-<speaker>-<type>-<pair>, as S01A-F01-S-FM01"
        )
    return parts
