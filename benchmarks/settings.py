"""The settings of the speed comparison, and their data: plain NumPy, so that every environment can read it."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Setting:
    """One size of federation: two modalities, one encoder each, and one linear head over both embeddings.

    Attributes:
        clients: in the population.
        cohort: clients a round.
        rows: samples of each client.
        features: width of the two modalities.
        hidden: width of each encoder's hidden layer.
        embedding: width of each encoder's output.
        classes: of the label.
        data: name of the setting whose data this one uses; empty for its own data.
        encoder: `mlp` has two layers for vectors. `cnn4` and `conv-gru` are the encoders of the recipes fedavg-cg-mnist
            and fedavg-ucihar, without dropout.
        shapes: shape of a sample of each modality, for encoders that do not read vectors.
        warm_up: rounds of each program that are not counted. polyfed rewrites the steps from round 8 on with the six
            steps of `small`, and from round 11 on with the four steps of `ucihar`.
    """

    name: str
    clients: int
    cohort: int
    rows: int
    features: tuple[int, int]
    hidden: int
    embedding: int
    classes: int
    batch_size: int = 16
    lr: float = 0.1
    data: str = ""
    encoder: str = "mlp"
    shapes: tuple[tuple[int, ...], ...] = ()
    warm_up: int = 10

    @property
    def num_parameters(self) -> int:
        """What the model must have; every program checks it."""
        if self.encoder == "cnn4":
            encoders = [self._cnn4(channels) for channels, _, _ in self.shapes]
        elif self.encoder == "conv-gru":
            encoders = [self._conv_gru(width) for _, width in self.shapes]
        else:
            encoders = [f * self.hidden + self.hidden + (self.hidden + 1) * self.embedding for f in self.features]
        return sum(encoders) + (2 * self.embedding + 1) * self.classes

    def _cnn4(self, channels: int) -> int:
        convolutions = (25 * channels + 1) * 32 + (9 * 32 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 64
        return 2 * channels + convolutions + (64 + 1) * self.embedding

    def _conv_gru(self, width: int) -> int:
        convolutions = (5 * width + 1) * 32 + (5 * 32 + 1) * 64 + (5 * 64 + 1) * 128
        return convolutions + 3 * self.embedding * (128 + self.embedding + 2)


FOOD = Setting("food", 200, 20, 288, (1280, 768), 128, 64, 101)
SMALL = Setting("small", 500, 50, 96, (74, 300), 32, 16, 7)

CG_MNIST = Setting(
    "cg-mnist",
    *(12, 6, 128, (784, 2352), 0, 512, 10),
    batch_size=64,
    lr=0.01,
    encoder="cnn4",
    shapes=((1, 28, 28), (3, 28, 28)),
    warm_up=2,
)
UCIHAR = Setting(
    "ucihar",
    *(105, 10, 58, (384, 384), 0, 128, 6),
    lr=0.05,
    encoder="conv-gru",
    shapes=((128, 3), (128, 3)),
    warm_up=12,
)

CONVOLVED = ("cg-mnist", "ucihar")
"""Settings whose models convolve. pfl and Flower have no program for them."""

COHORTS = [replace(SMALL, name=f"small-{n}-clients", cohort=n, data="small") for n in (5, 20, 50, 200, 500)]
"""`small` with other numbers of clients in a round."""

SIZES = [
    replace(SMALL, name=f"small-{hidden}-hidden", hidden=hidden, embedding=hidden // 2, data="small")
    for hidden in (8, 32, 128, 512)
]
"""`small` with other sizes of the model."""

SETTINGS = {s.name: s for s in (FOOD, SMALL, CG_MNIST, UCIHAR, *COHORTS, *SIZES)}


def arrays(setting: Setting, folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Samples of the two modalities, float32 (clients * rows, *shape), and labels; created once and kept in `folder`.

    Client k holds rows k * rows to (k + 1) * rows. Labels depend on the features, so that training has a slope.
    """
    path = folder / f"{setting.data or setting.name}-{setting.clients}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.Generator(np.random.Philox(7))
        n = setting.clients * setting.rows
        x = [draw.standard_normal((n, width), dtype=np.float32) for width in setting.features]
        maps = [draw.standard_normal((width, setting.classes), dtype=np.float32) for width in setting.features]
        whole = path.with_suffix(f".{os.getpid()}.npz")  # renamed at the end: several programs may start at once
        np.savez(whole, a=x[0], b=x[1], y=(x[0] @ maps[0] + x[1] @ maps[1]).argmax(1))
        whole.replace(path)
    with np.load(path) as file:
        shapes = setting.shapes or tuple((width,) for width in setting.features)
        x = [file[name].reshape(-1, *shape) for name, shape in zip("ab", shapes, strict=True)]
        return x, file["y"].astype(np.int64)
