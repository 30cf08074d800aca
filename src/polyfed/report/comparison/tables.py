"""A comparison as text tables for the terminal, Markdown and LaTeX, and as numbers in CSV and JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from polyfed.core.system.log_lines import escaped
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.report.comparison.cells import Cell, Column
from polyfed.report.comparison.compare import Comparison
from polyfed.report.comparison.paired_differences import Difference, Evidence
from polyfed.report.formatting import MISSING, number_of

MEANING = "mean ± sample standard deviation over n runs, last round"


@dataclass(frozen=True)
class Sheet:
    """A table of text.

    Attributes:
        name: a short name, for LaTeX's label.
        title: the caption, which describes the table.
        headings: the heading of each column; the first column holds names.
        rows: the cells of each row.
        best: (row, column) of the cells that hold the best value of their column.
        absent: the methods that the table lacks, because their runs are not finished.
    """

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    absent: Sequence[str] = ()

    @property
    def caption(self) -> str:
        """Return the title, and the names of the methods that the table lacks."""
        return self.title + (f". Not compared: {', '.join(self.absent)}" if self.absent else "")


def sheets_of(comparison: Comparison, proof: Evidence) -> list[Sheet]:
    """All tables of a comparison: scores by scenario, quality, cost, differences and ranks."""
    wanted = [
        scenarios_sheet(comparison, proof),
        columns_sheet(comparison, "quality", "Quality", [c for c in comparison.columns if c.is_quality]),
        columns_sheet(comparison, "cost", "Cost", [c for c in comparison.columns if not c.is_quality]),
        *tests_of(proof),
    ]
    names = tuple(dict.fromkeys(absent.method for absent in comparison.absent))
    return [replace(sheet, absent=names) for sheet in wanted if sheet is not None and sheet.rows]


def tests_of(proof: Evidence) -> list[Sheet]:
    """Return the tables of tests: differences to the baseline, differences to the placebos, and ranks.

    A table is left out if there are no such tests.
    """
    result = (differences_sheet(proof), placebos_sheet(proof), ranks_sheet(proof))
    return [sheet for sheet in result if sheet is not None]


def scenarios_sheet(comparison: Comparison, proof: Evidence) -> Sheet | None:
    """Return a table of methods by scenarios, with the tested metric and the mean rank; None for a single scenario."""
    scenarios = list(dict.fromkeys(group.scenario for group in comparison.groups))
    if len(scenarios) < 2:
        return None
    methods = list(dict.fromkeys(group.method for group in comparison.groups))
    cells = {
        (method, scenario): Cell(*mean_and_spread(list(found.values())), len(found), len(found))
        for (scenario, method), found in proof.scores.items()
        if found
    }
    ranks = {} if proof.ranks is None else dict(zip(proof.methods, proof.ranks.ranks, strict=True))
    rows = [
        [method, *(_text(cells.get((method, s)), _unit(proof, s)) for s in scenarios), _rank(ranks.get(method))]
        for method in methods
    ]
    best = set()
    for place, scenario in enumerate(scenarios, 1):
        means = {row: cell.mean for row, method in enumerate(methods) if (cell := cells.get((method, scenario)))}
        if means:
            top = min(means.values()) if proof.lowest(scenario) else max(means.values())
            best |= {(row, place) for row, mean in means.items() if mean == top}
    title = f"{_metric(proof)} by scenario: {MEANING}"
    columns = [f"{s}, {proof.metrics[s].name}" for s in scenarios] if proof.mixed else scenarios
    return Sheet("scenarios", title, ["method", *columns, "mean rank"], rows, frozenset(best))


def columns_sheet(comparison: Comparison, name: str, title: str, columns: Sequence[Column]) -> Sheet:
    """Return a table of groups by columns, as the terminal and the page show it."""
    rows = [
        [group.name, str(len(group.folders)), *(comparison.cell(group, column) for column in columns)]
        for group in comparison.groups
    ]
    best = set()
    for scenario in dict.fromkeys(group.scenario for group in comparison.groups):
        rivals = [(row, group) for row, group in enumerate(comparison.groups) if group.scenario == scenario]
        for place, column in enumerate(columns, 2):
            means = {row: cell.mean for row, g in rivals if (cell := g.cells.get(column.name))}
            if column.is_quality and len(means) > 1:
                best |= {(row, place) for row, mean in means.items() if mean == max(means.values())}
    return Sheet(name, f"{title}: {MEANING}", ["method", "n", *(c.heading for c in columns)], rows, frozenset(best))


def differences_sheet(proof: Evidence) -> Sheet | None:
    """Return the paired differences to the baseline, or None if no two runs share seed and fold."""
    if not proof.differences:
        return None
    title = f"{_metric(proof)} minus that of {proof.differences[0].baseline}, {_pairing(proof, proof.differences)}"
    return _differences("differences", title, proof, proof.differences, {"method": lambda row: row.method})


def placebos_sheet(proof: Evidence) -> Sheet | None:
    """Return the paired differences of the methods to their placebos, or None if there are none."""
    if not proof.placebos:
        return None
    title = f"{_metric(proof)} of each method minus that of its placebo, {_pairing(proof, proof.placebos)}"
    names = {"method": lambda row: row.method, "placebo": lambda row: row.baseline}
    return _differences("placebos", title, proof, proof.placebos, names)


def _pairing(proof: Evidence, rows: Sequence[Difference]) -> str:
    """Return the part of a table's title that explains the numbers of the table."""
    if all(row.n == 1 for row in rows):
        return "paired by seed: each row has one pair, and a test needs at least two, so run the methods on more seeds"
    shared = "; folds share training rows, so intervals and p are too small" if proof.folded else ""
    test = "Student's t" if proof.test == "t" else "Wilcoxon's signed-rank test"
    return (
        f"paired by {proof.units}: mean with its 95 % interval; p by {test}, then after Holm's correction over "
        f"{sum(row.p is not None for row in rows)} tests{shared}"
    )


def _differences(
    name: str,
    title: str,
    proof: Evidence,
    rows: Sequence[Difference],
    names: Mapping[str, Callable[[Difference], str]],
) -> Sheet:
    """Return a table of differences. It has a column for the scenario if there are several scenarios."""
    if len({row.scenario for row in rows}) > 1:
        names = {**names, "scenario": lambda row: row.scenario}
    headings = [*names, "n", "difference", "95 % interval", "p", "p (Holm)"]
    cells = [[*(text(row) for text in names.values()), *_numbers(row, _unit(proof, row.scenario))] for row in rows]
    return Sheet(name, title, headings, cells)


def ranks_sheet(proof: Evidence) -> Sheet | None:
    """Return the mean ranks, or None if they are not defined."""
    if proof.ranks is None:
        return None
    ranks = proof.ranks
    title = (
        f"Mean ranks over {ranks.blocks} {proof.blocks} by {_metric(proof)}, rank 1 is the best; Friedman's test "
        f"{_equation(ranks.p)}; Nemenyi's critical difference at 5 % is {ranks.critical:.2f}"
    )
    order = sorted(range(len(proof.methods)), key=lambda place: ranks.ranks[place])
    rows = []
    for place in order:
        alike = {m for clique in ranks.cliques if place in clique for m in clique} - {place}
        names = [proof.methods[m] for m in order if m in alike]
        rows.append([proof.methods[place], _rank(ranks.ranks[place]), ", ".join(names) or "none"])
    return Sheet("ranks", title, ["method", "mean rank", "not different from"], rows)


def markdown(sheets: Sequence[Sheet], notes: Sequence[str] = ()) -> str:
    """Return the tables in Markdown, with the best cells in bold, and below them the notes."""
    parts = []
    for sheet in sheets:
        lines = [f"{sheet.caption}.", "", _row(sheet.headings), "|---|" + "---:|" * (len(sheet.headings) - 1)]
        for place, row in enumerate(sheet.rows):
            cells = (cell.replace("|", "\\|") for cell in row)
            lines.append(_row([f"**{c}**" if (place, n) in sheet.best else c for n, c in enumerate(cells)]))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *notes]) + "\n"


def latex(sheets: Sequence[Sheet], notes: Sequence[str] = ()) -> str:
    """Return the tables in LaTeX, for the package booktabs, with the best cells in bold, and the notes as comments."""
    parts = ["\n".join(["% needs \\usepackage{booktabs}", *(f"% {escaped(note)}" for note in notes)])]
    for sheet in sheets:
        head = " & ".join(_escaped(heading) for heading in sheet.headings)
        lines = [
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{_escaped(sheet.caption)}.}}",
            f"\\label{{tab:{sheet.name}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(sheet.headings) - 1)}}}",
            "\\toprule",
            f"{head} \\\\",
            "\\midrule",
        ]
        for place, row in enumerate(sheet.rows):
            cells = (_escaped(cell) for cell in row)
            marked = [f"\\textbf{{{c}}}" if (place, n) in sheet.best else c for n, c in enumerate(cells)]
            lines.append(" & ".join(marked) + " \\\\")
        parts.append("\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}"]))
    return "\n\n".join(parts) + "\n"


def csv(comparison: Comparison, proof: Evidence) -> str:
    """One line for each group, with all numbers at full precision and the tests of the group.

    A method of a study without a finished run has a line too, with n = 0 and the reason in the column `not_compared`.
    """
    import pandas as pd  # imported here, because it takes half a second

    tests = {(d.scenario, d.method): d for d in proof.differences}
    rows = []
    for row, group in zip(comparison.rows(), comparison.groups, strict=True):
        found = tests.get((group.scenario, group.method))
        words = {"method": group.method, "scenario": group.scenario}
        row = {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in row.items()}
        extra = {} if found is None else _test_columns(found)
        rows.append({"label": row.pop("label")} | words | row | extra)
    rows += [row | {"method": row["label"], "seeds": ""} for row in comparison.absent_rows()]
    return str(pd.DataFrame(rows).to_csv(index=False))


def content(comparison: Comparison, proof: Evidence) -> dict[str, Any]:
    """Return groups, tests and warnings in a form that JSON can hold."""
    groups = [
        row | {"method": group.method, "scenario": group.scenario}
        for row, group in zip(comparison.rows(), comparison.groups, strict=True)
    ]
    absent = [asdict(method) for method in comparison.absent]
    return {"groups": groups, "tests": proof.table(), "not_compared": absent, "warnings": list(comparison.warnings)}


def _text(cell: Cell | None, unit: str) -> str:
    return MISSING if cell is None else cell.text(unit)


def _unit(proof: Evidence, scenario: str) -> str:
    return "share" if proof.share(scenario) else "number"


def _metric(proof: Evidence) -> str:
    """Return the metrics with their units. If all scenarios have the same unit, the unit is written once."""
    metrics = list(proof.metrics.values())
    if proof.mixed:
        return " or ".join(dict.fromkeys(metric.title for metric in metrics))
    return f"{proof.metric} (%)" if metrics[0].share else proof.metric


def _rank(rank: float | None) -> str:
    return MISSING if rank is None else f"{rank:.2f}"


def _numbers(row: Difference, unit: str) -> list[str]:
    def signed(value: float) -> str:
        return f"{100 * value:+.1f}" if unit == "share" else f"{value:+.4g}"

    if row.n > 1 and row.low is None:
        return [number_of(row.n, "number"), signed(row.mean), "equal in all pairs", "no test", "no test"]
    inside = MISSING if row.low is None or row.high is None else f"{signed(row.low)} to {signed(row.high)}"
    return [number_of(row.n, "number"), signed(row.mean), inside, _p(row.p), _p(row.p_holm)]


def _p(value: float | None) -> str:
    if value is None:
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _equation(p: float) -> str:
    return f"p {_p(p)}" if p < 0.001 else f"p = {_p(p)}"


def _test_columns(row: Difference) -> dict[str, Any]:
    names = {"mean": "difference", "low": "difference.low", "high": "difference.high", "n": "pairs"}
    kept = ("n", "mean", "low", "high", "p", "p_holm", "baseline")
    return {names.get(key, key): getattr(row, key) for key in kept}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Return the text with LaTeX's special characters escaped."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {"±": r"$\pm$", "–": "--", "<": "$<$", ">": "$>$", "|": r"$\vert$", "×": r"$\times$"}
    return re.sub(r"[\\~^&%$#_{}±–<>|×]", lambda found: special[found.group()], text)
