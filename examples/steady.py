"""A message and local state of your own: FedAvg that gives more weight to clients whose updates keep their direction.

A client keeps the update of its last round as local state, which never leaves it, and reports for each block of the
model how well the new update agrees with the last one: (1 + cosine) / 2. The server averages each block with the
weights rows x agreement. It is an example, not a published method; docs/own-method.md explains it line by line.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import polyfed
from polyfed.algorithms.averaging import Averaging
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree, blocks, like, select, subtract, vector
from polyfed.data import ClientsSpec
from polyfed.data.sources import CgDigits
from polyfed.model import ModelSpec
from polyfed.training.optimisers import Train


@message
class SteadyUpdate(Message):
    """The fields that `Averaging` needs (parameters, loss, rows), and a number for each block, by its name."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    agreement: Tree = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Steady(Averaging):
    """FedAvg that weights each block of an update by its agreement with the client's last update.

    Attributes:
        floor: Minimum weight of a block; 1 is FedAvg.
    """

    floor: float = 0.05

    replies: ClassVar[type[Message]] = SteadyUpdate

    def local(self, context: Any, key: int) -> Tree:
        """The local state before a client's first round: an update of zeros."""
        return like(context.model.trainable(context.initial))

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[SteadyUpdate, Tree]:
        """The reply, and the update, which stays on the client as local state."""
        step = subtract(context.model.trainable(fit.params), got.params)
        agreement = {block: agreed(select(step, [block]), select(local, [block])) for block in blocks(step)}
        return SteadyUpdate(fit.params, fit.loss, data.num_rows, agreement), step

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        """Average each block over the clients that sent it, with the weights rows x agreement."""
        rows = self.weights(replies, fed)
        mean: Tree = {}
        for block in blocks(state.params):
            sent = {client: reply.agreement for client, reply in replies.items()}
            trust = {c: rows[c] * max(float(sent[c].get(block, 0.0)), self.floor) for c in replies}
            mean |= select(replies.mean("params", trust), [block])
        trainable = fed.context.model.trainable(state.params)
        params, moments = self.server.apply(state.params, mean, state.moments, trainable)
        return state.with_(params=params, moments=moments)


def agreed(step: Tree, last: Tree) -> Tensor:
    """(1 + cosine) / 2 of two updates, a 0-dimensional tensor; 1 if the last update is zero."""
    new, old = vector(step), vector(last)
    cosine = (new * old).sum() / (new.norm() * old.norm()).clamp(min=1e-12)
    return torch.where(old.norm() > 0, (1 + cosine) / 2, 1.0)


def main(rounds: int = 10) -> dict[str, Any]:
    mlp = {"kind": "mlp", "hidden": [64]}
    recipe = polyfed.Recipe(
        data=CgDigits(),
        clients=ClientsSpec(partition="dirichlet", num=10, alpha=0.5, missing={"color": 0.3}),
        model=ModelSpec(embedding=32, encoders={"gray": mlp, "color": mlp}),
        algorithm=Steady(train=Train(lr=0.1, batch_size=16)),
        rounds=rounds,
    )
    for row in polyfed.check(recipe).planned:
        print(f"{row.message}.{row.field}: {row.kind} of {row.block} to the {row.destination}, {row.bytes} bytes")
    run = polyfed.run(recipe)
    print(run.history[["round", "train_loss", "metrics.global.accuracy"]].to_string(index=False))
    return run.result


if __name__ == "__main__":
    main()
