"""Successive halving against the whole search: the chosen settings, their test scores and the rounds of both.

    python benchmarks/halving.py [--out runs/halving] [--jobs 1] [--one-seed]

The whole search continues the trials that halving stopped, from their checkpoints, so both together compute no round
twice. With `--one-seed`, settings are tuned on one seed, and none is confirmed on a second one. The command goes on
where it was stopped.
"""

import argparse
import copy
import json
import os
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

import polyfed

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "studies" / "halving.toml"
CLASSES = {"digits": 10, "views": 10, "speakers": 2, "sensors": 6}


def study() -> dict[str, Any]:
    """The table of the study, with absolute paths of its recipes."""
    table = tomllib.loads(STUDY.read_text())
    for scenario in table["scenarios"].values():
        scenario["recipe"] = str((STUDY.parent / scenario["recipe"]).resolve())
    return table


def swept(table: dict[str, Any], out: Path, jobs: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Carry out a study. Scenario and method -> the rounds of the search, the chosen settings and the test scores."""
    boards: list[Any] = []
    frame = polyfed.sweep(table, out, jobs=jobs, listeners=[lambda event, board: boards.append(board)])
    board, found = boards[-1], {}
    for number, cell in enumerate(board.cells):
        searcher = board.searches[number]
        rows = frame[(frame["scenario"] == cell.scenario) & (frame["method"] == cell.method)]
        found[cell.scenario, cell.method] = {
            "rounds": searcher.spent,
            "chosen": dict(searcher.best),
            "scores": rows["metrics.global.uar"].tolist(),
        }
    return found


def compared(halving: dict[str, Any], whole: dict[str, Any], guess: float) -> dict[str, Any]:
    """The means over the seeds, the standard error of the whole search, and whether halving is within it.

    Training that diverged leaves no model, so it scores as a guess does: to leave it out would reward settings that
    often diverge.
    """
    scores = [[guess if score != score else score for score in found["scores"]] for found in (halving, whole)]
    means = [statistics.fmean(own) for own in scores]
    error = statistics.stdev(scores[1]) / len(scores[1]) ** 0.5
    return {
        "diverged": [sum(score != score for score in found["scores"]) for found in (halving, whole)],
        "halving": means[0],
        "whole": means[1],
        "error": error,
        "rounds": halving["rounds"] / whole["rounds"],
        "same": halving["chosen"] == whole["chosen"],
        "holds": means[0] >= means[1] - error and 3 * halving["rounds"] <= whole["rounds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "halving")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="only these scenarios of the study")
    parser.add_argument("--score-over", type=int, help="the score of a trial: the mean of so many last evaluations")
    parser.add_argument("--one-seed", action="store_true", help="tune on one seed, and confirm nothing")
    options = parser.parse_args()
    out = options.out.absolute()
    os.chdir(ROOT)  # the recipes name their data from here
    started = time.monotonic()
    table = study()
    if options.only:
        table["scenarios"] = {name: table["scenarios"][name] for name in options.only}
    if options.one_seed:
        table["search"] |= {"seeds": table["search"]["seeds"][:1]}
        del table["search"]["confirm"]
    if options.score_over:
        table["search"] |= {"score_over": options.score_over}
    halving = swept(table, out, options.jobs)
    exhaustive = copy.deepcopy(table)
    for key in ("prune", "least_rounds"):
        del exhaustive["search"][key]
    whole = swept(exhaustive, out, options.jobs)
    rows = {cell: compared(halving[cell], whole[cell], 1 / CLASSES[cell[0]]) for cell in whole}
    print(
        "| data | method | all 27 settings | halving | rounds | diverged | same settings | within one standard error |"
    )
    print("|---|---|---:|---:|---:|---|---|---|")
    for (scenario, method), row in rows.items():
        scores = f"{row['whole']:.3f} ± {row['error']:.3f} | {row['halving']:.3f} | {100 * row['rounds']:.0f} %"
        lost = row["diverged"]
        scores += f" | {lost[0]}, {lost[1]}"
        same, holds = ("yes" if row[key] else "no" for key in ("same", "holds"))
        print(f"| {scenario} | {method} | {scores} | {same} | {holds} |")
    print(f"{sum(row['holds'] for row in rows.values())} of {len(rows)} hold; {time.monotonic() - started:.0f} s")
    facts = {f"{s}, {m}": rows[s, m] | {"searches": [halving[s, m], whole[s, m]]} for s, m in rows}
    (out / "halving.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
