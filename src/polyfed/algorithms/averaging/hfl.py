"""HFL: FedAvg with early fusion. HFL is the horizontal baseline for HFM.

Every silo is one client with one model of all modalities. The modalities are stacked as channels beforehand (`[data]
stack`). The server averages the silos' models, weighted by the silos' rows. If `mu` is above 0, HFL is FedProx (Eq. 4
of HFM's report). See docs/algorithms/hfl.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import UPDATES
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import NOT_NEGATIVE, SearchRange
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation


@dataclass(frozen=True, kw_only=True)
class Hfl(Averaging):
    """HFL: FedAvg on stacked modalities, or FedProx if `mu` is above 0.

    Attributes:
        mu: strength of the proximal term.
    """

    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1, 1.0)] = 0.0

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "data": {"stack": {"all": ["a", "b"]}},
        "clients": {"partition": "silos", "silos": 2},
    }
    mixing: ClassVar[str] = "hfl stacks them into one"
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def init(self, fed: Federation, params: Tree) -> Any:
        """Return the state of `Averaging`.

        Raises:
            RecipeError: the data has several modalities, because the recipe does not stack them into one.
        """
        if len(fed.clients.modalities) > 1:
            names = ", ".join(f'"{name}"' for name in fed.clients.modalities)
            raise RecipeError(
                f"hfl trains one model on stacked modalities: write [data] stack = {{ all = [{names}] }}",
                ("data", "stack"),
            )
        return super().init(fed, params)

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        """Return the cross-entropy plus the proximal term mu / 2 * ||w - w_received||^2."""
        if not self.mu:
            return super().loss(context, w, batch, got, local)
        pull = squared_distance(context.model.trainable(w), got.params)
        return super().loss(context, w, batch, got, local) + self.mu / 2 * pull
