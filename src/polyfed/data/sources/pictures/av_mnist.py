"""av-mnist: an MNIST image and a spoken digit, paired on the digit."""

import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from polyfed.core import keys
from polyfed.core.errors import DataError
from polyfed.core.option_checks import FRACTION, check_ranges
from polyfed.data.column_scaling import standardised
from polyfed.data.columns import TEST, TRAIN, Column, Columns
from polyfed.data.population.splits import subset
from polyfed.data.reading.array_files import Arrays, existing
from polyfed.data.sources.base import Facts, Source
from polyfed.data.sources.pictures.mnist import LAYOUT, LICENCE, OBTAIN, read_mnist

RATE = 8000  # Hz, of every recording
SAMPLES = 8192  # a recording is padded with zeros or cut to this length; 17 of 3,000 are longer
TEST_TAKES = 5  # recordings 0..4 of every speaker and digit are the official test set of the recordings
_FRAME, _HOP, _BANDS = 256, 128, 32


@dataclass(frozen=True, kw_only=True)
class AvMnist(Source):
    """Pairs of a written and a spoken digit: `image` (1, 28, 28), and `audio` (1, 32, 64), a log-mel (1, band, frame).

    Every MNIST image gets a recording of its digit from the Free Spoken Digit Dataset. Training images get recordings
    of the official training split, and test images get recordings of the official test split. The recording is drawn
    uniformly. It is stored once, even if several images share it. Each of the six speakers is a natural client. They
    are numbered from 0 to 5 in alphabetical order of their names. Both modalities are standardised with training
    statistics. This is not the AV-MNIST of Vielzeuf et al. (2018), whose images are reduced by PCA and whose sounds are
    noisy. Do not compare results on one of these two data sets with results on the other.

    Attributes:
        mnist: MNIST, as an .npz or a folder; `polyfed data av-mnist` prints the layout.
        fsdd: Folder with files `<digit>_<speaker>_<take>.wav`, or an .npz file with `label`, `client`, `split`, and
            `logmel` or `audio` (int16, 8 kHz).
        subset: Share of the images of each digit that is kept in each split of MNIST, drawn at random.
        seed: Seed of the pairs and the subset, the same in all runs.
    """

    mnist: str
    fsdd: str
    subset: Annotated[float, FRACTION] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges("[data]", self)

    @override
    def load(self) -> Columns:
        image, label, split = read_mnist(self.mnist)
        rows = subset(label, split, self.subset, keys.key(self.seed, "av-mnist", "subset"))
        spoken, digit, speaker, spoken_split = read_fsdd(self.fsdd)
        partner = pairs(label, split, digit, spoken_split, keys.key(self.seed, "av-mnist", "pairs"))[rows]
        return standardised(
            Columns(
                name="av-mnist",
                modalities={
                    "image": Column(image[rows, None]),
                    "audio": Column(spoken[:, None], index=partner),
                },
                label=label[rows],
                num_classes=10,
                split=split[rows],
                ids=rows,
                class_names=tuple("0123456789"),
                client=speaker[partner],
            )
        )

    @classmethod
    def describe(cls) -> Facts:
        """Licence, origin and layout, as `polyfed data av-mnist` prints them."""
        return Facts(
            title="written and spoken digits paired on the digit; six speakers are the natural clients",
            modalities={"image": "(1, 28, 28)", "audio": "(1, 32, 64) log-mel (band, frame)"},
            licence=f"{LICENCE}; Free Spoken Digit Dataset: CC BY-SA 4.0",
            obtain=f"{OBTAIN}; github.com/Jakobovski/free-spoken-digit-dataset, folder recordings",
            layout=f"MNIST: {LAYOUT}. FSDD: folder of <digit>_<speaker>_<take>.wav, or an .npz",
        )


def pairs(label: Tensor, split: Tensor, digit: Tensor, spoken_split: Tensor, key: int) -> Tensor:
    """For every image, draw a recording of the same digit and the same split uniformly at random.

    Args:
        label: Digits of the N images, int64 (N,).
        split: Split codes of the images, int8 (N,).
        digit: Digits of the U recordings, int64 (U,).
        spoken_split: Split codes of the recordings, int8 (U,).
        key: Key of the random numbers.

    Returns:
        Number of the recording for each image, int64 (N,).

    Raises:
        DataError: In one of the splits, a digit has images but no recording.
    """
    partner = torch.full_like(label, -1)
    draw = keys.uniform(key, len(label)).double()
    for code in (TRAIN, TEST):
        for number in range(10):
            mine = (label == number) & (split == code)
            pool = ((digit == number) & (spoken_split == code)).nonzero()[:, 0]
            if mine.any() and len(pool) == 0:
                half = "training" if code == TRAIN else "test"
                raise DataError(f"av-mnist: no {half} recording of digit {number} to pair with; add some to data.fsdd")
            partner[mine] = pool[(draw[mine] * len(pool)).long()]
    return partner


def read_fsdd(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-mels float32 (U, 32, 64), digits and speakers int64 (U,), and split codes int8 (U,) of the recordings."""
    result = existing(path, "FSDD")
    if result.is_dir() and (result / "fsdd.npz").exists():
        result = result / "fsdd.npz"
    if result.is_dir():
        return _from_recordings(result)
    arrays = Arrays(result)
    spoken = arrays.features("logmel") if "logmel" in arrays else log_mel(arrays.features("audio"))
    if tuple(spoken.shape[1:]) != (_BANDS, 64):
        raise DataError(f"'{result}': log-mels of shape {tuple(spoken.shape[1:])}, expected ({_BANDS}, 64)")
    digit, speaker, split = (arrays.integers(name) for name in ("label", "client", "split"))
    return spoken, digit, speaker, split.to(torch.int8)


def log_mel(audio: Tensor) -> Tensor:
    """Log-mels: log(1e-6 + power) in 32 mel bands from 0 to 4 kHz.

    The sound is padded with 64 zeros on each side. A frame of 256 samples, weighted by a symmetric Hann window, starts
    at every 128th sample.

    Args:
        audio: int16 (U, 8192) at 8 kHz.

    Returns:
        float32 (U, 32, 64).
    """
    wave_form = torch.nn.functional.pad(audio.to(torch.float32) / 32768.0, (64, 64))
    frames = wave_form.unfold(1, _FRAME, _HOP) * torch.hann_window(_FRAME, periodic=False)
    power = torch.fft.rfft(frames).abs().square()
    return torch.log(1e-6 + power @ _mel_filters().T).transpose(1, 2).contiguous()


def _mel_filters() -> Tensor:
    """Mel filters, triangles of height 1, evenly spaced on 2595 log10(1 + f / 700): float32 (32, 129)."""
    top = 2595.0 * np.log10(1.0 + RATE / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, _BANDS + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, RATE / 2, _FRAME // 2 + 1)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - low) / (mid - low), (high - bins) / (high - mid)
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling))).float()


def _from_recordings(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    files = sorted(folder.glob("*.wav"))
    if not files:
        raise DataError(f"'{folder}' holds no .wav files; data.fsdd is the folder 'recordings' of the data set")
    names = [_fields(file) for file in files]
    speakers = sorted({speaker for _, speaker, _ in names})
    audio = torch.stack([_samples(file) for file in files])
    spoken = torch.cat([log_mel(part) for part in torch.split(audio, 256)])
    digit = torch.tensor([number for number, _, _ in names])
    speaker = torch.tensor([speakers.index(who) for _, who, _ in names])
    split = torch.tensor([TEST if take < TEST_TAKES else TRAIN for _, _, take in names], dtype=torch.int8)
    return spoken, digit, speaker, split


def _fields(file: Path) -> tuple[int, str, int]:
    parts = file.stem.split("_")
    if len(parts) != 3 or not (parts[0].isdigit() and parts[2].isdigit()):
        raise DataError(f"'{file}': the name must be <digit>_<speaker>_<take>.wav")
    return int(parts[0]), parts[1], int(parts[2])


def _samples(file: Path) -> Tensor:
    try:
        with wave.open(str(file)) as reader:
            form = (reader.getnchannels(), reader.getsampwidth(), reader.getframerate())
            raw = reader.readframes(SAMPLES)
    except (wave.Error, EOFError) as error:
        raise DataError(f"'{file}' is not a whole wav file ({error}). Fetch it again") from error
    if form != (1, 2, RATE):
        raise DataError(f"'{file}': {form[0]} channels of {8 * form[1]} bit at {form[2]} Hz; expected 1, 16, {RATE}")
    result = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16))
    return torch.nn.functional.pad(result, (0, SAMPLES - len(result)))
