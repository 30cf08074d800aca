"""MOON: federated averaging with a model-contrastive term in the local loss.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3. The local loss has a contrastive term. This term
pulls the representation of a sample towards its representation under the received model, and away from its
representation under the client's previous model. The previous model is the client's model at the end of its last
participation.

polyfed's choices: the representation is the concatenation of the modalities' features, mapped by the paper's two-layer
projection head. The clients and the server exchange the head together with the model. If `per_modality` is set, there
is one term for each modality, and the terms are summed. When a client takes part for the first time, it has no previous
model. The loss then has no contrastive term.

The messages are the same as under FedAvg. The previous model stays on the client. Page: docs/algorithms/moon.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import UPDATES, Broadcast
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.option_checks import NOT_NEGATIVE, OF_MODEL, POSITIVE, NotSearched, SearchRange
from polyfed.core.tree import Tree, like, nested, under
from polyfed.federation.context import ClientContext
from polyfed.federation.federation import Federation
from polyfed.model import Model
from polyfed.model.fusion import masked
from polyfed.training import ClientData, TrainingResult
from polyfed.training.client_data import Passes

PREVIOUS = "previous"
"""Prefix of the previous model in a client's local state."""

SEEN = "seen"
"""Name of the flag in a client's local state that is 1 after the client has taken part once."""


@dataclass(frozen=True, kw_only=True)
class Moon(Averaging):
    """FedAvg with a model-contrastive term in the local loss.

    Attributes:
        mu: weight of the contrastive term.
        temperature: temperature tau of the cosine similarities.
        projection: width of the projection head, as in the paper; 0 for none.
        per_modality: whether to contrast the features of each modality instead of their concatenation; only without a
            projection head.
    """

    mu: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.1, 1.0, 5.0, 10.0, fedavg=0.0)] = 1.0
    temperature: Annotated[float, POSITIVE, SearchRange(0.1, 0.5, 1.0)] = 0.5
    projection: Annotated[int, NOT_NEGATIVE, OF_MODEL] = 256
    per_modality: Annotated[bool, NotSearched("needs projection = 0")] = False

    needs_embeddings: ClassVar[bool] = True
    protects: ClassVar[Mapping[str, tuple[str, ...]]] = UPDATES

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            RecipeError: private blocks and a projection head are both set.
        """
        super().__post_init__()
        if self.private and self.projection and not self.per_modality:
            raise RecipeError(
                "[algorithm] private: moon's projection head is averaged, and a private block would hold a part of it. "
                "Set projection = 0 or per_modality = true",
                ("algorithm", "private"),
            )

    @property
    @override
    def passes(self) -> Passes:  # the received and the previous model
        return Passes(encoders=2)

    @property
    @override
    def mixing(self) -> str:  # type: ignore[override]
        why = "moon contrasts the features of all modalities together; [algorithm] per_modality = true avoids this"
        return "" if self.per_modality else why

    @override
    def received_template(self, task: str, model: Model) -> Tree:
        if not self.projection or self.per_modality:
            return model.template
        return model.template | projection_template(model, self.projection)

    @override
    def init(self, fed: Federation, params: Tree) -> Any:
        return super().init(fed, params | self._head(fed.context, fed.seed))

    @override
    def local(self, context: ClientContext, key: int) -> Tree:
        params = context.initial | self._head(context, 0)
        return nested(PREVIOUS, like(params)) | {SEEN: torch.zeros(())}

    @override
    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Tensor:
        features = context.model.features(w, batch)
        error = context.loss(w, batch, features)
        previous = under(PREVIOUS, local)
        with torch.no_grad():
            plain = batch.evaluation()  # no dropout, no update of batch statistics
            received = self._represent(context, got.params, context.model.features(got.params, plain), batch)
            last = self._represent(context, previous, context.model.features(previous, plain), batch)
        own = self._represent(context, w, features, batch)
        terms = [contrast(z, g, p, self.temperature) for z, g, p in zip(own, received, last, strict=True)]
        return error + self.mu * local[SEEN] * batch.mean(torch.stack(terms).sum(0))

    @override
    def reply(
        self, context: ClientContext, data: ClientData, fit: TrainingResult, got: Broadcast, local: Tree
    ) -> tuple[Message, Tree]:
        kept = nested(PREVIOUS, fit.params) | {SEEN: torch.ones_like(local[SEEN])}
        return Update(fit.params, fit.loss, data.num_rows), kept

    def _represent(self, context: ClientContext, w: Tree, features: Mapping[str, Tensor], batch: Batch) -> list[Tensor]:
        """Return the representation (B, P), or one for each modality. It is zero for rows that lack the modality."""
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
        """Return the projection head. Its first layer is split by modality, so a client needs only its own parts."""
        if not self.projection or self.per_modality:
            return {}
        return projection_head(context, self.projection, seed)


def contrast(z_BP: Tensor, received_BP: Tensor, previous_BP: Tensor, temperature: float) -> Tensor:
    """Return the contrastive term of Eq. 3 for each row, (B,).

    The term is -log(e^(cos(z, received) / t) / (e^(cos(z, received) / t) + e^(cos(z, previous) / t))), where t is the
    temperature.
    """
    near = F.cosine_similarity(z_BP, received_BP, dim=-1)
    far = F.cosine_similarity(z_BP, previous_BP, dim=-1)
    term: Tensor = F.softplus((far - near) / temperature)
    return term


def projection_head(context: ClientContext, width: int, seed: int) -> Tree:
    """Return initial parameters of the projection head: two linear layers, initialised as in PyTorch.

    Args:
        context: the context of the client or of the server.
        width: output size of both layers.
        seed: the run's seed.
    """
    sizes = {m: context.model.feature_size(m) for m in context.modalities}
    total = sum(context.model.feature_size(m) for m in context.model.modalities)

    def draw(name: str, inputs: int, *shape: int) -> Tensor:
        return (2 * keys.uniform(keys.key(seed, "init", name), shape) - 1) / math.sqrt(inputs)

    tree = {f"{m}.projection.weight": draw(f"{m}.projection", total, width, size) for m, size in sizes.items()}
    tree["shared.projection.0.bias"] = draw("projection.0.bias", total, width)
    tree["shared.projection.1.weight"] = draw("projection.1.weight", width, width, width)
    tree["shared.projection.1.bias"] = draw("projection.1.bias", width, width)
    return tree


def projection_template(model: Model, width: int) -> Tree:
    """Return the names, shapes and types of `projection_head`, without values."""
    size: dict[str, tuple[int, ...]] = {
        f"{m}.projection.weight": (width, model.feature_size(m)) for m in model.modalities
    }
    size |= {"shared.projection.0.bias": (width,), "shared.projection.1.weight": (width, width)}
    size |= {"shared.projection.1.bias": (width,)}
    return {name: torch.empty(shape, device="meta") for name, shape in size.items()}
