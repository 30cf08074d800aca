"""The leaderboard of the methods: carry out its study, and write docs/results/leaderboard.md and an HTML page.

    python benchmarks/leaderboard.py [--out runs/leaderboard] [--jobs N] [--tables]

The command goes on where it was stopped. `--tables` carries out nothing and writes the tables of the runs that have
finished. The text of the page above the mark stays as it is; everything below it is written anew.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from polyfed import sweep
from polyfed.report.comparison.compare import Comparison, compare
from polyfed.report.comparison.paired_differences import Evidence, evidence
from polyfed.report.comparison.tables import Sheet, markdown, scenarios_sheet
from polyfed.report.pages.page import write_comparison

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "leaderboard.md"
MARK = "<!-- benchmarks/leaderboard.py writes everything below this line -->"

LEVEL = 0.05
"""Below this p-value, after Holm's correction, a difference is significant."""


def traffic(comparison: Comparison) -> dict[str, str]:
    """The bytes of a method in both directions, as a multiple of FedAvg's: the least and the most of the scenarios."""
    sent: dict[str, dict[str, float]] = {}
    for group in comparison.groups:
        if not group.method.endswith("-placebo"):  # costs what its method costs
            results = [folder.result for folder in group.folders]
            mean = statistics.fmean(result["bytes_up"] + result["bytes_down"] for result in results)
            sent.setdefault(group.method, {})[group.scenario] = mean
    found = {}
    for method, of_method in sent.items():
        ratios = [mean / sent["fedavg"][scenario] for scenario, mean in of_method.items()]
        ends = dict.fromkeys(f"{value:.2g}" if value >= 0.01 else "0" for value in (min(ratios), max(ratios)))
        found[method] = " to ".join(ends)
    return found


def scores_of(comparison: Comparison, proof: Evidence) -> Sheet | None:
    """The scores with the traffic beside them; bold if they differ from FedAvg's."""
    sheet = scenarios_sheet(comparison, proof)
    if sheet is None:
        return None
    scenarios = list(dict.fromkeys(group.scenario for group in comparison.groups))
    differ = {(row.method, row.scenario) for row in proof.differences if row.p_holm is not None and row.p_holm < LEVEL}
    bold = {
        (place, 1 + column)
        for place, row in enumerate(sheet.rows)
        for column, name in enumerate(scenarios)
        if (row[0], name) in differ
    }
    bytes_of = traffic(comparison)
    return replace(
        sheet,
        title="Score in %, mean ± sample standard deviation",
        headings=[*sheet.headings, "bytes, FedAvg = 1"],
        rows=[[*row, bytes_of.get(row[0], "–")] for row in sheet.rows],
        best=frozenset(bold),
    )


def said_of_ranks(proof: Evidence) -> str:
    """Say which mean ranks differ."""
    if proof.ranks is None:
        return ""
    ranks = sorted(zip(proof.ranks.ranks, proof.methods, strict=True))
    apart = [(one, other) for (low, one), (high, other) in combinations(ranks, 2) if high - low >= proof.ranks.critical]
    found = "; ".join(f"{one} and {other}" for one, other in apart)
    return (
        f"The best method has rank 1. Friedman's test of the mean ranks gives p = {proof.ranks.p:.3f}, and Nemenyi's "
        f"critical difference at 5 % is {proof.ranks.critical:.2f}: "
        + (f"these methods differ: {found}." if found else "no two mean ranks differ significantly.")
    )


def page(comparison: Comparison, proof: Evidence) -> str:
    """The generated part of the page."""
    scores = scores_of(comparison, proof)
    tests = sum(row.p is not None for row in proof.differences)
    tested = "p < 0.05 in Student's paired t-test after Holm's correction"
    parts = [
        "## Scores and mean ranks",
        markdown([] if scores is None else [scores]).strip(),
        f"Bold: differs from FedAvg, {tested} over {tests} tests. {said_of_ranks(proof)}",
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "leaderboard")
    parser.add_argument("--jobs", type=int, default=None, help="the most runs at once; default: the number of cores")
    parser.add_argument("--tables", action="store_true", help="carry out nothing")
    given = parser.parse_args(arguments)
    if not given.tables:
        sweep(ROOT / "studies" / "leaderboard.toml", given.out, jobs=given.jobs)
    comparison = compare([given.out])
    proof = evidence(comparison, baseline="fedavg")
    text = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{text}{MARK}\n\n{page(comparison, proof)}")
    write_comparison(comparison, given.out / "leaderboard.html", proof)


if __name__ == "__main__":
    main()
