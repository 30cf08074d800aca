"""The files of a study's folder: its page, its finished, failed and unfinished runs, and a table of all numbers."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import STUDY, replace_text
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.experiment.study.board import Board, Entry, State, no_metric
from polyfed.experiment.study.plan import Cell, short, value_text
from polyfed.experiment.study.search import Searcher
from polyfed.experiment.study.study_schema import Study
from polyfed.report.pages.page import render
from polyfed.report.pages.template import write_page
from polyfed.report.reading.run_folder import numbers_of
from polyfed.report.reading.run_schema import parse_as
from polyfed.report.reading.study_folder import STUDY_FACTS
from polyfed.report.scores import Metric

if TYPE_CHECKING:
    import pandas as pd

PAGE, NUMBERS = "index.html", "results.csv"

STATES: tuple[State, ...] = ("finished", "running", "paused", "failed", "left")


def claim(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Create the folder of a study, unless it already exists.

    Returns:
        By the name of a run: its warnings, and the digest of the code that computed its result.

    Raises:
        RecipeError: the folder holds other files, or cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise RecipeError(f"--out {folder}: {error.strerror or error}. Choose a folder that can be written") from None
    if others and STUDY not in others:
        raise RecipeError(f"--out {folder} is not empty and holds no study ({others[0]}, ...). Choose another folder")
    if not others:
        replace_text(folder / STUDY, json.dumps({"runs": []}))
    try:
        facts = parse_as(STUDY_FACTS, (folder / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the sweep writes this file again
        return {}, {}
    runs = {Path(run["folder"]).name: run for run in facts.get("runs", [])}
    sources = {name: run.get("source", "") for name, run in runs.items() if run["state"] == "finished"}
    return {name: run.get("remarks", []) for name, run in runs.items()}, sources


def write(board: Board, study: Study) -> None:
    """Write the files. Each file is replaced as a whole."""
    content = {
        "name": study.name,
        "title": study.title,
        "metrics": {name: list(metrics) for name, metrics in board.metrics.items()},
        "reads_rounds": study.reads_rounds,
        "runs": [_run(board, entry, number) for number, entry in _all_runs(board)],
        "not_compared": [asdict(absent) for absent in board.not_compared()],
    }
    replace_text(board.folder / STUDY, json.dumps(content, indent=1, default=str))
    write_page(board.folder / PAGE, page_text(board, study))
    replace_text(board.folder / NUMBERS, frame(board).to_csv(index=False))


def frame(board: Board) -> "pd.DataFrame":
    """One row for each reported run; see `polyfed.sweep`."""
    import pandas as pd  # imported here, because it takes half a second

    rows = []
    taken = any(cell.settings_of for cell in board.cells)
    for number, entry in _reported(board):
        cell = board.cells[number]
        rows.append(
            {"method": cell.label, "scenario": cell.scenario, "seed": entry.seed}
            | dict(cell.values)
            | dict(entry.chosen)
            | ({"settings_of": cell.settings_of} if taken else {})
            | {"state": entry.state, "why": entry.why, "folder": str(board.path(entry))}
            | numbers_of(entry.result)
        )
    return pd.DataFrame(rows)


def page_text(board: Board, study: Study) -> str:
    """Return the page of a study: results, chosen settings, and finished, failed and unfinished runs."""
    scenarios = list(study.scenarios)
    labels = list(dict.fromkeys(cell.label for cell in board.cells))
    places = {(cell.label, cell.scenario): number for number, cell in enumerate(board.cells)}
    rows = [(label, [_cell(board, places.get((label, name))) for name in scenarios]) for label in labels]
    rows = [*fold_means(board, scenarios), *rows]
    return render(
        "study.html",
        study=study,
        metrics={name: " or ".join(board.metrics[name]) for name in scenarios},
        scenarios=scenarios,
        rows=rows,
        counts={state: count for state in STATES if (count := board.count(state)) or state != "paused"},
        choices=list(_choices(board)),
        takers=any(cell.settings_of for cell in board.cells),
        problems=[*board.problems(), *board.left_out()],
        notes=board.notes(),
        runs=[_line(board, entry, number) for number, entry in _all_runs(board)],
        drawn={"charts": []},
    )


def fold_means(board: Board, scenarios: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the label of each method whose runs are folds, and by scenario its mean over folds and seeds."""
    groups: dict[str, list[int]] = {}
    for number, cell in enumerate(board.cells):
        groups.setdefault(cell.compared, []).append(number)
    rows = []
    for label, numbers in groups.items():
        folds = {board.cells[number].label for number in numbers}
        if len(folds) < 2:
            continue
        texts = []
        for name in scenarios:
            own = [number for number in numbers if board.cells[number].scenario == name]
            scores = [score for number in own for score in board.scores(number)]
            metric = next((m for number in own if (m := board.metric(number, board.reported.get(number, [])))), None)
            texts.append(_score_words(metric, scores) if metric is not None and scores else "")
        rows.append((f"{label}, mean of {len(folds)} folds", texts))
    return rows


def _score_words(metric: Metric, scores: Sequence[float]) -> str:
    """Return mean and sample standard deviation of scores."""
    mean, spread = mean_and_spread(list(scores))
    factor, digits = (100, 1) if metric.share else (1, 3)
    return " ± ".join(f"{factor * value:.{digits}f}" for value in ((mean, spread) if len(scores) > 1 else (mean,)))


def settings_text(values: Mapping[str, Any]) -> str:
    """Return the values of keys as text, such as `lr = 0.1, mu = 0.01`."""
    return ", ".join(f"{short(key)} = {value_text(value)}" for key, value in values.items())


def cell_text(board: Board, number: int) -> str:
    """Return mean and sample standard deviation of a cell's scores, and the number of runs if some are missing.

    If no run has a score, there are two cases. If no run has finished, the text is empty. If runs have finished but do
    not have the study's metric, the text lists the metrics that they have.
    """
    found, reported = board.summary(number), board.reported.get(number, [])
    metric = board.metric(number, reported)
    if found is None or metric is None:
        groups = next((entry.result["metrics"] for entry in reported if entry.state == "finished"), None)
        if groups is None:
            return ""
        return f"no {no_metric(board.metrics[board.cells[number].scenario], groups)}"
    mean, spread, count = found
    factor, digits = (100, 1) if metric.share else (1, 3)
    words = [f"{factor * value:.{digits}f}" for value in ((mean, spread) if count > 1 else (mean,))]
    return " ± ".join(words) + (f" (n={count} of {len(reported)})" if count < len(reported) else "")


def _reported(board: Board) -> Iterator[tuple[int, Entry]]:
    """Yield every reported run, with the position of its cell among all cells."""
    for number, entries in sorted(board.reported.items()):
        for entry in entries:
            yield number, entry


def _all_runs(board: Board) -> list[tuple[int | None, Entry]]:
    """Return (index of the cell, run) for the reported runs, and then (None, run) for the runs of the searches."""
    return [*_reported(board), *((None, entry) for entry in board.entries.values() if entry.tuning)]


def _run(board: Board, entry: Entry, number: int | None) -> dict[str, Any]:
    """Return the entry of a run in `study.json`."""
    cell = entry.cell if number is None else board.cells[number]
    return {
        "folder": f"runs/{entry.name}",
        "method": cell.compared,
        "scenario": cell.scenario,
        "seed": entry.seed,
        "tuning": entry.tuning,
        "state": entry.state,
        "why": entry.why,
        "remarks": entry.remarks,
        "source": entry.source,
        "values": dict(cell.values),
        "chosen": dict(entry.chosen),
        "settings_of": cell.settings_of,
        "ranked": cell.ranked,
        "edges": [] if number is None else board.edges(number),
    }


def _cell(board: Board, number: int | None) -> str:
    if number is None:
        return ""
    if skip := board.cells[number].skip:
        return f"left out: {skip}"
    return cell_text(board, number) or board.blocked.get(number, "left")


def _choices(board: Board) -> Iterator[dict[str, Any]]:
    """Yield for each searched cell the number of trials, the chosen setting, and all settings that were tried.

    A cell that takes the settings of another method has no trials.
    """
    for number, cell in enumerate(board.cells):
        search, reported = board.searches.get(number), board.reported.get(number, [])
        if search is None and (cell.skip or not cell.settings_of):
            continue
        trials = [] if search is None else search.trials
        yield {
            "cell": f"{cell.label} in {cell.scenario}",
            "trials": len(trials),
            "rounds": 0 if search is None else search.spent,
            "chosen": _chosen_text(cell, reported[0]) if reported else board.blocked.get(number, ""),
            "tried": [
                (settings_text(values), _score_text(search, place, score))
                for place, (values, score) in enumerate(trials)
            ],
        }


def _state_text(entry: Entry) -> str:
    if entry.state == "running":
        return f"round {entry.round} of {entry.rounds}"
    return f"stopped after round {entry.round}" if entry.state == "paused" else entry.state


def _score_text(search: Searcher | None, place: int, score: float | None) -> str:
    """Return the score of a trial, whether it had all seeds and, if it stopped early, its last round."""
    text = "diverged" if score is None else f"{score:.4f}"
    if search is not None and place in search.confirmed:
        return f"{text} with all seeds"
    ended = search.pruned.get(place) if search is not None else None
    return text if ended is None else f"{text}, stopped after round {ended}"


def _chosen_text(cell: Cell, entry: Entry) -> str:
    """Return the chosen settings of a run. If another method's search chose them, the text also names that method."""
    text = settings_text(entry.chosen)
    return f"{text} (settings of {cell.settings_of})" if cell.settings_of else text


def _line(board: Board, entry: Entry, number: int | None) -> dict[str, Any]:
    """Return a run in the form in which the page lists it."""
    cell = entry.cell if number is None else board.cells[number]
    report = board.path(entry) / "report.html"
    score = entry.score(board.metrics[cell.scenario])
    return {
        "name": entry.name,
        "report": os.path.relpath(report, board.folder) if entry.state == "finished" else "",
        "method": cell.label,
        "scenario": cell.scenario,
        "seed": entry.seed,
        "use": "search" if entry.tuning else "reported",
        "chosen": _chosen_text(cell, entry),
        "state": _state_text(entry),
        "why": entry.why,
        "score": "" if score is None else f"{score:.4f}",
    }
