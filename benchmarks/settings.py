"""The settings of the speed comparison, and their data: plain NumPy, so that every environment can read it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Setting:
    """One size of federation: two modalities of vectors, one two-layer encoder each, one linear head over both.

    Attributes:
        clients: in the population.
        cohort: clients a round.
        rows: samples of each client.
        features: width of the two modalities.
        hidden: width of each encoder's hidden layer.
        embedding: width of each encoder's output.
        classes: of the label.
        data: name of the setting whose data this one uses; empty for its own data.
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

    @property
    def num_parameters(self) -> int:
        """What the model must have; every program checks it."""
        encoders = [f * self.hidden + self.hidden + (self.hidden + 1) * self.embedding for f in self.features]
        return sum(encoders) + (2 * self.embedding + 1) * self.classes


FOOD = Setting("food", 200, 20, 288, (1280, 768), 128, 64, 101)
SMALL = Setting("small", 500, 50, 96, (74, 300), 32, 16, 7)

COHORTS = [replace(SMALL, name=f"small-{n}-clients", cohort=n, data="small") for n in (5, 20, 50, 200, 500)]
"""`small` with other numbers of clients in a round."""

SIZES = [
    replace(SMALL, name=f"small-{hidden}-hidden", hidden=hidden, embedding=hidden // 2, data="small")
    for hidden in (8, 32, 128, 512)
]
"""`small` with other sizes of the model."""

SETTINGS = {s.name: s for s in (FOOD, SMALL, *COHORTS, *SIZES)}


def arrays(setting: Setting, folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Features of the two modalities, float32 (clients * rows, F), and labels; created once and kept in `folder`.

    Client k holds rows k * rows to (k + 1) * rows. Labels depend on the features, so that training has a slope.
    """
    path = folder / f"{setting.data or setting.name}-{setting.clients}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.Generator(np.random.Philox(7))
        n = setting.clients * setting.rows
        x = [draw.standard_normal((n, width), dtype=np.float32) for width in setting.features]
        maps = [draw.standard_normal((width, setting.classes), dtype=np.float32) for width in setting.features]
        np.savez(path, a=x[0], b=x[1], y=(x[0] @ maps[0] + x[1] @ maps[1]).argmax(1))
    with np.load(path) as file:
        return [file["a"], file["b"]], file["y"].astype(np.int64)
