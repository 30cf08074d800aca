"""Accuracy against bytes under [wire]: FedAvg on two small data sets, several seeds.

`python benchmarks/compression.py [--seeds 5] [--rounds 30]` prints the table of docs/network.md.
"""

import argparse
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import polyfed
from polyfed.experiment.recipes.recipe import parse_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
SETS = {"cg-digits": "fedavg-cg-digits.toml", "mfeat": "fedmac-mfeat.toml"}
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compress": "bf16"},
    "int8": {"compress": "int8"},
    "int8, bf16 down": {"compress": "int8", "down": "bf16"},
    "top-k, 10 %": {"compress": "top-k", "fraction": 0.1},
    "top-k, 10 %, no feedback": {"compress": "top-k", "fraction": 0.1, "error_feedback": False},
    "top-k, 1 %": {"compress": "top-k", "fraction": 0.01},
    "top-k, 1 %, no feedback": {"compress": "top-k", "fraction": 0.01, "error_feedback": False},
}


def measured(recipe: str, form: dict[str, Any], seed: int, rounds: int) -> tuple[float, int, int]:
    """Return the test accuracy in %, and the bytes up and down, of one run."""
    table = tomllib.loads((RECIPES / recipe).read_text()) | {"seed": seed, "rounds": rounds}
    table["algorithm"] = {"name": "fedavg"}
    table["evaluate"] = {"every": rounds}
    if form:
        table["wire"] = form
    with tempfile.TemporaryDirectory() as folder:
        result = polyfed.run(parse_recipe(table), Path(folder) / "run").result
    return 100 * result["metrics"]["global"]["accuracy"], result["bytes_up"], result["bytes_down"]


def main() -> None:
    """Print a line for each data set and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    for name, recipe in SETS.items():
        base: list[float] = []
        for form, table in FORMS.items():
            runs = [measured(recipe, table, seed, given.rounds) for seed in range(1, given.seeds + 1)]
            accuracy = [one[0] for one in runs]
            base = base or accuracy
            apart = [one - other for one, other in zip(accuracy, base, strict=True)]
            spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
            paired = f"paired {statistics.mean(apart):+.1f} ({min(apart):+.1f} to {max(apart):+.1f})"
            moved = f"up {runs[0][1] / 1e6:.2f} MB, down {runs[0][2] / 1e6:.2f} MB"
            print(f"{name}: {form}: {statistics.mean(accuracy):.1f} ± {spread:.1f}, {paired}, {moved}", flush=True)


if __name__ == "__main__":
    main()
