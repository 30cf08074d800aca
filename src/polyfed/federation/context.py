"""The client context: the facts that a task may use about the client that runs it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree
from polyfed.model import Model
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.egress.policy import Policy


@dataclass(frozen=True)
class ClientContext:
    """Facts about a client that stay the same during a run and that its tasks may use.

    Attributes:
        model: the model, as pure functions of a tree of parameters.
        modalities: the modalities of this client, in the federation's order.
        num_classes: number of classes of the label, or number of targets if the objective has no classes.
        initial: this client's blocks of the model's initial parameters, which are drawn from the run's seed.
        evaluation_client: whether this is an evaluation client, which holds the server's own test or validation rows.
        policy: the egress policy. It names the kinds of data that may leave this client.
        objective: the objective from the [task] section: what the model learns to predict, and with which loss.
        on_device: whether the client is a device of a deployment. A device draws its secrets from the system's secure
            generator. A simulated client draws its secrets from the run's seed.
    """

    model: Model
    modalities: tuple[str, ...]
    num_classes: int
    initial: Tree
    evaluation_client: bool = False
    policy: Policy = Policy()
    objective: Objective = CLASSES
    on_device: bool = False

    @property
    def blocks(self) -> frozenset[str]:
        """The blocks of this client's model: one for each of its modalities, and the shared block."""
        return frozenset((*self.modalities, SHARED))

    def loss(self, w: Tree, batch: Batch, features: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the objective's loss for a batch, a 0-dim tensor. For classes, this is the cross-entropy.

        Args:
            w: parameters of the model.
            batch: the rows, with their labels.
            features: the result of `model.features`, if you have already computed it.
        """
        return self.objective.loss(self.objective.outputs(self.model, w, batch, features), batch)

    def row_losses(self, w: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return, for each row, the sum of its known targets' losses and the sum of their weights, (B,) each."""
        return self.objective.row_losses(self.objective.outputs(self.model, w, batch), batch)
