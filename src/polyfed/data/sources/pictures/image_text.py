"""Base class of the data sets that pair an image with a text."""

from dataclasses import dataclass
from typing import Annotated

from typing_extensions import override

from polyfed.core.option_checks import AT_LEAST_ONE, check_ranges
from polyfed.data.media import Extractor
from polyfed.data.media.embedding import ImageKind, TextKind, image_extractor, text_extractor
from polyfed.data.sources.media_set import MediaSet, check_modalities


@dataclass(frozen=True, kw_only=True)
class ImageText(MediaSet):
    """A data set of images with texts. Frozen models embed them, or a recipe's encoders read pixels and tokens.

    Attributes:
        path: The data set's folder, or a folder of prepared features.
        cache: Folder for extracted features, by default `$XDG_CACHE_HOME/polyfed` or `~/.cache/polyfed`.
        modalities: "image", "text".
        image: "embedding" (a vector that `image_model` computes from the image) or "pixels" (the image itself, with the
            shape (3, size, size), for the encoders `resnet18` and `hf`).
        image_model: Folder of the model, or its name in the hub's cache. MobileNetV2 gives 1280 numbers.
        size: Height and width of the image.
        text: "embedding" (a vector that `text_model` computes from the text) or "tokens" (the numbers of 64 tokens, for
            the encoder `hf`).
        text_model: Folder of the model, or its name in the hub's cache. DistilBERT gives 768 numbers.
    """

    modalities: tuple[str, ...] = ("image", "text")
    image: ImageKind = "embedding"
    image_model: str = "google/mobilenet_v2_1.0_224"
    size: Annotated[int, AT_LEAST_ONE] = 224
    text: TextKind = "embedding"
    text_model: str = "distilbert-base-uncased"

    def __post_init__(self) -> None:
        check_modalities(self.modalities, ("image", "text"))
        check_ranges("[data]", self)

    @override
    def extractors(self) -> dict[str, Extractor]:
        every: dict[str, Extractor] = {
            "image": image_extractor(self.image, self.image_model, self.size),
            "text": text_extractor(self.text, self.text_model),
        }
        return {name: every[name] for name in self.modalities}
