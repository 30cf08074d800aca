"""How good are the choices of `polyfed recommend`? Compared with an exhaustive study of the same methods on four sets.

    python benchmarks/recommend.py [--out runs/recommend] [--sets NAME ...] [--jobs N]

For each set, the study gives every method 14 trials on three tuning seeds without early stopping, and reports ten
seeds. The recommendation then has a quarter of the seconds that the study took. Both go on where they were stopped. The
script prints the rows of docs/results/recommend.md.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from polyfed import parse_recipe, recommend, run, sweep
from polyfed.experiment.recipes.recipe import read_table
from polyfed.recommendation.candidates import Planner
from polyfed.recommendation.recommend import RECIPE

ROOT = Path(__file__).resolve().parents[1]

SMALL = {"embedding": 64, "encoders": {m: {"kind": "mlp", "hidden": [64]} for m in ("acc", "gyro")}}
"""A small model for the sensors, with which a study takes minutes."""

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("fedavg-cg-digits", {}),
    "views": ("partialfl-mfeat", {"egress": {}, "train": {"lr": 0.05, "momentum": 0.9, "epochs": 1}}),
    "speakers": ("partialfl-mosi", {"egress": {}, "train": {"lr": 0.05, "momentum": 0.9, "epochs": 1}}),
    "sensors": ("fedavg-ucihar", {"egress": {}, "model": SMALL, "train": {"lr": 0.05, "momentum": 0.9, "epochs": 1}}),
}
"""Name -> recipe, and the sections that are replaced: methods meet the default policy and one way of training."""

METHODS = ("fedavg", "fedprox", "moon", "feddyn", "fedavgm", "fedmsplit")
TRIALS, SEEDS, ROUNDS, QUARTER = 14, 10, 10, 0.25


def exhaustive(table: dict[str, Any], out: Path, jobs: int | None) -> tuple[dict[str, list[float]], float]:
    """Return the test scores of each method, and the seconds that the study took in all calls together."""
    planner = Planner(table)
    out.mkdir(parents=True, exist_ok=True)
    recipe = out / "base.toml"
    recipe.write_text(tomli_w.dumps({**planner.table, "algorithm": {"name": "fedavg"}}))
    methods = {c.name: {"set": dict(c.changes)} for c in planner.all() if c.name in METHODS}
    study = {
        "recipe": str(recipe),
        "seeds": list(range(1, SEEDS + 1)),
        "metric": list(planner.metrics),
        "set": {"evaluate.every": 0, "checkpoint.every": ROUNDS},
        "methods": methods,
        "search": {
            "trials": TRIALS,
            "seeds": [101, 102, 103],
            "sampler": "latin",
            "batch": TRIALS,
            "ranges": "default",
        },
    }
    clock, started = out / "seconds.json", time.monotonic()
    before = json.loads(clock.read_text()) if clock.exists() else 0.0
    try:
        frame = sweep(study, out / "study", jobs=jobs)
    finally:
        seconds = before + time.monotonic() - started
        if not (out / "done").exists():
            clock.write_text(json.dumps(seconds))
    (out / "done").touch()
    column = next(c for c in (f"metrics.{m}" for m in planner.metrics) if c in frame)
    scores = {name: list(own[column].dropna()) for name, own in frame.groupby("method")}
    return scores, float(json.loads(clock.read_text()))


def row(name: str, out: Path, jobs: int | None) -> str:
    """Return the line of the table for a set."""
    recipe, changes = SETS[name]
    table = {**read_table(ROOT / "recipes" / f"{recipe}.toml"), **changes, "rounds": ROUNDS}
    table["algorithm"] = {"name": "fedavg"}
    scores, seconds = exhaustive(table, out / name / "exhaustive", jobs)
    minutes = QUARTER * seconds / 60
    found = recommend(table, out / name / "recommended", minutes=minutes, methods=METHODS, jobs=jobs)
    assert found.conclusion is not None
    means = {method: statistics.fmean(own) for method, own in scores.items() if own}
    best = max(means, key=lambda method: means[method])
    error = statistics.stdev(scores[best]) / math.sqrt(len(scores[best]))
    choice = found.conclusion.choice.name
    chosen = read_table(found.folder / RECIPE)
    own = [run(parse_recipe({**chosen, "seed": n, "evaluate": {"every": 0}})).result for n in range(1, SEEDS + 1)]
    group, metric = found.conclusion.metric.name.split(".")
    reached = statistics.fmean(result["metrics"][group][metric] for result in own)
    gap = means[best] - reached
    verdict = "yes" if gap <= error else "no"
    print(found.paragraph, flush=True)
    return (
        f"| {name} | {best}, {100 * means[best]:.1f} ± {100 * error:.2f} | {choice} | {100 * reached:.1f} | "
        f"{100 * gap:.2f} | {verdict} | {seconds / 60:.1f} | {minutes:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "recommend")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--jobs", type=int, default=None)
    given = parser.parse_args(arguments)
    for name in given.sets:
        print(row(name, given.out, given.jobs), flush=True)


if __name__ == "__main__":
    main()
