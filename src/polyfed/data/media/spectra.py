"""Spectrograms and log-mels of sound. `tests/data/test_media.py` checks them against SciPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from polyfed.data.media.audio import read_wave, tiled
from polyfed.data.media.clip import Clip, PlainExtractor

Floats = NDArray[np.float32]

# Settings of CMSFed's and FMML's released code, see docs/data.md
_WINDOW = 512  # samples, which give 257 frequencies
_FLOOR = 1e-7  # added before the logarithm
_NORM_EPS = 1e-9  # added to the deviation of a clip


@dataclass(frozen=True, kw_only=True)
class LogSpectrogram(PlainExtractor):
    """CMSFed's log-spectrogram, float32: (1, 257, 299) for a sound of 3 s, (1, 257, 1004) for 10 s.

    The feature is the power spectral density per Hz of windows of 512 samples, one every 159 samples, without padding.
    The mean of each window is subtracted, and a Tukey window with a taper of a quarter is applied. These are the
    defaults of SciPy's `spectrogram`, which the released code calls. The next steps are log(x + 1e-7), and then (x -
    mean) / (deviation + 1e-9) over the clip.

    Attributes:
        seconds: Length that every clip is tiled and cut to.
        rate: Sampling rate in Hz.
        hop: Samples from one window to the next.
    """

    seconds: float = 3.0
    rate: int = 16_000
    hop: int = 159

    def __call__(self, clip: Clip) -> Floats:
        """Features of a sound, or of the sound of a video.

        Raises:
            DataError: The file cannot be read as sound, or has no sound in this part.
        """
        wave = tiled(read_wave(clip, self.rate), round(self.seconds * self.rate))
        frames = np.lib.stride_tricks.sliding_window_view(wave, _WINDOW)[:: self.hop]
        window = _tukey(_WINDOW, 0.25).astype(np.float32)
        spectrum = _rfft((frames - frames.mean(1, keepdims=True)) * window).T
        power = (spectrum.real**2 + spectrum.imag**2) / np.float32(self.rate * (window.astype(np.float64) ** 2).sum())
        power[1:-1] *= 2.0  # one-sided: the negative frequencies count too
        logs = np.log(power + np.float32(_FLOOR))
        shifted: Floats = ((logs - logs.mean()) / (logs.std() + _NORM_EPS)).astype(np.float32, copy=False)
        return shifted[None]


@dataclass(frozen=True, kw_only=True)
class StftMagnitude(PlainExtractor):
    """FMML's log-spectrogram, float32 (1, 257, 188) for 3 s at 22,050 Hz: log(|STFT| + 1e-7), not normalised.

    The windows are periodic Hann windows of 512 samples, centred on every 353rd sample. Reflection padding adds 256
    samples at both ends of the sound, as librosa does by default up to version 0.9. We infer from release dates that
    FMML used such a version of librosa.

    Attributes:
        seconds: Length that every clip is tiled and cut to.
        rate: Sampling rate in Hz.
        hop: Samples from one window to the next.
    """

    seconds: float = 3.0
    rate: int = 22_050
    hop: int = 353

    def __call__(self, clip: Clip) -> Floats:
        """Features of a sound, or of the sound of a video.

        Raises:
            DataError: The file cannot be read as sound, or has no sound in this part.
        """
        wave = tiled(read_wave(clip, self.rate), round(self.seconds * self.rate)).astype(np.float64)
        padded = np.pad(wave, _WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[:: self.hop]
        magnitude = np.abs(_rfft(frames * _hann(_WINDOW)))
        logs: Floats = np.log(magnitude.T + _FLOOR).astype(np.float32)
        return logs[None]


@dataclass(frozen=True, kw_only=True)
class LogMel(PlainExtractor):
    """Log-mel frames, float32 (frames, bands): 25 ms Hamming windows, one every 10 ms at 16 kHz, 80 bands (PartialFL).

    A shorter clip is padded with frames of zeros at the end, which encoders that use masks ignore. A longer clip is
    cut. If `per_speaker` is set, every band is standardised over all frames of its speaker, without padding: (x - mean)
    / (deviation + 1e-5).

    Attributes:
        frames: Length of every clip, in windows.
        bands: Mel bands between 0 and half the rate, evenly spaced on the scale 2595 log10(1 + f / 700).
        rate: Sampling rate in Hz.
        per_speaker: Whether to standardise over all clips of the speaker, who is the natural client.
    """

    frames: int = 600
    bands: int = 80
    rate: int = 16_000
    per_speaker: bool = True

    @property
    @override
    def by_client(self) -> bool:
        return self.per_speaker

    def __call__(self, clip: Clip) -> Floats:
        """Features of a sound, or of the sound of a video.

        Raises:
            DataError: The file cannot be read as sound, or has no sound in this part.
        """
        wave = read_wave(clip, self.rate).astype(np.float64)
        size, hop = self.rate // 40, self.rate // 100  # 25 and 10 ms
        wave = np.pad(wave, (0, max(0, size - len(wave))))
        frames = np.lib.stride_tricks.sliding_window_view(wave, size)[::hop][: self.frames]
        points = 1 << (size - 1).bit_length()
        power = np.abs(np.fft.rfft(frames * np.hamming(size), points)) ** 2
        logs = np.log(power @ mel_filters(self.bands, self.rate, points).T + 1e-10)
        filled = np.zeros((self.frames, self.bands), np.float32)
        filled[: len(logs)] = logs
        return filled


def mel_filters(bands: int, rate: int, points: int) -> NDArray[np.float64]:
    """Mel filters, triangles of height 1: float64 (bands, points // 2 + 1).

    Args:
        bands: Number of filters.
        rate: Sampling rate in Hz.
        points: Length of the Fourier transform.
    """
    top = 2595.0 * np.log10(1.0 + rate / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, bands + 2) / 2595.0) - 1.0)
    bins = np.linspace(0.0, rate / 2, points // 2 + 1)
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles: NDArray[np.float64] = np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid))
    return np.maximum(0.0, triangles)


def _rfft(frames: NDArray[Any]) -> NDArray[Any]:
    """Spectra (frames, size // 2 + 1) of real frames (frames, size), in the same precision; much faster than NumPy."""
    spectra: NDArray[Any] = torch.fft.rfft(torch.from_numpy(frames)).numpy()
    return spectra


def _tukey(size: int, taper: float) -> NDArray[np.float64]:
    """The periodic Tukey window (size,): flat in the middle, with cosine flanks over `taper` of its length."""
    place = np.arange(size) / size
    flank = np.minimum(np.minimum(place, 1.0 - place) * 2.0 / taper, 1.0)
    window: NDArray[np.float64] = 0.5 * (1.0 - np.cos(np.pi * flank))
    return window


def _hann(size: int) -> NDArray[np.float64]:
    window: NDArray[np.float64] = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size)
    return window
