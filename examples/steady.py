"""Your own message and local state: FedAvg that trusts, modality by modality, clients whose steps do not turn back.

A client keeps the step of its last round (it never leaves) and reports, for each block of the model, how well the new
step agrees with it: (1 + cosine) / 2. The server averages each block with weights rows x agreement. It is an example,
not a published method. docs/own-method.md goes through it line by line.
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
    """What the template needs (parameters, loss, rows), and a number for each block, under the block's name."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    agreement: Tree = carries("statistic")


@dataclass(frozen=True, kw_only=True)
class Steady(Averaging):
    """See the module.

    Attributes:
        floor: least agreement that counts; 1 is FedAvg.
    """

    floor: float = 0.05

    replies: ClassVar[type[Message]] = SteadyUpdate

    def local(self, context: Any, key: int) -> Tree:
        """Before the first round: no step yet."""
        return like(context.model.trainable(context.initial))

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[SteadyUpdate, Tree]:
        """What goes to the server, and the step, which stays."""
        step = subtract(context.model.trainable(fit.params), got.params)
        agreement = {block: agreed(select(step, [block]), select(local, [block])) for block in blocks(step)}
        return SteadyUpdate(fit.params, fit.loss, data.num_rows, agreement), step

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        """Each block averaged over the clients that sent it, by rows x agreement."""
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
    """(1 + cosine) / 2 of two steps, a 0-dim tensor; 1 where there was no last one."""
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
