"""Gradients of single rows, clipped and with noise: the step of differentially private SGD.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep Learning with Differential Privacy", CCS 2016, Algorithm
1. Both implementations of `ClientData` use this code, so both compute the gradient of each row with `vmap(grad)`.

Shape letters: `B` rows of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.privacy_noise import Clip, DiscreteGaussian
from polyfed.core.tree import Tree
from polyfed.training.client_data import Job, Loss, split_loss


@dataclass(frozen=True)
class PerSample:
    """How local training protects single rows.

    Attributes:
        clip: the limit of the norm of each row's gradient.
        deviation: standard deviation of the noise that is added to the sum of the clipped gradients of a batch.
        secure: whether the noise comes from the operating system's random number generator. Otherwise polyfed derives
            the noise from `Batch.key`, the random key of the batch.
    """

    clip: Clip
    deviation: float
    secure: bool = False

    def refuse(self, job: Job) -> None:
        """Refuse training whose gradient is not the mean of the gradients of single rows.

        Raises:
            RecipeError: [train] accumulate is above 1, or the method needs a gradient for each term of the loss.
        """
        if job.split or job.train.accumulate > 1:
            what = "[train] accumulate > 1" if job.train.accumulate > 1 else "a method that needs each term's gradient"
            raise RecipeError(
                f'[privacy] unit = "example" clips the gradient of each row, which {what} does not allow',
                ("privacy", "unit"),
            )

    def gradient(self, loss: Loss, trained: Tree, rest: Tree, batch: Batch, size: int | Tensor) -> tuple[Tree, Tensor]:
        """Return the protected gradient of a batch and the mean loss of its rows.

        The gradient is (sum of clipped gradients of real rows + noise) / size. The mean loss is not protected.

        Args:
            loss: the loss of a batch; it is called with batches of one row.
            trained: the parameters to differentiate.
            rest: the other entries of the tree.
            batch: the rows, in training mode.
            size: the nominal number of rows of a batch. It does not depend on which rows are real.
        """
        assert batch.key is not None, "a batch of local training has a key"
        grads, losses = row_gradients(loss, trained, rest, batch)
        factors, noise = self.clip.factors(grads), DiscreteGaussian(self.deviation)
        result: Tree = {}
        for name, rows in grads.items():
            factor = factors[name] if batch.ok is None else torch.where(batch.ok, factors[name], 0.0)
            total = noise.released(noise.total(rows, factor), None if self.secure else batch.key, name)
            result[name] = (total / size).to(rows.dtype)
        return result, batch.mean(losses)


def refuse_reading(privacy: PerSample | None) -> None:
    """In a task whose reply is protected, refuse to use rows for anything but training.

    Raises:
        RecipeError: `privacy` is not None, so this reply must protect single rows.
    """
    if privacy is not None:
        raise RecipeError(
            '[privacy] unit = "example" protects this reply, and its task may use rows only in `minimise`. The method '
            "declares in `protects` that it does; remove the field from `protects`, or the use of the rows",
            ("privacy", "unit"),
        )


def row_gradients(loss: Loss, trained: Tree, rest: Tree, batch: Batch) -> tuple[Tree, Tensor]:
    """Return the gradient of the loss of each row, tensors (B, ...), and the losses, (B,).

    Each row is computed as a batch of its own and has its own dropout key. With a common key, all rows would get the
    same dropout mask.
    """

    def one(trained: Tree, x: Tree, y: Tensor, row: Tensor, present: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        single = Batch(
            x={m: value.unsqueeze(0) for m, value in x.items()},
            y=y.unsqueeze(0),
            rows=row.unsqueeze(0),
            present={m: value.unsqueeze(0) for m, value in present.items()},
            key=key,
        )
        value, aux = split_loss(loss({**trained, **rest}, single))
        refuse_batch_facts(aux)
        return value, value

    of_rows: Callable[..., Any] = vmap(grad(one, has_aux=True), in_dims=(None, 0, 0, 0, 0, 0))
    positions = torch.arange(len(batch.rows), device=batch.rows.device)
    assert batch.key is not None, "a batch of local training has a key"
    row_keys = keys.fold_in(batch.key, positions)
    grads, losses = of_rows(trained, dict(batch.x), batch.y, batch.rows, dict(batch.present), row_keys)
    return grads, losses


def refuse_batch_facts(aux: Any) -> None:
    """Refuse a loss that returns `aux`, facts that the loss computes from the rows of a batch.

    Noise is added to the gradient, but not to `aux`. The function `direction` of a method could use `aux` to change the
    gradient, and so reveal single rows.

    Raises:
        RecipeError: `aux` is not empty.
    """
    if isinstance(aux, Tensor) or aux:  # in this order, because under `vmap` a tensor has no truth value
        raise RecipeError(
            '[privacy] unit = "example": this method changes its gradients by numbers that it computes from the rows, '
            "and these numbers have no noise",
            ("privacy", "unit"),
        )
