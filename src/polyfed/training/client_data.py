"""`ClientData`: a client's dataset as a client task sees it.

A task trains with `ClientData.minimise`. It computes everything else over its rows with `ClientData.fold` or
`ClientData.collect`. Algorithms contain no other loop over batches. There are two implementations. `SingleClientData`
holds one client. `StackedClientData` holds many similar clients, and the task runs once for all of them under
`torch.func.vmap`. Both use the same rows in the same order with the same dropout keys. Their results therefore differ
only by the order of floating-point sums.

A task must follow these rules so that it also runs under `vmap`:

- Write the code for the tensors of one client; the client axis is hidden.
- Do not branch on the value of a tensor in Python (`if loss > 1`, `.item()`, `float(loss)`); use `torch.where`.
- Batches may hold padding, because clients differ in their number of rows. Average and sum over rows with
  `Batch.mean` and `Batch.sum`, or use the losses in `polyfed.training.losses`.
- Draw random numbers from keys (`ClientData.draw`, `polyfed.core.keys`), never from PyTorch's global generator.

A task that cannot follow these rules is marked `@task(loop_because="...")`. The engine then runs it for one client
after another.

Shape letters: `B` rows of a batch, `n` rows of the client.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree, add, block_of
from polyfed.model import Model
from polyfed.training.optimisers import Moments, Train

Loss = Callable[[Tree, Batch], Any]
"""`loss(params, batch)` returns a 0-dim tensor, or a pair (0-dim tensor, aux). `aux` is any nested structure of
tensors, and `direction` receives it. With `split=True`, the loss returns its terms instead of the 0-dim tensor: a dict
of 0-dim tensors by name."""

Direction = Callable[[Any, Tree, Any, Tree], tuple[Tree, Tree]]
"""`direction(grads, params, aux, carry)` returns (grads, carry): the gradient for the optimiser, and the state for the
next step. Use it for gradient modulation, control variates and running sums. The state may hold tensors of `params`:
polyfed keeps their values from before the optimiser step. With `split=True`, `grads` is a dict with
one Tree for each term of the loss, but the returned gradient is still a single Tree."""

Step = Callable[[Any, Batch], Any]
"""`step(carry, batch)` returns the new carry."""

FOLD_BATCH = 256
"""Number of rows in a batch of `fold`. It hides Python's overhead, but the activations of images still fit in
memory."""

ORDER, DROPOUT = keys.key("batch_order"), keys.key("dropout")
"""Purposes of a client's random streams; see `stream_key`."""


TRAINING_PASSES = 3
"""Cost of a training step in forward passes: one for the forward pass, two for the backward pass (docs/network.md)."""


@dataclass(frozen=True)
class Passes:
    """What the loss of a training step computes, for simulated time. The default is one pass forward and one backward.

    Attributes:
        whole: forward passes through the model that is trained; a backward pass counts as two.
        encoders: further forward passes through the encoders alone.
        others: forward passes through the encoders of modalities that this training leaves out (`only`).
        singly: further forward passes through the fusion from each modality alone, in clients with several modalities;
            a backward pass counts as two.
        together: further forward passes through the fusion of all modalities, in such clients; a backward pass counts
            as two.
    """

    whole: int = TRAINING_PASSES
    encoders: int = 0
    others: int = 0
    singly: int = 0
    together: int = 0


ONCE = Passes()
"""One pass forward and one backward."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of local training.

    Attributes:
        params: all of `params` after training, as detached copies. Entries that were not trained are unchanged.
        loss: mean of the training loss over the steps, a 0-dim tensor; 0 if no step was taken.
        num_steps: number of optimiser steps, a 0-dim int64 tensor.
        carry: the state that `direction` returned in the last step.
        moments: the optimiser's moments, with which `minimise(after=...)` continues.
        num_epochs: number of epochs; if `minimise(after=...)` continued an earlier training, its epochs are included.
    """

    params: Tree
    loss: Tensor
    num_steps: Tensor
    carry: Tree = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    num_epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of one call of `ClientData.minimise`, whose docstring explains them."""

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
    passes: Passes = ONCE

    def __post_init__(self) -> None:
        """Refuse `after` in combination with `train.steps`, and `split` in combination with gradient accumulation.

        Raises:
            RecipeError: with `split`, the recipe sets [train] accumulate to more than 1.
        """
        assert self.after is None or self.train.steps is None, "after= continues epochs; train.steps must be None"
        if self.split and self.train.accumulate > 1:
            raise RecipeError(
                "[train] accumulate: this method needs the gradient of each term. Set accumulate = 1",
                ("train", "accumulate"),
            )

    def trained(self, model: Model) -> list[str]:
        """Return the names of the parameters to train: all trainable parameters, or those that `only` names."""
        names = list(model.trainable(self.params))
        if self.only is None:
            return names
        return [name for name in names if name in self.only or block_of(name) in self.only]


class ClientData(ABC):
    """The dataset of one client, as a client task sees it.

    A task trains with `minimise`. The following task adds the proximal term of FedProx to the loss:

    ```python
    def loss(params: Tree, batch: Batch) -> Tensor:
        error = cross_entropy(context.model.logits(params, batch), batch)
        return error + mu / 2 * squared_distance(context.model.trainable(params), got.params)

    result = data.minimise(loss, got.params, train=self.train)
    ```

    Under `vmap`, the functions that a task gives to `minimise` and `fold` see the tensors of one client, without a
    client axis. All clients of the stack do their steps together:

    - All clients' batches have the same number of rows; `batch.ok` (B,) is False for padding.
    - `minimise` and `fold` call these functions until the client with the most steps has finished. A client that
      finished earlier keeps its parameters, moments and carry. Results for this client after its last step are ignored.
    - `loss` and `direction` may be called more or fewer times than there are steps, because their operations are
      recorded and replayed. The functions must not rely on side effects, such as counting their calls.

    Attributes:
        num_rows: number of training rows, a 0-dim int64 tensor.
        key: random key of (run, round, client). To draw numbers, derive a key with `draw`.
        round: the round, from 1.
        rounds: number of rounds of the run.
        min_rows_per_class: least number of rows of a class of which the client may tell; 0 without such a limit.
        min_group: least number of rows of a class or group that an evaluation job may show; 0 without such a limit.
        min_test_rows: least number of test rows in a score; 0 without such a limit.
    """

    min_rows_per_class: int = 0
    min_group: int = 0
    min_test_rows: int = 0
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
        passes: Passes = ONCE,
    ) -> TrainingResult:
        """Train `params` on the client's rows; the class docstring has an example.

        Each step differentiates `loss` on one batch, passes the gradient through `direction`, and takes an optimiser
        step. Rows are shuffled again in every epoch. The batches update the running BatchNorm statistics.

        Args:
            loss: the objective, see `Loss`. On its batches, models run in training mode: dropout is active, and
                BatchNorm uses the statistics of the batch. The Tree that `loss` receives is valid only during the call.
            params: the Tree to start from; it is not changed. It holds parameters and buffers of the model. It may also
                hold tensors of the method itself (a projection head) under names that the model does not have.
            train: number of epochs or steps, batch size, optimiser and learning rate.
            model: the model that `params` belong to. Default: the client's model, `context.model`.
            direction: changes the gradient of every step, see `Direction`. It runs without gradient tracking and must
                not change its arguments. Default: the optimiser uses the gradient of the loss.
            carry: the Tree that `direction` receives in the first step; all steps must return the same names, shapes
                and types. Default: empty.
            only: names of the parameters to train, or blocks, which stand for all their parameters. Default: all
                trainable parameters in `params`.
            stream: number of a random stream. The order of rows and the dropout masks are drawn from it, so calls with
                the same number see the same batches.
            split: whether `loss` returns its terms by name, and `direction` receives the gradient of each term. Without
                `direction`, the optimiser uses the sum of the gradients. Every term needs one backward pass.
            after: result of an earlier call. This call continues with the earlier moments, step numbers and place in
                the order of rows. E calls of one epoch then equal one call of E epochs. `loss` and `num_steps` of the
                new result cover all of these calls. Pass `params` and `carry` of the earlier result again. Not allowed
                with `train.steps`. Default: a new training run, whose moments start at zero.
            on: a batch for a single step, which replaces all the steps of `train`. With `after`, this step follows the
                steps of the earlier call.
            passes: what `loss` computes, if it calls the model more than once; only simulated time reads it.

        Returns:
            The trained parameters, the mean loss, the number of steps and the state of the optimiser.
        """

    @abstractmethod
    def batch(self, train: Train, number: int | Tensor, *, model: Model | None = None, stream: int = 0) -> Batch:
        """Return the batch that `minimise` would use in one of its steps.

        Use it in methods that exchange messages with the server between the forward and the backward pass of a batch,
        such as split learning. These methods send one request for each batch.

        Args:
            train: as for `minimise`.
            number: number of the step, from 1; a 0-dim tensor if the clients of a stack are at different steps. It
                must not exceed the client's number of steps.
            model: as for `minimise`; if it has BatchNorm, batches of one row are left out.
            stream: as for `minimise`.
        """

    @abstractmethod
    def fold(self, step: Step, carry: Any, *, batch_size: int = FOLD_BATCH) -> Any:
        """Run `step` over all rows of the client, in the client's own order, one batch after another.

        Batches are in evaluation mode (no dropout, running BatchNorm statistics), and no gradients are recorded.

        ```python
        def step(total: Tensor, batch: Batch) -> Tensor:
            return total + batch.sum(context.model.logits(params, batch).argmax(1) == batch.y)

        num_correct = data.fold(step, torch.zeros((), dtype=torch.int64))
        ```

        Under `vmap`, use `batch.sum` and `batch.mean`, which leave out padding. If the carry is a nested structure of
        tensors and `step` keeps their shapes, a client that has no rows left keeps its carry. With any other carry,
        such as a list that grows, the carry also includes the results of `step` on padding.

        Args:
            step: `step(carry, batch)` returns the new carry.
            carry: the carry that the first call receives, usually a nested structure of tensors.
            batch_size: number of rows in a batch; the last batch may have fewer.

        Returns:
            The value that the last call of `step` returned, or `carry` itself if the client has no rows.
        """

    def collect(self, function: Callable[[Batch], Tree], *, batch_size: int = FOLD_BATCH) -> Tree:
        """Evaluate a function of a batch on all rows of the client and join the results.

        Args:
            function: returns a Tree of tensors (B, ...), one entry for each row of the batch.
            batch_size: as in `fold`.

        Returns:
            Tensors (n, ...) by name, in the order of the client's rows; empty if there are no rows. Under `vmap`, n is
            the number of rows of the client with the most rows, and the entries beyond `num_rows` are meaningless.
        """
        parts: list[Tree] = self.fold(lambda found, batch: [*found, function(batch)], [], batch_size=batch_size)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}

    @abstractmethod
    def at(self, rows: Tensor) -> "ClientData":
        """Return the dataset that consists of some of the client's rows, in the given order.

        In its batches, `Batch.rows` are positions in the returned dataset, not in the client's whole dataset.

        Args:
            rows: positions among the client's own rows, int64 (n,). Under `vmap` the clients of a stack may select
                different rows, but all select the same number of rows.
        """

    @property
    @abstractmethod
    def ids(self) -> Tensor:
        """Sample ids of the client's rows, int64 (n,); under `vmap`, padded to the stack's largest number of rows."""

    @property
    def groups(self) -> Mapping[str, Tensor]:
        """Column -> the group of each row, int64 (n,): see `Columns.groups`. A stack of clients has none."""
        return {}

    @property
    def clusters(self) -> Tensor | None:
        """The natural client of each row, int64 (n,) from 0, if the rows belong to several; a stack has none."""
        return None

    @property
    @abstractmethod
    def test(self) -> "ClientData":
        """The client's own test rows; an empty dataset if the data has no test rows for clients."""

    def draw(self, purpose: str, number: int = 0) -> int | Tensor:
        """Return a key for random numbers of this client in this round, for the functions of `polyfed.core.keys`.

        Args:
            purpose: a word that says what the numbers are for; different words give independent numbers.
            number: number of the draw, if there are several draws for the same purpose.
        """
        return stream_key(self.key, keys.key(purpose), number)


@overload
def stream_key(client: int, purpose: int, number: int) -> int: ...
@overload
def stream_key(client: int | Tensor, purpose: int, number: int) -> int | Tensor: ...
def stream_key(client: int | Tensor, purpose: int, number: int) -> int | Tensor:
    """Return the key of one random stream of a client.

    Args:
        client: the client's key of the round.
        purpose: what the random numbers are for: `ORDER`, `DROPOUT`, or `keys.key(word)` for a word that the task
            chooses.
        number: number of the stream, if there are several streams for the same purpose.
    """
    return keys.fold_in(keys.fold_in(client, purpose), number)


def split_loss(out: Any) -> tuple[Any, Any]:
    """Split the result of a loss into its value (or its terms) and its aux, which is {} if the loss returned none."""
    return out if isinstance(out, tuple) else (out, {})


def legs(train: Train) -> list[Train]:
    """Split training of E epochs into E legs of one epoch each; return a `Train` per leg, for `minimise(after=...)`.

    If `train` gives a number of steps, it cannot be split. The result is then a list with the unchanged `train`.
    """
    return [replace(train, epochs=1)] * train.epochs if train.steps is None and train.epochs > 1 else [train]


def summed(grads: Mapping[str, Tree]) -> Tree:
    """Add the gradients of all terms, which gives the gradient of the whole loss."""
    first, *rest = grads.values()
    for term in rest:
        first = add(first, term)
    return first
