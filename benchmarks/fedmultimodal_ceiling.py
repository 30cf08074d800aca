"""What can be learned from UCI-HAR as FedMultimodal normalises it, if nothing is federated?

    python benchmarks/fedmultimodal_ceiling.py [--normalise train] [--seeds 8 16 24 32 40]
    python benchmarks/fedmultimodal_ceiling.py --epochs 20 [--seeds 8]

Prints macro-F1 (%) and F1 by activity on the held-out fifth of the training subjects' windows and on the test subjects.
Without --epochs, extremely randomised trees read the spectra, quantiles and correlations of each window's axes. With
it, the network of recipes/fedavg-ucihar.toml is trained on the pooled rows, in plain PyTorch.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.metrics import f1_score
from torch import nn

from fedmultimodal import recipe_of
from fedmultimodal_plain import LR, Loop
from polyfed.data.columns import TEST, TRAIN, VALIDATION, Columns

BATCH, FREQUENCIES, TREES = 64, 32, 200


def described(table: Columns) -> NDArray[np.float32]:
    """Features (N, F) of the windows: of each axis the spectrum and quantiles, and products of axes."""
    found = []
    for column in table.modalities.values():
        x = column.values.float().numpy()
        found.append(np.log1p(np.abs(np.fft.rfft(x, axis=1)[:, 1 : FREQUENCIES + 1])).reshape(len(x), -1))
        found.append(np.sort(x, axis=1)[:, ::8].reshape(len(x), -1))
        found.append(np.einsum("nti,ntj->nij", x, x).reshape(len(x), -1) / x.shape[1])
        found.append(np.abs(np.diff(x, axis=1)).mean(1))
    return np.concatenate(found, 1).astype(np.float32)


def show(name: str, label: NDArray[Any], predicted: NDArray[Any]) -> float:
    """Print the scores of some rows; return macro-F1 in %."""
    each = 100 * f1_score(label, predicted, average=None)
    print(f"{name}: {each.mean():.1f} ({', '.join(f'{f1:.0f}' for f1 in each)})", flush=True)
    return float(each.mean())


def trees(table: Columns, seed: int) -> float:
    """Fit trees to the training rows; return macro-F1 on the test subjects."""
    x, y, split = described(table), table.label.numpy(), table.split.numpy()
    fitted = ExtraTreesClassifier(TREES, random_state=seed).fit(x[split == TRAIN], y[split == TRAIN])
    parts = (("held out", VALIDATION), ("test", TEST))
    return [show(f"seed {seed}, {name}", y[split == k], fitted.predict(x[split == k])) for name, k in parts][-1]


def network(table: Columns, seed: int, epochs: int) -> float:
    """Train the network on the pooled rows; return macro-F1 on the test subjects after the last epoch."""
    loop, score = Loop(table, fedopt=False, seed=seed), 0.0
    rows, net = torch.cat(loop.shards), loop.net
    optimiser = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=1e-5)
    for epoch in range(1, epochs + 1):
        net.train()
        for batch in rows[torch.randperm(len(rows))].split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(*(x[batch] for x in loop.x)), loop.y[batch]).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimiser.step()
        if epoch % 5 and epoch < epochs:
            continue
        net.eval()
        for name, part in (("held out", loop.held_out), ("test", loop.test)):
            with torch.no_grad():
                found = torch.cat([net(*(x[some] for x in loop.x)).argmax(1) for some in part.split(256)])
            score = show(f"seed {seed}, epoch {epoch}, {name}", loop.y[part].numpy(), found.numpy())
    return score


def main(normalise: Any, seeds: Sequence[int], epochs: int) -> None:
    torch.set_num_threads(1)
    data: Any = recipe_of(5.0, False).data
    table = replace(data, normalise=normalise).load()
    found = [network(table, seed, epochs) if epochs else trees(table, seed) for seed in seeds]
    if len(found) > 1:
        print(f"test: {statistics.mean(found):.1f} +- {statistics.stdev(found):.1f}, seeds {list(seeds)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--normalise", choices=("window", "train", "none"), default="window")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8, 16, 24, 32, 40])
    parser.add_argument("--epochs", type=int, default=0, help="of the network; 0 for the trees")
    options = parser.parse_args()
    main(options.normalise, options.seeds, options.epochs)
