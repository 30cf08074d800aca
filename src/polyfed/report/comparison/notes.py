"""Notes about several runs of one method: warnings of the runs, and parts of the method that had no effect."""

import json
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
    result: dict[str, list[str]] = {}
    for notes in runs:
        for key, note in {NUMBER.sub("0", note): note for note in notes}.items():
            result.setdefault(key, []).append(note)
    return [
        first if len(rest) + 1 == len(runs) else f"{first} ({len(rest) + 1} of {len(runs)} runs)"
        for first, *rest in result.values()
    ]


def other_models(groups: Sequence[Any]) -> list[str]:
    """Return a sentence if groups of a comparison have different sections [model], with the sizes of the models."""
    models: dict[str, list[str]] = {}
    sizes: dict[str, Any] = {}
    for group in groups:
        for folder in group.folders:
            model = json.dumps(folder.recipe.get("model", {}), sort_keys=True, default=str)
            names = models.setdefault(model, [])
            if group.name not in names:
                names.append(group.name)
            sizes[model] = folder.result.get("num_parameters")
    if len(models) < 2:
        return []
    told = "; ".join(
        f"{', '.join(names)}: {sizes[model]:,} parameters" if sizes[model] else ", ".join(names)
        for model, names in models.items()
    )
    return [f"the runs have {len(models)} different sections [model], so the methods are not alone compared ({told})"]
