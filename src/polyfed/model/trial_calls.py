"""Checks the user's own module with trial calls in training and in evaluation mode, before any client runs it.

In training, a random number must depend only on the key of the batch, so that a run repeats exactly and all engines
draw the same numbers. Dropout and BatchNorm must find the rows of the batch on the first axis of their input, because
they tell rows of padding from real rows by their position. The results of a real row must not depend on rows of
padding, because engines pad batches differently.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.core.tree import Tree
from polyfed.model.model import Model
from polyfed.model.modules.layers import BatchNorm, Dropout
from polyfed.model.modules.seeded_modules import draws_watched

ROWS = 3
"""Rows of a trial batch. BatchNorm needs at least two rows. The number is odd, because other axes rarely have odd
sizes, so the check of the first axis rarely takes another axis for the rows."""

Call = Callable[[Tree, Batch], object]


def check_trial_calls(model: Model, w: Tree, where: str, modalities: Collection[str], call: Call) -> None:
    """Run a part of a model on a few rows of zeros and ones, with and without a row of padding.

    Args:
        w: its Tree. The function changes nothing in it.
        where: the part, for error texts.
        modalities: the modalities of the batch.
        call: a function that runs the part on a Tree and a batch.

    Raises:
        ModelError: the part fails in training mode, or it draws from PyTorch's global random generator. The error also
            occurs if the rows of the batch are not on the first axis of the input of a BatchNorm or dropout layer, or
            if the results of real rows depend on a row of padding.
    """
    batch = model.zero_batch(ROWS, modalities)

    def fresh() -> Tree:
        return {name: value.clone() if model.is_buffer(name) else value for name, value in w.items()}

    with torch.no_grad():
        _check_training(where, lambda: call(fresh(), replace(batch, key=0)))
        _check_rows(model, where, batch, lambda batch: call(w, batch))
        _check_padding(where, model.zero_batch(ROWS + 1, modalities), lambda batch: (call(own := fresh(), batch), own))


def _check_training(where: str, run: Callable[[], object]) -> None:
    with draws_watched() as draws:
        try:
            run()
        except Exception as error:
            raise ModelError(
                f"{where} fails in training mode on {ROWS} rows of zeros: {type(error).__name__}: {error}."
            ) from error
        if draws():
            raise ModelError(
                f"{where} draws random numbers from PyTorch's global generator while it trains, as functional dropout "
                "(F.dropout, or dropout_p of scaled_dot_product_attention), torch.rand and torch.bernoulli do. The "
                "numbers would not depend on the seed, and a run would not repeat. Use a layer nn.Dropout or "
                "nn.Dropout1d/2d/3d, made in the constructor, which polyfed replaces by a dropout with reproducible "
                "masks. To drop a whole path of a row, apply nn.Dropout to a tensor of ones (B, 1, ...), and "
                "multiply the path by the result."
            )


def _check_rows(model: Model, where: str, zeros: Batch, run: Callable[[Batch], object]) -> None:
    """Check on which axis of the inputs of BatchNorm and dropout the last row of the batch is."""
    layers = {path: layer for path, layer in model.layers().items() if isinstance(layer, BatchNorm | Dropout)}
    last = {m: x.index_fill(0, zeros.rows[-1:], 1.0) for m, x in zeros.x.items()}
    seen: list[list[tuple[str, Tensor]]] = []
    for batch in (zeros, replace(zeros, x=last)) if layers else ():
        inputs: list[tuple[str, Tensor]] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, path=path, inputs=inputs: inputs.append((path, args[0])))
            for path, layer in layers.items()
            if layer.training  # False for a layer that its encoder keeps in evaluation mode
        ]
        try:
            run(batch)
        except Exception:  # samples of ones are not valid for this module
            return
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(inputs)
    for (path, one), (_, other) in zip(*seen, strict=False):
        if not _last_third(one, other):
            raise ModelError(
                f"{where}: the input {tuple(one.shape)} of {path} ({type(model.layers()[path]).__name__}) for {ROWS} "
                f"rows mixes the rows, or does not have them on its first axis. This axis must have the rows in their "
                "order, each with the same number of neighbouring entries: (B, ...), or (B * T, ...) from "
                "x.flatten(0, 1) of a tensor (B, T, ...). Transpose the tensor before this layer, so that the rows "
                "come first."
            )


def _check_padding(where: str, batch: Batch, run: Callable[[Batch], tuple[object, Tree]]) -> None:
    """Check, in training and in evaluation mode, that the samples in a row of padding do not change other rows.

    A module may keep statistics of its batches in a buffer and read them. Such modules are not checked.
    """
    batch = replace(batch, ok=batch.rows < ROWS)
    odd, last = batch.rows[1:2], batch.rows[[1, -1]]
    real, other = ({m: x.index_fill(0, ones, 1.0) for m, x in batch.x.items()} for ones in (odd, last))
    for key in (0, None):
        try:
            calls = [run(replace(batch, x=x, key=key)) for x in (real, real, other)]
        except Exception:  # samples of ones are not valid for this module
            return
        one, again, moved = (_real_rows(out) for out, _ in calls)
        kept, _, changed = ([*after.values()] for _, after in calls)
        if not _alike(one, again) or not _alike(kept, changed):
            return
        if not _alike(one, moved):
            raise ModelError(
                f"{where} computes a row from the other rows of the batch. Examples are x - x.mean(0), a softmax over "
                "the rows, and code that cuts all sequences to the longest one. An engine that trains several clients "
                "at once adds rows of padding to their batches, which would change the results. Evaluation uses other "
                "batches than training. Compute each row from its own entries. To normalise over the batch, use "
                "nn.BatchNorm1d/2d/3d, which leaves out the padding."
            )


def _real_rows(out: Any) -> list[Tensor]:
    """Return the results of a trial call without the row of padding."""
    return [value[:ROWS] for value in (out.values() if isinstance(out, dict) else [out])]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(one, other, strict=True))


def _last_third(one: Tensor, other: Tensor) -> bool:
    """Return whether two inputs differ only in the entries of the last row, which are the last third of the first axis.

    Inputs that do not differ at all also pass.
    """
    if one.shape != other.shape:
        return False
    differs = ~torch.isclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
    if not differs.any():
        return True
    return one.shape[0] % ROWS == 0 and not differs[: -(one.shape[0] // ROWS)].any()
