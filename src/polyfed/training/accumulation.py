"""Gradient accumulation: computes the gradient of a batch in smaller parts, one after another, to save memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.training.optimisers import Train


def parts_of(batch: Batch, train: Train) -> Iterator[tuple[Batch, Tensor]]:
    """Split a batch into consecutive parts of at most ceil(batch_size / accumulate) rows.

    All engines split a batch at the same rows. Each part has its own dropout key, because a dropout mask depends on the
    position of a row in its part.

    Yields:
        A part, and its share of the real rows of the batch, a 0-dim tensor.
    """
    size = -(-train.batch_size // train.accumulate)
    total = batch.num_real.clamp(min=1.0)
    for number, start in enumerate(range(0, len(batch.rows), size)):
        rows = slice(start, start + size)
        part = replace(
            batch,
            x={m: value[rows] for m, value in batch.x.items()},
            y=batch.y[rows],
            rows=batch.rows[rows],
            ok=None if batch.ok is None else batch.ok[rows],
            present={m: value[rows] for m, value in batch.present.items()},
            key=None if batch.key is None else keys.fold_in(batch.key, number),
        )
        yield part, part.num_real / total


def refuse_aux(aux: Any) -> None:
    """Refuse a loss that returns `aux`, the auxiliary output that `direction` receives.

    Such output describes a whole batch, but with `accumulate`, the loss sees only a part of the batch at a time.

    Raises:
        RecipeError: `aux` is not empty.
    """
    if aux or isinstance(aux, Tensor):
        raise RecipeError(
            "[train] accumulate: this method changes its gradients by numbers of a whole batch, which parts of the "
            "batch do not give. Set accumulate = 1"
        )


def added(total: dict[str, Tensor] | None, more: dict[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Add the gradients of another part, scaled by its share of the batch, to the gradients so far."""
    scaled = {name: value * share for name, value in more.items()}
    return scaled if total is None else {name: torch.add(value, scaled[name]) for name, value in total.items()}
