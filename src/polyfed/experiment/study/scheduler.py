"""`polyfed.sweep`: carries out a study. It skips finished runs, and carries out several other runs at the same time."""

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError
from polyfed.experiment.results.round_facts import code_digest
from polyfed.experiment.running import machine
from polyfed.experiment.running.events import Emitter, Listener
from polyfed.experiment.running.lock import alone_in
from polyfed.experiment.study import results
from polyfed.experiment.study.board import Board, Entry
from polyfed.experiment.study.known_results import Known, read_known, restore, write_known
from polyfed.experiment.study.plan import Cell, Planner, planned
from polyfed.experiment.study.pool import Message, Pool, RayPool
from polyfed.experiment.study.ranges import put
from polyfed.experiment.study.search import Searcher
from polyfed.report.reading.study_folder import NOT_CHOSEN

if TYPE_CHECKING:
    import pandas as pd

KILLS = 6
"""A run has failed if its process was killed this number of times without a finished round in between. The memory may
then be too small for this run, even if it runs alone. With a smaller number, kills from outside could also make a run
fail: five of them may all hit one run."""

DIGITS = 12
"""The digits of the digest of polyfed's code that name the code beside a result."""

PATIENCE = 0.5
"""Seconds between two looks at the free memory."""

PAGE_EVERY = 5.0
"""Seconds between two versions of the page while runs go on, at least."""

PAGE_SHARE = 0.02
"""The part of the time that is spent on the page, which takes longer the more runs it lists."""

Needs = Iterator[list[Entry]]
"""The runs that a cell needs next. All of them must end before the cell continues."""


def sweep(
    study: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    known: str | Path | None = None,
    listeners: Sequence[Listener] = (),
) -> "pd.DataFrame":
    """Carry out a study: every method in every scenario, with every combination of the grid, on every seed.

    Args:
        study: the path of a study's TOML file, or its table.
        out: the folder of the study. The default is `runs/NAME`. A sweep that was stopped continues in its folder.
        jobs: the largest number of runs at the same time. The default is the number of cores. Fewer runs start while
            memory is short.
        ray: the address of a Ray cluster (docs/cluster.md) whose nodes carry out the runs, or "" for the cluster that
            RAY_ADDRESS names or this machine belongs to. All nodes must share the folder. None: this machine alone.
        known: a file with results of this study, which are not computed again. At the end, the sweep writes its own
            results into the file too, so that they can travel to another machine; see docs/sweep.md.
        listeners: called with every event, as `listener(event, board=...)`; see docs/sweep.md.

    Returns:
        One row for each reported run, finished or not. The first columns are `method`, `scenario` and `seed`. Then
        each key of the grid and of the search has a column. If a method of the study has `settings_of`, the column
        `settings_of` names the method whose search chose the settings. This column is empty for the other methods.
        Then come `state`, `why` (why the run failed or is unfinished) and `folder`. Finally, each number in result.json
        has a column with a dotted name.

    Raises:
        PolyfedError: one of `polyfed.core.errors`; its text names all problems of the study.
    """
    if jobs is not None and jobs < 1:
        raise RecipeError(f"--jobs {jobs}: must be 1 or more")
    folder = _folder_of(study, out)
    with processes(folder, jobs or machine.cores()) if ray is None else RayPool(folder, jobs, ray) as pool:
        return results.frame(carried_out(study, folder, pool, listeners, None if known is None else Path(known)))


def processes(folder: Path, jobs: int) -> Pool:
    """Return processes of this machine for `carried_out`; use them in a `with` block."""
    return Pool(folder, jobs)


def carried_out(
    study: str | Path | Mapping[str, Any],
    folder: Path,
    pool: Pool | RayPool,
    listeners: Sequence[Listener] = (),
    known: Path | None = None,
) -> Board:
    """Carry out a study with processes that may already have carried out others in this folder; see `sweep`.

    If a listener raises an exception, the sweep ends with it, and so do its runs, whose checkpoints stay.
    """
    rows = {} if known is None else read_known(known)
    planner, cells = planned(study)
    loaded = planner.study
    remarks, sources = results.claim(folder)
    metrics = {name: loaded.metrics_of(name) for name in loaded.scenarios}
    board = Board(folder, cells, metrics, remarks=remarks, sources=sources, code=code_digest()[:DIGITS])
    with alone_in(folder, "another sweep is writing this study", "Wait for it, or choose another folder"):
        try:
            _Sweep(planner, board, pool, Emitter(listeners), rows).carry_out()
        except BaseException:
            pool.drop()  # the next sweep of this pool would hear of runs that it does not know
            raise
        finally:  # also after Ctrl-C, because the page lists the unfinished runs
            results.write(board, loaded)
            if known is not None:
                write_known(folder, known)
    return board


def _folder_of(study: str | Path | Mapping[str, Any], out: str | Path | None) -> Path:
    """Return the folder of a study, by default the one with the name of its file."""
    if out is not None:
        return Path(out)
    return Path("runs") / ("study" if isinstance(study, Mapping) else Path(study).stem)


class _Sweep:
    """One sweep: collects the runs that the cells need, and passes them to the pool."""

    def __init__(
        self, planner: Planner, board: Board, pool: Pool | RayPool, emit: Emitter, known: Mapping[str, Known]
    ) -> None:
        self.planner, self.board, self.pool, self.emit, self.known = planner, board, pool, emit, known
        self.waiting: list[Entry] = []
        self.cells: dict[int, tuple[Needs, list[Entry]]] = {}

    def carry_out(self) -> None:
        """Execute all runs of the study."""
        for number, cell in enumerate(self.board.cells):
            if not cell.skip and not cell.settings_of:
                self._advance(number, self._needs(number, cell), [])
        self.emit("sweep-started", board=self.board)
        due = -math.inf
        while self.waiting or self.pool.running:
            self._start()
            message = self.pool.message(PATIENCE)
            if message is not None:
                self._hear(message)
            self.emit("sweep-progress", board=self.board)
            if (began := time.monotonic()) > due:
                results.write(self.board, self.planner.study)
                due = time.monotonic() + max(PAGE_EVERY, (time.monotonic() - began) / PAGE_SHARE)
        self.emit("sweep-finished", board=self.board)

    def _needs(self, number: int, cell: Cell) -> Needs:
        """Yield the runs that a cell needs, batch by batch: first the runs of its search, then the reported runs.

        When the search ends, the cells that take its settings start too. If a stopped sweep is started again, it
        repeats the search with the stored scores, so these cells get the same settings again.
        """
        blocked = self.board.blocked
        takers = [n for n, c in enumerate(self.board.cells) if cell.gives_settings_to(c) and not c.skip]
        best: Mapping[str, Any] | None = {}
        if cell.space:
            blocked |= dict.fromkeys((number, *takers), NOT_CHOSEN)
            best = yield from self._search(number, cell)
        if best is None:
            blocked |= dict.fromkeys(takers, f"there are no settings of {cell.label}: {blocked[number]}")
            return
        reported = self._reported(number, best)
        for taker in takers:
            self._advance(taker, iter([self._reported(taker, best)]), [])
        yield reported

    def _reported(self, number: int, chosen: Mapping[str, Any]) -> list[Entry]:
        """Return the reported runs of a cell, whose settings are now chosen."""
        cell, board = self.board.cells[number], self.board
        board.blocked.pop(number, None)
        board.reported[number] = [self._entry(cell, seed, chosen) for seed in self.planner.study.reported_seeds]
        return board.reported[number]

    def _search(self, number: int, cell: Cell) -> Generator[list[Entry], None, Mapping[str, Any] | None]:
        """Try settings on validation rows and return the best, or None if no setting can be chosen."""
        board, study = self.board, self.planner.study
        assert study.search is not None
        rungs = study.search.rungs(int(cell.table["rounds"]))
        searcher = board.searches[number] = Searcher(study.search, cell.space, rounds=rungs[-1])
        while asked := searcher.ask():
            batch = [[self._entry(cell, s, values, tuning=True) for s in study.first_seeds] for values in asked]
            compared = yield from self._compared(number, searcher, batch, rungs)
            if compared is None:
                return None
            searcher.tell(asked, *compared)
            if searcher.by_lines and not (yield from self._confirm(number, searcher)):
                return None
        if not (yield from self._confirm(number, searcher)):
            return None
        if searcher.best is None:
            board.blocked[number] = (
                f"training diverged with each of the {len(searcher.trials)} settings that were tried"
            )
        return searcher.best

    def _confirm(self, number: int, searcher: Searcher) -> Generator[list[Entry], None, bool]:
        """Run the best trials with all seeds, if the search confirms them. Return whether the search can go on."""
        cell, seeds = self.board.cells[number], self.planner.study.tuning_seeds
        while unsure := searcher.unsure():
            tried = [searcher.trials[place][0] for place in unsure]
            batch = [[self._entry(cell, seed, values, tuning=True) for seed in seeds] for values in tried]
            compared = yield from self._compared(number, searcher, batch, [searcher.rounds])
            if compared is None:
                return False
            searcher.confirm(unsure, compared[0])
        return True

    def _compared(
        self, number: int, searcher: Searcher, batch: Sequence[Sequence[Entry]], rungs: Sequence[int]
    ) -> Generator[list[Entry], None, tuple[list[float | None], dict[int, int]] | None]:
        """Run the trials of a batch from rung to rung.

        Returns:
            The score of each trial, and the last rounds of those that stopped early, by their places; or None if the
            search cannot go on.
        """
        board, metrics = self.board, self.board.metrics[self.board.cells[number].scenario]
        scores: list[float | None] = [None] * len(batch)
        running, ended = list(range(len(batch))), dict[int, int]()
        for rung in rungs:
            entries = [entry for place in running for entry in batch[place]]
            for entry in entries:
                self._reach(entry, 0 if rung == rungs[-1] else rung)
            yield entries
            if why := _unusable(entries, metrics):
                board.blocked[number] = f"its search stopped, because {why}"
                return None
            if (metric := board.metric(number, entries)) is not None:
                searcher.lowest = metric.lowest
            last = searcher.search.score_over
            scores_now = {p: _mean([board.score_at(entry, rung, metrics, last) for entry in batch[p]]) for p in running}
            for place, score in scores_now.items():
                scores[place] = score
            if rung < rungs[-1]:
                stay = searcher.stay(rung, scores_now)
                ended |= {place: rung for place in running if place not in stay}
                running = stay
        return scores, ended

    def _entry(self, cell: Cell, seed: int, chosen: Mapping[str, Any], *, tuning: bool = False) -> Entry:
        """Return the run of a cell with this seed and these chosen settings. Cells that need the same run share it."""
        table = cell.recipe(seed, chosen, tuning=tuning)
        if tuning and (search := self.planner.study.search) is not None and search.prune:
            put(table, "evaluate.every", search.least_rounds)  # all rungs but the last one are multiples of it
            put(table, "checkpoint.every", search.least_rounds)
        name = self.planner.name(table)
        if name not in self.board.entries:
            entry = self.board.entries[name] = Entry(name, table, cell, seed, chosen, tuning)
            row = self.known.get(name)
            if tuning and self.planner.study.reads_rounds and row is not None and "evaluated" not in row:
                row = None  # of a search that read only the last score, so the others are not known
            if row is not None and not self.board.ended(entry):
                restore(row, entry, self.board.folder)
                self.board.sources[name] = row["code"]
            entry.kept = self.board.look(entry)
        return self.board.entries[name]

    def _reach(self, entry: Entry, until: int) -> None:
        """Let a run go on to this round, or to its end if it is 0, unless another cell needs more of it."""
        if entry.state in ("finished", "failed") or (entry.state == "running" and not entry.until):
            return
        further = not until or (entry.until and until > entry.until)
        if entry.state == "left" or further:
            entry.until = until
            if entry.state == "paused":
                entry.state = "left"
            if entry.state == "left":
                self.board.look(entry)

    def _advance(self, number: int, needs: Needs, last: list[Entry]) -> None:
        """Queue the next batch of runs of a cell, if all runs of the previous batch have ended.

        `last` holds the previous batch. If all runs of the next batch have already ended too, continue with the batch
        after it.
        """
        while all(entry.ended for entry in last):
            try:
                last = next(needs)
            except StopIteration:
                self.cells.pop(number, None)
                return
        self.cells[number] = (needs, last)
        self.waiting += [entry for entry in last if entry.state == "left" and entry not in self.waiting]
        study = self.planner.study  # scenario by scenario, so that a sweep that is stopped has whole ones
        first = {scenario: place for place, scenario in enumerate(study.scenarios)}
        order = {seed: place for place, seed in enumerate(study.reported_seeds)}
        self.waiting.sort(key=lambda e: (first[e.cell.scenario], not e.tuning, order.get(e.seed, 0)))

    def _start(self) -> None:
        """Start runs while the pool has room for them."""
        while self.waiting:
            refusal = self.pool.refusal()
            for entry in self.waiting:
                entry.why = refusal
            if refusal:
                return
            entry = self.waiting.pop(0)
            entry.state = "running"
            self.pool.start(entry.name, entry.recipe, self.board.path(entry).absolute(), entry.until)

    def _hear(self, message: Message) -> None:
        """Record a process's message about its run."""
        entry, facts = self.board.entries[message.job], message.facts
        if message.event == "round":
            if facts["round"] > entry.round:
                entry.tries = 0
            entry.round, entry.rounds = facts["round"], facts.get("rounds", entry.rounds)
            return
        if message.event == "killed":
            entry.tries += 1
            if entry.tries < KILLS:
                entry.state = "left"
                self.waiting.append(entry)
                return
            self.board.note_failure(entry, 1, f"{facts['why']}; {KILLS} times in a row")
        elif facts["code"]:
            self.board.note_failure(entry, facts["code"], facts["why"])
        else:
            if not self.board.look(entry):
                assert facts["paused"], f"{entry.name} ended without a result"
                entry.state = "left"  # meanwhile, another cell needs more of it
                self.waiting.append(entry)
                return
            entry.remarks = facts["remarks"]
        for number, (needs, last) in list(self.cells.items()):
            if entry in last:
                self._advance(number, needs, last)


def _unusable(entries: Sequence[Entry], metrics: Sequence[str]) -> str:
    """Return why a search cannot use these runs, or an empty text."""
    broken = [entry.name for entry in entries if entry.state == "failed" and not entry.diverged]
    if broken:
        return f"the run {broken[0]} failed"
    if any(entry.state != "failed" and entry.score(metrics) is None for entry in entries):
        return f"its runs have no metric {' or '.join(metrics)}"
    return ""


def _mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds of a trial, or None if training diverged with one of the seeds."""
    result = [score for score in scores if score is not None]
    return sum(result) / len(result) if len(result) == len(scores) else None
