"""Results, checks and comparisons as tables for the terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyfed.evaluation.subsets import LACKS, SUBSET, WORST
from polyfed.privacy.differential.guarantee import number
from polyfed.report.comparison.cells import Column
from polyfed.report.comparison.compare import Comparison
from polyfed.report.formatting import bytes_of, counted, number_of, seconds_of
from polyfed.report.scores import (
    TITLES,
    Headline,
    goes_on,
    lacks_in,
    lacks_title,
    not_beaten,
    of_target,
    scored_rows,
    sets_title,
    sets_words,
    subset_title,
    subsets_in,
    title_of,
    unit_of,
    with_interval,
)
from polyfed.report.text_layout import plain_table, stacked, titled


def result_table(result: dict[str, Any], folder: object = None) -> Group:
    """The scores and the cost of a finished run.

    Args:
        result: the content of result.json.
        folder: the folder of the run, for the commands that follow.
    """
    title = f"{result['algorithm']} on {result['dataset']}, {counted(result['rounds'], 'round')}, seed {result['seed']}"
    table = plain_table("", "")
    head = Headline.of(result.get("task"))
    for name, value in _scores(result, head):
        table.add_row(Text(name), value)
    for name, value in _context(result, head, folder):
        table.add_row(Text(name), Text(value))
    if best := result.get("best"):
        groups = best["metrics"]
        reached = groups.get("global") or groups.get("validation", {})
        if reached:
            words = ", ".join(f"{k} {number_of(reached[k], unit_of(k))}" for k in head.shown if k in reached)
            table.add_row(f"at best validation, round {best['round']}", words)
    if (end := result.get("stopped", {})).get("by", "rounds") != "rounds":
        table.add_row("stopped", Text(end["why"]))
    if backdoor := result.get("backdoor"):
        turned, without = (number_of(backdoor[name], "share") for name in ("success", "without_trigger"))
        table.add_row(
            Text(f"backdoor to class {backdoor['target']}"), f"{turned} of test rows ({without} without trigger)"
        )
    table.add_row("bytes up, down", f"{bytes_of(result['bytes_up'])}, {bytes_of(result['bytes_down'])}")
    table.add_row("time per round", seconds_of(result["seconds_per_round"]))
    if spent := result.get("privacy"):
        partial = " (of the protected parts only)" if spent["unprotected"] else ""
        table.add_row(f"epsilon at delta {spent['delta']:g}", number(spent["epsilon"]) + partial)
    if "simulated_seconds" in result:
        table.add_row("simulated time", seconds_of(result["simulated_seconds"]))
    told = {"warning": not_beaten(result), "hint": goes_on(result, folder)}
    return Group(titled(title, table), *(Text(f"{kind}: {text}") for kind, text in told.items() if text))


def _context(result: dict[str, Any], head: Headline, folder: object) -> Iterator[tuple[str, str]]:
    """What a score is to be compared with, whose rows it is about, and what sets hold."""
    if result.get("sets"):
        yield sets_title(result), sets_words(result, folder)
    if known := result.get("baseline"):
        yield f"{head.title}, {known['answer']}", number_of(known["score"], head.unit)
    if (ranked := result.get("ranking")) and "auroc" not in result["metrics"].get("global", {}):
        yield f"AUROC of '{ranked['positive']}'", number_of(ranked["auroc"], "number")
    if people := result.get("unseen_clients"):
        yield "test clients, outside training", named(people)


def named(people: Sequence[str]) -> str:
    """Return the number of clients and the names of the first ones."""
    more = ", ..." if len(people) > MOST_PEOPLE else ""
    return f"{len(people)}: {', '.join(people[:MOST_PEOPLE])}{more}"


MOST_PEOPLE = 6
"""The most clients that a line names."""


def _scores(result: dict[str, Any], head: Headline) -> Iterator[tuple[str, str]]:
    metrics, known = result["metrics"], result.get("intervals", {})
    reached, of_rows = metrics.get("global", {}), known.get("global", {})
    if head.score in reached:
        words = with_interval(reached[head.score], head.unit, of_rows.get(head.score))
        yield f"{head.title}{of_target(result)}, {scored_rows(reached)}", words
    for name in lacks_in(reached, ""):
        yield f"- {lacks_title(name)}", with_interval(reached[LACKS + name], head.unit, of_rows.get(LACKS + name))
    yield from _subsets(reached, of_rows, head, head.title)
    for modality, value in metrics.get("unimodal", {}).items():
        if SUBSET + modality not in reached:  # which reads as the same, and differs by the share of the bias
            yield f"{head.title}, {modality} alone", number_of(value, head.unit)
    for name in TITLES:
        if name in reached and name not in (head.score, "top5"):
            yield title_of(name), number_of(reached[name], unit_of(name))
    if each := metrics.get("global_by_client"):
        words = f"{number_of(each['weighted'], head.unit)} (worst {number_of(each['worst'], head.unit)})"
        yield "the same, clients weighted by rows", words
    if "mean" in (personal := metrics.get("personal", {})):
        own = known.get("personal", {})
        yield f"personal {head.title}, mean", with_interval(personal["mean"], head.unit, own.get("mean"))
        yield "- of the worst client", with_interval(personal["worst"], head.unit, own.get("worst"))
        if WORST not in reached:
            yield from _subsets(personal, own, head, f"personal {head.title}")


def _subsets(reached: dict[str, float], known: dict[str, Any], head: Headline, title: str) -> Iterator[tuple[str, str]]:
    """The score of each subset of the modalities, or only the worst of them if there are many."""
    names = subsets_in(reached, "")
    if WORST not in reached:
        return
    if len(names) <= MOST_SUBSETS:
        for name in names:
            words = with_interval(reached[SUBSET + name], head.unit, known.get(SUBSET + name))
            yield f"{title} from {subset_title(name)}", words
        for name in subsets_in(known, ""):
            if not known[SUBSET + name]["rows"]:
                yield f"{title} from {subset_title(name)}", "no test row has all of these"
    worst = next((f" ({subset_title(n)})" for n in names if reached[SUBSET + n] == reached[WORST]), "")
    yield f"worst subset{worst}", with_interval(reached[WORST], head.unit, known.get(WORST))


MOST_SUBSETS = 7
"""The largest number of subsets that are printed, those of three modalities. The report shows all of them."""


def comparison_tables(comparison: Comparison, width: int) -> Group:
    """Quality and cost of each group: mean ± sample standard deviation over n runs (n seeds if folds are pooled).

    Columns that do not fit into `width` characters are shown in additional tables.
    """
    quality = [column for column in comparison.columns if column.is_quality]
    cost = [column for column in comparison.columns if not column.is_quality]
    parts = []
    for title, columns in (("Quality", quality), ("Cost", cost)):
        tables = [_comparison(comparison, part) for part in _fitting(comparison, columns, width)]
        parts.append(Group(Text(title, "bold"), *tables))
    return stacked(*parts, *(Text(warning) for warning in comparison.warnings))


def _comparison(comparison: Comparison, columns: Sequence[Column]) -> Table:
    table = plain_table("method", "n", *(column.heading for column in columns))
    for group in comparison.groups:
        cells = (comparison.cell(group, column) for column in columns)
        table.add_row(Text(group.name), str(len(group.folders)), *cells)
    return table


def _fitting(comparison: Comparison, columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Split the columns into tables that fit into `width`. The width includes the leading columns, method and n."""
    gap, first = 2, max(len(group.name) for group in comparison.groups) + 6
    parts: list[list[Column]] = []
    room = 0
    for column in columns:
        cells = (comparison.cell(group, column) for group in comparison.groups)
        need = gap + max(len(column.heading), *(len(cell) for cell in cells))
        if not parts or need > room:
            parts.append([])
            room = width - first
        parts[-1].append(column)
        room -= need
    return parts
