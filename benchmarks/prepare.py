"""Files per second of `polyfed data prepare`, and of a bare loop with the same libraries, on generated media.

The loop reads a file, computes the feature and saves it, and does nothing else: no hash, no cache, no manifest.
`python benchmarks/prepare.py [FILES]`
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import scipy.signal
import soundfile
import torch
from PIL import Image

from polyfed.data.features.extraction import Extraction
from polyfed.data.features.listing import Listing, Sample
from polyfed.data.media import Clip, Extractor, Frames, LogSpectrogram
from polyfed.data.media import Image as ImageFeature

SIZE = 224


def make_sound(path: Path, seed: int) -> None:
    wave = np.random.default_rng(seed).normal(size=40_000).clip(-4, 4) / 5
    soundfile.write(path, wave, 16_000, "PCM_16")


def make_image(path: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((640, 480)).save(path)


def make_video(path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        track = container.add_stream("mpeg4", rate=25)
        track.width, track.height, track.pix_fmt = 320, 240, "yuv420p"
        for _ in range(50):
            pixels = draw.integers(0, 255, (6, 8, 3), dtype=np.uint8).repeat(40, 0).repeat(40, 1)
            container.mux(track.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(track.encode())


def bare_sound(path: Path) -> np.ndarray:
    wave, rate = soundfile.read(path, dtype="float32")
    wave = np.tile(wave, 3)[:48_000].clip(-1, 1)
    _, _, power = scipy.signal.spectrogram(wave, rate, nperseg=512, noverlap=353)
    logs = np.log(power + 1e-7)
    return (logs - logs.mean()) / (logs.std() + 1e-9)


def bare_image(path: Path) -> np.ndarray:
    image = Image.open(path).convert("RGB")
    image = image.resize((341, 256), Image.Resampling.BILINEAR).crop((58, 16, 58 + SIZE, 16 + SIZE))
    return np.asarray(image).transpose(2, 0, 1)


def bare_video(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        frames = [frame for place, frame in enumerate(container.decode(video=0)) if place in (8, 25, 41)]
        images = [frame.to_image().resize((SIZE, SIZE), Image.Resampling.BILINEAR) for frame in frames]
    return np.stack([np.asarray(image).transpose(2, 0, 1) for image in images], 1)


CASES: dict[str, tuple[str, Callable[[Path, int], None], Callable[[Path], np.ndarray], Extractor]] = {
    "sound, spectrogram 257 x 299": ("wav", make_sound, bare_sound, LogSpectrogram()),
    "image, 224 x 224": ("jpg", make_image, bare_image, ImageFeature(size=SIZE)),
    "video of 2 s, 3 frames": ("mp4", make_video, bare_video, Frames(count=3, size=SIZE)),
}


def cost(num: int, call: Callable[[], object]) -> str:
    """Files per second, and milliseconds of processor time per file, which other work on the machine disturbs less."""
    began, busy = time.perf_counter(), time.process_time()
    call()
    wall, busy = time.perf_counter() - began, time.process_time() - busy
    return f"{num / wall:.0f} ({1000 * busy / num:.1f})"


def measure(name: str, num: int, root: Path) -> list[str]:
    """Cost of the bare loop, of preparing with 1 worker and with 2, and of preparing with all features cached."""
    suffix, make, bare, extractor = CASES[name]
    files = [root / f"{i}.{suffix}" for i in range(num)]
    for seed, file in enumerate(files):
        make(file, seed)
    listing = Listing([Sample(file.stem, 0, {"x": Clip.at(file)}) for file in files], ("one",))

    def loop() -> None:
        for file in files:
            np.save(root / f"{file.stem}.npy", bare(file))

    def prepared(folder: str, workers: int) -> Callable[[], object]:
        (root / folder).mkdir(exist_ok=True)
        return lambda: Extraction(listing, {"x": extractor}, root / folder, workers).run("benchmark", {})

    calls = (loop, prepared("one", 1), prepared("two", 2), prepared("two", 2))
    return [cost(num, call) for call in calls]


def main() -> None:
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    torch.set_num_threads(1)
    print(f"| {num} files | bare loop, files/s (CPU ms per file) | prepare, 1 worker | 2 workers | all cached |")
    print("|---|---|---|---|---|")
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, num, Path(folder))
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
