"""The runs of a comparison, from folders of runs and folders of studies. A study names its runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError
from polyfed.core.files import STUDY
from polyfed.report.run_folder import damaged
from polyfed.report.run_schema import ANY_KEYS, parse_as


@with_config(ANY_KEYS)
class StudyRun(TypedDict):
    """A run in `study.json`.

    Older folders have no `remarks` and no `settings_of`. `chosen` is empty without a search.
    """

    folder: str
    method: str
    scenario: str
    tuning: bool
    state: str
    remarks: NotRequired[list[str]]
    chosen: NotRequired[dict[str, Any]]
    settings_of: NotRequired[str]


@with_config(ANY_KEYS)
class StudyFacts(TypedDict, total=False):
    """The content of `study.json`."""

    metrics: dict[str, list[str]]
    runs: list[StudyRun]


STUDY_FACTS: TypeAdapter[StudyFacts] = TypeAdapter(StudyFacts)


@dataclass(frozen=True)
class NamedRun:
    """A run with the names that a study gives it.

    Attributes:
        folder: the folder of the run.
        method: the method, with the values of the grid.
        scenario: the data and the clients.
        metrics: the metrics that the study reports in this scenario.
        remarks: the warnings that the run gave.
        searched: the keys of the recipe whose values the study's search chose.
        settings_of: the method for which the search chose these values, if this is another method. Otherwise empty.
    """

    folder: Path
    method: str
    scenario: str
    metrics: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    settings_of: str = ""


def runs_of(dirs: Iterable[str | Path]) -> list[tuple[Path, NamedRun | None]]:
    """Return each run folder with the names that a study gives the run, or with None if no study names it.

    A folder occurs several times if a study names its run several times: methods with the same settings share runs.

    Raises:
        DataError: the folder of a study is damaged, or none of its runs is finished.
    """
    found: dict[tuple[Path, NamedRun | None], None] = {}
    for path in (Path(d).resolve() for d in dirs):
        if (path / STUDY).is_file():
            found |= dict.fromkeys((run.folder, run) for run in _reported(path))
        else:
            found[path, None] = None
    named = {path for path, run in found if run is not None}
    return [(path, run) for path, run in found if run is not None or path not in named]


def _reported(path: Path) -> list[NamedRun]:
    try:
        facts = parse_as(STUDY_FACTS, (path / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path / STUDY, error) from None
    runs = [run for run in facts.get("runs", []) if run["state"] == "finished" and not run["tuning"]]
    if not runs:
        raise DataError(f"{path} holds a study without a finished run. Go on with it: polyfed sweep STUDY.toml")
    metrics = facts.get("metrics", {})
    return [
        NamedRun(
            (path / run["folder"]).resolve(),
            run["method"],
            run["scenario"],
            tuple(metrics.get(run["scenario"], [])),
            tuple(run.get("remarks", [])),
            tuple(run.get("chosen", {})),
            run.get("settings_of", ""),
        )
        for run in runs
    ]
