"""The gradients g and h with which CMSFed compares clients (Eq. 11).

A client sums its gradients while it trains (`GradientSums`). The server checks the gradients that arrive
(`whole_gradients`). Alternatively, the server computes g and h from the trained parameters, as the released code does
(`deltas`). Then the server updates the distances between the clients (`refreshed`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms.cmsfed.local_scope import TrainingScope, encoder_names
from polyfed.core import keys
from polyfed.core.request import Accept
from polyfed.core.tree import SHARED, Tree, block_of, like, nested, scaled, select, subtract, under, vector, zip_map
from polyfed.federation.federation import Federation
from polyfed.selection.submodular import AnySimilarity, BlockSimilarity, Similarity
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Direction, Loss, legs, summed
from polyfed.training.optimisers import Train
from polyfed.training.prototypes import Prototypes

CE, PCE = "cross_entropy", "prototype_loss"
"""Names of the two terms of the local loss (Eq. 9). Reports and the error message of a diverged run use them."""

SUM, LAST = "sum", "last"
"""Names under which the running sums keep the sum and the last finite value of each term."""


@dataclass(frozen=True)
class GradientSums:
    """The running sums of one local training: values of both loss terms and, if `exact`, the gradients g and h.

    Attributes:
        scope: the part of the model that the client trains.
        exact: whether the loss is split into its terms, so that g and h can be summed.
    """

    scope: TrainingScope
    exact: bool

    def start(self, params: Tree) -> Tree:
        """Return all sums at zero."""
        zeros = {CE: torch.zeros(()), PCE: torch.zeros(())}
        sums = nested(SUM, zeros) | nested(LAST, zeros)
        if self.exact:
            g = self.scope.context.model.trainable(params) if self.scope.whole else {}
            h = {name: params[name] for name in self.scope.helped_encoders(params)}
            sums |= nested("g", like(g)) | nested("h", like(h))
        return sums

    def direction(self, params: Tree) -> Direction:
        """Return the hook that `minimise` calls in each training step with the gradients of both loss terms.

        If `exact` is set, the hook adds these gradients to the running sums of g and h. The hook returns the gradient
        of the whole loss, so it does not change the training.
        """
        helped = self.scope.helped_encoders(params)

        def direction(grads: Any, w: Tree, seen: Any, carry: Tree) -> tuple[Tree, Tree]:
            finite = torch.stack([torch.isfinite(value) for value in seen.values()]).all()
            sums, last = under(SUM, carry), under(LAST, carry)
            after = dict(carry) | nested(SUM, zip_map(torch.add, seen, sums))
            after |= nested(LAST, {term: torch.where(finite, value, last[term]) for term, value in seen.items()})
            if not self.exact:
                return grads, after
            step = summed(grads)
            if self.scope.whole:
                after |= nested("g", zip_map(torch.add, grads[CE], under("g", carry)))
            h = grads.get(PCE, {}) if self.scope.complete else step
            after |= nested("h", zip_map(torch.add, {n: h[n] for n in helped if n in h}, under("h", carry)))
            return step, after

        return direction

    def minimise(
        self,
        loss: Callable[[Mapping[str, Prototypes]], Loss],
        data: ClientData,
        params: Tree,
        near: Mapping[str, Prototypes] | None,
        train: Train,
    ) -> TrainingResult:
        """Train, and sum the gradients and loss terms.

        Args:
            loss: a function that makes the local loss from prototypes.
            params: the model to start from.
            near: the prototypes. If None, the loss uses the client's own prototypes, which are computed again before
                every epoch.
            train: options of local training.
        """
        fit: TrainingResult | None = None
        for leg in [train] if near is not None else legs(train):
            start = fit.params if fit else params
            fit = data.minimise(
                loss(near if near is not None else self.scope.own_prototypes(data, start)[0]),
                start,
                train=leg,
                direction=self.direction(params),
                carry=fit.carry if fit else self.start(params),
                only=(*self.scope.modalities, SHARED),
                split=self.exact,
                after=fit,
            )
        assert fit is not None, "a training has at least one epoch"
        return fit


def mean_gradients(fit: TrainingResult) -> tuple[Tree, Tree]:
    """Return the g and h of a client: its summed gradients, divided by the number of local training steps."""
    steps = fit.num_steps.clamp(min=1)
    g, h = ({name: v / steps for name, v in under(part, fit.carry).items()} for part in ("g", "h"))
    return g, h


def mean_terms(fit: TrainingResult) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and the mean PCE of local training, 0-dim.

    If training diverged, the function returns NaN for the term that had the larger value in the last finite step. In
    reply validation, the server then names the client and this term.
    """
    floats = [v for v in fit.params.values() if v.is_floating_point()]
    finite = torch.stack([torch.isfinite(fit.loss), *(torch.isfinite(v).all() for v in floats)]).all()
    sums, last = under(SUM, fit.carry), under(LAST, fit.carry)
    ce_larger = last[CE] >= last[PCE]
    steps = fit.num_steps.clamp(min=1)
    ce, pce = (
        torch.where(finite, sums[term] / steps, torch.where(larger, float("nan"), last[term]))
        for term, larger in ((CE, ce_larger), (PCE, ~ce_larger))
    )
    return ce, pce


def whole_gradients(params: Tree, fed: Federation) -> Accept:
    """Return a function that checks whether the gradients in a client's report are complete.

    The report holds the gradients g and h, and each of them may be empty. If g is not empty, it must cover all
    trainable parameters of the client. If h holds parameters of an encoder, h must cover all parameters of this
    encoder.
    """
    blocks = {name: block_of(name) for name in fed.context.model.trainable(params)}
    encoders = {m: [*encoder_names(fed.context, params, m)] for m in fed.clients.modalities}

    def flaw(client: int, report: Any) -> str:
        own = {*fed.clients.owned(client), SHARED}
        if report.gradient and report.gradient.keys() != {name for name, block in blocks.items() if block in own}:
            return "sent a part of the gradient g"
        for m, names in encoders.items():
            if (part := select(report.encoder_gradient, [m])) and [*part] != names:
                return f"sent a part of the gradient h of {m}"
        return ""

    return flaw


def deltas(
    sent: Tree, trained: Tree, owned: Sequence[str], fed: Federation, divisor: float, *, first: bool
) -> tuple[Tree, Tree]:
    """Return g and h of a client as in the released code: both come from the change of the encoders in training.

    The function divides the change of the trained encoders by `divisor`. It returns the quotient as g, as h or as both:

    - As g, if the client trained the encoders of all modalities (a client of S_M).
    - As h, if the client trained only a part of the encoders that it owns.
    - As both, if the client trained all encoders that it owns, but does not own all modalities.

    The other vector is empty.

    Args:
        sent: the model before training.
        trained: the blocks that the client trained.
        owned: modalities of the client.
        divisor: the number by which theta_out - theta_in is divided: -1, or the negative product of learning rate and
            number of steps. If this number is 0, the function does not divide, and g and h are zero.
        first: whether this is the first pass. In the first pass, a client of S_M also gets both g and h, because no
            earlier vectors of the encoders exist.
    """
    names = [n for m in fed.clients.modalities for n in encoder_names(fed.context, sent, m)]
    moved = subtract({n: trained[n] for n in names if n in trained}, sent)
    moved = scaled(moved, 1.0 / divisor if divisor else 0.0)
    if len(moved) == len(names):
        return moved, moved if first else {}
    return moved if {block_of(name) for name in moved} == {*owned} else {}, moved


def refreshed(
    d1: AnySimilarity | None,
    d2: Mapping[str, Similarity],
    gradients: Mapping[int, tuple[Tree, Tree]],
    sent: Tree,
    fed: Federation,
    *,
    exact: bool,
    sketch: int,
) -> tuple[AnySimilarity, dict[str, Similarity]]:
    """Return D_1, and D_2 by modality, after recomputing the distances of the clients in `gradients`.

    Clients are compared by two gradients: g covers all modalities of a client, and h covers one encoder. D_1 holds the
    distance between the vectors g of every two clients. D_2 holds, for each modality, the distance between the vectors
    h of every two clients. If every client owns every modality, D_1 is computed from whole vectors g. Otherwise the
    vectors and distances of D_1 are stored separately for each block (decision 17).

    Args:
        d1: the last vector g of each client, and the distances between these vectors; None before the first pass.
        d2: by modality, the last vector h of each client, and the distances between these vectors. A modality may be
            missing.
        gradients: g and h by client, each empty if the client has none.
        sent: the model that the clients received, before they trained it.
        exact: whether g covers all parameters. Deltas cover only encoders.
        sketch: number of entries to which vectors are projected. 0 keeps the exact vectors.
    """
    num, key = len(fed.clients), keys.key(fed.seed, "sketch")
    names = {m: encoder_names(fed.context, sent, m) for m in fed.clients.modalities}
    sizes = {m: sum(sent[n].numel() for n in own) for m, own in names.items()}
    blocks = {m: [*own] for m, own in names.items()}
    if exact:
        trainable = fed.context.model.trainable(sent)
        blocks = {b: [n for n in trainable if block_of(n) == b] for b in (*names, SHARED)}
    parts = {block: sum(sent[n].numel() for n in own) for block, own in blocks.items()}
    complete = bool(fed.clients.holds[fed.clients.eligible].all())
    second = {m: d2.get(m) or Similarity.empty(num, own, sketch, key) for m, own in sizes.items()}
    h = {m: {c: vector(own) for c, (_, parts) in gradients.items() if (own := select(parts, [m]))} for m in second}
    after = {m: similarity.refreshed(h[m]) for m, similarity in second.items()}
    g = {client: own for client, (own, _) in gradients.items() if own}
    if complete:
        first = d1 or Similarity.empty(num, sum(parts.values()), sketch, key)
        assert isinstance(first, Similarity)
        return first.refreshed({client: vector(own) for client, own in g.items()}), after
    by_block = d1 or BlockSimilarity.empty(num, parts, sketch, key)
    assert isinstance(by_block, BlockSimilarity)
    pieces = {c: {b: vector(piece) for b in parts if (piece := select(own, [b]))} for c, own in g.items()}
    return by_block.refreshed(pieces), after
