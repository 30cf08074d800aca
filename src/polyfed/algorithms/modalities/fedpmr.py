"""FedPMR: local training with prototypical modal rebalance on every client, and averaging as in FedAvg.

Fan, Xu, Wang, Wang, Guo, "PMR: Prototypical Modal Rebalance for Multimodal Learning", CVPR 2023. A client predicts
classes from distances to its own class prototypes, for each modality alone. It compares the confidence of these
predictions. For a weaker modality, the client adds the prototypical cross-entropy (PCE) to the loss. The weight of this
term grows with the difference in confidence. Before every local epoch, the client computes the prototypes from all its
rows.

polyfed's choice: with more than two modalities, each modality is compared with the strongest one.

The messages are the same as under FedAvg. Prototypes stay on the client. Page: docs/algorithms/fedpmr.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.option_checks import NOT_NEGATIVE, READING, NotSearched, SearchRange
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.objective import Classification, Objective
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import legs
from polyfed.training.prototypes import Prototypes


@dataclass(frozen=True, kw_only=True)
class FedPmr(Averaging):
    """FedAvg with modal rebalance. A client with one modality trains as under FedAvg.

    Attributes:
        alpha: weight of the prototypical cross-entropy.
        coef: how the weight depends on the imbalance ratio: `clip` is alpha * clip(ratio - 1, 0, 1), as in the paper,
            `hard` is alpha if the ratio is above 1, else 0, as in the comparison of the CMSFed paper.
        active_rounds: number of rounds, from the first, with modal rebalance, as in the CMSFed paper.
        per: whether to add prototypical entropy regularisation (PER) to the strongest modality.
        mu: weight of PER.
        per_epochs: number of local epochs, from the first of the run, with PER (E_r in the paper).
        feature_norm: length to which features are scaled before distances to prototypes are computed; 0 does not scale
            them, as in the paper, and then training can lower the term simply by longer features.
    """

    mixing: ClassVar[str] = (
        "fedpmr weights the loss of each modality by the distances of all others to their prototypes"
    )
    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    objectives_because: ClassVar[str] = "its prototypes are the mean features of classes"

    alpha: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 0.5, 1.0, 2.0, 5.0, fedavg=0.0)] = 1.0
    coef: Annotated[Literal["clip", "hard"], READING] = "clip"
    active_rounds: Annotated[int, NOT_NEGATIVE, NotSearched("the rounds of the paper")] = 71
    per: Annotated[bool, NotSearched("an optional part; with it, mu is searched")] = False
    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.001, 0.01, 0.1, beside=("per", True))] = 0.01
    per_epochs: Annotated[int, NOT_NEGATIVE, NotSearched("the epochs of the paper")] = 10
    feature_norm: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 3.0, 6.0, 12.0)] = 0.0

    needs_embeddings: ClassVar[bool] = True

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        result = super().idle_options(fed) | {"limits.min_rows_per_class": ""}  # prototypes leave out rare classes
        return result if self.per else result | dict.fromkeys(("mu", "per_epochs"), "per = false")

    @task()
    @override
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Update, Tree]:  # type: ignore[override]
        balanced = len(context.modalities) > 1 and data.round <= self.active_rounds
        sizes = {m: context.model.feature_size(m) for m in context.modalities}
        fit: TrainingResult | None = None
        for epoch, train in enumerate(legs(self.train) if balanced else [self.train]):
            start = fit.params if fit else got.params
            near: dict[str, Prototypes] = {}
            if balanced:
                near, _ = prototypes.class_means(
                    data, partial(self._vectors, context, start), sizes, context.num_classes
                )
            regularised = self.per and (data.round - 1) * self.train.epochs + epoch < self.per_epochs
            fit = data.minimise(self._objective(context, near, regularised), start, train=train, after=fit)
        assert fit is not None
        return Update(fit.params, fit.loss, data.num_rows), local

    def _vectors(self, context: ClientContext, w: Tree, batch: Batch) -> dict[str, Tensor]:
        """Return the features (B, D) of a batch by modality, scaled for the distances to prototypes."""
        return prototypes.at_length(context.model.vectors(w, batch), self.feature_norm)

    def _objective(
        self, context: ClientContext, near: Mapping[str, Prototypes], regularised: bool
    ) -> Callable[[Tree, Batch], Tensor]:
        def objective(w: Tree, batch: Batch) -> Tensor:
            features = context.model.features(w, batch)
            loss = context.loss(w, batch, features)
            if not near:
                return loss
            flat = {m: context.model.vector(value) for m, value in features.items()}
            z = prototypes.at_length(flat, self.feature_norm)
            scores = prototypes.confidence(near, {m: value.detach() for m, value in z.items()}, batch)
            weights = modality_weights(scores, self.alpha, self.coef)
            for m, weight in weights.items():
                loss = loss + weight * prototypes.cross_entropy(near[m], z[m], batch, m)
                if regularised:
                    strongest = 1.0 * (scores[m] >= torch.stack(list(scores.values())).amax())
                    gap = torch.stack(list(weights.values())).sum() / self.alpha if self.alpha else 0.0
                    loss = loss - self.mu * strongest * gap * prototypes.entropy(near[m], z[m], batch, m)
            return loss

        return objective


def modality_weights(scores: Mapping[str, Tensor], alpha: float, mode: str) -> dict[str, Tensor]:
    """Return the weight of each modality's PCE, which grows with the lead of the strongest modality.

    The weight of the strongest modality is 0.

    Args:
        scores: modality -> confidence of its prototype predictions, a sum over the batch.
        alpha: see `FedPmr`.
        mode: `clip` or `hard`, see `FedPmr.coef`.
    """
    strongest = torch.stack(list(scores.values())).amax()
    return {
        m: prototypes.modulation(prototypes.imbalance_ratio(strongest, value), alpha, mode)
        for m, value in scores.items()
    }
