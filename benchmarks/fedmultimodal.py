"""UCI-HAR as FedMultimodal runs it: partition and cohorts come from fixed seeds of NumPy's legacy generator.

    python benchmarks/fedmultimodal.py [--alpha 0.1] [--fedopt] [--seeds 8 16 24] [--out DIR]

Prints test macro-F1 at the round with the best validation macro-F1, by seed, and mean and deviation. Data, model and
training are those of recipes/fedavg-ucihar.toml. This script adds two things that FedMultimodal's released code does.
Of each training subject a fifth of the windows is pooled for validation and the rest is cut into five shards, both
drawn after `numpy.random.seed(8)`. The cohort of round r (from 0) is drawn after `numpy.random.seed(r)`. All runs
therefore share one partition and one sequence of cohorts. FedMultimodal numbers a subject's windows as the original
text files have them; the .npz has another order within an activity, which moves windows between shards.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import polyfed
from polyfed.core.tree import Tree
from polyfed.data.columns import TRAIN, VALIDATION, Columns
from polyfed.data.sources.sensors.ucihar import UciHar
from polyfed.federation.federation import Federation
from polyfed.report.progress import Progress
from polyfed.selection import Selector

SEED = 8
RECIPE = Path(__file__).parents[1] / "recipes" / "fedavg-ucihar.toml"
PLAYED = (4, 3, 5, 0, 2, 1)
"""Order of the activities in a subject's recording: standing, sitting, lying, walking, walking down and up stairs."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Shards(UciHar):
    """UCI-HAR whose natural clients are the shards of the training subjects, in the order of their names as text.

    Attributes:
        alpha: concentration of a shard's labels.
        shards: of each subject.
        smallest: rows that every shard must have; the cut is redrawn until it does.
    """

    alpha: float = 5.0
    shards: int = 5
    smallest: int = 5

    def load(self) -> Columns:
        """Read the table, with the shards as natural clients."""
        columns = super().load()
        assert columns.client is not None
        subject, label, split = (t.numpy() for t in (columns.client, columns.label, columns.split.clone()))
        shards: dict[str, Rows] = {}
        for who in np.unique(subject[split == TRAIN]):
            windows = in_order_of_names(np.flatnonzero(subject == who), label)
            order = np.arange(len(windows))
            np.random.RandomState(SEED).shuffle(order)
            held_out = len(windows) // 5
            split[windows[order[:held_out]]] = VALIDATION
            rest = windows[order[held_out:]]
            shards |= {f"{who + 1}-{number}": rest[own] for number, own in enumerate(self.cut(label[rest]))}
        client = np.full(len(label), len(shards))  # the test subjects
        for number, name in enumerate(sorted(shards)):
            client[shards[name]] = number
        return replace(columns, split=torch.from_numpy(split), client=torch.from_numpy(client), split_personal=None)

    def cut(self, label: Rows) -> list[list[int]]:
        """Positions of each shard's rows; a shard that has its share of the rows gets none of the next class."""
        draw = np.random.RandomState(SEED)
        while True:
            held: list[list[int]] = [[] for _ in range(self.shards)]
            for number in np.unique(label):
                rows = np.flatnonzero(label == number)
                draw.shuffle(rows)
                share = draw.dirichlet(np.full(self.shards, self.alpha))
                share = share * [len(own) < len(label) / self.shards for own in held]
                bounds = (np.cumsum(share / share.sum()) * len(rows)).astype(int)[:-1]
                held = [own + more.tolist() for own, more in zip(held, np.split(rows, bounds), strict=True)]
            if min(map(len, held)) >= self.smallest:
                return held


@dataclass(frozen=True, kw_only=True)
class Cohorts(Selector):
    """Selects FedMultimodal's cohorts, which are the same in every run."""

    def choose(self, memory: Any, params: Tree, fed: Federation) -> tuple[list[int], Any]:
        """The clients of this round."""
        draw = np.random.RandomState(fed.round - 1)
        return sorted(draw.choice(len(fed.clients), self.size(fed.clients), replace=False).tolist()), memory


def in_order_of_names(windows: Rows, label: Rows) -> Rows:
    """A subject's windows numbered as recorded, in the order of these numbers as text: 0, 1, 10, 100, 101, ..."""
    recorded = windows[np.argsort(np.argsort(PLAYED)[label[windows]], kind="stable")]
    return recorded[np.argsort([str(number) for number in range(len(windows))])]


def recipe_of(alpha: float, fedopt: bool) -> polyfed.Recipe:
    """The recipe with this partition and these cohorts."""
    words = ["clients.shards=1", "clients.validation=0.0", "engine.name=sequential", "engine.threads=1"]
    if fedopt:
        words += ["server.optimiser=avgm", "server.lr=0.5"]
    recipe = polyfed.load_recipe(RECIPE, words)
    data = Shards(path=recipe.data.path, modalities=recipe.data.modalities, normalise="window", alpha=alpha)
    selector = Cohorts(participation=recipe.clients.participation)
    return replace(recipe, data=data, algorithm=replace(recipe.algorithm, selector=selector))  # type: ignore[call-arg]


def main(alpha: float, fedopt: bool, seeds: Sequence[int], out: Path) -> None:
    recipe, best, last = recipe_of(alpha, fedopt), list[float](), list[float]()
    name = f"{'fedopt' if fedopt else 'fedavg'}-{alpha:g}"
    for seed in seeds:
        with Progress() as progress:
            run = polyfed.run(replace(recipe, seed=seed), out / f"{name}-{seed}", listeners=[progress])
        best.append(100 * run.result["best"]["metrics"]["global"]["macro_f1"])
        last.append(100 * run.result["metrics"]["global"]["macro_f1"])
        print(f"{name} seed {seed}: {best[-1]:.1f} at round {run.result['best']['round']}, {last[-1]:.1f} at the end")
    if len(seeds) > 1:
        summary = [f"{statistics.mean(f1):.1f} +- {statistics.stdev(f1):.1f}" for f1 in (best, last)]
        print(f"{name}: {summary[0]} at the best round, {summary[1]} at the last, seeds {list(seeds)}")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The command-line options of this script and of fedmultimodal_plain.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alpha", type=float, default=5.0)
    parser.add_argument("--fedopt", action="store_true", help="the server's momentum 0.9 on half the mean update")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8, 16, 24])
    return parser


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/fedmultimodal"), help="folder of the runs' folders")
    options = parser.parse_args()
    main(options.alpha, options.fedopt, options.seeds, options.out)
