"""Hateful Memes: images with text, labelled as hateful or not (FedMultimodal)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from polyfed.core.errors import DataError
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, lines
from polyfed.data.media import Clip
from polyfed.data.sources.base import Facts
from polyfed.data.sources.pictures.image_text import ImageText

CLASSES = ("not hateful", "hateful")
_FILES = (("train.jsonl", TRAIN), ("dev_seen.jsonl", VALIDATION), ("test_seen.jsonl", TEST))


@dataclass(frozen=True, kw_only=True)
class HatefulMemes(ImageText):
    """`image` (1280,) and `text` (768,) of 10,000 memes, 2 classes; 8,500 / 500 / 1,000 in the released files.

    There are no natural clients; FedMultimodal makes 40 clients by a Dirichlet partition.

    Attributes:
        path: Folder with img/ and the .jsonl files, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "image", "text".
        image: "embedding" by `image_model`, or "pixels" (3, size, size) for the encoders `resnet18` and `hf`.
        image_model: Folder of the model, or its name in the hub's cache. MobileNetV2 gives 1280 numbers.
        size: Height and width of the image.
        text: "embedding" by `text_model`, or "tokens" (64,) for the encoder `hf`.
        text_model: Folder of the model, or its name in the hub's cache. DistilBERT gives 768 numbers, FedMultimodal's
            MobileBERT 512.
    """

    NAME: ClassVar[str] = "hateful-memes"

    @override
    def listing(self, root: Path) -> Listing:
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
        """Licence, origin and layout, as `polyfed data hateful-memes` prints them."""
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
