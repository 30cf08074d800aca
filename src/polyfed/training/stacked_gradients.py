"""Makes the functions that compute a client's gradient in a training step. They run under `torch.func.vmap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, vjp

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model
from polyfed.training.accumulation import added, parts_of, refuse_aux
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
