"""Accuracy against epsilon for methods that can honour [privacy]: the table of docs/results/differential-privacy.md.

    python benchmarks/privacy.py --seeds 1 2 3 --out runs/privacy

Each run has a folder of its own, and a run that has finished is not run again. `--seconds` ends the script in time. A
cell is the mean over the seeds of the accuracy in the last round, in per cent, with the median time of a round. If a
method cannot honour the section, the cell has the reason.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import polyfed
from polyfed.core.errors import PolyfedError

EPSILONS = ["none", "8", "4", "2", "1"]

MANY = ["clients.num=100", "clients.participation=1.0", "clients.min_size=2", "clients.validation=0.0", "rounds=40"]
"""Client-level privacy needs many clients: the noise of the sum is divided by their number."""

SETS = {
    "mfeat": ("fedavg-dp-mfeat.toml", "partialfl-mfeat.toml", ["train.optimiser=sgd", "train.lr=0.05"]),
    "cg-digits": ("fedavg-cg-digits.toml", "partialfl-cg-digits.toml", []),
}
"""Name -> the recipe of FedAvg, the recipe of PartialFL, and changes to the latter."""

METHODS = {
    "fedavg": [],
    "fedavg, per block": ['privacy.clip="per-block"'],
    "fedavg, local": ['privacy.noise_at="client"'],
    "fedavg, rows": ['privacy.unit="example"', "privacy.delta=0.0001"],
    "partialfl (embeddings unprotected)": ['privacy.unprotected=["embeddings", "statistic", "raw"]'],
    "cmsfed": ["algorithm.name=cmsfed"],
}
"""Row of the table -> the changes that make it."""


def words_of(name: str, method: str, epsilon: str, seed: int) -> tuple[Path, list[str]]:
    """The recipe and the changes of one run."""
    fedavg, partialfl, more = SETS[name]
    own = method.startswith("partialfl")
    words = [*MANY, *(more if own else []), f"seed={seed}", "algorithm.aggregation=uniform", "evaluate.every=0"]
    if epsilon != "none":
        words += ['privacy.unit="client"', "privacy.delta=0.001", "privacy.clip_norm=1.0", f"privacy.epsilon={epsilon}"]
        words += METHODS[method]
    elif not own:
        words += [word for word in METHODS[method] if word.startswith("algorithm.")]
    return Path("recipes") / (partialfl if own else fedavg), words


def outcome(name: str, method: str, epsilon: str, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy of the last round in per cent, and the median time of a round in milliseconds."""
    out = folder / f"{name}-{method.replace(' ', '-').replace(',', '')}-{epsilon}-{seed}"
    result = out / "result.json"
    if not result.exists():
        path, words = words_of(name, method, epsilon, seed)
        recipe = polyfed.load_recipe(path, words)
        if epsilon == "none" and recipe.privacy is not None:  # the recipe of FedAvg has the section
            object.__setattr__(recipe, "privacy", None)
        polyfed.run(recipe, out=out, resume=out.exists())
    found = json.loads(result.read_text())
    return 100 * float(found["metrics"]["global"]["accuracy"]), 1000 * float(found["seconds_per_round"])


def cell(name: str, method: str, epsilon: str, seeds: list[int], folder: Path) -> str:
    """One cell of the table."""
    found = [outcome(name, method, epsilon, seed, folder) for seed in seeds]
    scores, times = [score for score, _ in found], [milliseconds for _, milliseconds in found]
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{spread} ({statistics.median(times):.0f} ms)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=sorted(SETS), choices=sorted(SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", default=EPSILONS, choices=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/privacy"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    for name in given.sets:
        head = " | ".join(f"epsilon {epsilon}" for epsilon in given.epsilons)
        print(f"\n## {name}\n\n| method | {head} |\n|---|{'---:|' * len(given.epsilons)}", flush=True)
        for method in given.methods:
            cells = []
            for epsilon in given.epsilons:
                if time.monotonic() > end:
                    return
                try:
                    cells.append(cell(name, method, epsilon, given.seeds, given.out))
                except PolyfedError as error:
                    cells.append(f"refused: {' '.join(str(error).split(';')[0].split())[:160]}")
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
