"""pFedMe: personal models near the global one, which is trained on the Moreau envelopes of the clients' losses.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. In each step
on a batch, a client solves

    theta = argmin l(theta) + lambda / 2 ||theta - w||^2

by K steps of gradient descent, and moves its version of the global model towards the solution:
w <- w - eta lambda (w - theta). The last theta is its personal model. The server averages the w.

polyfed's choices: the inner descent starts at w. The paper's beta is the learning rate of [server]. Only the cohort
trains; in the paper all clients do, and the server draws some of their replies.

The messages are the same as under FedAvg; personal models never leave their clients. Page: docs/algorithms/pfedme.md.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.option_checks import AT_LEAST_ONE, COST, IN_RECIPE, PLACEBO, POSITIVE, SearchRange
from polyfed.core.problems import Conflict
from polyfed.core.tree import Tree, add, clone, nested, squared_distance, under
from polyfed.federation.context import ClientContext
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import TRAINING_PASSES, Direction, Passes

OWN = "@own"
"""Prefix of the personal model in a client's local state. No modality can have a name that starts with @."""


@dataclass(frozen=True, kw_only=True)
class PFedMe(Averaging):
    """Personalised federated learning with Moreau envelopes. The mean is uniform by default, as in the paper.

    Attributes:
        lam: lambda, weight of the pull of the personal model to the global one.
        inner_steps: K, gradient steps towards the personal model on each batch.
        inner_lr: learning rate of these steps. `inner_lr * lam` has to be below 2, else they diverge.
        placebo: `initial` is a control: the personal model is solved for near the initial one, which knows nothing of
            other clients. `none` is the method.
    """

    aggregation: Annotated[Literal["weighted", "uniform"], IN_RECIPE] = "uniform"
    lam: Annotated[float, POSITIVE, SearchRange(5.0, 15.0, 30.0)] = 15.0
    inner_steps: Annotated[int, AT_LEAST_ONE, COST] = 5
    inner_lr: Annotated[float, POSITIVE, SearchRange(0.005, 0.01, 0.02, 0.05)] = 0.05
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("train", "accumulate"),
            when=lambda recipe: recipe.algorithm.train.accumulate > 1,
            because="it solves for a model on each whole batch",
            instead="Set accumulate = 1",
        ),
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: the inner descent would diverge.
        """
        super().__post_init__()
        if self.inner_lr * self.lam >= 2:
            raise RecipeError(
                f"[algorithm] inner_lr * lam = {self.inner_lr * self.lam:g}: the inner descent diverges from 2 on. "
                "Lower one of them",
                ("algorithm", "inner_lr"),
            )

    @property
    @override
    def passes(self) -> Passes:  # every inner step, and the loss of its result; the outer gradient is a difference
        return Passes(whole=TRAINING_PASSES * self.inner_steps + 1)

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return nested(OWN, context.initial)

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Broadcast, local: Tree) -> Any:
        """Return the Moreau envelope of the loss on a batch, and the personal model theta that attains it.

        Its gradient is lambda (w - theta), because theta minimises the envelope's expression.
        """
        now = context.model.trainable(w)
        w0 = context.model.trainable(context.initial)
        centre = {name: (value if self.placebo == "none" else w0[name]).detach() for name, value in now.items()}
        buffers = {name: value for name, value in w.items() if name not in now}

        def inner(theta: Tree, buffers: Tree) -> Tensor:
            near = self.lam / 2 * squared_distance(theta, centre)
            return context.loss(clone(buffers) | theta, batch) + near  # a copy, because BatchNorm changes buffers

        theta = centre
        for _ in range(self.inner_steps):
            theta = add(theta, torch.func.grad(inner)(theta, buffers), -self.inner_lr)
        theta = {name: value.detach() for name, value in theta.items()}
        error = context.loss(buffers | theta, batch).detach()
        return error + self.lam / 2 * squared_distance(now, theta), theta

    @override
    def direction(
        self, context: ClientContext, data: ClientData, got: Broadcast, local: Tree
    ) -> tuple[Direction, Tree]:
        def remembered(grads: Tree, w: Tree, theta: Tree, carry: Tree) -> tuple[Tree, Tree]:
            return grads, theta

        return remembered, context.model.trainable(under(OWN, local))

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Broadcast, local: Tree
    ) -> tuple[Message, Tree]:
        return Update(fit.params, fit.loss, data.num_rows), nested(OWN, fit.params | fit.carry)

    @override
    def global_params(self, state: Any) -> Tree:
        params: Tree = state.params
        return params

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return under(OWN, local)
