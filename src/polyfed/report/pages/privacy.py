"""Differential privacy on the page of a run: epsilon over rounds, and epsilon of each block and kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.report.pages.charts import Chart, Series, colour_of
from polyfed.report.reading.history import History
from polyfed.report.reading.run_folder import Folder


@dataclass(frozen=True)
class Spent:
    """The privacy budget that a run has spent so far.

    Attributes:
        epsilon: the total epsilon. None if the number is missing or not finite.
        rows: (block, kind, epsilon). epsilon is None for a kind that is sent without protection.
        facts: the entry `privacy` of result.json. Empty if the run is not finished.
    """

    epsilon: float | None
    rows: list[tuple[str, str, float | None]]
    facts: dict[str, Any]


def spent(folder: Folder) -> Spent | None:
    """Return the budget spent after the last round, or None for a run without [privacy]."""
    last: dict[str, Any] | None = None
    for row in folder.rounds():
        last = row.get("privacy", last)
    if last is None:
        return None
    rows = [(block, kind, value) for block, kinds in last["blocks"].items() for kind, value in kinds.items()]
    return Spent(last["epsilon"], rows, folder.result.get("privacy", {}))


def remark(folder: Folder) -> str:
    """The note under the epsilon at the top of the page. It says if data leaves the clients without protection."""
    partial = folder.result.get("privacy", {}).get("unprotected")
    return "of the protected parts only, see below" if partial else "privacy spent, see below"


def chart(past: History, modalities: Sequence[str]) -> list[Chart]:
    """The chart of epsilon over rounds: in total, and for each block if it differs from the total."""
    total = past.columns.get("epsilon", [])
    blocks = {name: values for name, values in past.group("epsilon.").items() if values != total}
    series = [Series("all blocks", total, 0)] if total else []
    series += [Series(name, values, colour_of(name, modalities)) for name, values in blocks.items()]
    caption = "Spent after each round, at the delta of the recipe. Smaller is more private."
    return [Chart("epsilon", "Epsilon", caption, "number", past.rounds, series)]
