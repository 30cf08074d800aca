"""Ditto: beside the global model, every client trains a model of its own that is pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1. The
global model w is trained by federated averaging. Client k also takes steps on

    F_k(v) + lambda / 2 ||v - w||^2

from its own model v_k of the round before, where w is the model that it received, not the one that it trained.

The messages are the same as under FedAvg; the personal model never leaves its client. Page: docs/algorithms/ditto.md.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.averaging.private_blocks import epochs_of
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.messages import Message
from polyfed.core.option_checks import COST, NOT_NEGATIVE, PLACEBO, SearchRange
from polyfed.core.tree import Tree, nested, squared_distance, under
from polyfed.federation.context import ClientContext
from polyfed.training import ClientData, TrainingResult

OWN = "@own"
"""Prefix of the personal model in a client's local state. No modality can have a name that starts with @."""

OWN_STREAM = 1003
"""Random stream of the batches on which the personal model trains."""


@dataclass(frozen=True, kw_only=True)
class Ditto(Averaging):
    """Federated averaging, and a regularised personal model for each client.

    Attributes:
        lam: lambda, weight of the pull towards the global model (0.05 to 2 in the paper); 0 trains the personal model
            alone.
        personal_epochs: epochs of the personal model in each round; 0 for those of [train].
        placebo: `initial` is a control: the pull is towards the initial model, which knows nothing of other clients.
            `none` is the method.
    """

    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.05, 0.1, 0.2, 1.0, 2.0)] = 1.0
    personal_epochs: Annotated[int, NOT_NEGATIVE, COST] = 0
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        return nested(OWN, context.initial)

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Broadcast, local: Tree
    ) -> tuple[Message, Tree]:
        centre = got.params if self.placebo == "none" else context.initial

        def loss(v: Tree, batch: Batch) -> Tensor:
            pull = squared_distance(context.model.trainable(v), centre)
            return context.loss(v, batch) + self.lam / 2 * pull

        train = epochs_of(self.train, self.personal_epochs) if self.personal_epochs else self.train
        own = data.minimise(loss, under(OWN, local), train=train, stream=OWN_STREAM)
        return Update(fit.params, fit.loss, data.num_rows), nested(OWN, own.params)

    @override
    def global_params(self, state: Any) -> Tree:
        params: Tree = state.params
        return params

    @override
    def own_params(self, got: Broadcast, local: Tree) -> Tree:
        return under(OWN, local)
