"""Accuracy against epsilon for methods that can honour [privacy]: the table of docs/results/differential-privacy.md.

    python benchmarks/privacy.py --seeds 1 2 3 --out runs/privacy

Each run has a folder of its own, and a run that has finished is not run again. `--seconds` ends the script in time. A
cell is the mean over the seeds of the accuracy in the last round, in per cent, with the median time of a round. If a
method cannot honour the section, the cell has the reason.
"""

import argparse
import json
import re
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

import polyfed
from polyfed.core.errors import PolyfedError
from polyfed.experiment.recipes.recipe import parse_recipe

EPSILONS = ["none", "8", "4", "2", "1"]

SETS = {
    "cg-digits": ("fedavg-cg-digits.toml", ("gray", "color")),
    "mfeat": ("fedavg-dp-mfeat.toml", ("pix", "fou")),
    "ucihar": ("fedavg-ucihar.toml", ("acc", "gyro")),
}
"""Name -> the recipe with its data, and its modalities. PartialFL shares the embeddings of the first one."""

ROUNDS, CLIENTS, SILOS = 40, 100, 10
"""Client-level privacy needs many clients, because their number divides the noise. Privacy of rows needs many rows at
each client, so it has few clients."""

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, per block": {"clip": "per-block"},
    "fedavg, local": {"noise_at": "client"},
    "fedavg, rows": {"unit": "example", "delta": 1e-4},
    "partialfl (embeddings unprotected)": {"unprotected": ["embeddings", "statistic", "raw"]},
    "fedpmr": {},
    "cmsfed (gradients and prototypes unprotected)": {"unprotected": ["prototypes", "gradients", "statistic"]},
    "cmsfed, no selection (prototypes unprotected)": {"unprotected": ["prototypes", "statistic"]},
}
"""Row of the table -> what its section [privacy] has besides epsilon. The first word is the method."""


def table_of(name: str, method: str, epsilon: str, seed: int) -> dict[str, Any]:
    """The recipe of one run. All methods of a set share its clients, model and training."""
    file, (first, second) = SETS[name]
    own = METHODS[method]
    rows = own.get("unit") == "example"
    table = tomllib.loads((Path("recipes") / file).read_text())
    table |= {"seed": seed, "rounds": ROUNDS, "engine": {"name": "vectorised", "threads": 1, "workers": 1}}
    table["clients"] = {"partition": "dirichlet", "num": SILOS if rows else CLIENTS, "alpha": 2.0, "min_size": 2}
    encoders = {modality: {"kind": "mlp", "hidden": [64]} for modality in (first, second)}
    table["model"] = {"fusion": "concat", "embedding": 32, "encoders": encoders}
    table["train"] = {"epochs": 1, "batch_size": 32 if rows else 8, "lr": 0.05}
    table["evaluate"] = {"every": 0}
    kinds = ["parameters", "gradients", "prototypes", "statistic"]
    table["egress"] = {modality: {"server": kinds} for modality in (first, second)}
    table["egress"]["shared"] = {"server": ["parameters", "gradients", "prototypes", "statistic"]}
    algorithm = re.split(r"[, ]", method)[0]
    table["algorithm"] = {"name": algorithm}
    table["algorithm"]["aggregation"] = "uniform"
    if algorithm == "cmsfed":
        options = {"modality_selection": False} if "no selection" in method else {"gradient_split": "exact"}
        table["algorithm"] |= options
    if algorithm == "partialfl":
        table["algorithm"] |= {"inputs": "raw", "beta": 0.1, "mu": 0.0, "local_hidden": [64], "server_hidden": [64]}
        table["model"]["head"] = [32]
        table["egress"] |= {first: {"server": ["parameters", "embeddings", "raw"]}, second: {"server": ["parameters"]}}
    table.pop("privacy", None)
    if epsilon != "none":
        table["privacy"] = {"unit": "client", "delta": 0.001, "clip_norm": 1.0, "epsilon": float(epsilon)} | own
    return table


def outcome(name: str, method: str, epsilon: str, seed: int, folder: Path) -> tuple[float, float]:
    """Accuracy of the last round in per cent, and the median time of a round in milliseconds."""
    out = folder / f"{name}-{method.replace(' ', '-').replace(',', '')}-{epsilon}-{seed}"
    result = out / "result.json"
    if not result.exists():
        polyfed.run(parse_recipe(table_of(name, method, epsilon, seed)), out=out, resume=out.exists())
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
