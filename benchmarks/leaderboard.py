"""The leaderboard of the methods: carry out its study, and write docs/results/leaderboard.md and an HTML page.

    python benchmarks/leaderboard.py [--out runs/leaderboard] [--jobs N] [--tables]

The command goes on where it was stopped. `--tables` carries out nothing and writes the tables of the runs that have
finished. The text of the page above the mark stays as it is; everything below it is written anew.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from polyfed import sweep
from polyfed.report.comparison.compare import Comparison, compare
from polyfed.report.comparison.paired_differences import Evidence, evidence
from polyfed.report.comparison.tables import differences_sheet, markdown, placebos_sheet, ranks_sheet, scenarios_sheet
from polyfed.report.formatting import number_of
from polyfed.report.pages.page import write_comparison

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results" / "leaderboard.md"
MARK = "<!-- benchmarks/leaderboard.py writes everything below this line -->"


def cost_rows(comparison: Comparison) -> Iterator[str]:
    """A table of the bytes and the seconds of the runs: means over the seeds, one column for each scenario."""
    scenarios = list(dict.fromkeys(group.scenario for group in comparison.groups))
    cells: dict[str, dict[str, str]] = {}
    for group in comparison.groups:
        results = [folder.result for folder in group.folders]
        sent = statistics.fmean(result["bytes_up"] + result["bytes_down"] for result in results)
        size = number_of(sent, "bytes")
        seconds = statistics.median(result["seconds_total"] for result in results)
        cells.setdefault(group.method, {})[group.scenario] = f"{size}, {seconds:.1f} s"
    yield f"| method | {' | '.join(scenarios)} |"
    yield "|---|" + "---:|" * len(scenarios)
    for method, own in cells.items():
        yield f"| {method} | {' | '.join(own.get(scenario, '–') for scenario in scenarios)} |"


def page(comparison: Comparison, proof: Evidence) -> str:
    """The generated part of the page."""
    ranks, tests = proof.ranks, sum(row.p is not None for row in proof.differences)
    sheets = [
        (
            "Scores and mean ranks",
            "The score (%) of each method in each scenario: mean ± sample standard deviation over the reported runs",
            scenarios_sheet(comparison, proof),
        ),
        (
            "Which mean ranks differ",
            ""
            if ranks is None
            else "The mean rank of each method, where rank 1 is the best. Friedman's test gives p = "
            f"{ranks.p:.3f}, and Nemenyi's critical difference at 5 % is {ranks.critical:.2f}",
            ranks_sheet(proof),
        ),
        (
            "Differences to FedAvg",
            "The score of a method minus the score of FedAvg, in percentage points. Each p-value is from Student's "
            f"paired t-test. The last column has the p-values after Holm's correction over {tests} tests",
            differences_sheet(proof),
        ),
        (
            "Differences to the placebos",
            "The score of a method minus the score of its placebo, in percentage points, with the same tests as above. "
            "The last column has the p-values after Holm's correction over this table",
            placebos_sheet(proof),
        ),
    ]
    parts = [
        f"## {heading}\n\n{markdown([replace(sheet, title=caption)])}"
        for heading, caption, sheet in sheets
        if sheet is not None
    ]
    parts += ["## Bytes in both directions, and seconds of a run\n\n" + "\n".join(cost_rows(comparison))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


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
