"""LG-FedAvg: clients keep the encoders and share the head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", 2020, arXiv:2001.01523, Algorithm 1. Each client trains local encoders and the global
head together, and the server averages the head. The paper also names other losses for the encoders; polyfed uses the
loss of the task.

LG-FedAvg is `Averaging` with private encoders: private_blocks.py. Page: docs/algorithms/lg-fedavg.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.private_blocks import as_at_first
from polyfed.algorithms.base import UPDATES
from polyfed.core.option_checks import PLACEBO
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext


@dataclass(frozen=True, kw_only=True)
class LgFedAvg(Averaging):
    """Federated averaging of the head, with encoders for each client.

    Attributes:
        private: the blocks that every client keeps: `encoders`, or the names of other blocks that stand for them.
        placebo: `initial` is a control of the same cost: in every round the encoders start from the initial ones, so a
            client keeps nothing that it has learnt. `none` is the method.
    """

    private: tuple[str, ...] = ("encoders",)
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def kept_at_start(self, context: ClientContext, kept: Tree) -> Tree:
        return kept if self.placebo == "none" else as_at_first(context, kept)
