"""The client context: the facts that a task may use about the client that runs it."""

from dataclasses import dataclass

from polyfed.core.tree import SHARED, Tree
from polyfed.model import Model
from polyfed.privacy.policy import Policy


@dataclass(frozen=True)
class ClientContext:
    """Facts about a client that stay the same during a run and that its tasks may use.

    Attributes:
        model: the model, as pure functions of a tree of parameters.
        modalities: the modalities of this client, in the federation's order.
        num_classes: number of classes of the label.
        initial: this client's blocks of the model's initial parameters, drawn from the run's seed.
        evaluation_client: whether this is an evaluation client, which holds the server's own test or validation rows.
        policy: the egress policy, which says what may leave this client.
    """

    model: Model
    modalities: tuple[str, ...]
    num_classes: int
    initial: Tree
    evaluation_client: bool = False
    policy: Policy = Policy()

    @property
    def blocks(self) -> frozenset[str]:
        """The blocks of this client's model: one for each of its modalities, and the shared block."""
        return frozenset((*self.modalities, SHARED))
