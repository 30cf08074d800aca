"""Predictions of a trained model for samples of one's own."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import Predictor
from polyfed.model import Model
from polyfed.objective import Objective
from polyfed.training.client_data import FOLD_BATCH


def predict(
    model: Model,
    objective: Objective,
    w: Tree,
    x: Mapping[str, Any],
    *,
    reads: Collection[str] | None = None,
    present: Mapping[str, Any] | None = None,
    predictor: Predictor | None = None,
) -> Tensor:
    """What a model predicts for the given samples, computed in batches as in an evaluation; see `Objective.predicted`.

    Args:
        model: the recipe's model.
        objective: the task.
        w: its parameters; the computation runs on their device.
        x: modality -> samples (n, ...), tensors or arrays; modalities that are not read are ignored.
        reads: the modalities to read; None means all of the model's.
        present: modality -> bool (n,), for modalities that some rows lack.
        predictor: how `w` predicts; None: by its logits.

    Raises:
        RecipeError: a modality is unknown, samples have the wrong shape, the modalities have different numbers of rows,
            or none of the given modalities is read.
    """
    predictor = predictor or Predictor()
    read = [m for m in model.modalities if reads is None or m in reads]
    given = {m: torch.as_tensor(value) for m, value in x.items()}
    there = {m: torch.as_tensor(rows, dtype=torch.bool) for m, rows in (present or {}).items()}
    n = _rows_of(model, given, there)
    if not (used := [m for m in read if m in given]):
        raise RecipeError(f"x has {', '.join(given) or 'no modality'}; the model reads {', '.join(read)}")
    place, found = next(iter(w.values())).device, []
    with torch.no_grad():
        for rows in torch.split(torch.arange(n), FOLD_BATCH):
            numbers = rows.to(place)
            samples = {m: given[m][rows.to(given[m].device)].to(place, torch.float32) for m in used}
            known = {m: there[m][rows.to(there[m].device)].to(place) for m in used if m in there}
            batch = Batch(x=samples, y=torch.zeros_like(numbers), rows=numbers, present=known)
            by_modality = objective.BY_MODALITY
            found.append(objective.outputs(model, w, batch) if by_modality else predictor.logits(model, w, batch))
    return objective.predicted(torch.cat(found))


def _rows_of(model: Model, x: Tree, present: Tree) -> int:
    """The number of samples, after checking names, shapes and lengths."""
    for m in (*x, *present):
        if m not in model.shapes:
            raise RecipeError(f"x has '{m}', which is no modality of this model; {did_you_mean(m, model.shapes)}")
    for m, value in x.items():
        if not value.dim() or tuple(value.shape[1:]) != model.shapes[m]:
            wanted = ", ".join(map(str, ("n", *model.shapes[m])))
            raise RecipeError(f"x['{m}'] has the shape {tuple(value.shape)}; it must be ({wanted}) for n samples")
    counts = {m: len(value) for m, value in x.items()} | {f"present of {m}": len(rows) for m, rows in present.items()}
    if len(set(counts.values())) > 1:
        raise RecipeError(f"every modality must have as many rows as the others; there are {counts}")
    return max(counts.values(), default=0)
