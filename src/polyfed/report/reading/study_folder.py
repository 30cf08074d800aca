"""The runs of a comparison, from folders of runs and folders of studies. A study names its runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from polyfed.core.errors import DataError
from polyfed.core.system.files import STUDY
from polyfed.report.reading.run_folder import damaged
from polyfed.report.reading.run_schema import ANY_KEYS, parse_as

NOT_CHOSEN = "its settings are not chosen yet"
"""Why a method whose search goes on has no reported runs."""


@with_config(ANY_KEYS)
class StudyRun(TypedDict):
    """A run in `study.json`.

    Older folders lack the keys that are not required. `chosen` is empty without a search.
    """

    folder: str
    method: str
    scenario: str
    tuning: bool
    state: str
    seed: NotRequired[int]
    why: NotRequired[str]
    remarks: NotRequired[list[str]]
    chosen: NotRequired[dict[str, Any]]
    settings_of: NotRequired[str]
    ranked: NotRequired[bool]
    source: NotRequired[str]
    edges: NotRequired[list[str]]


class AbsentFacts(TypedDict):
    """A method in `study.json` of which some or all runs are not finished. See `Absent`."""

    method: str
    scenario: str
    missing: int
    of: int
    why: str


@with_config(ANY_KEYS)
class StudyFacts(TypedDict, total=False):
    """The content of `study.json`. Older folders have no `not_compared` and no `reads_rounds`.

    `reads_rounds` tells whether the search reads more of a trial than its last score.
    """

    metrics: dict[str, list[str]]
    reads_rounds: bool
    runs: list[StudyRun]
    not_compared: list[AbsentFacts]


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
        edges: a sentence for each of these values that lies at an edge of its range.
        ranked: whether the run counts in the mean ranks.
    """

    folder: Path
    method: str
    scenario: str
    metrics: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    settings_of: str = ""
    edges: tuple[str, ...] = ()
    ranked: bool = True


@dataclass(frozen=True)
class Absent:
    """A method of a study whose runs are not all finished, so that a comparison lacks them.

    Attributes:
        method: the method, with the values of the grid.
        scenario: the scenario.
        missing: the number of reported runs that are not finished.
        of: the number of all reported runs.
        why: why they are not finished, on one line.
    """

    method: str
    scenario: str
    missing: int
    of: int
    why: str

    @property
    def whole(self) -> bool:
        """Whether the method has no finished run at all."""
        return self.missing >= self.of

    def text(self, *, several: bool) -> str:
        """Return the sentence of a comparison about this method.

        Args:
            several: whether the comparison has several scenarios, so that the sentence names the scenario.
        """
        name = f"{self.method} in {self.scenario}" if several else self.method
        runs = "" if self.whole else f"{self.missing} of {self.of} runs of "
        return f"not compared: {runs}{name} ({self.why})"


def absent_of(dirs: Iterable[str | Path]) -> list[Absent]:
    """Return the methods of the studies in these folders of which some or all runs are not finished.

    Raises:
        DataError: the folder of a study is damaged.
    """
    folders = dict.fromkeys(Path(d).resolve() for d in dirs)
    return [absent for path in folders if (path / STUDY).is_file() for absent in _absent(facts_of_study(path))]


def _absent(facts: Mapping[str, Any]) -> list[Absent]:
    """Return the methods whose runs are not all finished. An older folder lacks `not_compared`, so its runs count."""
    if (listed := facts.get("not_compared")) is not None:
        return [Absent(**entry) for entry in listed]
    cells: dict[tuple[str, str], list[StudyRun]] = {}
    for run in facts.get("runs", []):
        cells.setdefault((run["method"], run["scenario"]), []).append(run)
    result = []
    for (method, scenario), runs in cells.items():
        reported = [run for run in runs if not run["tuning"]]
        missing = [run for run in reported if run["state"] != "finished"]
        if missing or not reported:
            whys = [run.get("why", "") for run in missing or runs if run["state"] != "finished"]
            why = next((" ".join(why.split()) for why in whys if why), "its runs are not finished")
            result.append(Absent(method, scenario, len(missing), len(reported), why))
    return result


def runs_of(dirs: Iterable[str | Path]) -> list[tuple[Path, NamedRun | None]]:
    """Return each run folder with the names that a study gives the run, or with None if no study names it.

    A folder occurs several times if a study names its run several times: methods with the same settings share runs.

    Raises:
        DataError: the folder of a study is damaged, or none of its runs is finished.
    """
    result: dict[tuple[Path, NamedRun | None], None] = {}
    for path in (Path(d).resolve() for d in dirs):
        if (path / STUDY).is_file():
            result |= dict.fromkeys((run.folder, run) for run in _reported(path))
        else:
            result[path, None] = None
    named = {path for path, run in result if run is not None}
    return [(path, run) for path, run in result if run is not None or path not in named]


def facts_of_study(path: Path) -> dict[str, Any]:
    """Return the content of a study's `study.json`; see `StudyFacts`.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return parse_as(STUDY_FACTS, (path / STUDY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path / STUDY, error) from None


def whole_scenarios(path: Path) -> list[str]:
    """Return the scenarios of a study in which all runs have ended, in the order of the study.

    Raises:
        DataError: the file of the study is damaged.
    """
    facts = facts_of_study(path)
    waits = {run["scenario"] for run in facts.get("runs", []) if run["state"] in ("left", "running")}
    waits |= {entry["scenario"] for entry in facts.get("not_compared", []) if entry["why"] == NOT_CHOSEN}
    begun = {run["scenario"] for run in facts.get("runs", [])}
    return [name for name in facts.get("metrics", {}) if name in begun - waits]


def _reported(path: Path) -> list[NamedRun]:
    facts = facts_of_study(path)
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
            tuple(run.get("edges", [])),
            run.get("ranked", True),
        )
        for run in runs
    ]
