"""The pages of a report. Each page is one HTML file that contains its data, style and script and loads no other files.

Recipes, reasons from clients and logged names are untrusted text. Jinja therefore escapes this text, and `tojson`
converts the data so that it contains no `<`. The script writes only text nodes. The content security policy allows only
the scripts whose hashes it lists.
"""

import base64
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from polyfed.core.messages import DESTINATIONS, KINDS, LABELS
from polyfed.core.tree import SHARED
from polyfed.evaluation.subsets import GAIN, LACKS, SUBSET, WORST
from polyfed.privacy.egress.policy import Policy
from polyfed.report import formatting as words
from polyfed.report.comparison.compare import Comparison
from polyfed.report.comparison.curves import curves_of
from polyfed.report.comparison.paired_differences import Evidence, evidence
from polyfed.report.comparison.score_against_cost import price_charts
from polyfed.report.comparison.tables import scenarios_sheet, tests_of
from polyfed.report.pages import bytes_by_client, charts, client_charts, privacy
from polyfed.report.pages.grids import class_scores, confusion, labels, modality_table
from polyfed.report.pages.leakage import leakage_of
from polyfed.report.pages.template import asset, environment, write_page
from polyfed.report.reading import egress, history
from polyfed.report.reading.reconciliation import Reconciliation, reconcile
from polyfed.report.reading.run_folder import Folder
from polyfed.report.scores import (
    AS_THEY_COME,
    GAINS,
    Headline,
    gain_words,
    goes_on,
    interval_of,
    lacks_in,
    lacks_title,
    not_beaten,
    of_target,
    sets_title,
    sets_words,
    subset_title,
    subsets_in,
    title_of,
    unit_of,
)

REPORT = "report.html"

SHOWN = ("macro_f1", "auroc", "pearson", "concordance", "acc7", "acc2", "f1", "recall5", "recall10", "weighted_kappa")
"""The metrics at the top of the page besides the score, if a run has them."""

WAYS = {"server": "To the server", "silo": "To the silo's edge", "client": "Down to clients"}
"""A map from each destination in the ledger to the heading on the page."""


def write_report(dir: str | Path, baseline: str | Path | None = None, device_logs: Sequence[Path] = ()) -> Path:
    """Write `report.html` into the folder of a run, whether it is finished or not.

    Args:
        dir: the folder of the run.
        baseline: the folder of another run on the same data, such as a run of FedAvg or Local. The page shows the gain
            of each client over this run.
        device_logs: state folders of devices, whose audit logs are compared with the server's log.

    Returns:
        The path of the page.

    Raises:
        DataError: a folder holds no run, or a file in it is damaged.
        RecipeError: the page cannot be written, or the baseline has other data, another seed or other clients.
    """
    folder = Folder(Path(dir))
    past = history.read(folder)
    modalities = folder.modalities
    sections = sections_of(folder, past, modalities, None if baseline is None else Folder(Path(baseline)))
    shown = [chart.table() for section in sections.values() for chart in section]
    grids = [grid for grid in (confusion(past, folder), labels(folder)) if grid is not None]
    crossed = egress.aggregate(folder, past.requests)
    groups = holdings(folder)
    text = render(
        "run.html",
        folder=folder,
        past=past,
        modalities=modalities,
        tiles=tiles(folder, past, modalities),
        not_beaten=not_beaten(folder.result),
        goes_on=goes_on(folder.result, folder.path),
        sets=(sets_title(folder.result), sets_words(folder.result, folder.path)) if "sets" in folder.result else None,
        groups=groups,
        held=modality_table(groups),
        sections=numbered(sections),
        grids={grid.name: grid for grid in grids},
        classes=class_scores(past, folder),
        subsets=subset_scores(past, modalities, folder.result.get("intervals", {})),
        lacks=scores_by_lack(past, folder.result.get("intervals", {}).get("global", {})),
        num_classes=len(past.confusion or ()),
        traffic=[(matrices(sums, folder, modalities), sums is crossed.evaluation) for sums in sides_of(crossed)],
        apart=crossed.evaluation is not None,
        senders=bytes_by_client.senders(crossed, folder),
        logs=_reconciled(folder, device_logs),
        spent=privacy.spent(folder),
        leakage=leakage_of(folder),
        drawn={
            "charts": shown,
            "participation": past.participation.table(modalities),
            "tables": {name: frames.drawn() for name, frames in past.tables.items()},
            "grids": {grid.name: grid.table() for grid in grids},
        },
    )
    return write_page(folder.path / REPORT, text)


def sections_of(
    folder: Folder, past: history.History, modalities: Sequence[str], baseline: Folder | None
) -> dict[str, list[charts.Chart]]:
    """Return the charts of each section of the page, without charts that have no values."""
    result = {
        "curves": charts.charts_of(past, modalities, folder.facts.get("captions", {})),
        "quality": client_charts.calibration(folder),
        "clients": client_charts.gains(past, folder, baseline),
        "updates": client_charts.norms(past, modalities),
        "picks": client_charts.picks(past, modalities, folder.num_clients),
        "entries": client_charts.coefficients(past),
        "privacy": privacy.chart(past, modalities),
    }
    return {name: [chart for chart in own if chart.has_values] for name, own in result.items()}


def numbered(sections: Mapping[str, Sequence[charts.Chart]]) -> dict[str, list[tuple[int, charts.Chart]]]:
    """Number all charts of the page in order, from 0. Return the pairs (number, chart) of each section."""
    numbers = itertools.count()
    return {name: [(next(numbers), chart) for chart in own] for name, own in sections.items()}


def sides_of(crossed: egress.Egress) -> list[egress.Egress]:
    """Return the ledger's sums for training, and its sums for evaluation if they are known and not empty."""
    evaluation = crossed.evaluation
    return [crossed] if evaluation is None or not evaluation.places else [crossed, evaluation]


def write_comparison(comparison: Comparison, path: str | Path, proof: Evidence | None = None) -> Path:
    """Write a comparison as a page: the tables, the tests, and curves with their range over runs.

    Args:
        path: the file to write.
        proof: the tests. If None, they are `evidence(comparison)`.

    Returns:
        The path of the page.

    Raises:
        DataError: a run's files are damaged.
        RecipeError: the page cannot be written.
    """
    proof = proof or evidence(comparison)
    found = [*curves_of(comparison), *price_charts(comparison)]
    sheets = [sheet for sheet in (scenarios_sheet(comparison, proof), *tests_of(proof)) if sheet is not None]
    drawn = {"charts": [chart.table() for chart in found]}
    text = render("comparison.html", comparison=comparison, sheets=sheets, charts=list(enumerate(found)), drawn=drawn)
    return write_page(Path(path), text)


def personal_remark(known: Mapping[str, Any], worst: float | None, head: Headline) -> str:
    """Return the interval and the rows of `personal.mean`, and the worst client with its rows.

    Args:
        known: the intervals of the group `personal` in result.json.
        worst: the score of the worst client, or None.
        head: the main metric.
    """
    result = [interval_of(known["mean"], head.unit)] if "mean" in known else []
    if worst is not None:
        rows = f" ({interval_of(known['worst'], head.unit)})" if "worst" in known else ""
        result.append(f"worst client {words.number_of(worst, head.unit)}{rows}")
    return "; ".join(result)


def tiles(folder: Folder, past: history.History, modalities: Sequence[str]) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: (title, value, remark)."""
    found: list[tuple[str, str, str]] = []

    def add(title: str, value: float | None, unit: str, remark: str = "") -> None:
        if value is not None:
            found.append((title, words.number_of(value, unit), remark))

    head = past.headline
    about = AS_THEY_COME if lacks_in(past.columns) else "all modalities"
    known = folder.result.get("intervals", {}).get("global", {})
    words_of = partial(interval_of, unit=head.unit)
    remark = f"{about}: {words_of(known[head.score])}" if head.score in known else f"{about}, test set"
    add(head.title + of_target(folder.result), past.last(f"global.{head.score}"), head.unit, remark)
    for title, value, unit, about in _beside(folder, past):
        add(title, value, unit, about)
    alone = past.group("unimodal.")
    for modality in (*modalities, *(m for m in alone if m not in modalities)):
        if f"global.{SUBSET}{modality}" not in past.columns:  # the table of subsets answers this better
            add(f"{modality} alone", past.last(f"unimodal.{modality}"), head.unit, ALONE)
    if (worst_subset := past.last(f"global.{WORST}")) is not None:
        found_subsets = subset_scores(past, modalities, {})
        which = "" if found_subsets is None else f"{found_subsets['worst']}: "
        add("worst subset", worst_subset, head.unit, which + words_of(known.get(WORST)))
    for metric in SHOWN:
        add(title_of(metric), past.last(f"global.{metric}"), unit_of(metric), "test set")
    own = folder.result.get("intervals", {}).get("personal", {})
    remark = personal_remark(own, past.last("personal.worst"), head)
    add(f"personal {head.title}", past.last("personal.mean"), head.unit, remark)
    for way in ("up", "down"):
        column = past.columns.get(f"bytes_{way}", [])
        total = folder.result.get(f"bytes_{way}", sum(v for v in column if v is not None))
        add(f"bytes {way}", total, "bytes", "training, all rounds")
    apart = [past.columns.get(f"evaluation.bytes_{way}", []) for way in ("up", "down")]
    if any(apart):
        up, down = (sum(v for v in column if v is not None) for column in apart)
        add("evaluation traffic", up + down, "bytes", f"up {words.bytes_of(up)}, down {words.bytes_of(down)}")
    add("epsilon", past.last("epsilon"), "epsilon", privacy.remark(folder))
    first = folder.result.get("seconds_first_round")
    remark = "median, without evaluation"
    remark += "" if first is None else f"; first round {words.seconds_of(first)}"
    add("time per round", folder.result.get("seconds_per_round"), "seconds", remark)
    add("parameters", folder.result.get("num_parameters"), "number", _kept(folder))
    return found


def _beside(folder: Folder, past: history.History) -> Iterator[tuple[str, float, str, str]]:
    """The numbers beside the score: that of one answer for all rows, the AUROC of two classes, and the backdoor."""
    if (baseline := folder.result.get("baseline")) is not None:
        yield "without a model", baseline["score"], past.headline.unit, baseline["answer"]
    if (ranked := folder.result.get("ranking")) is not None and past.last("global.auroc") is None:
        yield "AUROC", ranked["auroc"], "number", f"of '{ranked['positive']}', test set"
    if (backdoor := folder.result.get("backdoor")) is not None:
        without = words.number_of(backdoor["without_trigger"], "share")
        yield "backdoor", backdoor["success"], "share", f"test rows that the trigger turns; {without} without it"


ALONE = "this model on the rows that have it, with the others at zero, not a model of its own"
"""The remark on the score from one modality alone."""


def scores_by_lack(past: history.History, known: Mapping[str, Any]) -> list[tuple[str, float | None, str]]:
    """Return the last score of the rows that lack the same modalities: (title, score, interval and rows).

    Args:
        past: the rounds.
        known: the intervals of the group `global` in result.json.
    """
    unit = past.headline.unit
    names = lacks_in(past.columns)
    result = [(lacks_title(n), past.last(f"global.{LACKS}{n}"), interval_of(known.get(LACKS + n), unit)) for n in names]
    whole = past.headline.score
    everyone = (AS_THEY_COME, past.last(f"global.{whole}"), interval_of(known.get(whole), unit))
    return [everyone, *result] if result else []


def subset_scores(
    past: history.History, modalities: Sequence[str], intervals: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the last scores of the subsets of the modalities, the best first, or None if none was scored.

    Each row has a title, the modalities of the subset (None for a mean over subsets of one size), and the scores of the
    global model and of the clients' models, with the rows behind them. `worst` is the title of the worst row.

    Args:
        past: the rounds.
        intervals: the entry `intervals` of result.json.
    """
    names = subsets_in([*past.columns]) or subsets_in([*past.columns], "personal.")
    rows: list[dict[str, Any]] = []
    for name in names:
        scores = [past.last(f"{group}.{SUBSET}{name}") for group in ("global", "personal")]
        parts = name.split("+")
        known = parts if set(parts) <= set(modalities) else None
        row: dict[str, Any] = {"title": subset_title(name), "parts": known}
        row |= {"score": scores[0], "personal": scores[1]}
        told = [intervals.get(group, {}).get(SUBSET + name) for group in ("global", "personal")]
        row["told"] = interval_of(told[0] if scores[0] is not None else told[1], past.headline.unit)
        gain, known = past.last(f"global.{GAIN}{name}"), intervals.get("global", {}).get(GAIN + name)
        rows.append(row | {"gain": "" if gain is None else gain_words(gain, past.headline.unit, known)})
    if not rows:
        return None
    main = "score" if any(row["score"] is not None for row in rows) else "personal"
    rows = [row for row in rows if row[main] is not None]
    rows.sort(key=lambda row: row[main], reverse=past.headline.rising)
    largest = max(abs(row[main]) for row in rows) or 1.0
    for row in rows:
        row["width"] = round(100 * abs(row[main]) / (1.0 if past.headline.unit == "share" else largest))
    own = any(row["personal"] is not None for row in rows) and main == "score"
    gains = GAINS if any(row["gain"] for row in rows) else ""
    return {"rows": rows, "main": main, "worst": rows[-1]["title"], "own": own, "gains": gains}


def _kept(folder: Folder) -> str:
    """Describe the data that the method keeps besides the model, or return ""."""
    size, kept = folder.result.get("num_parameters", 0), folder.result.get("num_kept", {})
    server, client = (kept.get(place, 0) for place in ("server", "client"))
    parts = [f"server keeps {server:,}"] if server != size and server else []
    parts += [f"each client keeps up to {client:,}"] if client else []
    return f"of the model; {', '.join(parts)}" if parts else "of the model"


def holdings(folder: Folder) -> list[dict[str, Any]]:
    """How many clients hold which set of modalities, the most frequent set first, and rows that lack one of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    lacking: dict[tuple[str, ...], Counter[str]] = {}
    for client in folder.facts.get("clients", []):
        held, rows = tuple(client["modalities"]), int(client["rows"])
        groups.setdefault(held, []).append(rows)
        gone = {name: round(share * rows) for name, share in client.get("missing_rows", {}).items()}
        lacking.setdefault(held, Counter()).update(gone)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"modalities": held, "clients": len(own), "rows": sum(own), "least": min(own), "most": max(own)}
        | {"lacking": dict(lacking[held])}
        for held, own in ordered
    ]


def _reconciled(folder: Folder, device_logs: Sequence[Path]) -> Reconciliation | None:
    """Return the result of comparing the audit logs, or None for a run without an audit log."""
    if not (device_logs or folder.facts.get("audited")):
        return None
    try:
        return reconcile(folder.path, device_logs)
    except ImportError:  # a run that was copied to a machine without the extra
        return Reconciliation((), ("the audit logs were not checked: pip install 'polyfed[server]'",))


def matrices(sums: egress.Egress, folder: Folder, modalities: Sequence[str]) -> list[dict[str, Any]]:
    """Return a table (blocks x kinds) for each destination. A cell holds bytes, refusals and the policy's verdict."""
    policy: dict[str, dict[str, list[str]]] = folder.facts.get("egress", {})
    lines = {(block, way): frozenset(kinds) for block, row in policy.items() for way, kinds in row.items()}
    rules = Policy(lines).for_client(modalities)
    ways = [way for way in DESTINATIONS if way == "server" or any(place[2] == way for place in sums.places)]
    result = []
    for way, title in WAYS.items():
        places = [place for place in sums.places if place[2] == way]
        if not places and way != "server":
            continue
        kinds = [k for k in KINDS if way != "client" or any(k == place[1] for place in places)]
        blocks = list(dict.fromkeys([*modalities, SHARED, *([LABELS] if way != "client" else [])]))
        blocks += [block for block in dict.fromkeys(place[0] for place in places) if block not in blocks]
        most = max((sums.bytes[place] for place in places), default=0)
        rows = []
        for block in blocks:
            allowed = policy.get(block, {}).get(way, [])
            if way == "client":
                allowed = [kind for kind in kinds if any(rules.accepts(kind, block, to) for to in ways)]
            cells = [_cell(sums, (block, kind, way), kind in allowed, most) for kind in kinds]
            rows.append((block, cells))
        result.append({"title": title, "kinds": kinds, "rows": rows, "is_gated": way != "client"})
    return result


def _cell(sums: egress.Egress, place: egress.Place, allowed: bool, most: int) -> dict[str, Any]:
    size = sums.bytes[place]
    return {
        "bytes": size,
        "crossings": sums.crossings[place],
        "refused": sums.refused[place],
        "allowed": allowed,
        "shade": round(100 * (size / most) ** 0.5) if most else 0,
    }


def render(template: str, **context: Any) -> str:
    """Return the text of a page: the template, filled with the values in `context`. `drawn` is its charts' data."""
    own = "\n".join(asset(name) for name in ("report.js", "export.js", "start.js"))
    scripts = [asset("uPlot.iife.min.js"), own]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        _environment()
        .get_template(template)
        .render(
            licence=Markup(asset("uPlot.LICENSE")),
            scripts=[Markup(script) for script in scripts],
            styles=[Markup(asset(name)) for name in ("uPlot.min.css", "report.css")],
            security=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}",
            **context,
        )
    )


@cache
def _environment() -> Environment:
    made = environment()
    made.filters |= {"number": words.number_of, "moment": words.moment_of, "title_of": title_of, "unit_of": unit_of}
    return made


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
