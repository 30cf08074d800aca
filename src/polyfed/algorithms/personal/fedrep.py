"""FedRep: clients share the encoders and keep the head, which they train first and alone in every round.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. A client takes `private_epochs` epochs for its head with the encoders fixed, then the epochs of
[train] for the encoders with the head fixed. The server averages the encoders.

FedRep is `Averaging` with a private head: private_blocks.py. Page: docs/algorithms/fedrep.md.
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
class FedRep(Averaging):
    """Federated averaging of the encoders, with a head for each client.

    Attributes:
        private: the blocks that every client keeps: `head`, or the names of other blocks that stand for it.
        private_epochs: epochs in which a client trains only its head, at the start of each round; 10 in the paper.
        placebo: `initial` is a control of the same cost: in every round the head starts from the initial one, so a
            client keeps nothing that it has learnt. `none` is the method.
    """

    private: tuple[str, ...] = ("head",)
    private_epochs: Annotated[int, NOT_NEGATIVE, SearchRange(1, 2, 5, 10)] = 10
    placebo: Annotated[Literal["none", "initial"], PLACEBO] = "none"

    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def kept_at_start(self, context: ClientContext, kept: Tree) -> Tree:
        return kept if self.placebo == "none" else as_at_first(context, kept)
