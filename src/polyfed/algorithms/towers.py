"""Models beside the recipe's: towers that methods keep on devices or on the server, and embeddings to match."""

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.encoder import Mlp

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Sample shapes by modality, in a form that can be looked up."""


def embed(model: Model, w: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
    """The embedding (B, d) of the global model, one modality's feature or the joint representation, and logits."""
    features = model.features(w, batch)
    if len(model.modalities) == 1:
        return model.vector(features[model.modalities[0]]), model.fuse(w, features, batch)
    joint = model.joint(w, features, batch)
    return joint, model.classify(w, joint, batch)


def embedding_size(model: Model) -> int:
    """d, the width that all three models' embeddings share."""
    return model.feature_size(model.modalities[0]) if len(model.modalities) == 1 else model.joint_size


def shapes_of(model: Model, modalities: Iterable[str]) -> Shapes:
    """Sample shapes of these modalities, whether or not the model reads them."""
    return tuple((m, model.shapes[m]) for m in modalities)


@lru_cache(maxsize=64)
def mlps(shapes: Shapes, hidden: tuple[int, ...], embedding: int, num_classes: int) -> Model:
    """One MLP per modality and a linear head; the same object for the same arguments, as building one takes time."""
    encoders = {name: Mlp(hidden=hidden) for name, _ in shapes}
    return build_model(ModelSpec(embedding=embedding, encoders=encoders), dict(shapes), num_classes)
