"""How good are the choices of `polyfed recommend`? Compared with an exhaustive study of the same methods on four sets.

    python benchmarks/recommend.py [--out runs/recommend] [--sets NAME ...] [--rounds 30] [--jobs N] [--minutes M]
                                   [--cpu]

For each set, the study gives every method 14 trials on three tuning seeds without early stopping, and reports ten
seeds, both with the validation rows that the recommendation holds out. The recommendation then has a quarter of the
seconds that the study took. Both go on where they were stopped, and the script prints the rows of
docs/results/recommend.md. `--minutes` leaves out the study. `--cpu` counts seconds of the processor in place of the
clock's, for a machine that has other work.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from polyfed import parse_recipe, recommend, run, sweep
from polyfed.experiment.recipes.recipe import read_table
from polyfed.recommendation.candidates import Planner
from polyfed.recommendation.pilot import Journal
from polyfed.recommendation.recommend import RECIPE

ROOT = Path(__file__).resolve().parents[1]

TRAIN = {"lr": 0.05, "momentum": 0.9, "epochs": 1}


def small(hidden: int, embedding: int, *modalities: str) -> dict[str, Any]:
    """Return the section of a model with which a study takes minutes."""
    return {"embedding": embedding, "encoders": {name: {"kind": "mlp", "hidden": [hidden]} for name in modalities}}


MFEAT = {"name": "npz", "path": "../shared/data/mfeat/mfeat.npz", "standardise": True}
VIEWS = ("pix", "fou", "fac", "zer", "kar", "mor")
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("fedavg-cg-digits", {}),
    "views": ("partialfl-mfeat", {"train": TRAIN}),
    "speakers": ("partialfl-mosi", {"train": TRAIN}),
    "sensors": ("fedavg-ucihar", {"model": small(64, 64, "acc", "gyro"), "train": TRAIN}),
    "rows-missing": (
        "partialfl-mfeat",
        {
            "data": {**MFEAT, "modalities": ["fou", "zer", "mor"]},
            "clients": {
                "partition": "dirichlet",
                "alpha": 1.0,
                "num": 10,
                "participation": 5,
                "missing_rows": {"fou": 0.5, "zer": 0.5, "mor": 0.5},
                "missing_rows_test": 0.3,
            },
            "model": small(32, 16, "fou", "zer", "mor"),
            "train": TRAIN,
        },
    ),
    "six-views": (
        "partialfl-mfeat",
        {
            "data": {**MFEAT, "modalities": [*VIEWS]},
            "clients": {"partition": "dirichlet", "alpha": 0.5, "num": 8, "participation": 4, "min_size": 2},
            "model": small(32, 16, *VIEWS),
            "train": TRAIN,
        },
    ),
}
"""Name -> recipe, and the sections that are replaced: methods meet the default policy and one way of training. The last
two are scenarios of the leaderboard."""

METHODS = ("fedavg", "fedprox", "moon", "feddyn", "fedavgm", "fedmsplit")
TRIALS, SEEDS, QUARTER = 14, 10, 0.25


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
        "set": {"evaluate.every": 0, "checkpoint.every": table["rounds"]},
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


def recommended(table: dict[str, Any], out: Path, minutes: float, jobs: int | None) -> tuple[str, float]:
    """Return the chosen method, and the mean test score of its recipe over the seeds of the study."""
    advice = recommend(
        table, out, minutes=minutes, methods=METHODS, jobs=jobs, say=lambda line: print(line, flush=True)
    )
    assert advice.conclusion is not None
    print(advice.paragraph, flush=True)
    chosen = read_table(advice.folder / RECIPE)
    results = [run(parse_recipe({**chosen, "seed": n, "evaluate": {"every": 0}})).result for n in range(1, SEEDS + 1)]
    group, metric = advice.conclusion.metric.name.split(".")
    scores = [result["metrics"][group][metric] for result in results]
    print("seeds:", *(f"{100 * score:.1f}" for score in scores), flush=True)
    return advice.conclusion.choice.name, statistics.fmean(scores)


class CpuClock:
    """Seconds of the processor that this process and those that it started have used."""

    def monotonic(self) -> float:
        """Return the seconds, those of ended processes included."""
        me = psutil.Process()
        seconds = 0.0
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                seconds += sum(process.cpu_times()[:4])  # with those of its children that have ended
        return seconds


def count_processor_seconds(folder: str) -> None:
    """Let study, recommendation and the runs of their processes measure seconds of the processor."""
    clock, module = CpuClock(), sys.modules[recommend.__module__]
    vars(module).update(time=clock, Journal=partial(Journal, clock=clock.monotonic))
    globals()["time"] = clock
    Path(folder, "sitecustomize.py").write_text("import time\ntime.perf_counter = time.process_time\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def row(name: str, rounds: int, out: Path, jobs: int | None, minutes: float | None) -> str:
    """Return the line of the table for a set."""
    recipe, changes = SETS[name]
    table = {**read_table(ROOT / "recipes" / f"{recipe}.toml"), "egress": {}, **changes, "rounds": rounds}
    table["algorithm"] = {"name": "fedavg"}
    table["clients"] = {key: value for key, value in table["clients"].items() if key != "validation"}
    if minutes:
        choice, reached = recommended(table, out / name / "recommended", minutes, jobs)
        return f"| {name} | {choice} | {100 * reached:.1f} | {minutes:.1f} |"
    scores, seconds = exhaustive(table, out / name / "exhaustive", jobs)
    minutes = QUARTER * seconds / 60
    choice, reached = recommended(table, out / name / "recommended", minutes, jobs)
    means = {method: statistics.fmean(own) for method, own in scores.items() if own}
    best = max(means, key=lambda method: means[method])
    error = statistics.stdev(scores[best]) / math.sqrt(len(scores[best]))
    gap = means[best] - reached
    verdict = "yes" if gap <= error else "no"
    return (
        f"| {name} | {best}, {100 * means[best]:.1f} ± {100 * error:.2f} | {choice} | {100 * reached:.1f} | "
        f"{100 * gap:.2f} | {verdict} | {seconds / 60:.1f} | {minutes:.1f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "recommend")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=None, help="the recommendation's, without the study")
    parser.add_argument("--cpu", action="store_true", help="count seconds of the processor")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if given.cpu:
            count_processor_seconds(folder)
        for name in given.sets:
            print(row(name, given.rounds, given.out, given.jobs, given.minutes), flush=True)


if __name__ == "__main__":
    main()
