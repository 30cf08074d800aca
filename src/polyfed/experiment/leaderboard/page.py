"""The page of a board: a table of entries in Markdown, with their differences to control and placebo."""

import html
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError
from polyfed.core.system.files import replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.experiment.leaderboard.entry import (
    LARGEST,
    STRICT,
    Entry,
    Made,
    Part,
    algorithm_of,
    parts_of,
    read_entry,
    reported,
    scores,
    trials,
)
from polyfed.experiment.leaderboard.verification import RECEIPT
from polyfed.experiment.study.ranges import at
from polyfed.report.comparison.paired_tests import Paired, paired
from polyfed.report.formatting import MISSING, bytes_of, number_of
from polyfed.report.scores import Metric, first_metric


@with_config(STRICT)
class _Receipt(TypedDict):
    format: str
    entry: str
    runs: int
    search: bool
    differing: int
    when: str
    made: Made


_RECEIPT: TypeAdapter[Any] = TypeAdapter(_Receipt)

HEAD = """# Board

Each line is a method with its control, FedAvg with the same tuning budget, and its placebo, on the same seeds. Scores
are means over the seeds with the 95 % interval (Student's t), differences are paired by seed. *Repeated* names when and
where somebody says to have run the entry again to the same bits; `polyfed board verify ENTRY` is your own check, and
`polyfed docs board` says how to add an entry.

"""

COLUMNS = (
    *("entry", "method", "data", "score", "seeds, trials", "minus control", "minus placebo", "sent by clients"),
    "repeated",
)


def write_page(files: Sequence[Path], out: Path) -> list[dict[str, Any]]:
    """Write the page of these entries and receipts.

    Args:
        files: entries, and receipts of `polyfed board verify`.
        out: the page, in Markdown.

    Returns:
        A row for each entry, with the numbers of the page.

    Raises:
        DataError: a file is neither.
    """
    receipts, entries = list[dict[str, Any]](), list[tuple[Path, Entry, str]]()
    for file in files:
        found = _receipt(file)
        if found is None:
            entries.append((file, *read_entry(file)))
        else:
            receipts.append(found)
    rows = [_row(file, entry, sha, receipts) for file, entry, sha in entries]
    rows.sort(key=lambda row: (row["scenario"], row["metric"], -row["score"] if not row["lowest"] else row["score"]))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(row, out)) + " |" for row in rows]
    reasons = [
        f"- {_plain(row['method'])}: no placebo. {_plain(row['no_placebo'])}" for row in rows if row["no_placebo"]
    ]
    replace_text(out, HEAD + "\n".join([*lines, *([""] if reasons else []), *reasons]) + "\n")
    return rows


def _receipt(file: Path) -> dict[str, Any] | None:
    """Return a receipt, or None for another file."""
    try:
        if file.stat().st_size > LARGEST:
            return None
        content = parse_json(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != RECEIPT:
            return None
        result: dict[str, Any] = _RECEIPT.validate_python(content)
    except ValidationError:
        raise DataError(
            f"{file} is a damaged receipt. `polyfed board verify ENTRY --receipt FILE` writes one"
        ) from None
    except (OSError, ValueError):
        return None
    return result


def _row(file: Path, entry: Entry, sha: str, receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    method = entry["method"]
    own = scores(method, entry["metrics"])
    first = first_metric(reported(method)[0]["result"] or {}, entry["metrics"])
    assert first is not None, "faults_of refuses a run without the metric"
    metric = first[0]
    parts: dict[str, Part] = dict(parts_of(entry))
    rows = {role: _difference(own, scores(part, entry["metrics"])) for role, part in parts.items() if role != "method"}
    return {
        "file": str(file),
        "sha256": sha,
        "method": method["name"],
        "algorithm": algorithm_of(method),
        "scenario": entry["scenario"],
        "data": str(at(method["recipe"], "data.name")),
        "metric": metric.name,
        "lowest": metric.lowest,
        "share": metric.share,
        "seeds": len(own),
        "trials": len(trials(method)),
        **_paired("score", paired(list(own.values()))),
        **{key: value for role, found in rows.items() for key, value in _paired(role, found).items()},
        "bytes_up": sum(int((run["result"] or {}).get("bytes_up", 0)) for run in reported(method)) / len(own),
        "no_placebo": entry["no_placebo"] if "placebo" not in entry else "",
        "own_code": entry["code"] is not None,
        "repeated": [
            {"when": one["when"], "search": one["search"], **one["made"]}
            for one in receipts
            if one["entry"] == sha and one["differing"] == 0
        ],
        "differed": sum(one["entry"] == sha and one["differing"] > 0 for one in receipts),
    }


def _difference(own: Mapping[int, float], other: Mapping[int, float]) -> Paired:
    return paired([own[seed] - other[seed] for seed in own if seed in other])


def _paired(name: str, found: Paired) -> dict[str, float | None]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def _cells(row: Mapping[str, Any], out: Path) -> list[str]:
    """Return the cells of a line. Text of an entry is escaped, since it comes from a stranger."""
    metric = Metric(row["metric"], row["lowest"], row["share"])
    link = Path(os.path.relpath(row["file"], out.parent)).as_posix()
    repeated = [
        f"{_plain(one['when'])}, {_plain(one['processor'])}, torch {_plain(one['versions'].get('torch', ''))}"
        + (", with the search" if one["search"] else "")
        for one in row["repeated"]
    ]
    if row["differed"]:
        repeated.append(f"**{row['differed']} differed**")
    return [
        f"[{_plain(Path(row['file']).stem)}]({link})",
        _plain(row["method"]) + (" (own code)" if row["own_code"] else ""),
        f"{_plain(row['scenario'])} ({_plain(row['data'])})",
        f"{_number(row, 'score', metric)} {_plain(row['metric'])}",
        f"{row['seeds']}, {row['trials']}",
        _number(row, "control", metric, points=True),
        _number(row, "placebo", metric, points=True) if "placebo" in row else "no placebo",
        bytes_of(row["bytes_up"]),
        "; ".join(repeated) or MISSING,
    ]


def _number(row: Mapping[str, Any], name: str, metric: Metric, *, points: bool = False) -> str:
    """Return a mean with its interval. Differences of shares are in percentage points."""

    def text(value: float | None) -> str:
        if value is None:
            return MISSING
        if points:
            return f"{100 * value:+.1f}" if metric.share else f"{value:+.4g}"
        return number_of(value, "share" if metric.share else "number")

    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return text(row[name]) if low is None else f"{text(row[name])} ({text(low)} to {text(high)})"


def _plain(text: str) -> str:
    """Return a text in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]()#|!~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
