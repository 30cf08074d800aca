"""Checks the user's own module with trial calls in training and in evaluation mode, before any client runs it.

In training, a random number must depend only on the key of the batch, so that a run repeats exactly and all engines
draw the same numbers. Dropout and BatchNorm must find the rows of the batch on the first axis of their input, because
they tell rows of padding from real rows by their position.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.core.tree import Tree
from polyfed.model.layers import BatchNorm, Dropout
from polyfed.model.model import Model
from polyfed.model.seeded_modules import draws_watched

ROWS = 3
"""Rows of a trial batch. BatchNorm needs at least two rows. The number is odd, because other axes rarely have odd
sizes, so the check of the first axis rarely takes another axis for the rows."""

Call = Callable[[Tree, Batch], object]


def check_trial_calls(model: Model, w: Tree, where: str, modalities: Collection[str], call: Call) -> None:
    """Run a part of a model on a few rows of zeros, and on the same rows with ones in the last row.

    Args:
        model: the model.
        w: its Tree. The function changes nothing in it.
        where: the part, for error texts.
        modalities: the modalities of the batch.
        call: a function that runs the part on a Tree and a batch.

    Raises:
        ModelError: the part fails in training mode, or it draws from PyTorch's global random generator. The error also
            occurs if the rows of the batch are not on the first axis of the input of a BatchNorm or dropout layer.
    """
    batch = model.zero_batch(ROWS, modalities)
    own = {name: value.clone() if model.is_buffer(name) else value for name, value in w.items()}
    with torch.no_grad():
        _check_training(where, lambda: call(own, replace(batch, key=0)))
        _check_rows(model, where, batch, lambda batch: call(w, batch))


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
