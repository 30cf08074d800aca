"""The leaderboard of the methods: carry out its study, and write docs/results/leaderboard.md and an HTML page.

    python benchmarks/leaderboard.py [--out runs/leaderboard] [--jobs N] [--tables] [--seeds N]

The command goes on where it was stopped, on another machine too: docs/results/leaderboard.jsonl.gz holds the results so
far. `--tables` carries out nothing: it adds the results of the folder to this file, and writes the tables of the
scenarios in which all runs have ended. Without a folder, it makes one from the file. The page keeps its text above the
mark.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from polyfed import sweep
from polyfed.core.system.files import STUDY
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.experiment.study.known_results import read_known, write_known
from polyfed.report.comparison.compare import Comparison, compare
from polyfed.report.comparison.paired_differences import Difference, Evidence, evidence
from polyfed.report.comparison.paired_tests import LEVEL
from polyfed.report.comparison.standing import Cost, Judgement, conclusion, costs_of, judgements, seeds_needed
from polyfed.report.comparison.tables import Sheet, markdown, scenarios_sheet, tests_of
from polyfed.report.pages.page import write_comparison
from polyfed.report.reading.study_folder import whole_scenarios

ROOT = Path(__file__).resolve().parents[1]
STUDY_FILE = ROOT / "studies" / "leaderboard.toml"
PAGE = ROOT / "docs" / "results" / "leaderboard.md"
KNOWN = ROOT / "docs" / "results" / "leaderboard.jsonl.gz"
MARK = "<!-- benchmarks/leaderboard.py writes everything below this line -->"
BASELINE, PLACEBO = "fedavg", "-placebo"

REACHED = 0.02
"""A method has reached the baseline's score if it is at most so much below it."""

FAMILIES = {"global": "methods with a global model", "personal": "methods on the clients' own test rows"}
"""The group of a scenario's metric, and what its methods are called."""


@dataclass(frozen=True)
class Board:
    """The results so far.

    Attributes:
        comparison: The scenarios in which all runs have ended.
        judged: By scenario, whether its validation rows can judge.
        curves: The scenarios whose learning rates are all reported.
    """

    comparison: Comparison
    judged: dict[str, Judgement]
    curves: list[str]

    def scenarios(self, family: str) -> list[str]:
        """The scenarios of a family that are ranked, in the order of the study."""
        metrics = {group.scenario: group.metrics[0] for group in self.comparison.groups}
        ranked = [name for name in metrics if name not in self.curves and self.judges(name)]
        return [name for name in ranked if metrics[name].startswith(f"{family}.")]

    def judges(self, scenario: str) -> bool:
        """Whether the validation rows of a scenario can judge."""
        return scenario not in self.judged or self.judged[scenario].holds

    def of(self, scenarios: Sequence[str], wanted: Callable[[str], bool] = lambda method: True) -> Comparison:
        """Return the comparison of some scenarios and methods."""
        return self.comparison.only(lambda scenario, method: scenario in scenarios and wanted(method))


def scores_of(comparison: Comparison, proof: Evidence) -> Sheet | None:
    """The scores, bold if they differ from FedAvg's."""
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
    return replace(sheet, title="Score in %, mean ± sample standard deviation", best=frozenset(bold))


def ratios_of(board: Board, scenarios: Sequence[str], cost: Callable[[Cost], float]) -> dict[tuple[str, str], str]:
    """(method, scenario) -> what a method spent until it was two points below FedAvg's last score; FedAvg = 1."""
    result: dict[tuple[str, str], str] = {}
    for scenario in scenarios:
        groups = {group.method: group for group in board.of([scenario]).groups if not group.method.endswith(PLACEBO)}
        if BASELINE not in groups:
            continue
        scores = evidence(board.of([scenario]), baseline=BASELINE).scores[scenario, BASELINE]
        target = statistics.fmean(scores.values()) - REACHED
        base = costs_of(groups[BASELINE], target)
        for method, group in groups.items():
            own = costs_of(group, target)
            whole = base is not None and own is not None and cost(base) > 0
            result[method, scenario] = f"{cost(own) / cost(base):.2g}" if whole and own and base else "–"
    return result


def costs_sheet(board: Board, scenarios: Sequence[str], what: str, cost: Callable[[Cost], float]) -> Sheet:
    """The cost of FedAvg's score by method and scenario."""
    ratios = ratios_of(board, scenarios, cost)
    methods = list(dict.fromkeys(method for method, _ in ratios))
    rows = [[method, *(ratios.get((method, name), "") for name in scenarios)] for method in methods]
    title = f"{what} until FedAvg's last score less two points, FedAvg = 1; a dash: half of the runs do not reach it"
    return Sheet("costs", title, ["method", *scenarios], rows)


def needed_sheet(proof: Evidence, scenarios: Sequence[str]) -> Sheet:
    """How many seeds would show two points between each method and FedAvg."""
    methods = list(dict.fromkeys(row.method for row in proof.differences))
    needed = {(m, s): seeds_needed(proof, s, m, BASELINE) for m in methods for s in scenarios}
    rows = [[m, *(str(needed[m, s] or "–") for s in scenarios)] for m in methods]
    title = "Seeds with which a paired t-test at 5 % would show two points to FedAvg, with a power of 80 %"
    return Sheet("seeds", title, ["method", *scenarios], rows)


def judged_sheet(board: Board) -> Sheet:
    """Whether the validation rows of each scenario can judge."""
    rows = [
        [name, f"{100 * own.validation:.1f}", f"{100 * own.test:.1f}", "yes" if own.holds else "**no**"]
        for name, own in board.judged.items()
    ]
    return Sheet(
        "judged", "FedAvg on validation and on test rows, in %", ["scenario", "validation", "test", "ranked"], rows
    )


def curve_sheet(board: Board, scenario: str) -> Sheet:
    """The mean score of each method at each learning rate in one scenario."""
    means: dict[str, dict[float, float]] = {}
    for (_, label), scores in evidence(board.of([scenario])).scores.items():
        method, _, rate = label.partition(" lr=")
        means.setdefault(method, {})[float(rate)] = statistics.fmean(scores.values())
    rates = sorted({rate for own in means.values() for rate in own})
    rows, best = [], set()
    for place, (method, own) in enumerate(means.items()):
        top = max(own.values())
        rows.append([method, *(f"{100 * own[rate]:.1f}" if rate in own else "–" for rate in rates)])
        best |= {(place, 1 + column) for column, rate in enumerate(rates) if own.get(rate) == top}
    title = f"{scenario}: accuracy in % at each learning rate, mean over the seeds, other options at their defaults"
    return Sheet("curve", title, ["method", *(f"{rate:g}" for rate in rates)], rows, frozenset(best))


def family(board: Board, name: str) -> Iterator[str]:
    """Yield the parts of the page about the scenarios of a family."""
    scenarios = board.scenarios(name)
    if not scenarios:
        return
    whole = evidence(board.of(scenarios), baseline=BASELINE)
    shown = board.of(scenarios, lambda method: not method.endswith(PLACEBO))
    proof = replace(evidence(shown, baseline=BASELINE), placebos=whole.placebos)
    yield f"## {FAMILIES[name].capitalize()}"
    yield conclusion(proof, FAMILIES[name])
    yield from _written([scores_of(shown, proof) or one_scenario(proof, scenarios[0])])
    yield f"Bold: differs from FedAvg, {_test_of(proof.differences)}. A dash: left out, or training diverged."
    told = ("differences", "ranks")  # the scores have the mean ranks, and the conclusion who differs by them
    yield from _written([sheet for sheet in tests_of(replace(proof, differences=())) if sheet.name not in told])
    yield from _written([needed_sheet(proof, scenarios)])
    yield from _written([costs_sheet(board, scenarios, "Bytes", lambda cost: cost.bytes)])
    yield from _written([costs_sheet(board, scenarios, "Seconds of training", lambda cost: cost.seconds)])


def one_scenario(proof: Evidence, scenario: str) -> Sheet:
    """The scores of a single scenario."""
    rows = [
        [method, f"{100 * statistics.fmean(own.values()):.1f} ± {100 * statistics.stdev(own.values()):.1f}"]
        for (_, method), own in proof.scores.items()
        if len(own) > 1
    ]
    return Sheet("scores", "Score in %, mean ± sample standard deviation", ["method", scenario], rows)


def _test_of(differences: Sequence[Difference]) -> str:
    sizes = [sum(row.scenario == name for row in differences) for name in {row.scenario for row in differences}]
    tests = " to ".join(map(str, sorted({min(sizes, default=0), max(sizes, default=0)})))
    return f"p < {LEVEL} in Student's paired t-test after Holm's correction over the {tests} tests of its scenario"


def _written(sheets: Sequence[Sheet]) -> Iterator[str]:
    for sheet in sheets:
        yield markdown([sheet]).strip()


def page(board: Board, left: Sequence[str]) -> str:
    """The generated part of the page."""
    parts = [f"Not run yet: {', '.join(left)}." if left else "All scenarios have been run.", *family(board, "global")]
    parts += family(board, "personal")
    if board.judged:
        parts += ["## Can validation judge?", *_written([judged_sheet(board)])]
    apart = [name for name in board.judged if not board.judges(name) or name in board.curves]
    for name in (name for name in apart if name not in board.curves):
        shown = board.of([name], lambda method: not method.endswith(PLACEBO))
        scores = one_scenario(evidence(shown, baseline=BASELINE), name)
        parts += [f"The scores in {name} are of settings that its validation rows chose.", *_written([scores])]
    curves = [name for name in board.curves if name in apart]
    if curves:
        parts += ["## Curves over the learning rate", *_written([curve_sheet(board, name) for name in curves])]
    return "\n\n".join(parts) + "\n"


def results(out: Path) -> tuple[Board, list[str]]:
    """Return the results in the folder of the study, and the scenarios that have not ended."""
    table = parse_toml(STUDY_FILE.read_text())["scenarios"]
    whole = whole_scenarios(out)
    comparison = (compare([out]) if whole else Comparison((), (), ())).only(lambda scenario, method: scenario in whole)
    curves = [name for name in whole if table.get(name, {}).get("curve")]
    return Board(comparison, judgements(comparison, BASELINE), curves), [name for name in table if name not in whole]


class _Restored(Exception):
    """The folder has all results of the file."""


def _stop(event: str, **_: object) -> None:
    """End a sweep before its first run."""
    if event == "sweep-started":
        raise _Restored


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "leaderboard")
    parser.add_argument("--jobs", type=int, default=None, help="the most runs at once; default: the number of cores")
    parser.add_argument("--seeds", type=int, default=5, help="the number of reported seeds")
    parser.add_argument("--tables", action="store_true", help="carry out nothing")
    given = parser.parse_args(arguments)
    if given.tables and (given.out / STUDY).is_file():
        write_known(given.out, KNOWN)  # of a sweep that goes on, too
    else:
        study = parse_toml(STUDY_FILE.read_text()) | {"seeds": list(range(1, given.seeds + 1))}
        study["recipe"] = str((STUDY_FILE.parent / study["recipe"]).resolve())
        with suppress(_Restored):
            sweep(study, given.out, jobs=given.jobs, known=KNOWN, listeners=[_stop] if given.tables else [])
    print(f"{KNOWN}: {len(read_known(KNOWN))} runs")
    board, left = results(given.out)
    text = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(f"{text}{MARK}\n\n{page(board, left)}")
    if board.comparison.groups:
        write_comparison(board.comparison, given.out / "leaderboard.html", evidence(board.comparison))


if __name__ == "__main__":
    main()
