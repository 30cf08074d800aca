"""MOON: model-contrastive federated learning.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3: a client's representation is pulled towards the
received model's and away from its own at the end of its last participation.

Ours: the representation is the concatenation of the modalities' features (or each modality by itself, summed, with
`per_modality`), through the paper's two-layer projection head; the head travels with the shared block. On a client's
first participation both references are the same model, so the term is the constant ln 2: it is left out
(algorithms.md 5.19).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import Message
from polyfed.core.schema import NOT_NEGATIVE, POSITIVE
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model.fusion import masked
from polyfed.training import ClientData, TrainingResult
from polyfed.training.losses import cross_entropy

PREVIOUS = "previous."
"""Where a client keeps its last model among its local state."""

SEEN = "seen"
"""1 once the client has taken part."""


@dataclass(frozen=True, kw_only=True)
class Moon(Averaging):
    """See the module.

    Attributes:
        mu: weight of the contrastive term; the paper searches {0.1, 1, 5, 10}, 5 on CIFAR-10.
        temperature: of the cosine similarities; 0.5 in the paper.
        projection: width of the projection head; 256 in the paper, 0 leaves the head out.
        per_modality: contrast each modality by itself instead of their concatenation.
    """

    mu: Annotated[float, NOT_NEGATIVE] = 1.0
    temperature: Annotated[float, POSITIVE] = 0.5
    projection: Annotated[int, NOT_NEGATIVE] = 256
    per_modality: bool = False

    def init(self, fed: Federation, params: Tree) -> Any:
        """Averaging's state; the projection head joins the shared block."""
        return super().init(fed, params | self._head(fed.context, fed.seed))

    def local(self, context: ClientContext, key: int) -> Tree:
        """No previous model yet."""
        widths = self._head(context, 0)
        return {PREVIOUS + n: torch.zeros_like(v) for n, v in (context.initial | widths).items()} | {
            SEEN: torch.zeros(())
        }

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Tensor:
        """Cross-entropy and the model-contrastive term."""
        features = context.model.features(w, batch)
        logits = context.model.fuse(w, features, batch)
        previous = {n.removeprefix(PREVIOUS): v for n, v in local.items() if n.startswith(PREVIOUS)}
        with torch.no_grad():
            calm = batch.evaluation()
            received = self._views(context, got.params, context.model.features(got.params, calm), batch)
            last = self._views(context, previous, context.model.features(previous, calm), batch)
        own = self._views(context, w, features, batch)
        terms = [contrast(z, g, p, self.temperature) for z, g, p in zip(own, received, last, strict=True)]
        return cross_entropy(logits, batch) + self.mu * local[SEEN] * batch.mean(torch.stack(terms).sum(0))

    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Broadcast, local: Tree
    ) -> tuple[Message, Tree]:
        """The update; the trained model stays as the next round's "previous"."""
        kept = {PREVIOUS + name: value for name, value in fit.params.items()} | {SEEN: torch.ones_like(local[SEEN])}
        return Update(fit.params, fit.loss, data.num_rows), kept

    def _views(self, context: ClientContext, w: Tree, features: Mapping[str, Tensor], batch: Batch) -> list[Tensor]:
        """What is contrasted: one representation (B, P), or one per modality; zero where a row lacks it."""
        flat = [context.model.vector(z) for z in masked(features, batch.present).values()]
        if self.per_modality:
            return flat
        joint = torch.cat(flat, 1)
        if not self.projection:
            return [joint]
        hidden = (
            sum(F.linear(z, w[f"{m}.projection.weight"]) for m, z in zip(features, flat, strict=True))
            + w["shared.projection.0.bias"]
        )
        return [F.linear(F.relu(hidden), w["shared.projection.1.weight"], w["shared.projection.1.bias"])]

    def _head(self, context: ClientContext, seed: int) -> Tree:
        """The projection head, its first layer split by modality so that every client can use its own part."""
        if not self.projection or self.per_modality:
            return {}
        return projection_head(context, self.projection, seed)


def contrast(z_BP: Tensor, received_BP: Tensor, previous_BP: Tensor, temperature: float) -> Tensor:
    """Eq. 3 row by row, (B,): -log(e^(cos(z, received)/t) / (e^(cos(z, received)/t) + e^(cos(z, previous)/t)))."""
    near = F.cosine_similarity(z_BP, received_BP, dim=-1)
    far = F.cosine_similarity(z_BP, previous_BP, dim=-1)
    term: Tensor = F.softplus((far - near) / temperature)
    return term


def projection_head(context: ClientContext, width: int, seed: int) -> Tree:
    """Two linear layers as PyTorch would initialise them: uniform in +-1/sqrt(inputs)."""
    sizes = {m: context.model.feature_size(m) for m in context.modalities}
    total = sum(context.model.feature_size(m) for m in context.model.modalities)

    def draw(name: str, inputs: int, *shape: int) -> Tensor:
        return (2 * keys.uniform(keys.key(seed, "init", name), shape) - 1) / math.sqrt(inputs)

    tree = {f"{m}.projection.weight": draw(f"{m}.projection", total, width, size) for m, size in sizes.items()}
    tree["shared.projection.0.bias"] = draw("projection.0.bias", total, width)
    tree["shared.projection.1.weight"] = draw("projection.1.weight", width, width, width)
    tree["shared.projection.1.bias"] = draw("projection.1.bias", width, width)
    return tree
