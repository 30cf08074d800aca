"""The progress display of a run: a live panel on a terminal or in a notebook, and a few lines in other places."""

import io
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyfed.report.formatting import bytes_of, number_of, seconds_of
from polyfed.report.scores import Headline
from polyfed.report.text_layout import SafeConsole

MOST_LINES = 20
"""The approximate number of lines about the rounds if there is no terminal."""

ACCURACY = Headline()
"""The headline of a run whose task is classification."""

SMOOTHING = 0.2
"""The weight of the latest round in the running mean of the time per round."""


NOTEBOOK_SECONDS = 0.25
"""The shortest time between two updates of a notebook's panel, because every update is a message to the browser."""

NOTEBOOK_WIDTH = 100
"""The width of a notebook's panel, in characters."""


class NotebookPanel:
    """A panel below the cell of a notebook, with the methods of `rich.live.Live` that `Progress` uses.

    Rich's own panel needs the package ipywidgets. Without this package, rich shows the panel only at the end.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.handle: Any = None
        self.panel: RenderableType = ""
        self.drawn = float("-inf")

    def start(self) -> None:
        """Create the output cell of the panel."""
        from IPython.display import display

        self.handle = display(self, display_id=True)  # type: ignore[no-untyped-call]

    def update(self, panel: RenderableType) -> None:
        """Show the panel, unless the last update was a moment ago."""
        self.panel = panel
        if self.clock() - self.drawn >= NOTEBOOK_SECONDS:
            self.drawn = self.clock()
            self.handle.update(self)

    def stop(self) -> None:
        """Show the final panel, which remains visible."""
        self.handle.update(self)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        console = SafeConsole(record=True, file=io.StringIO(), width=NOTEBOOK_WIDTH, force_jupyter=False)
        console.print(self.panel)
        page = '<pre style="line-height:normal">{code}</pre>'
        html = console.export_html(inline_styles=True, code_format=page, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}


class Progress:
    """A listener for the events of a run. As a context manager, it removes the panel even after an error.

    Args:
        console: the console to write to. None selects standard error, because results go to standard output.
        clock: returns the time in seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or SafeConsole(stderr=True, highlight=False)
        self.clock = clock
        self.live: Live | NotebookPanel | None = None
        self.headline = ""
        self.first, self.rounds, self.done = 1, 0, 0
        self.latest: dict[str, str] = {}
        self.task: dict[str, Any] = {}
        self.seen: set[tuple[str, ...]] = set()
        self.missing = 0
        self.moment = 0.0
        self.pace: float | None = None

    def __call__(self, event: str, **facts: Any) -> None:
        """Show an event; events without a handler are ignored."""
        handler = getattr(self, f"_on_{event.replace('-', '_')}", None)
        if handler is not None:
            handler(**facts)
        if self.live is not None:
            self.live.update(self.panel())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def seconds_left(self) -> float | None:
        """The estimated time to the end of the run, in seconds; None before the second round has ended."""
        return None if self.pace is None else self.pace * (self.rounds - self.done)

    def panel(self) -> Group:
        """The live display: a headline, a bar with rounds per second, and the latest numbers."""
        bar = Table.grid(padding=(0, 2))
        spent = self.done - self.first + 1
        bar.add_row(
            f"round {self.done}/{self.rounds}",
            ProgressBar(total=max(self.rounds - self.first + 1, 1), completed=max(spent, 0), width=30),
            *self._pace(),
        )
        numbers = Table.grid(padding=(0, 3))
        for _ in self.latest:
            numbers.add_column(justify="right")
        numbers.add_row(*(Text(name, "dim") for name in self.latest))
        numbers.add_row(*(Text(value) for value in self.latest.values()))
        return Group(Text(self.headline, "bold"), bar, numbers)

    def _on_run_started(self, **facts: Any) -> None:
        self.first, self.rounds = facts["first_round"], facts["rounds"]
        self.done = self.first - 1
        self.moment, self.task = self.clock(), facts.get("task", {})
        self.headline = (
            f"{facts['algorithm']} on {facts['dataset']}: {facts['clients']:,} clients, "
            f"{facts['num_parameters']:,} parameters, {facts['engine']} engine"
        )
        if self.console.is_jupyter:
            self.live = self.live or NotebookPanel(self.clock)
            self.live.start()
        elif not self.console.is_terminal:
            self._say(self.headline)
        elif self.live is None:
            self.live = Live(self.panel(), console=self.console, transient=True, refresh_per_second=8)
            self.live.start()

    def _on_round_finished(self, row: dict[str, Any]) -> None:
        now = self.clock()
        took, self.moment = now - self.moment, now
        self.done = row["round"]
        # the first round also loads libraries and warms up caches, so it says nothing about the others
        if self.pace is None:
            self.pace = took if self.done > self.first else None
        else:
            self.pace += SMOOTHING * (took - self.pace)
        numbers = round_numbers(row, Headline.of(self.task))
        self.latest |= numbers
        step = max(1, -(-self.rounds // MOST_LINES))
        if self.live is None and (self.done in (self.first, self.rounds) or self.done % step == 0):
            words = (f"{name} {value}" for name, value in numbers.items())
            self._say("  ".join((f"round {self.done}/{self.rounds}", *words, *self._pace())))

    def _on_client_missing(self, round: int, task: str, client: int, reason: str) -> None:
        self.missing += 1
        self._once(f"round {round}: client {client} gave no usable reply to {task}: {reason}", task, reason)

    def _on_looped(self, task: str, reason: str) -> None:
        self._once(f"{task} runs client by client: {reason}", reason)

    def _on_note(self, text: str) -> None:
        self._say(text)

    def _on_run_stopped(self, round: int, reason: str) -> None:
        self._close()
        self._say(f"stopped in round {round}: {reason}")

    def _on_run_finished(self, result: dict[str, Any]) -> None:
        self._close()
        if self.missing:
            self._say(f"{self.missing} times a client gave no usable reply; report.html lists the reasons")

    def _once(self, text: str, *cause: str) -> None:
        """Print a line only the first time its cause occurs, so that a cause common to all clients prints one line."""
        if cause not in self.seen:
            self.seen.add(cause)
            self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _pace(self) -> tuple[str, ...]:
        if self.pace is None or self.seconds_left is None:
            return ()
        speed = f"{1 / self.pace:.3g} rounds/s" if self.pace > 0 else "- rounds/s"
        return (speed, f"{seconds_of(self.seconds_left)} left") if self.done < self.rounds else (speed,)

    def _close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def round_numbers(row: dict[str, Any], head: Headline = ACCURACY) -> dict[str, str]:
    """The numbers of a round that the display shows, formatted.

    Args:
        row: the row of rounds.jsonl.
        head: the headline of the run: its main metric, with title and unit.
    """
    metrics: dict[str, dict[str, float]] = row.get("metrics", {})
    numbers = {"cohort": str(len(row["cohort"]))}
    if row.get("train_loss") is not None:
        numbers["loss"] = number_of(row["train_loss"], "number")
    if head.score in metrics.get("global", {}):
        numbers[head.title] = number_of(metrics["global"][head.score], head.unit)
    numbers |= {m: number_of(value, head.unit) for m, value in metrics.get("unimodal", {}).items()}
    if "mean" in metrics.get("personal", {}):
        numbers["personal"] = number_of(metrics["personal"]["mean"], head.unit)
    return numbers | {"up": bytes_of(row["bytes_up"]), "down": bytes_of(row["bytes_down"])}
