"""A method of your own: FedAvg whose clients clip the length of their update, run on scikit-learn's digits.

An algorithm is a frozen dataclass; this one overrides one hook of `Averaging`. It needs no registration, because parts
of a recipe can be objects of your own. The same class runs on every engine.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

import polyfed
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.core.tree import Tree, add, scaled, squared_distance, subtract
from polyfed.data.sources import CgDigits
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train


@dataclass(frozen=True, kw_only=True)
class ClippedFedAvg(Averaging):
    """FedAvg in which each update is scaled down to length `reach`, as by McMahan et al., ICLR 2018, before noise.

    Attributes:
        reach: Maximum length of an update, in the 2-norm over all trainable parameters.
    """

    reach: float = 1.0

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> tuple[Update, Tree]:
        """The reply after local training, and the local state, which stays on the client."""
        start = context.model.trainable(got.params)
        length = squared_distance(start, fit.params).sqrt()
        step = scaled(subtract(context.model.trainable(fit.params), start), torch.clamp(self.reach / length, max=1.0))
        return Update(fit.params | add(start, step), fit.loss, data.num_rows), local


def main(rounds: int = 10) -> dict[str, Any]:
    mlp = {"kind": "mlp", "hidden": [64]}
    recipe = polyfed.Recipe(
        data=CgDigits(),
        model=ModelSpec(embedding=32, encoders={"gray": mlp, "color": mlp}),
        algorithm=ClippedFedAvg(reach=2.0, train=Train(lr=0.1, batch_size=16), selector=Uniform(participation=0.5)),
        rounds=rounds,
    )
    run = polyfed.run(recipe)
    same = polyfed.run(replace(recipe, engine=replace(recipe.engine, name="sequential")))
    print(run.history[["round", "train_loss", "metrics.global.accuracy"]].to_string(index=False))
    print(
        "largest difference between the engines:",
        max(float((run.params[name] - same.params[name]).abs().max()) for name in run.params),
    )
    return run.result


if __name__ == "__main__":
    main()
