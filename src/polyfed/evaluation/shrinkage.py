"""Which missing modality would help a row most: by how much it is expected to shrink the row's conformal set.

A row with the modalities S and the confidence c has a set of some size. Had it the modality m too, its set would have
the mean size of the validation rows that have S and m, and whose confidence from S alone is about c. Clients count for
this, besides the scores of `evaluation/conformal.py`, the scores that *all* classes get from S and m.

Shape letters: S subsets of the modalities, M modalities, L levels of confidence, N bins, B rows, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.messages import Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE
from polyfed.core.tree import Tree
from polyfed.evaluation.subsets import subsets_of, with_all
from polyfed.federation.context import ClientContext
from polyfed.model import Model
from polyfed.objective.report import raised
from polyfed.training import ClientData

LEVELS = 8
"""Levels of confidence: of the largest probability of a row, from 1 / C to 1."""

WIDTH = 20
"""How many bins of scores of `evaluation/conformal.py` are joined in one bin here."""

FEWEST = 10
"""With fewer validation rows of a level, the mean size is that over all levels."""

TELLS = (
    "for each subset of the modalities and each further one, how confident a model that the server chooses is of a "
    "validation row, and the scores that it gives all classes with the further modality"
)


@message
class SizeCounts(Message):
    """How many classes of a client's validation rows have a score in which bin, (S, M, L, N); see `own_sizes`."""

    in_bins: Tensor = carries(
        "statistic",
        dtype="int64",
        shape=("subsets", None, None, None),
        within=NOT_NEGATIVE,
        sum_only=True,
        tells=TELLS,
        scored=True,
    )


def level_of(logits: Tensor) -> Tensor:
    """Return the level of confidence of each row, int64 (B,). A prediction that is not finite has the lowest."""
    classes = logits.shape[1]
    share = (logits.double().softmax(-1).amax(-1) * classes - 1.0) / max(classes - 1, 1)
    return (share * LEVELS).floor().nan_to_num(0.0).clamp(0, LEVELS - 1).long()


def sizes_of(before: Tensor, bins: Tensor, ok: Tensor, num_bins: int) -> Tensor:
    """Return how many classes have a score in which bin, for each level of confidence, int64 (L, N).

    Args:
        before: logits of the rows without the further modality, (B, C).
        bins: the bin of each class's score with it, (B, C), of `evaluation/conformal.py`.
        ok: which rows count, bool (B,).
        num_bins: N.
    """
    places = level_of(before)[:, None] * num_bins + (bins + WIDTH - 1) // WIDTH
    none = torch.zeros(LEVELS * num_bins, dtype=torch.int64, device=bins.device)
    return none.scatter_add(0, places.flatten(), ok[:, None].expand(bins.shape).flatten().long()).view(LEVELS, num_bins)


def own_sizes(
    context: ClientContext,
    w: Tree,
    data: ClientData,
    logits: Callable[[Model, Tree, Batch], Tensor],
    bins_of: Callable[[Tensor], Tensor],
    num_bins: int,
    seen: Callable[[Batch], Batch],
) -> SizeCounts:
    """Count the scores of all classes on a client's own validation rows.

    The counts of a subset and a modality that is in it, or that the client does not hold, are 0. Under the device's
    limit `min_group`, so are those of a level with fewer rows, and bins are joined.

    Args:
        context: the client context.
        w: the client's own model.
        data: the client's validation rows.
        logits: returns the logits of the model with the parameters `w`, (B, C).
        bins_of: returns the bins of the scores of logits.
        num_bins: N.
        seen: returns a batch as the model reads it, with all modalities of `context`.
    """
    model, result = context.model, []
    none = torch.zeros(LEVELS, num_bins, dtype=torch.int64, device=data.num_rows.device)
    for subset in subsets_of("all", model.modalities):
        for further in model.modalities:
            both = [m for m in model.modalities if m in subset or m == further]

            def step(total: Tensor, batch: Batch, subset: Sequence[str] = subset, both: Sequence[str] = both) -> Tensor:
                batch = seen(batch)
                ok = with_all(both, batch)
                before, after = (
                    logits(model, w, replace(batch, x={m: batch.x[m] for m in part}, ok=ok)) for part in (subset, both)
                )
                return total + sizes_of(before, bins_of(after), ok, num_bins)

            counts = further not in subset and set(both) <= set(context.modalities)
            result.append(data.fold(step, none) if counts else none)
    if data.min_group > 1:  # a row has a score of each class
        result = [raised(own, data.min_group * context.num_classes) for own in result]
    return SizeCounts(torch.stack(result).view(-1, len(model.modalities), LEVELS, num_bins))


def expected_sizes(counts: Tensor, limits: Tensor) -> Tensor:
    """Return the mean size of the sets of the validation rows of each level, float64 (L,); NaN without rows.

    Args:
        counts: the counts of one subset and one further modality, (L, N).
        limits: the last bin of `evaluation/conformal.py` that belongs to the sets, for each class, int64 (C,). If they
            differ, the classes count as if each had the scores of all.
    """
    rows = counts.sum(1).double() / len(limits)
    whole = torch.where(rows[:, None] >= FEWEST, counts, counts.sum(0)).double()
    upto = torch.nn.functional.pad(whole.cumsum(1), (0, 1), value=0.0)
    place, rest = limits // WIDTH, (limits % WIDTH).double() / WIDTH
    last = counts.shape[1] - 1
    held = upto[:, place] + rest * whole[:, (place + 1).clamp(max=last)] * (place < last)
    total = whole.sum(1) / len(limits)
    return torch.where(total > 0, held.mean(1) / total, torch.nan)
