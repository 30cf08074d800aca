"""Reads sound files with soundfile and the sound of videos with PyAV, resamples the sound and tiles it."""

from math import gcd
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.data.media.clip import Clip, corrupt, optional

Wave = NDArray[np.float32]

_SOUND = (".wav", ".flac", ".ogg", ".mp3", ".aiff", "")


def read_wave(clip: Clip, rate: int) -> Wave:
    """Read the part of a clip that is used, as mono sound.

    Args:
        clip: A sound file or a video.
        rate: Sampling rate of the result in Hz.

    Returns:
        Samples in [-1, 1], float32 (samples,).

    Raises:
        DataError: The file cannot be decoded as audio, or the part of it that is used contains no audio.
    """
    is_sound = Path(clip.path or "").suffix.lower() in _SOUND
    wave, result = (_from_sound if is_sound else _from_video)(clip)
    first = round(clip.start * result)
    wave = wave[first : None if clip.end is None else round(clip.end * result)]
    if len(wave) == 0:
        raise corrupt(clip, "holds no sound" if clip.part == (0.0, None) else f"holds no sound in {clip.part} s")
    if not np.isfinite(wave).all():
        raise corrupt(clip, "holds samples that are not finite")
    return resampled(wave, result, rate)


def resampled(wave: Wave, found: int, rate: int) -> Wave:
    """Return the sound at another sampling rate, with a polyphase low-pass filter.

    Args:
        wave: float32 (samples,).
        found: Sampling rate of `wave` in Hz.
        rate: Sampling rate of the result in Hz.
    """
    if found == rate:
        return wave
    signal = optional("scipy.signal", "audio")
    common = gcd(found, rate)
    moved: Wave = signal.resample_poly(wave, rate // common, found // common).astype(np.float32)
    return moved


def tiled(wave: Wave, samples: int) -> Wave:
    """Repeat the sound if it is too short, cut it to `samples` samples, and clip it to [-1, 1].

    The releases of CMSFed and FMML repeat a clip three times and cut it. If a clip is shorter than a third of the
    length, this function repeats it more often. In the releases, the features of such a clip have another shape
    (docs/data.md).
    """
    return np.clip(np.tile(wave, -(-samples // len(wave)))[:samples], -1.0, 1.0)


def _from_sound(clip: Clip) -> tuple[Wave, int]:
    soundfile = optional("soundfile", "audio")
    try:
        wave, rate = soundfile.read(clip.stream(), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise corrupt(clip, f"cannot be read as sound ({error})") from error
    return wave.mean(1), int(rate)


def _from_video(clip: Clip) -> tuple[Wave, int]:
    av = optional("av", "video")
    try:
        with av.open(clip.stream()) as container:
            if not container.streams.audio:
                raise corrupt(clip, "has no sound track")
            rate = int(container.streams.audio[0].rate)
            mono = av.AudioResampler(format="flt", layout="mono", rate=rate)
            parts = [out for frame in container.decode(audio=0) for out in mono.resample(frame)]
            parts += mono.resample(None)
    except av.FFmpegError as error:
        raise corrupt(clip, f"cannot be decoded ({error})") from error
    waves = [part.to_ndarray().reshape(-1) for part in parts]
    return np.concatenate([*waves, np.zeros(0, np.float32)]).astype(np.float32, copy=False), rate
