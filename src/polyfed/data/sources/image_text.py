"""Base of the sets that pair an image with a text."""

from dataclasses import dataclass
from typing import Annotated

from polyfed.core.schema import AT_LEAST_ONE, check_ranges
from polyfed.data.media import Extractor
from polyfed.data.media.embedding import ImageKind, TextKind, image_extractor, text_extractor
from polyfed.data.sources.media_set import MediaSet, check_modalities


@dataclass(frozen=True, kw_only=True)
class ImageText(MediaSet):
    """An image and a text a sample, each embedded by a frozen model, or raw for an encoder of the recipe.

    Attributes:
        path: see `MediaSet`.
        cache: see `MediaSet`.
        modalities: "image", "text".
        image: "embedding" by `image_model`; "pixels" (3, size, size) for `resnet18` or `hf`.
        image_model: folder or name in the hub's cache; MobileNetV2 gives 1280 entries (6.3).
        size: height and width of the image.
        text: "embedding" by `text_model`; "tokens" (64,) for `hf`.
        text_model: folder or name in the hub's cache; DistilBERT gives 768 entries (6.3).
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

    def extractors(self) -> dict[str, Extractor]:
        """See `MediaSet.extractors`."""
        every: dict[str, Extractor] = {
            "image": image_extractor(self.image, self.image_model, self.size),
            "text": text_extractor(self.text, self.text_model),
        }
        return {name: every[name] for name in self.modalities}
