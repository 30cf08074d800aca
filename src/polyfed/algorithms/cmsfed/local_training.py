"""Local training in CMSFed: what a chosen client minimises, and the gradients it keeps on the way.

See `cmsfed.py` for the paper; section numbers are those of algorithms.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.context import ClientContext
from polyfed.training import ClientData, TrainingResult, prototypes
from polyfed.training.client_data import legs, summed
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes

if TYPE_CHECKING:
    from polyfed.algorithms.cmsfed.cmsfed import CmsFed

CE, PCE = "cross_entropy", "prototype_loss"
"""The two terms of the local loss (Eq. 9), as they are named in reports and where a run diverges."""


@dataclass(frozen=True)
class LocalTraining:
    """One client's training.

    Attributes:
        method: the hyper-parameters.
        context: the client's.
        modalities: what is trained.
        helped: modalities whose PCE is added.
        alone: PCE at full strength: there is no other modality in training to compare with (2.2).
    """

    method: "CmsFed"
    context: ClientContext
    modalities: tuple[str, ...]
    helped: tuple[str, ...]
    alone: bool

    @property
    def complete(self) -> bool:
        """Whether it has a gradient g: of a model with all modalities."""
        return self.modalities == self.context.model.modalities

    def encoder(self, params: Tree) -> list[str]:
        """Names behind h: the encoders of the helped modalities."""
        return [n for m in self.helped for n in encoder_names(self.context, params, m)]

    def own_prototypes(self, data: ClientData, w: Tree) -> tuple[dict[str, Prototypes], Tree]:
        """The client's own class means under a model, and its rows per class."""
        sizes = {m: self.context.model.feature_size(m) for m in self.context.modalities}
        return prototypes.class_means(data.fold, lambda b: self.vectors(w, b), sizes, self.context.num_classes)

    def vectors(self, w: Tree, batch: Batch) -> dict[str, Tensor]:
        """Features (B, D) by modality, as prototypes see them."""
        return self.measured(self.context.model.features(w, batch))

    def measured(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Features as vectors, at one length if the method says so."""
        flat = {m: self.context.model.vector(value) for m, value in features.items()}
        return prototypes.at_length(flat, self.method.feature_norm)

    def fit(
        self, data: ClientData, params: Tree, near: Mapping[str, Prototypes] | None, train: Train
    ) -> TrainingResult:
        """Local training near these prototypes; None: the client's own, renewed after every epoch."""
        fit: TrainingResult | None = None
        carry = self._accumulators(params)
        for leg in [train] if near is not None else legs(train):
            start = fit.params if fit else params
            use = near if near is not None else self.own_prototypes(data, start)[0]
            fit = data.minimise(
                self._loss(use),
                start,
                train=leg,
                direction=self._direction(params),
                carry=fit.carry if fit else carry,
                only=(*self.modalities, SHARED),
                split=self.method.sends_gradients,
                after=fit,
            )
        assert fit is not None
        return fit

    def _loss(self, near: Mapping[str, Prototypes]) -> Callable[[Tree, Batch], Any]:
        def loss(w: Tree, batch: Batch) -> tuple[Any, dict[str, Tensor]]:
            batch = replace(batch, x={m: batch.x[m] for m in self.modalities})
            features = self.context.model.features(w, batch)
            terms = {CE: cross_entropy(self.context.model.fuse(w, features, batch), batch)}
            z = self.measured(features)
            weights = self._weights(near, z, batch)
            if weights:
                pulls = [b * prototypes.cross_entropy(near[m], z[m], batch, m) for m, b in weights.items()]
                terms[PCE] = torch.stack(pulls).sum()
            seen = {name: value.detach() for name, value in terms.items()}
            return terms if self.method.sends_gradients else torch.stack(list(terms.values())).sum(), seen

        return loss

    def _weights(
        self, near: Mapping[str, Prototypes], z: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, float | Tensor]:
        """beta by modality: alpha_p where one modality trains alone, else by who is behind in this batch."""
        helped = [m for m in self.helped if m in near]
        if self.alone or not helped:
            return dict.fromkeys(helped, self.method.alpha_p)
        compared = {m: value.detach() for m, value in z.items() if m in near}
        if len(compared) < 2:
            return {}  # no prototypes yet of anything to be behind of
        sure = prototypes.confidence(near, compared, batch)
        weights: dict[str, float | Tensor] = {}
        for m in helped:
            others = torch.stack([value for name, value in sure.items() if name != m])
            beta = prototypes.modulation(
                prototypes.imbalance_ratio(others.amax(), sure[m]), self.method.alpha_p, self.method.beta_mode
            )
            # of several behind the strongest only the last is helped; with two modalities this changes nothing
            weights[m] = beta * (sure[m] <= others.amin()) if self.method.pce_target == "batch_weak" else beta
        return weights

    def _accumulators(self, params: Tree) -> Tree:
        zero = torch.zeros(())
        carry = {f"{part}.{term}": zero for part in ("sum", "last") for term in (CE, PCE)}
        if self.method.sends_gradients:
            g = self.context.model.trainable(params) if self.complete else {}
            carry |= {f"g.{n}": torch.zeros_like(v) for n, v in g.items()}
            carry |= {f"h.{n}": torch.zeros_like(params[n]) for n in self.encoder(params)}
        return carry

    def _direction(self, params: Tree) -> Callable[..., tuple[Tree, Tree]]:
        """The sum of both gradients; on the way, the sums behind g and h and the values of both terms."""
        h_names = self.encoder(params)

        def direction(grads: Any, w: Tree, seen: Any, carry: Tree) -> tuple[Tree, Tree]:
            after = dict(carry)
            fine = torch.stack([torch.isfinite(value) for value in seen.values()]).all()
            for term, value in seen.items():
                after[f"sum.{term}"] = carry[f"sum.{term}"] + value
                after[f"last.{term}"] = torch.where(fine, value, carry[f"last.{term}"])
            if not self.method.sends_gradients:
                return grads, after
            step = summed(grads)
            if self.complete:
                after |= {f"g.{n}": carry[f"g.{n}"] + g for n, g in grads[CE].items()}
            h = grads.get(PCE, {}) if self.complete else step
            after |= {f"h.{n}": carry[f"h.{n}"] + h[n] for n in h_names if n in h}
            return step, after

        return direction


def encoder_names(context: ClientContext, params: Tree, modality: str) -> list[str]:
    """theta^m: the trainable parameters of an encoder, without the modality's part of the classifier."""
    head = context.model.head_slice(modality)
    return [n for n in context.model.trainable(params) if block_of(n) == modality and n not in head]


def blamed(fit: TrainingResult) -> tuple[Tensor, Tensor]:
    """Mean CE and PCE of a training; where it left the finite numbers, NaN for the term that was larger before.

    The server's own check of replies then names the client and the term.
    """
    floats = [v for v in fit.params.values() if v.is_floating_point()]
    fine = torch.stack([torch.isfinite(fit.loss), *(torch.isfinite(v).all() for v in floats)]).all()
    larger = fit.carry[f"last.{CE}"] >= fit.carry[f"last.{PCE}"]
    steps = fit.num_steps.clamp(min=1)
    found = []
    for term, guilty in ((CE, larger), (PCE, ~larger)):
        last = torch.where(guilty, float("nan"), fit.carry[f"last.{term}"])
        found.append(torch.where(fine, fit.carry[f"sum.{term}"] / steps, last))
    return found[0], found[1]
