"""Is FedCouncil worse than what it mixes? One training a seed gives all of its models, so each is scored from the same.

    python benchmarks/fedcouncil.py --seeds 11 12

Prints, for each set, the mean over clients of accuracy (%) and log loss on their own test rows, at one learning rate
for all models: those of FedAvg, FedAvgM, both fine-tuned and Local; their mixture as FedCouncil weighs it, with
ingredients left out; and two placebos, random weights and the uniform mean. Results: docs/results/fedcouncil.md.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.algorithms.personal.fedcouncil import ADAPTED, ADAPTED_ANCHOR, OWN, WEIGHTS, BothModels, Council
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.messages import cut
from polyfed.core.tree import Tree, block_of
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe, read_table
from polyfed.experiment.running.assembly import assemble
from polyfed.laws.federation import through

SETS = {
    "digits": ("fedcouncil-cg-digits", 0.03),
    "views": ("pfmml-mfeat", 0.03),
    "views, lr 0.1": ("pfmml-mfeat", 0.1),
    "sensors": ("pfmml-ucihar", 0.01),
    "speakers": ("pfmml-mosi", 0.1),
}
"""The recipe of each set, and the learning rate."""

MODELS = ("FedAvg", "FedAvgM", "FedAvgM fine-tuned", "FedAvg fine-tuned", "Local")
"""The models in the order of `Council.members`."""

MIXTURES: dict[str, tuple[Council, tuple[str, ...]]] = {
    "FedCouncil": (Council(), ()),
    'prior = "global"': (Council(prior="global"), ()),
    "own = false": (Council(), (OWN,)),
    "adapted = 0": (Council(), (ADAPTED, ADAPTED_ANCHOR)),
    "unimodal = false": (Council(unimodal=False), ()),
    "calibrated = false": (Council(calibrated=False), ()),
}
"""What is weighed, and the models that are left out."""


class Held:
    """The held-out rows of a client as one batch, in the form that `Council.weighed` reads."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.num_rows = batch, torch.tensor(len(batch.y))

    def fold(self, step: Callable[..., Any], carry: Any, **_: Any) -> Any:
        """Take one step."""
        return step(carry, self.batch)


def made(name: str, lr: float, seed: int) -> Recipe:
    """The recipe of a set: 30 rounds, a third of the clients in each, a fifth of their rows held out."""
    table = read_table(Path("recipes") / f"{name}.toml")
    for section in ("network", "checkpoint"):
        table.pop(section, None)
    table |= {"seed": seed, "rounds": 30, "evaluate": {"every": 30}, "engine": {"name": "vectorised", "threads": 1}}
    table |= {"algorithm": {"name": "fedcouncil"}}
    table |= {"train": {"epochs": 1, "batch_size": 16, "momentum": 0.9, "lr": lr}}
    table["clients"] |= {"validation": 0.2, "participation": 0.34}
    return parse_recipe(table)


def scores(recipe: Recipe) -> dict[str, Tensor]:
    """The accuracy and the log loss of each model and mixture, (2,), means over clients."""
    parts = assemble(recipe)
    state, model, population = through(parts, recipe.rounds), parts.fed.context.model, parts.population
    assert population.test is not None
    assert population.own_validation is not None
    found: dict[str, list[Tensor]] = {}
    for client, local in parts.engine.locals.items():
        held = parts.fed.clients.owned(client)

        def batch(rows: Tensor, held: tuple[str, ...] = held) -> Batch:
            x = {m: population.columns.modalities[m].take(rows).float() for m in held}
            return Batch(x, population.columns.label[rows], torch.arange(len(rows)))

        new, kept = batch(population.test[client]), batch(population.own_validation[client])
        if not len(new.y) or not len(kept.y):
            continue
        got = cut(BothModels(state.params, state.anchor), parts.fed.clients[client].blocks)
        tree = parts.algorithm.own_params(got, local)  # type: ignore[attr-defined]
        members, context = Council().members(tree), parts.engine.context(client)
        log_p = {name: model.logits(one, new).log_softmax(1) for name, one in zip(MODELS, members, strict=True)}
        log_p["uniform mean"] = torch.stack([*log_p.values()]).exp().mean(0).log()
        for name, (council, without) in MIXTURES.items():
            own: Tree = {n: v for n, v in tree.items() if block_of(n) not in without}
            own[WEIGHTS] = council.weighed(context, own, Held(kept))  # type: ignore[arg-type]
            log_p[name] = council.logits(model, own, new)
        drawn = Council().drawn(context, tree, Held(kept), keys.key(recipe.seed, "random", client))  # type: ignore[arg-type]
        log_p["random weights"] = Council().logits(model, tree | {WEIGHTS: drawn}, new)
        for name, value in log_p.items():
            right = (value.argmax(1) == new.y).float().mean()
            loss = torch.nn.functional.nll_loss(value, new.y)
            found.setdefault(name, []).append(torch.stack([100 * right, loss]))
    return {name: torch.stack(each).mean(0) for name, each in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    told = parser.parse_args()
    for name in told.sets:
        recipe, lr = SETS[name]
        with torch.no_grad():
            runs = [scores(made(recipe, lr, seed)) for seed in told.seeds]
        print(f"\n{name}, learning rate {lr}, seeds {told.seeds}", flush=True)
        for line in runs[0]:
            each = torch.stack([run[line] for run in runs])
            apart = torch.stack([run["FedCouncil"][0] - run[line][0] for run in runs]).tolist()
            gaps = ", ".join(f"{gap:+.1f}" for gap in apart)
            print(f"{line:20} {each[:, 0].mean():5.1f} %  loss {each[:, 1].mean():.3f}  FedCouncil {gaps}", flush=True)


if __name__ == "__main__":
    main()
