"""The page of an evaluation: the scores of all sites together, of each site and of each group."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyfed.report.formatting import number_of
from polyfed.report.scores import title_of, unit_of

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
    unit = unit_of(name)
    text = number_of(numbers["value"], unit)
    if numbers.get("low") is not None:
        text += f" ({number_of(numbers['low'], unit)} to {number_of(numbers['high'], unit)})"
    return text


def tables(content: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables of an evaluation: (title, headings, rows)."""
    everyone = {"all sites": content["pooled"], **content["sites"]}
    names = list(content["pooled"]["metrics"])
    mark = {True: " *", False: ""}
    rows = [
        [f"{site}{mark[one['hidden']]}", f"{one['rows']:,}", *(cell(one["metrics"].get(n), n) for n in names)]
        for site, one in everyone.items()
    ]
    found = [("Scores, with 95 % intervals", ["site", "rows", *map(title_of, names)], rows)]
    if any(one["support"] for one in everyone.values()):
        size = max(len(one["support"]) for one in everyone.values())
        classes = content.get("classes") or [str(number) for number in range(size)]
        lines = [[site, *(f"{n:,}" for n in one["support"])] for site, one in everyone.items()]
        found.append(("Rows of each class", ["site", *map(str, classes)], lines))
    score = content["score"]
    for column in content["pooled"].get("groups", {}):
        values = list(content["pooled"]["groups"][column])
        lines = [
            [site, *(_group(one["groups"][column][value], score) for value in values)] for site, one in everyone.items()
        ]
        found.append((f"{title_of(score)} by {column}, with rows", ["site", *values], lines))
    return found + _compared(content.get("comparison"))


def _group(told: Mapping[str, Any], score: str) -> str:
    return f"{cell(told.get(score), score)}, {told['rows']:,}" if told["rows"] else "hidden or none"


def _compared(told: Mapping[str, Any] | None) -> list[tuple[str, list[str], list[list[str]]]]:
    if told is None:
        return []
    heads, rows = ["", "first", "second", "difference", "p"], []
    for name, one in told["bootstrap"].items():
        gap = f"{one['first'] - one['second']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        rows.append([f"{title_of(name)}, bootstrap", f"{one['first']:.4f}", f"{one['second']:.4f}", gap, ""])
    for label, one in told.get("delong", {}).items():
        gap = f"{one['first'] - one['second']:+.4f} ({one['low']:+.4f} to {one['high']:+.4f})"
        rows.append(
            [f"AUROC of {label}, DeLong", f"{one['first']:.4f}", f"{one['second']:.4f}", gap, f"{one['p']:.3g}"]
        )
    if one := told.get("mcnemar"):
        only = (f"{one['first_only']} only", f"{one['second_only']} only")
        rows.append(["right, McNemar", *only, f"{one['first_only'] - one['second_only']:+d}", f"{one['p']:.3g}"])
    return [(f"Two models on the same {told['rows']:,} rows", heads, rows)]


NOTE = (
    "* a class or group with fewer rows than [limits] min_group is hidden, and not in the sums. AUROC and average "
    "precision come from histograms; their intervals include the largest error of that."
)


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
    return "".join([*parts, f"<p>{escape(NOTE)}</p><p>{len(lines)} numbers in evaluation.csv</p>"])
