"""Scores that need several runs or all rounds: those over folds, and the rounds until an accuracy is reached.

A fold is one part of the data that serves as the test set. The runs of a group may differ in their fold. There are two
scores over folds. The mean of the folds' UAR gives every fold the same weight. The UAR of their summed confusion
matrices gives every row the same weight. This second score needs the matrices, which are in the last line of
rounds.jsonl. See docs/evaluation.md.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import ROUNDS
from polyfed.evaluation.subsets import is_share_score
from polyfed.objective.class_metrics import uar
from polyfed.objective.report import Estimate, of_moments
from polyfed.report.reading.run_folder import Folder, damaged

FOLD_KEYS = ("data.test_session", "data.fold", "clients.fold")
"""Options that select the fold: of the sources IEMOCAP and MSP-Improv, CREMA-D and KU-HAR, and of every source."""


def fold_of(folder: Folder) -> str:
    """Return the fold of a run as text, such as `test_session=5`, or "" if its data has no such option."""
    result = [(name, folder.recipe.get(section, {})) for section, _, name in (key.partition(".") for key in FOLD_KEYS)]
    return " ".join(f"{name}={own[name]}" for name, own in result if name in own)


def confusion_of(folder: Folder) -> Tensor | None:
    """The confusion matrix (C, C) of the last evaluation on the global test set, or None if the run has none.

    Entry (i, j) is the number of rows of class i that were predicted as class j.

    Raises:
        DataError: the matrix is not square.
    """
    result: Any = None
    for row in folder.rounds():
        result = row.get("confusion")
    if result is None:
        return None
    if any(len(row) != len(result) for row in result):
        raise damaged(folder.path / ROUNDS, "the last confusion matrix is not square")
    return torch.tensor(result, dtype=torch.float64)


def _by_seed(folders: Sequence[Folder]) -> Iterator[list[Folder]]:
    """Yield the runs of each seed that has exactly one run for each fold; nothing if there is only one fold."""
    folds = {fold_of(folder) for folder in folders}
    if len(folds) < 2:
        return
    by_seed: dict[int, list[Folder]] = {}
    for folder in folders:
        by_seed.setdefault(int(folder.result.get("seed", 0)), []).append(folder)
    for own in by_seed.values():
        if len(own) == len(folds) and {fold_of(folder) for folder in own} == folds:
            yield own


def pooled_uars(folders: Sequence[Folder]) -> list[float]:
    """For each seed, the UAR of the sum of its folds' confusion matrices.

    A seed counts only if each fold has exactly one run with this seed, and this run has a matrix.
    """
    pooled = []
    for own in _by_seed(folders):
        matrices = [matrix for folder in own if (matrix := confusion_of(folder)) is not None]
        if len(own) == len(matrices) and len({tuple(matrix.shape) for matrix in matrices}) == 1:
            pooled.append(uar(torch.stack(matrices).sum(0)))
    return pooled


def pooled_scores(folders: Sequence[Folder]) -> list[Estimate]:
    """For each seed, the main score of the test rows of all its folds together.

    The interval is that over the natural clients of all folds, or over rows if rows belong to nobody. It takes the
    models of the folds as one, although their training rows differ.
    """
    pooled = []
    for own in _by_seed(folders):
        told = [[{}, *folder.rounds()][-1].get("moments", {}) for folder in own]
        units = next((unit for unit in ("clients", "rows") if all(unit in one for one in told)), None)
        scores = {folder.headline.score for folder in own}
        if units is None or len(scores) > 1 or len({len(one[units]) for one in told}) > 1:
            continue
        (score,) = scores
        total = torch.tensor([one[units] for one in told], dtype=torch.float64).sum(0).tolist()
        found = of_moments(total, share=is_share_score(score), clusters=units == "clients", metric=score)
        pooled += [] if found is None else [found]
    return pooled


def rounds_to(folder: Folder, reach: float) -> int | None:
    """Return the first evaluated round whose accuracy on the global test set is at least `reach`, or None.

    If an algorithm has no global model, the function uses the mean accuracy over clients' own test rows instead. If the
    run evaluates every n rounds, the result can be up to n - 1 rounds late. The result is also None if the run's score
    is not the accuracy.
    """
    if folder.headline.score != "accuracy":
        return None
    seen: dict[str, list[tuple[int, float]]] = {"global.accuracy": [], "personal.mean": []}
    for row in folder.rounds():
        for name, found in seen.items():
            group, key = name.split(".")
            value = row.get("metrics", {}).get(group, {}).get(key)
            if value is not None:
                found.append((int(row["round"]), float(value)))
    curve = max(seen.values(), key=len)
    return next((number for number, value in curve if value >= reach), None)


def check_reach(reach: float) -> None:
    """Refuse an accuracy of 0 or less, or of more than 1."""
    if not 0.0 < reach <= 1.0:
        raise RecipeError(f"--reach {reach:g}: must be an accuracy above 0 and at most 1, as in --reach 0.5")
