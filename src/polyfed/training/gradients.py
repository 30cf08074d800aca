"""The gradient of a batch under `torch.func.vmap`, whole or accumulated from parts of the batch to save memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.training.client_data import Loss, split_loss
from polyfed.training.optimisers import Train


def gradient_of(loss: Loss, model: Model, split: bool) -> Callable[..., Any]:
    """Return a function `f(trained, rest, batch)` that computes the gradient of the loss for the `trained` parameters.

    The function returns `(gradient, (value, aux, buffers))`. With `split`, the loss has several terms, and `gradient`
    and `value` have an entry for each term.
    """

    def scalar(trained: Tree, rest: Tree, batch: Batch) -> tuple[Any, tuple[Any, Any, Tree]]:
        # the layers write buffers in place, but a function under `grad` must not change its inputs
        rest = {n: v.clone() if model.is_buffer(n) else v for n, v in rest.items()}
        value, aux = split_loss(loss({**trained, **rest}, batch))
        return value, (value, aux, {n: v for n, v in rest.items() if model.is_buffer(n)})

    return _split_grad(scalar) if split else grad(scalar, has_aux=True)


def accumulating(gradient: Callable[..., Any], train: Train) -> Callable[..., Any]:
    """Return a function that computes the same gradient, but splits the batch into parts to save memory."""

    def whole(trained: Tree, rest: Tree, batch: Batch) -> tuple[Tree, tuple[Any, Any, Tree]]:
        grads, total, buffers = None, torch.zeros((), device=batch.y.device), Tree()
        for part, share in parts_of(batch, train):
            found, (value, aux, buffers) = gradient(trained, {**rest, **buffers}, part)
            refuse_aux(aux)
            grads, total = added(grads, found, share), total + value * share
        return grads or {}, (total, {}, buffers)

    return whole


def _split_grad(terms: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `grad(terms, has_aux=True)`, for a function `terms` that returns a dict of scalars.

    The result has one gradient Tree for each scalar, by the scalar's name.
    """

    def gradient(trained: Tree, *rest: Any) -> tuple[dict[str, Tree], Any]:
        values, pull, aux = vjp(lambda w: terms(w, *rest), trained, has_aux=True)  # type: ignore[misc]
        grads = {}
        for chosen in values:
            weights = {name: torch.full_like(value, float(name == chosen)) for name, value in values.items()}
            (grads[chosen],) = pull(weights)
        return grads, aux

    return gradient


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
            "batch do not give. Set accumulate = 1",
            ("train", "accumulate"),
        )


def added(total: dict[str, Tensor] | None, more: dict[str, Tensor], share: Tensor) -> dict[str, Tensor]:
    """Add the gradients of another part, scaled by its share of the batch, to the gradients so far."""
    scaled = {name: value * share for name, value in more.items()}
    return scaled if total is None else {name: torch.add(value, scaled[name]) for name, value in total.items()}
