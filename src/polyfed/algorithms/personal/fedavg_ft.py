"""FedAvg with fine-tuning: after the last round, every client trains a copy of the global model on its own rows.

The usual baseline of personalised methods; it has no paper of its own. Wang, Mathews, Kiddon, Eichner, Beaufays,
Ramage, "Federated Evaluation of On-device Personalization", 2019, measure it.

It is `Averaging` with `fine_tune`. Page: docs/algorithms/fedavg-ft.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.private_blocks import as_at_first
from polyfed.algorithms.base import UPDATES
from polyfed.core.option_checks import NOT_NEGATIVE, PLACEBO, SearchRange
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext


@dataclass(frozen=True, kw_only=True)
class FedAvgFt(Averaging):
    """Federated averaging, then fine-tuning on every client.

    Attributes:
        fine_tune: epochs in which every client trains a copy of its whole model after the last round, before the last
            personal evaluation.
        placebo: `initial` is a control of the same cost: clients fine-tune the initial model, which knows nothing of
            other clients. `none` is the method.
    """

    fine_tune: Annotated[int, NOT_NEGATIVE, SearchRange(1, 2, 5)] = 2
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def tuned_from(self, context: ClientContext, params: Tree) -> Tree:
        return params if self.placebo == "none" else as_at_first(context, params)
