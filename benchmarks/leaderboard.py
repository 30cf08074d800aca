"""The leaderboard of the methods: carry out its study, and write docs/results/leaderboard.md and an HTML page.

    python benchmarks/leaderboard.py [--out runs/leaderboard] [--jobs N] [--tables]

The command goes on where it was stopped. `--tables` carries out nothing and writes the tables of the runs that have
finished. The text of the page above the mark stays as it is; everything below it is written anew.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from polyfed import sweep
from polyfed.report.comparison.compare import Comparison, compare
from polyfed.report.comparison.paired_differences import Difference, Evidence, evidence
from polyfed.report.comparison.tables import markdown, scenarios_sheet
from polyfed.report.pages.page import write_comparison

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "leaderboard.md"
MARK = "<!-- benchmarks/leaderboard.py writes everything below this line -->"

LEVEL = 0.05
"""Below this p-value, after Holm's correction, a difference is significant."""


def cost_rows(comparison: Comparison) -> Iterator[str]:
    """A table of the megabytes that a run sends: means over the seeds, one column for each scenario."""
    scenarios = list(dict.fromkeys(group.scenario for group in comparison.groups))
    cells: dict[str, dict[str, str]] = {}
    for group in comparison.groups:
        results = [folder.result for folder in group.folders]
        sent = statistics.fmean(result["bytes_up"] + result["bytes_down"] for result in results)
        size = sent / 1e6
        if not group.method.endswith("-placebo"):  # costs what its method costs
            cells.setdefault(group.method, {})[group.scenario] = f"{size:,.0f}" if size >= 100 else f"{size:.3g}"
    yield f"| method | {' | '.join(scenarios)} |"
    yield "|---|" + "---:|" * len(scenarios)
    for method, own in cells.items():
        yield f"| {method} | {' | '.join(own.get(scenario, '–') for scenario in scenarios)} |"


def difference_rows(rows: Sequence[Difference]) -> Iterator[str]:
    """A table of mean differences with their 95 % intervals, one column for each scenario; bold if significant."""
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        inside = "" if row.low is None or row.high is None else f" ({100 * row.low:+.1f} to {100 * row.high:+.1f})"
        text = f"{100 * row.mean:+.1f}{inside}"
        significant = row.p_holm is not None and row.p_holm < LEVEL
        cells.setdefault(row.method, {})[row.scenario] = f"**{text}**" if significant else text
    yield f"| method | {' | '.join(scenarios)} |"
    yield "|---|" + "---:|" * len(scenarios)
    for method, own in cells.items():
        yield f"| {method} | {' | '.join(own.get(scenario, '–') for scenario in scenarios)} |"


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
    scores = scenarios_sheet(comparison, proof)
    sheets = [] if scores is None else [replace(scores, title="Score in %, mean ± sample standard deviation")]
    tested = (
        "in percentage points with the 95 % interval of Student's paired t-test; bold: p < 0.05 after Holm's correction"
    )
    parts = [
        "## Scores and mean ranks",
        f"{markdown(sheets).strip()}\n\n{said_of_ranks(proof)}",
        "## Differences to FedAvg",
        f"Score minus FedAvg's, {tested} over {sum(row.p is not None for row in proof.differences)} tests.",
        "\n".join(difference_rows(proof.differences)),
        "## Differences to the placebos",
        f"Score minus the placebo's, {tested} over this table.",
        "\n".join(difference_rows(proof.placebos)),
        "## Megabytes in both directions",
        "\n".join(cost_rows(comparison)),
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
