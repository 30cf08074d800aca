"""The progress display of a sweep: a live table on a terminal, and otherwise a line for each run that ends."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyfed.experiment.study.board import Board, Entry
from polyfed.experiment.study.results import cell_text
from polyfed.report.formatting import seconds_of
from polyfed.report.text_layout import SafeConsole, plain_table, titled

MOST_LINES = 24
"""The largest number of results in the live table, because a terminal cannot show more."""

MOST_PLACES = 8
"""The largest number of runs or methods that a line of the summary names."""


class SweepProgress:
    """A listener for the events of a sweep. Use it in a `with` block, which removes the table even after an error.

    Args:
        console: the console to write to. None selects standard error, because results go to standard output.
        clock: returns the time in seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or SafeConsole(stderr=True, highlight=False)
        self.clock = clock
        self.board: Board | None = None
        self.live: Live | None = None
        self.told: set[str] = set()
        self.started = 0.0
        self.before = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: str, board: Board) -> None:
        """Show the state of the sweep."""
        self.board = board
        if event == "sweep-started":
            self.started, self.before = self.clock(), self._ended()
            if self.live is not None:  # of an earlier sweep in the same `with` block
                self.live.stop()
            self.told = {entry.name for entry in board.entries.values() if entry.ended}
            self.say(f"{len(board.entries)} runs are known, {self.before} of them from an earlier sweep")
            if self.console.is_terminal:
                self.live = Live(self.panel(), console=self.console, transient=True, refresh_per_second=4)
                self.live.start()
        if self.live is not None:
            self.live.update(self.panel())
        for entry in board.entries.values():
            if entry.ended and entry.name not in self.told:
                self._tell(entry)
        if event == "sweep-finished":
            self._sum_up()

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated seconds until all known runs have ended, or None before the first run has ended."""
        assert self.board is not None
        done = self._ended() - self.before
        if not done:
            return None
        return (self.clock() - self.started) / done * (len(self.board.entries) - self._ended())

    def panel(self) -> Group:
        """Return the live display: counts and a bar, the current runs, and the results so far."""
        board = self.board
        assert board is not None
        bar = Table.grid(padding=(0, 2))
        left = self.seconds_left
        bar.add_row(
            f"{self._ended()}/{len(board.entries)} runs",
            ProgressBar(total=max(len(board.entries), 1), completed=self._ended(), width=30),
            f"{board.count('failed')} failed" if board.count("failed") else "",
            "" if left is None else f"{seconds_of(left)} left",
        )
        parts: list[RenderableType] = [bar]
        for entry in board.entries.values():
            if entry.state == "running":
                use = "search" if entry.tuning else f"seed {entry.seed}"
                place = f"round {entry.round}/{entry.rounds}" if entry.rounds else "starts"
                parts.append(Text(f"  {entry.cell.label} in {entry.cell.scenario}, {use}: {place}"))
        reasons = {e.why for e in board.entries.values() if e.state == "left" and "memory" in e.why}
        parts += [Text(f"  waiting: {why}") for why in sorted(reasons)]
        return Group(*parts, results_table(board, MOST_LINES))

    def _ended(self) -> int:
        assert self.board is not None
        return sum(entry.ended for entry in self.board.entries.values())

    def _tell(self, entry: Entry) -> None:
        """Print a line about a run that has ended. If there is a live table, print the line only for a failed run."""
        self.told.add(entry.name)
        use = "search" if entry.tuning else "reported"
        name = f"{entry.cell.label} in {entry.cell.scenario}, {use} seed {entry.seed}"
        if entry.state == "failed":
            self.say(f"failed: {name}: {entry.why}")
        elif self.live is None:
            assert self.board is not None
            self.say(f"{self._ended()}/{len(self.board.entries)} runs, finished: {name}")

    def _sum_up(self) -> None:
        """Print the notes about the runs and, if the study is incomplete, the reasons.

        A text of several lines, such as the list of what a policy forbids, is printed whole.
        """
        assert self.board is not None
        for kind, found in (("incomplete", self.board.problems()), ("note", self.board.notes())):
            for text, places in found:
                more = f" and {len(places) - MOST_PLACES} more" if len(places) > MOST_PLACES else ""
                self.say(f"{kind}: {', '.join(places[:MOST_PLACES])}{more}: {text}")

    def say(self, text: str) -> None:
        """Print a line, above the live table."""
        self.console.print(Text(text), soft_wrap=True)


def results_table(board: Board, most: int | None = None) -> Group:
    """Return a table of methods and scenarios with the mean and deviation of the finished runs.

    The table has at most `most` lines. Without `most`, lines below the table name the methods that a comparison lacks.
    """
    scenarios = list(dict.fromkeys(cell.scenario for cell in board.cells))
    labels = list(dict.fromkeys(cell.label for cell in board.cells))
    table = plain_table("method", *scenarios)
    texts = {(cell.label, cell.scenario): _text(board, number) for number, cell in enumerate(board.cells)}
    for label in labels[:most]:
        table.add_row(Text(label), *(texts.get((label, scenario), "") for scenario in scenarios))
    metrics = dict.fromkeys(" or ".join(found) for found in board.metrics.values())
    title = f"{', '.join(metrics)}, last round, mean ± sample standard deviation; shares in percent"
    rest = [] if most is None or len(labels) <= most else [Text(f"and {len(labels) - most} more lines")]
    if most is None:
        rest += [Text(absent.text(several=len(scenarios) > 1)) for absent in board.not_compared()]
    return Group(titled(title, table), *rest)


def _text(board: Board, number: int) -> str:
    """Return the text of a cell: mean and deviation of the scores of its runs, or why there are no scores yet."""
    if board.cells[number].skip:
        return "left out"
    entries = board.reported.get(number)
    if entries is None:
        return "search" if number in board.searches and number in board.blocked else "-"
    return cell_text(board, number) or f"0 of {len(entries)}"
