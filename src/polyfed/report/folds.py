"""Figures over several runs that none of them holds: UAR over folds, and how many rounds it took to get somewhere.

algorithms.md 7.1. A fold is a run that differs from others of its group only in which part of the data is the test set.
Over folds there are two figures: the mean of the folds' UAR, which weighs folds alike, and the UAR of their summed
confusion matrices, which weighs rows alike. The second needs the matrices, which the last line of rounds.jsonl holds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import RecipeError
from polyfed.core.files import ROUNDS
from polyfed.evaluation.metrics import uar
from polyfed.report.run_folder import Folder, damaged

FOLD_KEYS = ("data.test_session", "data.fold")
"""Options of data sources that choose the fold (IEMOCAP, MSP-Improv; CREMA-D, KU-HAR)."""


def fold_of(folder: Folder) -> str:
    """The fold of a run in words, as `test_session=5`; empty where its data has no such option."""
    data = folder.recipe.get("data", {})
    names = [key.removeprefix("data.") for key in FOLD_KEYS]
    return " ".join(f"{name}={data[name]}" for name in names if name in data)


def confusion_of(folder: Folder) -> Tensor | None:
    """The confusion matrix (C, C) of the last evaluation on the global test set, rows the truth; None of older runs."""
    found: Any = None
    for row in folder.rounds():
        found = row.get("confusion")
    if found is None:
        return None
    if any(len(row) != len(found) for row in found):
        raise damaged(folder.path / ROUNDS, "the last confusion matrix is not square")
    return torch.tensor(found, dtype=torch.float64)


def pooled_uars(folders: Sequence[Folder]) -> list[float]:
    """Per seed the UAR of the sum of its folds' confusion matrices.

    A seed counts only if it has every fold that any seed has, once, each with a matrix; nothing of a single fold.
    """
    folds = {fold_of(folder) for folder in folders}
    if len(folds) < 2:
        return []
    by_seed: dict[int, list[Folder]] = {}
    for folder in folders:
        by_seed.setdefault(int(folder.result.get("seed", 0)), []).append(folder)
    pooled = []
    for own in by_seed.values():
        matrices = [matrix for folder in own if (matrix := confusion_of(folder)) is not None]
        complete = len(own) == len(matrices) == len(folds) and {fold_of(folder) for folder in own} == folds
        if complete and len({tuple(matrix.shape) for matrix in matrices}) == 1:
            pooled.append(uar(torch.stack(matrices).sum(0)))
    return pooled


def rounds_to(folder: Folder, reach: float) -> int | None:
    """The first evaluated round whose accuracy on the global test set is at least `reach`; None if none was.

    A method without a global model is taken by the mean over clients' own test rows. Evaluations every n rounds make
    the answer coarse: it can be up to n - 1 rounds late.
    """
    seen: dict[str, list[tuple[int, float]]] = {"global.accuracy": [], "personal.mean": []}
    for row in folder.rounds():
        for name, found in seen.items():
            group, key = name.split(".")
            value = row.get("metrics", {}).get(group, {}).get(key)
            if value is not None:
                found.append((int(row["round"]), float(value)))
    # Local measures its models on the global test set after the last round only: a curve of one point says nothing
    curve = max(seen.values(), key=len)
    return next((number for number, value in curve if value >= reach), None)


def check_reach(reach: float) -> None:
    """Refuse an accuracy that cannot be reached or always is."""
    if not 0.0 < reach <= 1.0:
        raise RecipeError(f"--reach {reach:g}: an accuracy above 0 and at most 1, as in --reach 0.5")
