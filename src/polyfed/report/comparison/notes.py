"""Notes about several runs of one method: warnings of the runs, and parts of the method that had no effect."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHARED_RUNS = "these have the same settings, so they share their runs"

NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


def notes_of_run(remarks: Iterable[str], result: Mapping[str, Any]) -> list[str]:
    """Return the notes of one run: its warnings `remarks`, and the parts of its method that had no effect."""
    return [*remarks, *result.get("concerns", ())]


def notes_of(runs: Sequence[Iterable[str]]) -> list[str]:
    """Return the notes of all runs, each once. A note that only some runs have ends with the number of these runs.

    Notes that differ only in their numbers count as one note. The numbers of the first run are shown.

    Args:
        runs: the notes of each run.
    """
    found: dict[str, list[str]] = {}
    for notes in runs:
        for key, note in {NUMBER.sub("0", note): note for note in notes}.items():
            found.setdefault(key, []).append(note)
    return [
        first if len(rest) + 1 == len(runs) else f"{first} ({len(rest) + 1} of {len(runs)} runs)"
        for first, *rest in found.values()
    ]
