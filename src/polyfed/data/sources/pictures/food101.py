"""UPMC Food-101: images of dishes with the text of their web page (docs/data.md)."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError
from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, folder, records
from polyfed.data.media import Clip
from polyfed.data.sources.base import Facts
from polyfed.data.sources.pictures.image_text import ImageText

_VALIDATION = 10  # percent of every class, rounded up


@dataclass(frozen=True, kw_only=True)
class Food101(ImageText):
    """`image` (1280,) and `text` (768,) of 101 dishes. Images without a text are left out.

    58,545 samples are for training, 6,556 for validation and 21,695 for the test. Validation is a tenth of each
    training class, rounded up and drawn with `seed`, because the draw of PartialFL's paper is not published. There are
    no natural clients.

    Attributes:
        path: Folder with images/ and texts_txt/ or texts/, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "image", "text".
        text_source: "page" is the text of the web page, as in the paper; "title" its title from the csv file.
        seed: Seed of the validation draw, the same in all runs.
        image: "embedding" by `image_model`, or "pixels" (3, size, size) for the encoders `resnet18` and `hf`.
        image_model: Folder of the model, or its name in the hub's cache. MobileNetV2 gives 1280 numbers.
        size: Height and width of the image.
        text: "embedding" by `text_model`, or "tokens" (64,) for the encoder `hf`.
        text_model: Folder of the model, or its name in the hub's cache. DistilBERT gives 768 numbers.
    """

    NAME: ClassVar[str] = "food101"
    CHOOSES: ClassVar[tuple[str, ...]] = ("text_source", "seed")

    text_source: Literal["page", "title"] = "page"
    seed: int = 0

    @override
    def listing(self, root: Path) -> Listing:
        classes = sorted(place.name for place in folder(root, "images/train", self.NAME).iterdir() if place.is_dir())
        samples = []
        for half, code in (("train", TRAIN), ("test", TEST)):
            texts = self._texts(root, half, classes)
            for label, name in enumerate(classes):
                for image in sorted(folder(root, f"images/{half}/{name}", self.NAME).glob("*.jpg")):
                    if image.stem in texts:
                        media = {"image": Clip.at(image), "text": texts[image.stem]}
                        samples.append(Sample(f"{half}/{image.stem}", label, media, code))
        return Listing(_with_validation(samples, self.seed), tuple(classes))

    def _texts(self, root: Path, half: str, classes: list[str]) -> dict[str, Clip]:
        if self.text_source == "title":
            return _titles(folder(root, "texts", self.NAME) / f"{half}_titles.csv", classes)
        pages = folder(root, "texts_txt", self.NAME)
        return {page.stem: Clip.at(page) for page in sorted(pages.glob("*/*.txt")) if page.stat().st_size}

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data food101` prints them."""
        return Facts(
            title="101 dishes, image and text of the web page, 58,545 / 6,556 / 21,695",
            modalities={"image": "(1280,) MobileNetV2, or pixels", "text": "(768,) DistilBERT, or tokens"},
            licence="research use; images and texts belong to the pages they come from",
            obtain="visiir.isir.upmc.fr (Wang et al. 2015)",
            layout="images/{train,test}/<class>/<class>_<i>.jpg; texts_txt/<class>/<class>_<i>.txt, or "
            "texts/{train,test}_titles.csv with file, title, class and no header",
        )


def _titles(file: Path, classes: list[str]) -> dict[str, Clip]:
    texts = {}
    for name, title, label in records(file, "food101", width=3):
        if label not in classes:
            raise DataError(f"'{file}': unknown class '{label}' of '{name}'. Restore the published file")
        if title.strip():
            texts[Path(name).stem] = Clip.of(f"title of {name}", title)
    return texts


def _with_validation(samples: list[Sample], seed: int) -> list[Sample]:
    """Return the samples after marking a tenth of each training class as validation."""
    rows: Mapping[int, list[int]] = defaultdict(list)
    for row, sample in enumerate(samples):
        if sample.split == TRAIN:
            rows[sample.label].append(row)
    held = set()
    for label, mine in rows.items():
        count = math.ceil(len(mine) * _VALIDATION / 100)
        held |= {mine[place] for place in keys.choice(keys.key(seed, "food101", label), len(mine), count)}
    return [replace(s, split=VALIDATION) if row in held else s for row, s in enumerate(samples)]
