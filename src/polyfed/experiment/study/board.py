"""The state of a sweep: its runs, which of them are finished, failed or unfinished, and why."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polyfed.core.system.files import FACTS, RESULT, ROUNDS, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.experiment.study.default_ranges import edge_notes
from polyfed.experiment.study.plan import Cell
from polyfed.experiment.study.search import Searcher
from polyfed.report.comparison.notes import SHARED_RUNS, notes_of, notes_of_run
from polyfed.report.reading.run_schema import ROUND_ROW, RUN_FACTS, RUN_RESULT, parse_as
from polyfed.report.reading.study_folder import Absent
from polyfed.report.scores import Metric, first_metric

State = Literal["left", "running", "paused", "finished", "failed"]

FAILURES = "failures"
"""The folder of a study with a file for each run whose training diverged."""

DIVERGED = 4
"""The exit code of a run whose training diverged or whose clients gave no usable reply. It would fail again."""


@dataclass(eq=False)
class Entry:
    """A run of a sweep.

    Attributes:
        name: The name of its folder.
        recipe: The table of its recipe.
        cell: The first cell that needs this run.
        seed: The seed of the run.
        chosen: The values of the searched keys.
        tuning: Whether the run belongs to the search.
        state: The state of the run.
        why: Why the run failed or is unfinished. Empty otherwise.
        code: The exit code of a failed run.
        round: The last round that is done.
        rounds: The number of rounds.
        until: The round after which the run pauses, or 0 if it runs to its end.
        kept: Whether an earlier sweep finished the run.
        tries: How often the process of the run was killed since the run's last finished round.
        remarks: The warnings of the run.
        source: The digest of the code of polyfed that computed the result, or an empty text if it is not known.
        result: The content of result.json. Empty if the run is not finished. A run that pauses has only `task` and the
            `metrics` of its last round.
    """

    name: str
    recipe: Mapping[str, Any]
    cell: Cell
    seed: int
    chosen: Mapping[str, Any]
    tuning: bool
    state: State = "left"
    why: str = ""
    code: int = 0
    round: int = 0
    rounds: int = 0
    until: int = 0
    kept: bool = False
    tries: int = 0
    remarks: list[str] = field(default_factory=list)
    source: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        """Whether the run failed because of its setting, so that it would fail again."""
        return self.state == "failed" and self.code == DIVERGED

    @property
    def ended(self) -> bool:
        """Whether the run is finished, has failed, or pauses at the round that was wanted."""
        return self.state in ("finished", "failed", "paused")

    @property
    def notes(self) -> list[str]:
        """The warnings of the run, and the parts of its method that had no effect."""
        return notes_of_run(self.remarks, self.result)

    def score(self, metrics: Sequence[str]) -> float | None:
        """Return the value of the first of these metrics that the run has, or None."""
        found = first_metric(self.result, metrics)
        return None if found is None else found[1]


@dataclass
class Board:
    """All runs of a sweep.

    Attributes:
        folder: The folder of the study.
        cells: The cells, in the order of the study.
        metrics: Scenario -> its metrics.
        entries: Maps the name of a run to the run. A run is added when the first cell needs it.
        reported: Maps the index of a cell to the cell's final runs, whose scores the study reports. The runs of a
            search are not among them. A cell has no entry before the settings of its final runs are chosen.
        searches: Maps the index of a cell to its search.
        blocked: Maps the index of a cell to the reason why `reported` has no entry for this cell. For example, the
            cell's search has not chosen the settings yet, or the search stopped.
        remarks: The warnings of each run that an earlier sweep finished, by the name of the run.
        sources: The digest of the code that computed each result of an earlier sweep, by the name of the run.
        code: The digest of the code of this process.
    """

    folder: Path
    cells: list[Cell]
    metrics: Mapping[str, Sequence[str]]
    entries: dict[str, Entry] = field(default_factory=dict)
    reported: dict[int, list[Entry]] = field(default_factory=dict)
    searches: dict[int, Searcher] = field(default_factory=dict)
    blocked: dict[int, str] = field(default_factory=dict)
    remarks: Mapping[str, list[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    code: str = ""

    def count(self, state: State, *, tuning: bool | None = None) -> int:
        """Return the number of runs in this state.

        Args:
            tuning: True counts only the runs of the search. False counts only the other runs. None counts both.
        """
        return sum(e.state == state and tuning in (None, e.tuning) for e in self.entries.values())

    def path(self, entry: Entry) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / entry.name

    def ended(self, entry: Entry) -> bool:
        """Return whether the folder has the result of a run, or the reason why training diverged."""
        return (self.path(entry) / RESULT).is_file() or self._failure(entry).is_file()

    def look(self, entry: Entry) -> bool:
        """Return whether the run ended, or reached the round after which it pauses. If so, read its state and result.

        A run is finished if it has a `result.json`. A run writes this file last, in one step.
        """
        result = self.path(entry) / RESULT
        entry.source = self.sources.setdefault(entry.name, "" if result.is_file() else self.code)
        if result.is_file():
            try:
                entry.result = parse_as(RUN_RESULT, result.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return False
            entry.state, entry.why, entry.remarks = "finished", "", self.remarks.get(entry.name, [])
            entry.round = entry.rounds = int(entry.result.get("rounds", 0))
            return True
        failure = self._failure(entry)
        if failure.is_file():
            try:
                facts = parse_json(failure.read_text(encoding="utf-8"))
                entry.state, entry.code, entry.why = "failed", int(facts["code"]), str(facts["why"])
            except (OSError, ValueError, KeyError, TypeError):
                return False
            return True
        return self._paused(entry)

    def _paused(self, entry: Entry) -> bool:
        """Return whether the run has had the round after which it pauses. If so, read the metrics of that round."""
        row = self.row(entry, entry.until)
        if row is None:
            return False
        entry.state, entry.why, entry.round = "paused", "", entry.until
        entry.result = {"metrics": row["metrics"], "task": self.task(entry)}
        return True

    def row(self, entry: Entry, round: int) -> dict[str, Any] | None:
        """Return the row of an evaluated round of a run, or None if the run has not had it."""
        return next((row for row in self.rows(entry) if row["round"] == round), None) if round else None

    def rows(self, entry: Entry) -> Iterator[dict[str, Any]]:
        """Yield the rows of the rounds of a run that were evaluated."""
        path = self.path(entry) / ROUNDS
        if not path.is_file():
            return
        for line in path.read_bytes().splitlines(keepends=True):
            with suppress(ValueError):  # the last line of a run that was killed
                row = parse_as(ROUND_ROW, line) if line.endswith(b"\n") else {}
                if "metrics" in row:
                    yield row

    def task(self, entry: Entry) -> Any:
        """Return what a run's result.json says about its task, from its run.json."""
        with suppress(OSError, ValueError):
            return parse_as(RUN_FACTS, (self.path(entry) / FACTS).read_text(encoding="utf-8")).get("task")
        return None

    def score_at(self, entry: Entry, rung: int, metrics: Sequence[str], last: int = 1) -> float | None:
        """Return the mean score of the `last` evaluations of a run until a round (or of all, if there are fewer).

        A run that ended earlier has the score of its end, a diverged one None. A run that diverged later has its score:
        the search read it before, and must read it again when it goes on.
        """
        rows = [row for row in self.rows(entry) if row["round"] <= rung]
        if not rows or (rows[-1]["round"] < rung and entry.state == "failed"):
            return entry.score(metrics)
        task = entry.result.get("task")
        scores = [first_metric({"metrics": row["metrics"], "task": task}, metrics) for row in rows[-last:]]
        known = [score[1] for score in scores if score is not None]
        return sum(known) / len(known) if known else entry.score(metrics)

    def note_failure(self, entry: Entry, code: int, why: str) -> None:
        """Note that a run failed. If training diverged, also note this on disk, because it would diverge again."""
        entry.state, entry.code, entry.why = "failed", code, why
        entry.result = {}  # the score of a round after which it paused is not that of the setting
        if entry.diverged:
            self._failure(entry).parent.mkdir(exist_ok=True)
            replace_text(self._failure(entry), json.dumps({"code": code, "why": why}))

    def scores(self, number: int) -> list[float]:
        """Return the scores of a cell's reported runs. Runs that are not finished are left out."""
        metrics = self.metrics[self.cells[number].scenario]
        result = (entry.score(metrics) for entry in self.reported.get(number, []) if entry.state == "finished")
        return [score for score in result if score is not None]

    def metric(self, number: int, entries: Sequence[Entry]) -> Metric | None:
        """Return the metric by which these runs of a cell are scored, or None if no run has a score."""
        metrics = self.metrics[self.cells[number].scenario]
        firsts = (first_metric(entry.result, metrics) for entry in entries)
        return next((first[0] for first in firsts if first is not None), None)

    def summary(self, number: int) -> tuple[float, float, int] | None:
        """Return mean, sample standard deviation and number of a cell's scores, or None if there are no scores."""
        scores = self.scores(number)
        return (*mean_and_spread(scores), len(scores)) if scores else None

    def left_out(self) -> list[tuple[str, list[str]]]:
        """Return the reasons why the study leaves cells out, each with the cells that it concerns."""
        return _gathered((f"left out: {cell.skip}", self._place(cell)) for cell in self.cells if cell.skip)

    def problems(self) -> list[tuple[str, list[str]]]:
        """Return the reasons why the study is incomplete, each with the runs or cells that it concerns.

        A study is incomplete if a run failed or is unfinished, if the settings of a cell are not chosen yet, or if a
        reported run has none of the study's metrics.
        """
        failed = ((e.why, e.name) for e in self.entries.values() if e.why and e.state not in ("finished", "paused"))
        waiting = ((why, self._place(self.cells[number])) for number, why in self.blocked.items())
        return _gathered([*failed, *waiting, *self._unmeasured()])

    def not_compared(self) -> list[Absent]:
        """Return the cells that a comparison lacks wholly or in part, each with the reason on one line."""
        result = []
        for number, cell in enumerate(self.cells):
            reported = self.reported.get(number, [])
            missing = [entry for entry in reported if entry.state != "finished"]
            if reported and not missing:
                continue
            failed = [entry.why for entry in missing or self._runs_of(number) if entry.state == "failed"]
            whys = [cell.skip and f"left out: {cell.skip}", self.blocked.get(number, ""), *failed]
            why = ": ".join(dict.fromkeys(" ".join(why.split()) for why in whys if why))
            result.append(
                Absent(cell.label, cell.scenario, len(missing), len(reported), why or "its runs are not finished")
            )
        return result

    def notes(self) -> list[tuple[str, list[str]]]:
        """Return the notes about the runs, with the cells that each note concerns.

        The notes are the warnings of the runs, the parts of a method that had no effect, and which cells share their
        runs. Before the reported runs of a cell are known, the notes are about the runs of the cell's search.
        """
        twins = _gathered(
            (",".join(e.name for e in entries), self._place(self.cells[number]))
            for number, entries in sorted(self.reported.items())
        )
        shared = [(SHARED_RUNS, places) for _, places in twins if len(places) > 1]
        other = _gathered(
            (f"computed with other code of polyfed, of digest {entry.source}", self._place(self.cells[number]))
            for number, entries in sorted(self.reported.items())
            for entry in entries
            if entry.state == "finished" and entry.source not in ("", self.code)
        )
        edges = _gathered((note, self._place(cell)) for n, cell in enumerate(self.cells) for note in self.edges(n))
        return (
            shared
            + [(text, list(dict.fromkeys(places))) for text, places in other]
            + edges
            + _gathered(
                (note, self._place(cell))
                for number, cell in enumerate(self.cells)
                for note in notes_of([entry.notes for entry in self._runs_of(number) if entry.state == "finished"])
            )
        )

    def edges(self, number: int) -> list[str]:
        """Return a sentence for each value of a cell that its search chose at an edge of its range."""
        reported = self.reported.get(number)
        if not reported or number not in self.searches:
            return []
        cell = self.cells[number]
        return list(edge_notes(cell.space, reported[0].chosen, cell.table))

    def _runs_of(self, number: int) -> list[Entry]:
        result = self.reported.get(number)
        return [e for e in self.entries.values() if e.cell is self.cells[number]] if result is None else result

    def _unmeasured(self) -> Iterator[tuple[str, str]]:
        """Yield a reason and the name of a run, for each reported run that is finished but has no score."""
        for number, entries in self.reported.items():
            wanted = self.metrics[self.cells[number].scenario]
            for entry in entries:
                if entry.state == "finished" and entry.score(wanted) is None:
                    yield f"finished without {no_metric(wanted, entry.result['metrics'])}", entry.name

    @staticmethod
    def _place(cell: Cell) -> str:
        return f"{cell.label} in {cell.scenario}"

    def _failure(self, entry: Entry) -> Path:
        return self.folder / FAILURES / f"{entry.name}.json"


def no_metric(wanted: Sequence[str], measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a text that lists the metrics that the study wants, and the metrics that the run has."""
    has = [f"{group}.{name}" for group, values in measured.items() for name in values]
    return f"{' or '.join(wanted)}, only {', '.join(has) or 'no metrics'}"


def _gathered(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return each text once, with a list of all places that are paired with it."""
    result: dict[str, list[str]] = {}
    for text, place in pairs:
        result.setdefault(text, []).append(place)
    return list(result.items())
