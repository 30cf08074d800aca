"""The page of an evaluation: the scores of all sites together, of each site and of each group."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.objective.report import WITHIN
from polyfed.report.formatting import number_of
from polyfed.report.scores import sets_title, sets_words, title_of, unit_of

_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;text-align:right}"
    "th,td{border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}caption{text-align:left;font-weight:600;padding:.3rem 0}"
)


def cell(numbers: Mapping[str, Any] | None, name: str) -> str:
    """Return a metric with its interval, as in `84.1 % (80.2 % to 87.5 %)`; empty if it is undefined."""
    if numbers is None or numbers.get("value") is None:
        return ""
    ends = _ends(numbers, name, "")
    return number_of(numbers["value"], unit_of(name)) + (f" ({ends})" if ends else "")


def _ends(numbers: Mapping[str, Any], name: str, by: str) -> str:
    low, high = numbers.get(f"low{by}"), numbers.get(f"high{by}")
    if low is None or high is None:
        return ""
    unit = unit_of(name)
    return f"{number_of(low, unit)} to {number_of(high, unit)}"


def tables(content: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of an evaluation: (title, headings, rows)."""
    pooled, sites = content["pooled"], content["sites"]
    several = {"all": pooled, **sites} if len(sites) > 1 else {"all": pooled}
    result = [_pooled(pooled)]
    score = content["score"]
    if len(several) > 1:
        shown = [name for name in dict.fromkeys((score, *BESIDE)) if name in pooled["metrics"]]
        mark = {True: " *", False: ""}
        rows = [
            [f"{site}{mark[one['hidden']]}", f"{one['rows']:,}", *(_of_site(one, name, score) for name in shown)]
            for site, one in several.items()
        ]
        result.append(("By site", ["site", "rows", *map(title_of, shown)], rows))
    if pooled["support"]:
        classes = content.get("classes") or [str(number) for number in range(len(pooled["support"]))]
        few = several if len(several) <= MOST_SITES else {"all": pooled}
        lines = [
            [str(name), *(f"{one['support'][place]:,}" if one["support"] else "0" for one in few.values())]
            for place, name in enumerate(classes)
        ]
        result.append(("Rows of each class", ["class", *few], lines))
    for column, groups in pooled.get("groups", {}).items():
        few = several if len(several) <= MOST_SITES else {"all": pooled}
        lines = [
            [value, *(_group(one["groups"][column][value], score, hidden=one["hidden"]) for one in few.values())]
            for value in groups
        ]
        rest = pooled["rows"] - sum(told["rows"] for told in groups.values())
        lines += [["other or empty", f"{rest:,} rows, not scored apart"]] if rest and not pooled["hidden"] else []
        clients = max(told.get(score, {}).get("clients", 0) for told in groups.values())
        by = "by what a row lacks" if column == "missing" else f"by {column}"
        over = f"; those of all are over up to {clients:,} clients" if clients else ""
        title = f"{title_of(score)} {by}, with rows and 95 % intervals over rows{over}"
        result.append((title, ["", *few], [[*line, *[""] * (1 + len(few) - len(line))] for line in lines]))
    return result + _compared(content.get("comparison"))


BESIDE = ("auroc", "loss")
"""The metrics that the table of sites shows beside the main score."""

MOST_SITES = 6
"""The largest number of sites that have a column of their own."""


def _pooled(pooled: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Return the table of all rows: each metric with its intervals over rows and over clients."""
    clients = max((one.get("clients", 0) for one in pooled["metrics"].values()), default=0)
    rows = []
    for name, one in pooled["metrics"].items():
        by_rows = _ends(one, name, "_by_rows" if "clients" in one else "")
        ends = [by_rows, _ends(one, name, "") if "clients" in one else ""] if clients else [by_rows]
        rows.append([title_of(name), number_of(one["value"], unit_of(name)), *ends])
    heads = ["", "score", "over rows", *([f"over {clients} clients"] if clients else [])]
    return f"All {pooled['rows']:,} rows, with 95 % intervals", heads, rows


def _of_site(one: Mapping[str, Any], name: str, score: str) -> str:
    result = one["metrics"].get(name)
    if name == score or result is None:
        return cell(result, name)
    return number_of(result["value"], unit_of(name))


def _group(told: Mapping[str, Any], score: str, *, hidden: bool) -> str:
    return f"{cell(told.get(score), score)}, {told['rows']:,}" if told["rows"] else "hidden" if hidden else "no rows"


def _compared(told: Mapping[str, Any] | None) -> list[tuple[str, list[str], list[list[str]]]]:
    if told is None:
        return []
    first, second = told.get("models") or ("first", "second")
    heads, rows = ["", first, second, "difference", "p"], []
    for name, one in told["bootstrap"].items():
        gap = f"{one['first'] - one['second']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        rows.append([f"{title_of(name)}, bootstrap", f"{one['first']:.4f}", f"{one['second']:.4f}", gap, ""])
    for label, one in told.get("delong", {}).items():
        gap = f"{one['first'] - one['second']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        rows.append(
            [f"AUROC of {label}, DeLong", f"{one['first']:.4f}", f"{one['second']:.4f}", gap, f"{one['p']:.3g}"]
        )
    for label, one in told.get("delong_within_sites", {}).items():
        gap = f"{one['first'] - one['second']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        what = f"AUROC of {label} within {one['sites']} sites, DeLong"
        rows.append([what, f"{one['first']:.4f}", f"{one['second']:.4f}", gap, f"{one['p']:.3g}"])
    for name, one in told.get("paired", {}).items():
        sites = {f" at {site}": part for site, part in one.get("by_site", {}).items()}
        for where, part in {", paired": one, **sites}.items():
            gap = f"{part['first'] - part['second']:+.4f} ({part['low']:+.4f} to {part['high']:+.4f})"
            metric, _, target = name.partition(" ")
            what = " ".join(filter(None, (title_of(metric), target))) + where + f", {part['rows']:,} rows"
            rows.append([what, f"{part['first']:.4f}", f"{part['second']:.4f}", gap, f"{part['p']:.3g}"])
    if one := told.get("mcnemar"):
        only = (f"{one['first_only']} only", f"{one['second_only']} only")
        rows.append(["right, McNemar", *only, f"{one['first_only'] - one['second_only']:+d}", f"{one['p']:.3g}"])
    for site, one in told.get("by_site", {}).items():
        gap = f"{100 * (one['first'] - one['second']):+.1f} ({100 * one['low']:+.1f} to {100 * one['high']:+.1f})"
        shares = (number_of(one[name], "share") for name in ("first", "second"))
        rows.append([f"accuracy at {site}, {one['rows']:,} rows", *shares, f"{gap} points", f"{one['p']:.3g}"])
    clients = told.get("clients")
    whose = f" of {clients:,} clients, over which all tests are" if clients else ""
    return [(f"Two models on the same {told['rows']:,} rows{whose}", heads, rows)]


def notes(content: Mapping[str, Any]) -> list[str]:
    """Return what the reader of the tables must know."""
    pooled, result = content["pooled"], []
    told = content.get("model", {})
    if told.get("round"):
        best = told.get("best_round")
        other = f"; its best round is {best} (--best)" if best not in (None, told["round"]) else ""
        result.append(f"the model is that of round {told['round']}{other}")
    if "sets" in content:
        shown = {"metrics": {"global": pooled["metrics"]}, **content}
        result.append(f"{sets_title(content)}: {sets_words(shown, told.get('path'))}")
    if pooled["hidden"]:
        result.append("* a class or group with fewer rows than [limits] min_group is hidden, and not in the sums")
    if any("clients" in one for one in pooled["metrics"].values()):
        result.append(
            "over rows: as if all rows were independent; over clients: as a sample of clients, whose rows are alike, "
            "as you need it to speak of new clients"
        )
    if "delong_within_sites" in content.get("comparison", {}):
        result.append(
            "AUROCs within sites compare no rows of two sites, and are averaged by rows, for these sites; the paired "
            "bootstrap needs the answers for single rows, which no device sends"
        )
    if pooled.get("float32"):
        result.append(
            "the model cannot compute in float64, so the last digits depend on who holds a row and on its machine"
        )
    if WITHIN in pooled["metrics"]:
        result.append("a query searches the rows of its own site; recall and rank are easier at a site of few rows")
    if "c_index_within_sites" in pooled["metrics"]:
        result.append("the C-index within sites compares no rows of two sites, which no sums of sites can do")
    if any("error" in one for one in pooled["metrics"].values()):
        result.append(
            "AUROC and average precision come from histograms; their intervals include the largest error of that"
        )
    return result


def page(content: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as HTML.

    Args:
        content: the entry `evaluation` of result.json.
        lines: the same numbers, a line for each.
    """
    parts = [f"<!doctype html><meta charset=utf-8><title>Evaluation</title><style>{_STYLE}</style><h1>Evaluation</h1>"]
    for title, heads, rows in tables(content):
        head = "".join(f"<th>{escape(word)}</th>" for word in heads)
        body = "".join(f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in rows)
        parts.append(f"<table><caption>{escape(title)}</caption><tr>{head}</tr>{body}</table>")
    return "".join(
        [
            *parts,
            *(f"<p>{escape(note)}</p>" for note in notes(content)),
            f"<p>{len(lines)} numbers in evaluation.csv</p>",
        ]
    )
