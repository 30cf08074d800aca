"""The two settings of the speed comparison, and their data: plain NumPy, so that every environment can read it."""

from dataclasses import dataclass
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
        num_parameters: what the model must have; every program checks it.
    """

    name: str
    clients: int
    cohort: int
    rows: int
    features: tuple[int, int]
    hidden: int
    embedding: int
    classes: int
    num_parameters: int
    batch_size: int = 16
    lr: float = 0.1


SETTINGS = {
    s.name: s
    for s in (
        Setting("food", 200, 20, 288, (1280, 768), 128, 64, 101, 291_941),
        Setting("small", 500, 50, 96, (74, 300), 32, 16, 7, 13_319),
    )
}


def arrays(setting: Setting, folder: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Features of the two modalities, float32 (clients * rows, F), and labels; created once and kept in `folder`.

    Client k holds rows k * rows to (k + 1) * rows. Labels depend on the features, so that training has a slope.
    """
    path = folder / f"{setting.name}-{setting.clients}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.Generator(np.random.Philox(7))
        n = setting.clients * setting.rows
        x = [draw.standard_normal((n, width), dtype=np.float32) for width in setting.features]
        maps = [draw.standard_normal((width, setting.classes), dtype=np.float32) for width in setting.features]
        np.savez(path, a=x[0], b=x[1], y=(x[0] @ maps[0] + x[1] @ maps[1]).argmax(1))
    with np.load(path) as file:
        return [file["a"], file["b"]], file["y"].astype(np.int64)
