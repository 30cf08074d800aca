"""FedBN: clients keep their normalisation layers, and share everything else.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1. The factors, terms and statistics of these layers are trained and used on each client and never averaged.

polyfed's choice: all normalisation layers of PyTorch count, not only BatchNorm. A model without one is refused.

FedBN is `Averaging` with the private words `norms`: private_blocks.py. Page: docs/algorithms/fedbn.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.private_blocks import NORMS, names_of
from polyfed.algorithms.base import IMAGES, UPDATES
from polyfed.core import keys
from polyfed.core.option_checks import PLACEBO
from polyfed.model import Model


@dataclass(frozen=True, kw_only=True)
class FedBn(Averaging):
    """Federated averaging of all layers but those of normalisation.

    Attributes:
        private: the blocks that every client keeps: `norms`, all normalisation layers, and others besides.
        placebo: `random` is a control: every client keeps as many other layers, drawn at random, and shares its
            normalisation layers. `none` is the method.
    """

    private: tuple[str, ...] = (NORMS,)
    placebo: Annotated[Literal["none", "random"], PLACEBO] = "none"

    needs: ClassVar[Mapping[str, Mapping[str, Any]]] = {"data": IMAGES}  # the encoder of images normalises
    mixing: ClassVar[str] = ""
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    @override
    def private_names(self, model: Model) -> frozenset[str]:
        own = names_of(self.private, model)
        if self.placebo == "none":
            return own
        layers = {name.rpartition(".")[0] for name in own}
        others = sorted({name.rpartition(".")[0] for name in model.names(model.modalities)} - layers)
        order = keys.permutation(keys.key("fedbn-placebo"), len(others)).tolist()
        drawn = {others[place] for place in order[: min(len(layers), len(others) - 1)]}
        return frozenset(name for name in model.names(model.modalities) if name.rpartition(".")[0] in drawn)
