"""Hateful Memes: is this image with this text hateful? (peers.md 3.2, 3.4)"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polyfed.core.errors import DataError
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, lines
from polyfed.data.media import Clip
from polyfed.data.sources.base import Facts
from polyfed.data.sources.image_text import ImageText

CLASSES = ("not hateful", "hateful")
_FILES = (("train.jsonl", TRAIN), ("dev_seen.jsonl", VALIDATION), ("test_seen.jsonl", TEST))


@dataclass(frozen=True, kw_only=True)
class HatefulMemes(ImageText):
    """`image` (1280,) and `text` (768,) of 10,000 memes, 2 classes; 8,500 / 500 / 1,000 by the released files.

    There are no natural clients; FedMultimodal cuts 40 by Dirichlet.

    Attributes:
        path: folder with img/ and the .jsonl files, or a prepared one.
        cache: see `MediaSet`.
        modalities: "image", "text".
        image: see `ImageText`.
        image_model: see `ImageText`.
        size: see `ImageText`.
        text: see `ImageText`.
        text_model: see `ImageText`; FedMultimodal takes MobileBERT, 512 entries.
    """

    NAME: ClassVar[str] = "hateful-memes"

    def listing(self, root: Path) -> Listing:
        """See `MediaSet.listing`."""
        samples = []
        for name, code in _FILES:
            for number, line in enumerate(lines(root / name, self.NAME), 1):
                entry = _entry(root / name, number, line)
                media = {
                    "image": Clip.at(root / entry["img"]),
                    "text": Clip.of(f"text of meme {entry['id']}", entry["text"]),
                }
                samples.append(Sample(str(entry["id"]), entry["label"], media, code))
        return Listing(samples, CLASSES)

    @classmethod
    def describe(cls) -> Facts:
        """Facts for `polyfed data hateful-memes`."""
        return Facts(
            title="memes, image and text, hateful or not, 8,500 / 500 / 1,000",
            modalities={"image": "(1280,) MobileNetV2, or pixels", "text": "(768,) DistilBERT, or tokens"},
            licence="the challenge's dataset licence agreement (Meta); do not pass it on",
            obtain="hatefulmemeschallenge.com, after accepting the agreement (Kiela et al. 2020)",
            layout="img/*.png; train.jsonl, dev_seen.jsonl, test_seen.jsonl: id, img, label, text",
        )


def _entry(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"'{file}', line {number} is not JSON ({error}). Restore the published file") from error
    missing = [key for key in ("id", "img", "label", "text") if not isinstance(entry, dict) or key not in entry]
    if missing:
        raise DataError(f"'{file}', line {number} lacks '{missing[0]}'. Labelled releases have id, img, label, text")
    if entry["label"] not in (0, 1):
        raise DataError(f"'{file}', line {number}: label {entry['label']!r}, allowed: 0, 1. Restore the published file")
    return dict(entry)
