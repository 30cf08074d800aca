"""FedProx: FedAvg with a proximal term that keeps a client's model near the model that the client received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2. The
local loss is the cross-entropy plus (mu / 2) * ||w - w_received||^2 over trainable parameters. The other steps are
those of FedAvg.

The messages are the same as under FedAvg. Page: docs/algorithms/fedprox.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import UPDATES
from polyfed.core.batch import Batch
from polyfed.core.option_checks import NOT_NEGATIVE, SearchRange
from polyfed.core.tree import Tree, squared_distance
from polyfed.federation.context import ClientContext


@dataclass(frozen=True, kw_only=True)
class FedProx(Averaging):
    """FedAvg with a proximal term in the local loss.

    Attributes:
        mu: weight of the proximal term; 0 is FedAvg. 0.01 in the PartialFL paper, 0.001 to 1 in FedProx's.
    """

    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.001, 0.01, 0.1, 1.0, fedavg=0.0)] = 0.01

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        return super().loss(context, w, batch, got, local) + self.mu / 2 * squared_distance(
            context.model.trainable(w), got.params
        )
