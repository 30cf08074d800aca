"""FedMAC: the model completes missing modalities, and contrastive terms keep its embeddings apart.

Nguyen, Nguyen, Pham, Hoang, Le Nguyen, Huynh, "FedMAC: Tackling Partial-Modality Missing in Federated Learning with
Cross-Modal Aggregation and Contrastive Regularization", NCA 2024 (arXiv:2410.03070). The fusion `cross-modal`
(`model/fusion.py`) replaces a missing modality by a learned embedding, and mixes each modality with what the others say
about it. The local loss has two contrastive terms: between the modalities of a row, and between a modality and what the
others say about it, so that the mixture does not become trivial.

We had the abstract and a summary of the paper, not its equations: the page lists what is inferred.

The messages are the same as under FedAvg. Page: docs/algorithms/fedmac.md.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.option_checks import NOT_NEGATIVE, POSITIVE, SearchRange
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model, ModelSpec
from polyfed.objective import SUPERVISED, Objective
from polyfed.privacy.egress.policy import Policy
from polyfed.training.losses import between_modalities, contrastive
from polyfed.training.prototypes import there

FUSION = "cross-modal"


@dataclass(frozen=True, kw_only=True)
class FedMac(Averaging):
    """FedAvg of a model that completes missing modalities, with contrastive terms.

    Attributes:
        lam: lambda, weight of the contrastive terms; 0 is FedAvg of the same model.
        temperature: temperature of the contrastive terms.
    """

    lam: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.01, 0.1, 1.0)] = 0.1
    temperature: Annotated[float, POSITIVE, SearchRange(0.1, 0.5, 1.0, beside=("lam", 0.01, 0.1, 1.0))] = 0.5

    mixing: ClassVar[str] = "fedmac completes a modality from the others, and compares their embeddings in its loss"
    objectives: ClassVar[tuple[type[Objective], ...]] = SUPERVISED
    objectives_because: ClassVar[str] = "it completes modalities that rows lack, and pairs of modalities lack none"

    @override
    def model_spec(
        self, spec: ModelSpec, modalities: tuple[str, ...], policy: Policy
    ) -> tuple[ModelSpec, tuple[str, ...]]:
        return with_fusion(spec, FUSION, "fedmac"), modalities

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed)
        return result if self.lam else result | {"temperature": "lam = 0"}

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        features = context.model.features(w, batch)
        views = context.model.views(w, features, batch)
        loss = context.objective.loss(views["logits"], batch)
        if not self.lam:
            return loss
        rows = {m: there(batch, m) for m in features}
        terms = between_modalities(features, rows, self.temperature)
        return loss + self.lam * (terms + self._of_others(context.model, views, rows))

    def _of_others(self, model: Model, views: dict[str, Tensor], rows: dict[str, Tensor]) -> Tensor:
        """Return the contrastive loss of what the others say about a modality, averaged over the modalities.

        It counts the rows that have the modality and another one.
        """
        several = views["there"].sum(1) > 1
        terms = []
        for m, real in rows.items():
            at = model.modalities.index(m)
            said, own = views["others"][:, at], views["completed"][:, at]
            terms.append(contrastive(said, own, real & several, temperature=self.temperature, negatives="inter"))
        return torch.stack(terms).mean()


def with_fusion(spec: ModelSpec, fusion: str, method: str) -> ModelSpec:
    """Return the model with the method's own fusion in place of the default one.

    Raises:
        RecipeError: the recipe names another fusion, or a whole module.
    """
    if spec.module is not None:
        raise RecipeError(
            f"[model] module: {method} completes missing modalities with the fusion '{fusion}', and a whole module has "
            "no fusion. Describe the model by encoders",
            ("model", "module"),
        )
    if spec.fusion not in ("concat", fusion):
        raise RecipeError(
            f"[model] fusion = {spec.fusion!r}: {method} completes missing modalities with the fusion '{fusion}'. Set "
            f"fusion = '{fusion}', or leave it out",
            ("model", "fusion"),
        )
    return replace(spec, fusion=fusion)
