"""The results of a study in one small file, with which a sweep goes on on another machine.

Each line of the file, which is compressed, is a run: its name, which is a digest of its recipe, its data and the
versions; where it stands in the study; its scores; and the digest of the code of polyfed that computed them. A run has
the same name on every machine, so a sweep finds its result by the name.
"""

import gzip
import json
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired

import tomli_w
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError
from polyfed.core.system.files import RECIPE, RESULT, ROUNDS, STUDY, replace_bytes, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.experiment.study.board import FAILURES, Entry
from polyfed.experiment.study.plan import quiet
from polyfed.report.comparison.folds import fold_of
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.run_schema import ANY_KEYS, ROUND_ROW, RUN_RESULT, parse_as
from polyfed.report.reading.study_folder import StudyRun, facts_of_study

KEPT = ("algorithm", "seed", "rounds", "task", "bytes_up", "bytes_down", "seconds", "simulated_seconds")
"""What the file keeps of `result.json`, beside the scores."""

SUMMED = ("bytes_up", "bytes_down", "simulated_seconds")
"""What a kept round sums up over the rounds since the last one that is kept."""

POOLED = ("confusion", "moments")
"""What the last kept round of a fold has besides, from which a comparison pools the rows of all folds."""

LARGEST = 2**28
"""Largest size in bytes of what the file unpacks to: some hundred thousand runs (inferred)."""


@with_config(ANY_KEYS)
class Known(TypedDict):
    """A line of the file. `failure` stands for the result of a run whose training diverged."""

    run: str
    scenario: str
    method: str
    seed: int
    tuning: bool
    chosen: dict[str, Any]
    code: str
    result: NotRequired[dict[str, Any]]
    evaluated: NotRequired[list[dict[str, Any]]]
    failure: NotRequired[dict[str, Any]]


_LINE: TypeAdapter[Known] = TypeAdapter(Known)


def read_known(file: Path) -> dict[str, Known]:
    """Read a file of known results, by the names of the runs; empty if there is no such file.

    Raises:
        DataError: the file is damaged.
    """
    if not file.exists():
        return {}
    try:
        with gzip.open(file) as packed:
            text = packed.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it unpacks to more than {LARGEST:,} bytes")
        rows = [_LINE.validate_python(parse_json(line)) for line in text.decode("utf-8").splitlines()]
        for row in rows:
            if not row.get("failure") and "metrics" not in row.get("result", {}):
                raise ValueError(f"the run {row['run']} has neither scores nor a failure")
            parse_as(RUN_RESULT, json.dumps(row.get("result", {})))
            for evaluated in row.get("evaluated", []):
                parse_as(ROUND_ROW, json.dumps(evaluated))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"{file} holds no results of a study: {why}. Take a copy, or leave the file out") from None
    return {row["run"]: row for row in rows}


def write_known(folder: Path, file: Path) -> int:
    """Write the finished and the diverged runs of a study's folder into a file, beside those that it holds already.

    Args:
        folder: the folder of a study.
        file: the file, which is replaced as a whole. Equal results give equal bytes.

    Returns:
        The number of runs in the file.

    Raises:
        DataError: the file or the folder is damaged.
    """
    facts = facts_of_study(folder) if (folder / STUDY).is_file() else {}
    rows = read_known(file)
    metrics, every = facts.get("metrics", {}), facts.get("reads_rounds", False)
    for run in facts.get("runs", []):
        name = Path(run["folder"]).name
        complete = name in rows and ("evaluated" in rows[name] or not (every and run["tuning"]))
        if not complete and (content := _content(folder, run, metrics.get(run["scenario"], []), every)):
            place = {key: run[key] for key in ("scenario", "method", "tuning")} | {"seed": run.get("seed", 0)}
            chosen, code = run.get("chosen", {}), run.get("source", "")
            rows[name] = _LINE.validate_python({"run": name, **place, "chosen": chosen, "code": code, **content})
    ordered = sorted(rows.values(), key=lambda row: (row["scenario"], row["method"], row["tuning"], row["run"]))
    text = "".join(json.dumps(row, separators=(",", ":"), sort_keys=True) + "\n" for row in ordered)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(file, gzip.compress(text.encode(), 9, mtime=0))
    return len(rows)


def _content(folder: Path, run: StudyRun, metrics: Iterable[str], every: bool) -> dict[str, Any]:
    """Return the entries of a run's line that hold its result; empty if the run has not ended.

    Args:
        folder: the folder of the study.
        run: its entry in `study.json`.
        metrics: the metrics of its scenario.
        every: whether the search reads more of a trial than its last score.
    """
    path, failure = folder / run["folder"], folder / FAILURES / f"{Path(run['folder']).name}.json"
    known = Folder(path) if run["state"] == "finished" else None
    rows = run["tuning"] and every and (path / ROUNDS).is_file()
    evaluated = {"evaluated": list(_evaluated(Folder(path), metrics))} if rows else {}
    if known is None:
        content = {"failure": parse_json(failure.read_text(encoding="utf-8"))} if failure.is_file() else {}
        return content and content | evaluated
    kept = {key: known.result[key] for key in KEPT if key in known.result}
    if run["tuning"]:  # the search reads nothing else
        return {"result": kept | {"metrics": _scores(known.result, metrics)}} | evaluated
    groups = {metric.partition(".")[0] for metric in metrics} | {"validation"}
    scores = {name: own for name, own in known.result.get("metrics", {}).items() if name in groups}
    curve = list(_evaluated(known, metrics))
    if curve and fold_of(known):
        *_, last = known.rounds()
        curve[-1] |= {name: last[name] for name in POOLED if name in last and last["round"] == curve[-1]["round"]}
    return {"result": kept | {"metrics": scores}, "evaluated": curve}


def _evaluated(run: Folder, metrics: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the evaluated rounds of a run with the reported metrics, and what was spent since the last one."""
    spent: dict[str, Any] = {}
    for row in run.rounds():
        for name in SUMMED:
            if row.get(name) is not None:
                spent[name] = spent.get(name, 0) + row[name]
        spent["train"] = spent.get("train", 0.0) + (row.get("seconds", {}).get("train") or 0.0)
        if scores := _scores(row, metrics):
            train = round(spent.pop("train"), 4)
            yield {"round": row["round"], "metrics": scores, "seconds": {"train": train}, **spent}
            spent = {}


def _scores(row: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return these metrics of a result or a round, as far as it has them."""
    result: dict[str, dict[str, Any]] = {}
    for group, _, name in (metric.partition(".") for metric in metrics):
        if name in row.get("metrics", {}).get(group, {}):
            result.setdefault(group, {})[name] = row["metrics"][group][name]
    return result


def restore(known: Known, entry: Entry, folder: Path) -> None:
    """Write a known result into the folder of a study, as if the run had ended there.

    The folder of the run has its recipe, its result and its evaluated rounds, and no ledger, report or model. That of a
    run that diverged has no result, and exists only if the search reads its rounds.
    """
    path = folder / "runs" / entry.name
    rows: Iterable[Mapping[str, Any]] = known.get("evaluated", ())
    if "failure" not in known or rows:
        made = path.with_name(f".{entry.name}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        (made / RECIPE).write_text(tomli_w.dumps(quiet(entry.recipe).table()), encoding="utf-8")
        (made / ROUNDS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        if "failure" not in known:
            (made / RESULT).write_text(json.dumps(known.get("result", {})), encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)  # the begin of a run that was stopped
        made.rename(path)  # in one step, so that no run has a part of its files
    if "failure" in known:
        (folder / FAILURES).mkdir(parents=True, exist_ok=True)
        replace_text(folder / FAILURES / f"{entry.name}.json", json.dumps(known["failure"]))
