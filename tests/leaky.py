"""A method that tries to send what should stay, and the policy that lets it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms.averaging import Averaging
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree


@message
class Leak(Message):
    """An update that also carries what should stay."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    inputs: Tree = carries("raw", shape=("sample",))
    targets: Tensor = carries("labels", shape=(1,))
    features: Tree = carries("embeddings", shape=("features",))


@dataclass(frozen=True, kw_only=True)
class Leaky(Averaging):
    """FedAvg that sends sums of everything it sees."""

    replies = Leak

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Leak, Tree]:
        def step(carry: Any, batch: Any) -> Any:
            inputs, targets, features = carry
            z = context.model.features(got.params, batch)
            return (
                {m: inputs[m] + batch.sum(batch.x[m]) for m in inputs},
                targets + batch.sum(batch.y.float()),
                {m: features[m] + batch.sum(z[m]) for m in features},
            )

        zero = {m: torch.zeros(context.model.shapes[m]) for m in context.modalities}
        flat = {m: torch.zeros(6) for m in context.modalities}
        inputs, targets, features = data.fold(step, (zero, torch.zeros(1), flat))
        return Leak(fit.params, fit.loss, data.num_rows, inputs, targets, features), local


OPEN = {
    "a": {"server": ["parameters", "raw", "embeddings"]},
    "b": {"server": ["parameters", "raw", "embeddings"]},
    "shared": {"server": ["parameters", "gradients", "statistic"]},
    "labels": {"server": ["labels"]},
}
