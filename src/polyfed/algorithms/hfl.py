"""HFL: FedAvg on early fusion, the horizontal control of HFM.

Every silo is one client with one model over all modalities, stacked as channels before it sees them (`[data] stack`);
silos are averaged by their rows (algorithms.md 3.4). With `mu` it is FedProx (Eq. 4).
"""

from dataclasses import dataclass
from typing import Annotated, Any

from polyfed.algorithms.averaging import Averaging
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation


@dataclass(frozen=True, kw_only=True)
class Hfl(Averaging):
    """See the module.

    Attributes:
        mu: strength of the proximal term; 0 leaves it out.
    """

    mu: Annotated[float, NOT_NEGATIVE] = 0.0

    def init(self, fed: Federation, params: Tree) -> Any:
        """Averaging's state.

        Raises:
            RecipeError: the data is not stacked.
        """
        if len(fed.clients.modalities) > 1:
            names = ", ".join(f'"{name}"' for name in fed.clients.modalities)
            raise RecipeError(f"hfl trains one model on stacked modalities: write [data] stack = {{ all = [{names}] }}")
        return super().init(fed, params)

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """Cross-entropy, and the proximal term."""
        if not self.mu:
            return super().loss(context, w, batch, got, local)
        pull = squared_distance(context.model.trainable(w), got.params)
        return super().loss(context, w, batch, got, local) + self.mu / 2 * pull
