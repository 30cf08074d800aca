"""FedPMR: prototypical modal rebalance on every client, FedAvg between them.

Fan, Xu, Wang, Wang, Guo, "PMR: Prototypical Modal Rebalance for Multimodal Learning", CVPR 2023 (algorithms.md 5.5).
A client compares its modalities by how sure their distances to its own class prototypes are; the modality that is
behind gets the prototypical cross-entropy as a second loss, weighted by how far it is behind. Prototypes are taken from
all of the client's rows, under the received model and again after every epoch.

With more than two modalities each is compared with the strongest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core.batch import Batch
from polyfed.core.schema import NOT_NEGATIVE
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import legs
from polyfed.training.losses import cross_entropy
from polyfed.training.prototypes import Prototypes


@dataclass(frozen=True, kw_only=True)
class FedPmr(Averaging):
    """See the module. A client with one modality trains as under FedAvg: its ratio is undefined.

    Attributes:
        alpha: strength of the term; 1 or 2 in the paper.
        coef: `clip`, alpha * clip(ratio - 1, 0, 1), the paper; `hard`, alpha or nothing, CMSFed's comparison.
        active_rounds: rounds with the term; 71 in CMSFed's comparison, which counts 0 to 70.
        per: add prototype entropy regularisation of the modality that is ahead.
        mu: its strength; 1e-2 or 1e-3 in the paper.
        per_epochs: it acts in so many first local epochs of the run (E_r of the paper).
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 1.0
    coef: Literal["clip", "hard"] = "clip"
    active_rounds: Annotated[int, NOT_NEGATIVE] = 71
    per: bool = False
    mu: Annotated[float, NOT_NEGATIVE] = 0.01
    per_epochs: Annotated[int, NOT_NEGATIVE] = 10

    @task()
    def update(self, context: ClientContext, data: ClientData, local: Tree, got: Broadcast) -> tuple[Update, Tree]:  # type: ignore[override]
        """Train epoch by epoch, each with prototypes of the model it starts from."""
        balanced = len(context.modalities) > 1 and data.round <= self.active_rounds
        sizes = {m: context.model.feature_size(m) for m in context.modalities}
        fit: TrainingResult | None = None
        for epoch, leg in enumerate(legs(self.train) if balanced else [self.train]):
            start = fit.params if fit else got.params
            near: dict[str, Prototypes] = {}
            if balanced:
                near, _ = prototypes.class_means(
                    data.fold, partial(context.model.vectors, start), sizes, context.num_classes
                )
            regularised = self.per and (data.round - 1) * self.train.epochs + epoch < self.per_epochs
            fit = data.minimise(self._objective(context, near, regularised), start, train=leg, after=fit)
        assert fit is not None
        return Update(fit.params, fit.loss, data.num_rows), local

    def _objective(
        self, context: ClientContext, near: Mapping[str, Prototypes], regularised: bool
    ) -> Callable[[Tree, Batch], Tensor]:
        def objective(w: Tree, batch: Batch) -> Tensor:
            features = context.model.features(w, batch)
            loss = cross_entropy(context.model.fuse(w, features, batch), batch)
            if not near:
                return loss
            z = {m: context.model.vector(value) for m, value in features.items()}
            sure = prototypes.confidence(near, {m: value.detach() for m, value in z.items()}, batch)
            weights = balance(sure, self.alpha, self.coef)
            for m, weight in weights.items():
                loss = loss + weight * prototypes.cross_entropy(near[m], z[m], batch, m)
                if regularised:
                    ahead = 1.0 * (sure[m] >= torch.stack(list(sure.values())).amax())
                    behind = torch.stack(list(weights.values())).sum() / self.alpha if self.alpha else 0.0
                    loss = loss - self.mu * ahead * behind * prototypes.entropy(near[m], z[m], batch, m)
            return loss

        return objective


def balance(sure: Mapping[str, Tensor], alpha: float, mode: str) -> dict[str, Tensor]:
    """Weight of each modality's PCE: by how far the strongest is ahead of it; none for the strongest itself."""
    strongest = torch.stack(list(sure.values())).amax()
    return {
        m: prototypes.modulation(prototypes.imbalance_ratio(strongest, value), alpha, mode) for m, value in sure.items()
    }
