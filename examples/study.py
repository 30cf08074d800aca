"""A study in Python: two methods over three seeds, with mean and deviation, recall of each class, and predictions.

It does the same as six calls of `polyfed run ... --set seed=1` and one of `polyfed compare`. docs/python.md has more.
"""

import statistics
from dataclasses import replace
from typing import Any

import polyfed
from polyfed.algorithms.averaging.fedavg import FedAvg
from polyfed.algorithms.cmsfed.cmsfed import CmsFed
from polyfed.data import ClientsSpec
from polyfed.data.columns import TEST
from polyfed.data.sources import CgDigits
from polyfed.evaluation.scores import Evaluation
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train

SAME = {
    "train": Train(lr=0.05, batch_size=16, momentum=0.9, epochs=2),
    "selector": Uniform(participation=5),
    "evaluation": Evaluation(every=0),
}
METHODS = {"FedAvg": FedAvg(**SAME), "CMSFed": CmsFed(**SAME)}
MAY_LEAVE = {m: {"server": ["parameters", "gradients", "prototypes", "statistic"]} for m in ("gray", "color")}


def study(rounds: int, seeds: tuple[int, ...]) -> dict[str, list[polyfed.Run]]:
    """Method -> its runs, one for each seed."""
    mlp = {"kind": "mlp", "hidden": [64]}
    recipe = polyfed.Recipe(
        data=CgDigits(),
        clients=ClientsSpec(partition="dirichlet", num=20, alpha=1.0),
        model=ModelSpec(embedding=32, encoders={"gray": mlp, "color": mlp}),
        algorithm=METHODS["FedAvg"],
        egress=MAY_LEAVE,
        rounds=rounds,
    )
    return {
        name: [polyfed.run(replace(recipe, algorithm=method, seed=seed)) for seed in seeds]
        for name, method in METHODS.items()
    }


def recalls(run: polyfed.Run) -> list[float]:
    """Recall of each class on the server's test rows, from the confusion matrix of the last round."""
    return [row[c] / max(sum(row), 1) for c, row in enumerate(run.rounds[-1]["confusion"])]


def main(rounds: int = 20, seeds: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
    runs = study(rounds, seeds)
    for name, done in runs.items():
        scores = [run.result["metrics"]["global"]["accuracy"] for run in done]
        print(f"{name}: {statistics.mean(scores):.3f} +- {statistics.stdev(scores):.3f} over seeds {list(seeds)}")
        print("  recall by class:", " ".join(f"{recall:.2f}" for recall in recalls(done[0])))
    digits, last = CgDigits().load(), runs["CMSFed"][0]
    rows = digits.rows(TEST)[:5]
    for held in (("gray", "color"), ("gray",)):
        logits = last.predict({m: digits.column(m).raw(rows) for m in held})
        print(f"{' + '.join(held)}: {logits.argmax(1).tolist()}, labels: {digits.label[rows].tolist()}")
    return last.result


if __name__ == "__main__":
    main()
