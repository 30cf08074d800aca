"""The part of the model that one client trains in a round of CMSFed, and the features that prototypes use.

Shape letters: `B` rows of a batch, `C` classes, `D` entries of a feature.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree, block_of
from polyfed.federation.context import ClientContext
from polyfed.training import ClientData, prototypes
from polyfed.training.prototypes import Prototypes


@dataclass(frozen=True)
class TrainingScope:
    """The part of the model that one client trains, and how PCE enters its loss.

    Attributes:
        context: the client context.
        modalities: modalities that the client trains.
        helped: modalities whose prototypical cross-entropy (PCE) is added to the loss.
        full_strength: if true, PCE has its full weight in every batch. If false, the weight comes from a comparison of
            the modalities in each batch. If the client trains only one modality, there is no other modality to compare
            it with, and PCE is not added.
        feature_norm: length to which features are scaled before distances to prototypes are computed; 0 does not scale
            them, as in the paper, and then training can lower the prototypical cross-entropy simply by longer features.
    """

    context: ClientContext
    modalities: tuple[str, ...]
    helped: tuple[str, ...]
    full_strength: bool
    feature_norm: float

    @property
    def complete(self) -> bool:
        """Whether the client trains all modalities of the model."""
        return self.modalities == self.context.model.modalities

    @property
    def whole(self) -> bool:
        """Whether the client trains all modalities that it owns. Only then does it have a gradient g (Eq. 11)."""
        return self.modalities == self.context.modalities

    def helped_encoders(self, params: Tree) -> list[str]:
        """Return the names of the parameters that h covers: the encoders of the helped modalities."""
        return [name for m in self.helped for name in encoder_names(self.context, params, m)]

    def own_prototypes(self, data: ClientData, w: Tree) -> tuple[dict[str, Prototypes], Tree]:
        """Compute the client's class means under the model w, by modality, and its number of rows per class (C,)."""
        sizes = {m: self.context.model.feature_size(m) for m in self.context.modalities}
        return prototypes.class_means(data, lambda b: self.features(w, b), sizes, self.context.num_classes)

    def features(self, w: Tree, batch: Batch) -> dict[str, Tensor]:
        """Return the features (B, D) of a batch by modality, scaled for the distances to prototypes."""
        return self.as_vectors(self.context.model.features(w, batch))

    def as_vectors(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoders' outputs as vectors (B, D), scaled to one length if `feature_norm` is not 0."""
        flat = {m: self.context.model.vector(value) for m, value in features.items()}
        return prototypes.at_length(flat, self.feature_norm)


def encoder_names(context: ClientContext, params: Tree, modality: str) -> list[str]:
    """Names of theta^m: the trainable parameters of an encoder, without the modality's part of the classifier."""
    head = context.model.head_slice(modality)
    return [n for n in context.model.trainable(params) if block_of(n) == modality and n not in head]
