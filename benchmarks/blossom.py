"""A grid after BLOSSOM on UCI-HAR and AV-MNIST: shared blocks, missing modalities, and equal or skewed data.

BLOSSOM (M R, Chandwani, Abdelmoniem, Paul, "Block-wise Federated Learning Over Shared and Sparse Observed Modalities",
IJCNN 2026, arXiv:2603.27552) shares some blocks of a model and keeps the others private. It reports a mean gain over
sharing everything of 18.7 % where modalities are incomplete, and of 37.7 % where every client has one modality.

Each cell is a run of FedAvg. What is shared: everything; all but the last layer; the encoders; the layers after the
encoders; nothing (`local`). Holdings: every client has both modalities; 40 % lack the first one and another 40 % lack
the second one; every client has one modality. An absent modality counts as a zero embedding, or its encoder, which
other clients trained, reads a zero sample. Training rows are dealt evenly, or by a Dirichlet distribution over the
labels. The score is the mean over clients of the accuracy on the client's own test rows, in percent, after the last
round. The models are small (an MLP for each modality), so the numbers are not those of the paper.

    nice -n 19 python benchmarks/blossom.py [--sets ucihar] [--partitions equal] [--shared all ...] [--minutes 20]

A run that has ended is not repeated and an interrupted one continues, so the same command fills the table up. The table
is printed at the end, also if the minutes are over before the grid is full.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polyfed
from polyfed.experiment.recipes.recipe import parse_recipe

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CLIENTS = 20


@dataclass(frozen=True)
class DataSet:
    """A data set: its section [data], with paths below `--data`, and its two modalities."""

    section: dict[str, Any]
    modalities: tuple[str, str]
    paths: dict[str, str]

    def data(self, folder: Path) -> dict[str, Any]:
        """The section [data]."""
        return self.section | {key: str(folder / path) for key, path in self.paths.items()}


SETS = {
    "ucihar": DataSet(
        {"name": "ucihar", "modalities": ["acc", "gyro"], "normalise": "window"},
        ("acc", "gyro"),
        {"path": "ucihar/ucihar.npz"},
    ),
    "av-mnist": DataSet(
        {"name": "av-mnist", "subset": 0.1}, ("image", "audio"), {"mnist": "mnist/mnist.npz", "fsdd": "fsdd"}
    ),
}
SHARING = {
    "all": [],
    "all but the classifier": ["classifier"],
    "encoders": ["head"],
    "heads": ["encoders"],
    "nothing": None,
}
"""Which blocks are private, for each column of the table; None is the algorithm `local`."""

ABSENT = {"embedding": "zero", "input": "input"}
"""What is zero where a modality is absent, and `[model] absent`."""

HOLDINGS = {"complete": [(0, 1)], "incomplete": [(1,)] * 8 + [(0,)] * 8 + [(0, 1)] * 4, "exclusive": [(0,), (1,)]}
"""The modalities of the clients, in turn, for each column of the table."""

PARTITIONS = {"equal": {"partition": "iid"}, "skewed": {"partition": "dirichlet", "alpha": 0.5}}


@dataclass(frozen=True)
class Cell:
    """A cell of the grid, for one seed."""

    set: str
    partition: str
    holdings: str
    sharing: str
    absent: str
    seed: int

    @property
    def name(self) -> str:
        words = self.set, self.partition, self.holdings, self.sharing.replace(" ", "-"), self.absent, self.seed
        return "-".join(map(str, words))

    @property
    def run(self) -> "Cell":
        """The cell whose run this one shares: where nothing is absent or sent, a zero input is a zero embedding."""
        same = self.holdings == "complete" or SHARING[self.sharing] is None
        return replace(self, absent="embedding") if same else self

    def recipe(self, data: Path, rounds: int) -> polyfed.Recipe:
        private, source = SHARING[self.sharing], SETS[self.set]
        alone, averaged = {"name": "local", "global_test": "never"}, {"name": "fedavg", "private": private}
        return parse_recipe(
            {
                "seed": self.seed,
                "rounds": rounds,
                "data": source.data(data),
                "clients": {
                    "num": CLIENTS,
                    "holdings": [[source.modalities[i] for i in held] for held in HOLDINGS[self.holdings]],
                    "personal_test": 0.2,
                    **PARTITIONS[self.partition],
                },
                "model": {
                    "fusion": "sum",
                    "embedding": 32,
                    "head": [32],
                    "absent": ABSENT[self.absent],
                    "encoders": {m: {"kind": "mlp", "hidden": [64]} for m in source.modalities},
                },
                "train": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
                "algorithm": alone if private is None else averaged,
                "evaluate": {"every": 0},
                "engine": {"name": "vectorised", "threads": 1},
            },
            name=self.name,
        )


def cells(given: argparse.Namespace) -> Iterator[Cell]:
    """All cells, seed by seed, so that an early end leaves whole tables."""
    axes = given.partitions, given.sets, HOLDINGS, given.shared, ABSENT
    for seed, (partition, name, holdings, sharing, absent) in itertools.product(given.seeds, itertools.product(*axes)):
        yield Cell(name, partition, holdings, sharing, absent, seed)


def score(cell: Cell, out: Path, data: Path, rounds: int) -> float:
    """The mean personal accuracy of a cell in percent; it runs, goes on with its run, or reads the result."""
    folder = out / f"{cell.run.name}-{rounds}"
    result = folder / "result.json"
    if not result.exists():
        polyfed.run(cell.run.recipe(data, rounds), folder, resume=(folder / "recipe.toml").exists())
    return 100 * float(json.loads(result.read_text())["metrics"]["personal"]["mean"])


def table(name: str, scores: dict[Cell, float], shared: Sequence[str]) -> Iterator[str]:
    """The table of a set: scores, and for private blocks the gain over sharing everything, relative and in points."""
    yield f"### {name}\n"
    gains = [sharing for sharing in shared if sharing != "all" and SHARING[sharing] is not None]
    yield (
        f"| rows | modalities | zero | {' | '.join(shared)} | "
        f"{' | '.join(f'{sharing}: points (%)' for sharing in gains)} |"
    )
    yield "|---|---|---|" + "---:|" * (len(shared) + len(gains))
    for partition, holdings, absent in itertools.product(PARTITIONS, HOLDINGS, ABSENT):
        key = name, partition, holdings, absent
        own = {c: s for c, s in scores.items() if (c.set, c.partition, c.holdings, c.absent) == key}
        by = {sharing: {c.seed: s for c, s in own.items() if c.sharing == sharing} for sharing in shared}
        if not own:
            continue
        columns = [partition, holdings, absent, *(spread(list(one.values())) for one in by.values())]
        for sharing in gains:
            pairs = [(by[sharing][seed], by["all"][seed]) for seed in by[sharing] if seed in by["all"]]
            points, relative = [one - all_ for one, all_ in pairs], [100 * (one / all_ - 1) for one, all_ in pairs]
            columns.append(f"{spread(points, sign='+')} ({spread(relative, sign='+').partition(' ')[0]})")
        yield f"| {' | '.join(columns)} |"


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean and sample standard deviation."""
    if len(values) < 2:
        return f"{values[0]:{sign}.1f}" if values else "-"
    return f"{statistics.mean(values):{sign}.1f} ± {statistics.stdev(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=list(PARTITIONS))
    parser.add_argument("--shared", nargs="+", default=list(SHARING), choices=list(SHARING))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=20.0, help="start no further run after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/blossom"), help="folder of the runs' folders")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with ucihar, mnist and fsdd")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    scores: dict[Cell, float] = {}
    for cell in cells(given):
        if time.monotonic() > end:
            print(f"{given.minutes:g} minutes are over, {len(scores)} cells are done; the same command goes on")
            break
        scores[cell] = score(cell, given.out, given.data, given.rounds)
        print(f"{cell.name}: {scores[cell]:.1f}", flush=True)
    for name in given.sets:
        print("\n".join(["", *table(name, scores, given.shared)]))


if __name__ == "__main__":
    main()
