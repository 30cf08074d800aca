"""A grid after BLOSSOM on UCI-HAR: which blocks are shared, which modalities are missing, equal data or not.

BLOSSOM (Abdelmoniem et al., "Block-wise Federated Learning Over Shared and Sparse Observed Modalities", IJCNN 2026,
arXiv:2603.27552) shares some blocks of a model and keeps the others private. It reports a mean gain over sharing
everything of 18.7 % where modalities are incomplete, and of 37.7 % where every client has one modality.

Each cell is a run of FedAvg. Rows: everything is shared, the encoders only (private heads), the heads only (private
encoders), nothing (`local`). Columns: every client has both modalities; 40 % lack `acc` and another 40 % lack `gyro`;
every client has one modality. Training rows are dealt evenly, or by a Dirichlet distribution over the labels. The score
is the mean over clients of the accuracy on the client's own test rows, in percent, after the last round. The models are
small (an MLP for each modality), so the numbers are not those of the paper.

    nice -n 19 python benchmarks/blossom.py [--seeds 1 2 3 4 5] [--rounds 30] [--minutes 20] [--out runs/blossom]

A run that has ended is not repeated and an interrupted one continues, so the same command fills the table up. The table
is printed at the end, also if the minutes are over before the grid is full.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polyfed
from polyfed.experiment.recipe import parse_recipe

DATA = Path(__file__).resolve().parents[1] / "shared" / "data" / "ucihar" / "ucihar.npz"
CLIENTS = 20
SHARING = {"all": [], "encoders": ["head"], "heads": ["encoders"], "nothing": None}
"""Which blocks are private, for each row of the table; None is the algorithm `local`."""

HOLDINGS = {
    "complete": [["acc", "gyro"]],
    "incomplete": [["gyro"]] * 8 + [["acc"]] * 8 + [["acc", "gyro"]] * 4,
    "exclusive": [["acc"], ["gyro"]],
}
PARTITIONS = {"equal": {"partition": "iid"}, "skewed": {"partition": "dirichlet", "alpha": 0.5}}


@dataclass(frozen=True)
class Cell:
    """A cell of the grid, for one seed."""

    partition: str
    holdings: str
    sharing: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.partition}-{self.holdings}-{self.sharing}-{self.seed}"

    def recipe(self, data: Path, rounds: int) -> polyfed.Recipe:
        private = SHARING[self.sharing]
        alone, averaged = {"name": "local", "global_test": "never"}, {"name": "fedavg", "private": private}
        return parse_recipe(
            {
                "seed": self.seed,
                "rounds": rounds,
                "data": {"name": "ucihar", "path": str(data), "modalities": ["acc", "gyro"], "normalise": "window"},
                "clients": {
                    "num": CLIENTS,
                    "holdings": HOLDINGS[self.holdings],
                    "personal_test": 0.2,
                    **PARTITIONS[self.partition],
                },
                "model": {
                    "fusion": "sum",
                    "embedding": 32,
                    "encoders": {m: {"kind": "mlp", "hidden": [64]} for m in ("acc", "gyro")},
                },
                "train": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.9},
                "algorithm": alone if private is None else averaged,
                "evaluate": {"every": 0},
                "engine": {"name": "vectorised", "threads": 1},
            },
            name=self.name,
        )


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """All cells, seed by seed, so that an early end leaves whole tables."""
    for seed, partition, holdings, sharing in itertools.product(seeds, PARTITIONS, HOLDINGS, SHARING):
        yield Cell(partition, holdings, sharing, seed)


def score(cell: Cell, out: Path, data: Path, rounds: int) -> float:
    """The mean personal accuracy of a cell in percent; it runs, goes on with its run, or reads the result."""
    folder = out / f"{cell.name}-{rounds}"
    result = folder / "result.json"
    if not result.exists():
        polyfed.run(cell.recipe(data, rounds), folder, resume=(folder / "recipe.toml").exists())
    return 100 * float(json.loads(result.read_text())["metrics"]["personal"]["mean"])


def table(scores: dict[Cell, float]) -> Iterator[str]:
    """The table. The last column is the difference of private heads to sharing everything, on the same seeds."""
    yield "| rows | modalities | " + " | ".join(f"shared: {name}" for name in SHARING) + " | private heads less all |"
    yield "|---|---|" + "---|" * (len(SHARING) + 1)
    for partition, holdings in itertools.product(PARTITIONS, HOLDINGS):
        own = {c: s for c, s in scores.items() if (c.partition, c.holdings) == (partition, holdings)}
        by = {name: {c.seed: s for c, s in own.items() if c.sharing == name} for name in SHARING}
        both = [by["encoders"][seed] - by["all"][seed] for seed in by["encoders"] if seed in by["all"]]
        columns = [partition, holdings, *(spread(list(one.values())) for one in by.values()), spread(both)]
        yield f"| {' | '.join(columns)} |"


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def main(seeds: Sequence[int], rounds: int, minutes: float, out: Path, data: Path) -> None:
    end = time.monotonic() + 60 * minutes
    scores: dict[Cell, float] = {}
    for cell in cells(seeds):
        if time.monotonic() > end:
            print(f"{minutes:g} minutes are over, {len(scores)} cells are done; the same command goes on")
            break
        scores[cell] = score(cell, out, data, rounds)
        print(f"{cell.name}: {scores[cell]:.1f}", flush=True)
    print("\n".join(table(scores)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=20.0, help="start no further run after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/blossom"), help="folder of the runs' folders")
    parser.add_argument("--data", type=Path, default=DATA, help="ucihar.npz")
    given = parser.parse_args()
    main(given.seeds, given.rounds, given.minutes, given.out, given.data)
