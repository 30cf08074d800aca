"""Accuracy of FedAvg under attacks, for every aggregation rule: the table of docs/results/robustness.md.

    python benchmarks/robustness.py --seeds 1 2 3 --out runs/robustness

Each run has a folder of its own, and a run that has finished is not run again. `--seconds` ends the script in time.
"""

import argparse
import json
import time
from pathlib import Path

import polyfed
from polyfed.core.errors import PolyfedError

RULES = ["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "norm-clip"]
ATTACKS = {
    "none": [],
    "scaling": ["attack.scale=10.0"],
    "sign-flip": ["attack.scale=4.0"],
    "alie": [],
    "label-flip": [],
}
SETS = {
    "cg-digits": ("fedavg-cg-digits.toml", ["clients.participation=1.0"]),
    "mfeat": ("partialfl-mfeat.toml", ["algorithm.name=fedavg"]),
    "ucihar": ("fedavg-ucihar.toml", []),
}


def accuracy(name: str, attack: str, rule: str, seed: int, folder: Path) -> float | None:
    """Accuracy of the last round, in per cent; None if the model diverged."""
    out = folder / f"{name}-{attack}-{rule}-{seed}"
    result = out / "result.json"
    if not result.exists():
        file, changes = SETS[name]
        words = [*changes, f"seed={seed}", f"server.aggregate={rule}", "algorithm.aggregation=uniform"]
        if attack != "none":
            words += [f"attack.name={attack}", *ATTACKS[attack]]
        recipe = polyfed.load_recipe(Path("recipes") / file, words)
        try:
            polyfed.run(recipe, out=out, resume=out.exists())
        except PolyfedError as error:
            print(f"{out.name}: {error}")
            return None
    return 100 * float(json.loads(result.read_text())["metrics"]["global"]["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", default=["cg-digits"], choices=sorted(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/robustness"))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    for name in given.sets:
        print(f"\n## {name}\n\n| attack | {' | '.join(RULES)} |\n|---|{'---:|' * len(RULES)}", flush=True)
        for attack in ATTACKS:
            cells = []
            for rule in RULES:
                if time.monotonic() > end:
                    return
                found = [accuracy(name, attack, rule, seed, given.out) for seed in given.seeds]
                known = [value for value in found if value is not None]
                lost = f" ({len(found) - len(known)} diverged)" if len(known) < len(found) else ""
                cells.append(f"{sum(known) / len(known):.1f}{lost}" if known else "diverged")
            print(f"| {attack} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
