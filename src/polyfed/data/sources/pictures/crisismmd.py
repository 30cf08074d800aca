"""CrisisMMD: tweets about disasters, each with an image, in eight humanitarian classes (FedMultimodal)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from typing_extensions import override

from polyfed.data.columns import TEST, TRAIN, VALIDATION
from polyfed.data.features.listing import Listing, Sample, class_of, table
from polyfed.data.media import Clip
from polyfed.data.sources.base import Facts
from polyfed.data.sources.pictures.image_text import ImageText

CLASSES = (
    "not_humanitarian",
    "infrastructure_and_utility_damage",
    "vehicle_damage",
    "rescue_volunteering_or_donation_effort",
    "other_relevant_information",
    "affected_individuals",
    "injured_or_dead_people",
    "missing_or_found_people",
)
_FILES = (("train", TRAIN), ("dev", VALIDATION), ("test", TEST))
_LINK = re.compile(r"http\S+")


@dataclass(frozen=True, kw_only=True)
class CrisisMmd(ImageText):
    """`image` (1280,) and `text` (768,) of tweets, without their links; about 18,100 pairs, 8 classes, official split.

    There are no natural clients. FedMultimodal makes 100 clients by a Dirichlet partition. Its released partition
    script combines the test images with the texts of the development file. In polyfed, every image keeps its own text,
    so test results differ.

    Attributes:
        path: Folder CrisisMMD_v2.0, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "image", "text".
        label: The annotation that serves as label: that of the "image" (as in FedMultimodal) or the "text".
        image: "embedding" by `image_model`, or "pixels" (3, size, size) for the encoders `resnet18` and `hf`.
        image_model: Folder of the model, or its name in the hub's cache. MobileNetV2 gives 1280 numbers.
        size: Height and width of the image.
        text: "embedding" by `text_model`, or "tokens" (64,) for the encoder `hf`.
        text_model: Folder of the model, or its name in the hub's cache. DistilBERT gives 768 numbers, FedMultimodal's
            MobileBERT 512.
    """

    NAME: ClassVar[str] = "crisismmd"
    CHOOSES: ClassVar[tuple[str, ...]] = ("label",)

    label: Literal["image", "text"] = "image"

    @override
    def listing(self, root: Path) -> Listing:
        column = f"label_{self.label}"
        samples = []
        for part, code in _FILES:
            file = root / "crisismmd_datasplit_all" / f"task_humanitarian_text_img_{part}.tsv"
            for row in table(file, ("image_id", "tweet_text", "image", column), self.NAME, "\t"):
                name = row["image_id"]
                media = {
                    "image": Clip.at(root / row["image"]),
                    "text": Clip.of(f"tweet of {name}", _LINK.sub("", row["tweet_text"]).strip()),
                }
                label = class_of(row[column], CLASSES, f"'{file}', image {name}")
                samples.append(Sample(name, label, media, code))
        return Listing(samples, CLASSES)

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data crisismmd` prints them."""
        return Facts(
            title="tweets of seven disasters, image and text, 8 humanitarian classes, about 18,100 pairs",
            modalities={"image": "(1280,) MobileNetV2, or pixels", "text": "(768,) DistilBERT, or tokens"},
            licence="CC BY-NC-SA 4.0; Twitter's terms hold for the tweets",
            obtain="crisisnlp.qcri.org/crisismmd, version 2.0 with its data split (Alam et al. 2018)",
            layout="data_image/**/*.jpg, crisismmd_datasplit_all/task_humanitarian_text_img_{train,dev,test}.tsv",
        )
