"""What a task may know of the client that runs it."""

from dataclasses import dataclass

from polyfed.core.tree import SHARED, Tree
from polyfed.model import Model
from polyfed.privacy.policy import Policy


@dataclass(frozen=True)
class ClientContext:
    """Static facts a task may use.

    Attributes:
        model: the model, as pure functions of a tree.
        modalities: what this client owns, in the federation's order.
        num_classes: classes of the label.
        initial: this client's blocks of the model's initial parameters, drawn from the run's seed.
        evaluation_client: whether these are the server's own test rows.
        policy: what may leave this client.
    """

    model: Model
    modalities: tuple[str, ...]
    num_classes: int
    initial: Tree
    evaluation_client: bool = False
    policy: Policy = Policy()

    @property
    def blocks(self) -> frozenset[str]:
        """The blocks of this client's model."""
        return frozenset((*self.modalities, SHARED))
