"""Helpers for methods that train a second model besides the recipe's model: one MLP per modality and a linear head.

FedGKT uses such a model as the server's network. PartialFL uses it for the tower and for the clients' local models.
`embed` returns embeddings of the recipe's model that can be compared with the embeddings of the second model.
"""

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.encoder_spec import Mlp

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Sample shapes by modality, as a hashable tuple so that `mlps` can cache its results."""


def embed(model: Model, w: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
    """The embedding (B, d) of a model and its logits (B, C).

    The embedding is the joint representation, or the feature of the only modality.
    """
    features = model.features(w, batch)
    if len(model.modalities) == 1:
        return model.vector(features[model.modalities[0]]), model.fuse(w, features, batch)
    joint = model.joint(w, features, batch)
    return joint, model.classify(w, joint, batch)


def embedding_size(model: Model) -> int:
    """d, the width of the embedding that `embed` returns."""
    return model.feature_size(model.modalities[0]) if len(model.modalities) == 1 else model.joint_size


def shapes_of(model: Model, modalities: Iterable[str]) -> Shapes:
    """Return the sample shapes of the given modalities. The model need not read them."""
    return tuple((m, model.shapes[m]) for m in modalities)


@lru_cache(maxsize=64)
def mlps(shapes: Shapes, hidden: tuple[int, ...], embedding: int, num_outputs: int) -> Model:
    """Build a model of one MLP per modality and a linear head.

    Equal arguments return the same object, because building a model takes time.

    Args:
        shapes: sample shapes by modality.
        hidden: hidden sizes of each MLP.
        embedding: output size of each MLP.
        num_outputs: width of the output.
    """
    encoders = {name: Mlp(hidden=hidden) for name, _ in shapes}
    return build_model(ModelSpec(embedding=embedding, encoders=encoders), dict(shapes), num_outputs)
