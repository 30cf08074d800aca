"""Extractors, which turn the media file of one sample into features. Each extractor turns a `Clip` into an array.

- `clip`: `Clip`, the place of one modality of one sample, and `Extractor`, the interface of an extractor.
- `audio`: reads sound, and resamples and tiles it.
- `spectra`: spectrograms and log-mels of sound.
- `image`: pixels of images.
- `video`: frames of videos.
- `embedding`: embeddings by pretrained models, and token ids.
- `signals`: windows of motion sensors, and electrocardiograms.
- `values`: numbers that need no extraction.

A new extractor is a frozen dataclass that extends `clip.PlainExtractor`. docs/data.md lists what each extractor
computes.
"""

from polyfed.data.media.clip import Clip, Extractor, Norm, Values
from polyfed.data.media.embedding import ImageEmbedding, TextEmbedding, Tokens
from polyfed.data.media.image import IMAGENET, Image
from polyfed.data.media.signals import Ecg, SensorWindow
from polyfed.data.media.spectra import LogMel, LogSpectrogram, StftMagnitude
from polyfed.data.media.video import Frames

__all__ = [
    "IMAGENET",
    "Clip",
    "Ecg",
    "Extractor",
    "Frames",
    "Image",
    "ImageEmbedding",
    "LogMel",
    "LogSpectrogram",
    "Norm",
    "SensorWindow",
    "StftMagnitude",
    "TextEmbedding",
    "Tokens",
    "Values",
]
