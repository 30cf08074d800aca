"""The contract of a view: `minimise` for local training, `fold` for everything else.

No other loop over batches exists. Both machines draw the same rows in the same order with the same dropout keys, so
their results differ only by the order of floating-point sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, add, block_of
from polyfed.model import Model
from polyfed.training.optimisers import Moments, Train

Loss = Callable[[Tree, Batch], Any]
"""`loss(params, batch)` -> scalar, or (scalar, aux) with aux any nest of tensors, handed to `direction`. Under `split`
the scalar is a dict of scalars, the terms of the loss by name."""

Direction = Callable[[Any, Tree, Any, Tree], tuple[Tree, Tree]]
"""`direction(grads, params, aux, carry)` -> (grads, carry): gradient modulation, control variates, running sums.
Under `split` the grads that come in are a dict of trees, one per term, and the one tree that goes out is the step's."""

Step = Callable[[Any, Batch], Any]
"""`step(carry, batch)` -> carry."""

FOLD_BATCH = 256
"""Rows of a batch in `fold`: large enough to hide the interpreter, small enough for activations of images."""

ORDER, DROPOUT = keys.key("batch_order"), keys.key("dropout")


@dataclass(frozen=True)
class TrainingResult:
    """What local training gives back.

    Attributes:
        params: the whole tree after training; entries that were not trained are unchanged.
        loss: mean over the steps of the training loss, a 0-dim tensor; 0 when there was no step.
        num_steps: steps taken, a 0-dim int64 tensor.
        carry: what `direction` accumulated.
        moments: of the optimiser, for another leg of the same training (`minimise(after=...)`).
        num_epochs: epochs so far, all legs together.
    """

    params: Tree
    loss: Tensor
    num_steps: Tensor
    carry: Tree = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    num_epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One local training: the arguments of `ClientData.minimise`, which says what they mean."""

    loss: Loss
    params: Tree
    train: Train
    model: Model | None = None
    direction: Direction | None = None
    carry: Mapping[str, Tensor] | None = None
    only: Collection[str] | None = None
    stream: int = 0
    split: bool = False
    after: TrainingResult | None = None
    on: Batch | None = None

    def __post_init__(self) -> None:
        """Refuse to split into legs what has no epochs."""
        assert self.after is None or self.train.steps is None, "a training counted in steps has no legs"

    def trained(self, model: Model) -> list[str]:
        """The names that it moves: trainable, and chosen by name or block where `only` is given."""
        names = list(model.trainable(self.params))
        if self.only is None:
            return names
        return [name for name in names if name in self.only or block_of(name) in self.only]


class ClientData(ABC):
    """One client's rows as a task sees them; under the vectorised engine the same text sees many at once.

    Attributes:
        num_rows: 0-dim int64 tensor.
        key: key of (run, round, client); tasks that draw numbers fold a purpose into it with `draw`.
        round: the round, from 1.
        rounds: rounds of the run.
    """

    num_rows: Tensor
    key: int | Tensor
    round: int
    rounds: int

    @abstractmethod
    def minimise(
        self,
        loss: Loss,
        params: Tree,
        *,
        train: Train,
        model: Model | None = None,
        direction: Direction | None = None,
        carry: Mapping[str, Tensor] | None = None,
        only: Collection[str] | None = None,
        stream: int = 0,
        split: bool = False,
        after: TrainingResult | None = None,
        on: Batch | None = None,
    ) -> TrainingResult:
        """Train `params` on the client's rows.

        Args:
            loss: see `Loss`; the batch is in training mode.
            params: where to start; never changed.
            train: epochs or steps, batch size, optimiser.
            model: the model `params` belong to; default the client's own (`context.model`).
            direction: see `Direction`; default the gradient itself.
            carry: tree handed through `direction`.
            only: names to train, or blocks by their name; default everything trainable in `params`.
            stream: two calls with the same stream see the same batches; another number, other batches.
            split: the loss gives its terms by name, and `direction` gets each term's gradient by itself; the step
                follows their sum where no `direction` is given. One more backward pass per further term.
            after: an earlier leg of this training: moments, step numbers and place in the batch order go on from
                there, so that E legs of one epoch equal one call of E epochs; `loss` and `num_steps` of the result
                speak of all legs. For methods that look at their data between epochs. Not with `train.steps`.
            on: take one step, on this batch, in place of all those of `train`; with `after`, the next one.
        """

    @abstractmethod
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        """The batch of step `number`, from 1, of the training that `minimise` would do.

        For methods that talk to the server between the forward and the backward pass of a batch, an ask each. The
        client must have that many steps.
        """

    @abstractmethod
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        """Run `step` over the client's rows in their own order, in evaluation mode, without gradients.

        Sums must leave out padding: use `batch.sum` and `batch.mean`.
        """

    def collect(self, function: Callable[[Batch], Tree]) -> Tree:
        """`function(batch)`, a tree of (B, ...), for all of the client's rows in their own order: (n, ...) each.

        In a stack, n is the number of rows of the longest client, and what stands beyond `num_rows` is meaningless.
        """
        parts: list[Tree] = self.fold(lambda found, batch: [*found, function(batch)], [])
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

    @abstractmethod
    def at(self, rows: Tensor) -> "ClientData":
        """The view of some of the client's rows, in this order; in its batches, `rows` are positions in the selection.

        Args:
            rows: positions among the client's own rows, int64 (n,); under the vectorised engine each client may have
                others, but as many.
        """

    @property
    @abstractmethod
    def ids(self) -> Tensor:
        """The sample ids of the client's rows, int64 (n,); stacked, padded to the longest client's."""

    @property
    @abstractmethod
    def test(self) -> "ClientData":
        """The client's own test rows (possibly none)."""

    def draw(self, purpose: str, number: int = 0) -> int | Tensor:
        """A key for random numbers of this client in this round."""
        return stream_key(self.key, keys.key(purpose), number)


@overload
def stream_key(client: int, purpose: int, number: int) -> int: ...
@overload
def stream_key(client: int | Tensor, purpose: int, number: int) -> int | Tensor: ...
def stream_key(client: int | Tensor, purpose: int, number: int) -> int | Tensor:
    """The key of one of a client's streams: batch order, dropout, whatever a task draws."""
    return keys.fold_in(keys.fold_in(client, purpose), number)


def usable_rows(n: int, batch_size: int, skip_single: bool) -> int:
    """How many of a client's rows an epoch uses: a batch of one row has no batch statistics and is left out
    where the model has BatchNorm (algorithms.md 0.4). `batch_size` 0 means all rows in one batch.
    """
    size = batch_size or n
    if not skip_single or not n:
        return n
    if size == 1:
        return 0
    return n - 1 if n % size == 1 else n


def rows_trained(num_rows: int, train: Train, *, skip_single: bool) -> int:
    """Rows that a local training of a client puts through the model, repeats counted."""
    end = usable_rows(num_rows, train.batch_size, skip_single)
    if train.steps is None or not end:
        return train.epochs * end if end else 0
    size = min(train.batch_size or end, end)
    epochs, rest = divmod(train.steps, -(-end // size))
    return epochs * end + min(rest * size, end)


def steps_trained(num_rows: int, train: Train, *, skip_single: bool) -> int:
    """Optimiser steps of a client's local training."""
    end = usable_rows(num_rows, train.batch_size, skip_single)
    if train.steps is not None or not end:
        return train.steps or 0 if end else 0
    return train.epochs * -(-end // (train.batch_size or end))


def split_loss(out: Any) -> tuple[Any, Any]:
    """The scalar (or its terms) and the aux of what a loss returned."""
    return out if isinstance(out, tuple) else (out, {})


def legs(train: Train) -> list[Train]:
    """One training as legs of one epoch each; a training counted in steps, or of no epoch, is a single leg."""
    return [replace(train, epochs=1)] * train.epochs if train.steps is None and train.epochs > 1 else [train]


def summed(grads: Mapping[str, Tree]) -> Tree:
    """The gradient of a sum of terms."""
    first, *rest = grads.values()
    for term in rest:
        first = add(first, term)
    return first
