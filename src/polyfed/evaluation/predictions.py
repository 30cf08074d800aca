"""Predictions of a trained model for new samples."""

from collections.abc import Collection, Mapping
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import PolyfedWarning, RecipeError, counted, did_you_mean
from polyfed.core.scaling import Scaling
from polyfed.core.tree import Tree
from polyfed.data.column_fitting import Features, samples_from
from polyfed.data.reading.values import without_nan_rows
from polyfed.evaluation.sample_forms import refuse_other_forms, refuse_unknown_ids, samples_of, turned
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
    scaling: Mapping[str, Scaling] | None = None,
    vocabularies: Mapping[str, int] | None = None,
    features: Mapping[str, Features] | None = None,
) -> Tensor:
    """Return a model's predictions for samples, computed in batches as in an evaluation; see `Objective.predicted`.

    Args:
        model: the recipe's model.
        objective: what the model predicts.
        w: the model's parameters. The computation runs on their device.
        x: modality -> samples (n, ...); `samples_of` lists the allowed forms. Modalities outside `reads` are ignored. A
            row whose entries are all NaN lacks the modality.
        reads: the modalities to read. If None, the model reads all its modalities.
        present: modality -> bool (n,), for modalities that some rows lack.
        predictor: how to predict with `w`. If None, the predictions come from the model's logits.
        scaling: the shift and the scale of each modality whose samples are not yet scaled.
        vocabularies: the number of token ids that the encoder reads, for each modality of token ids.
        features: the columns of each modality whose words, empty cells or dates become numbers.

    Raises:
        RecipeError: a modality is unknown, samples have the wrong shape or are partly NaN or infinite, a token id is
            not in the vocabulary, the modalities have different numbers of rows, or the model
            reads none of the given modalities.
    """
    predictor = predictor or Predictor()
    n, used, given, there = _samples(model, x, present or {}, reads, vocabularies or {}, features or {})
    if not n:  # one row of zeros shows the shape of a prediction; encoders may fail without rows
        row = {m: given[m].new_zeros(1, *given[m].shape[1:]) for m in used}
        return predict(model, objective, w, row, reads=reads, predictor=predictor, scaling=scaling)[:0]
    place, result = next(iter(w.values())).device, []
    with torch.no_grad():
        for rows in torch.split(torch.arange(n), FOLD_BATCH):
            numbers = rows.to(place)
            samples = {m: given[m][rows.to(given[m].device)].to(place) for m in used}
            samples |= {m: by.applied(samples[m]) for m, by in (scaling or {}).items() if m in samples}
            samples = {m: value.to(torch.float32) for m, value in samples.items()}
            known = {m: there[m][rows.to(there[m].device)].to(place) for m in used if m in there}
            batch = Batch(x=samples, y=torch.zeros_like(numbers), rows=numbers, present=known)
            by_modality = objective.BY_MODALITY
            result.append(objective.outputs(model, w, batch) if by_modality else predictor.logits(model, w, batch))
    return objective.predicted(torch.cat(result))


def used(
    model: Model,
    x: Mapping[str, Any],
    *,
    reads: Collection[str],
    present: Mapping[str, Any] | None = None,
    vocabularies: Mapping[str, int] | None = None,
    features: Mapping[str, Features] | None = None,
) -> Tree:
    """Return which modalities `predict` uses for each sample: modality -> bool (n,), for each modality in `reads`.

    The arguments and errors are those of `predict`.
    """
    n, _, given, there = _samples(model, x, present or {}, reads, vocabularies or {}, features or {})
    whole, none = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    return {m: there.get(m, whole) if m in given else none for m in model.modalities if m in reads}


def _samples(
    model: Model,
    x: Mapping[str, Any],
    present: Mapping[str, Any],
    reads: Collection[str] | None,
    ids: Mapping[str, int],
    features: Mapping[str, Features],
) -> tuple[int, list[str], Tree, Tree]:
    """Check the samples. Return their number, the modalities that are read, the samples, and which rows have them."""
    refuse_other_forms(x)
    read = [m for m in model.modalities if reads is None or m in reads]
    given, there = _tensors(model, x, present, ids, features)
    n = _rows_of(model, given, there)
    if not (used := [m for m in read if m in given]):
        raise RecipeError(f"x has {', '.join(given) or 'no modality'}; the model reads {', '.join(read)}")
    for m in used:
        given[m], there[m] = _present_rows(m, given[m], there.get(m))
        given[m] = refuse_unknown_ids(m, given[m], there[m], ids.get(m))
        if m in ids and (padding := int(((given[m] == 0).all(1) & there[m].to(given[m].device)).sum())):
            warn(
                f"x['{m}']: {counted(padding, 'row holds', 'rows hold')} only padding, the id 0, and counts as "
                f"present. If it lacks '{m}', mark it in present={{'{m}': ...}}, or give None in a list",
                PolyfedWarning,
                stacklevel=4,
            )
    return n, used, given, there


def _tensors(
    model: Model,
    x: Mapping[str, Any],
    present: Mapping[str, Any],
    ids: Mapping[str, int],
    features: Mapping[str, Features],
) -> tuple[Tree, Tree]:
    """Return the samples and the masks of the modalities as tensors."""
    given: Tree = {}
    there: Tree = {m: torch.as_tensor(rows, dtype=torch.bool) for m, rows in present.items()}
    for m, value in x.items():
        if m in features and not _are_numbers(value, model.shapes[m]):
            given[m] = samples_from(features[m], value, f"x['{m}']")
            continue
        given[m], held = samples_of(m, value, model.shapes.get(m, ()), tokens=m in ids)
        given[m] = turned(given[m], model.shapes.get(m, ()))
        if held is not None:
            there[m] = held if m not in there or len(there[m]) != len(held) else held & there[m]
    return given, there


def _are_numbers(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether samples are numbers in the shape that the model reads, and not the cells of a table."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f" if isinstance(value, Tensor) else "")
    return kind in tuple("fiub") and tuple(value.shape[1:]) == shape


def _rows_of(model: Model, x: Tree, present: Tree) -> int:
    """Check names, shapes and lengths, and return the number of samples."""
    for m in (*x, *present):
        if m not in model.shapes:
            raise RecipeError(f"x has '{m}', which is no modality of this model; {did_you_mean(m, model.shapes)}")
    for m, value in x.items():
        if not value.dim() or tuple(value.shape[1:]) != model.shapes[m]:
            wanted = ", ".join(map(str, ("n", *model.shapes[m])))
            one = tuple(value.shape) == model.shapes[m]
            cure = f". For a single sample, give x['{m}'][None]" if one else ""
            raise RecipeError(f"x['{m}'] has the shape {tuple(value.shape)}; it must be ({wanted}) for n samples{cure}")
    counts = {m: len(value) for m, value in x.items()} | {f"present of {m}": len(rows) for m, rows in present.items()}
    if len(set(counts.values())) > 1:
        raise RecipeError(f"every modality must have as many rows as the others; there are {counts}")
    return max(counts.values(), default=0)


def _present_rows(modality: str, value: Tensor, present: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the samples, with zeros for rows that lack the modality, and a mask of the rows that have it, bool (n,).

    Raises:
        RecipeError: a row that has the modality has infinite entries, or is partly NaN.
    """
    there = torch.ones(len(value), dtype=torch.bool) if present is None else present
    value, there, partly = without_nan_rows(value, there)
    infinite = value.isinf().flatten(1).any(1) if value.dim() > 1 else value.isinf()
    wrong = (partly | infinite).nonzero()[:, 0]
    if len(wrong):
        raise RecipeError(
            f"x['{modality}'] has {counted(len(wrong), 'row that is', 'rows that are')} partly NaN or infinite, first "
            f"row {int(wrong[0])}. Fill these values in, or make the whole row NaN if it lacks the modality"
        )
    return value, there
