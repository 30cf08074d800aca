"""Helpers for methods that train a second model besides the recipe's: one encoder per modality and a linear head.

In FedGKT, the second model is the server's network. In PartialFL, the server has a second model, the tower, and every
client has a second model, its local model.
`embed` returns embeddings of the recipe's model that can be compared with the embeddings of the second model.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.tree import Tree
from polyfed.model import Model, ModelSpec, build_model
from polyfed.model.encoders.spec import Mlp

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Sample shapes by modality, as a hashable tuple so that `second_model` can cache its results."""


def embed(model: Model, w: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
    """The embedding (B, d) of a model and its logits (B, C).

    If the model has only one modality, the embedding is the feature of this modality. Otherwise, the embedding is the
    joint representation of all modalities.
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


def second_model(
    shapes: Shapes, hidden: tuple[int, ...], embedding: int, num_outputs: int, named: Mapping[str, Any] | None = None
) -> Model:
    """Build a model of one encoder per modality and a linear head.

    Equal arguments return the same object, because building a model takes time.

    Args:
        shapes: sample shapes by modality.
        hidden: hidden sizes of the MLP of each modality that `named` leaves out.
        embedding: output size of each encoder.
        num_outputs: width of the output.
        named: entries as in [model.encoders], by modality.
    """
    own = {name: entry for name, entry in (named or {}).items() if name in dict(shapes)}
    return cached_model(shapes, hidden, embedding, num_outputs, json.dumps(own, sort_keys=True))


@lru_cache(maxsize=64)
def cached_model(shapes: Shapes, hidden: tuple[int, ...], embedding: int, num_outputs: int, named: str) -> Model:
    """Build the model of `second_model`; `named` is JSON, because a key of the cache must be hashable."""
    encoders = {name: Mlp(hidden=hidden) for name, _ in shapes} | json.loads(named)
    return build_model(ModelSpec(embedding=embedding, encoders=encoders), dict(shapes), num_outputs)
