"""polyfed's rounds on either in-process engine, including ledger, egress gate and reply validation."""

import os
import sys
from pathlib import Path

import torch

from polyfed.algorithms.averaging.fedavg import FedAvg
from polyfed.core import keys
from polyfed.data import Population
from polyfed.data.columns import Column, Columns
from polyfed.data.partitions.shards import Shards
from polyfed.engines import Sequential, Vectorised
from polyfed.federation.federation import Federation
from polyfed.model import ModelSpec, build_model
from polyfed.model.model import Model
from polyfed.privacy.egress.ledger import Ledger
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from settings import SETTINGS, Setting, arrays
from worker import serve

ENGINES = {"sequential": Sequential, "vectorised": Vectorised}


def population(setting: Setting, folder: Path) -> Population:
    """The setting's rows, split as in the other programs: equal consecutive slices."""
    (a, b), y = arrays(setting, folder)
    n = len(y)
    columns = Columns(
        name=setting.name,
        modalities={"a": Column(torch.from_numpy(a)), "b": Column(torch.from_numpy(b))},
        label=torch.from_numpy(y),
        num_classes=setting.classes,
        split=torch.zeros(n, dtype=torch.int8),
        ids=torch.arange(n),
    )
    none = torch.zeros(0, dtype=torch.int64)
    return Population(
        columns=columns,
        train=Shards(torch.arange(setting.clients + 1) * setting.rows, torch.arange(n)),
        test=None,
        holds=torch.ones(setting.clients, 2, dtype=torch.bool),
        silo=None,
        test_rows=none,
        validation_rows=none,
    )


def model(setting: Setting) -> Model:
    """The same network as in run_bare.py."""
    options = {"mlp": {"hidden": [setting.hidden]}, "conv-gru": {"dropout": 0.0}}
    encoder = {"kind": setting.encoder, **options.get(setting.encoder, {})}
    spec = ModelSpec(encoders={"a": encoder, "b": encoder}, embedding=setting.embedding)
    a, b = setting.shapes or tuple((width,) for width in setting.features)
    return build_model(spec, {"a": a, "b": b}, setting.classes)


class Ours:
    """A federation and the state of the algorithm."""

    def __init__(self, setting: Setting, people: Population, engine: str, workers: int = 0, stack: int = 0) -> None:
        net = model(setting)
        train = Train(lr=setting.lr, batch_size=setting.batch_size)
        algorithm = FedAvg(train=train, selector=Uniform(participation=setting.cohort))
        first = net.init(keys.key(1, "init"))
        self.ledger = Ledger("speed")
        workers = workers or max(1, len(os.sched_getaffinity(0)))  # what a recipe without [engine] workers gets
        options = {"policy": Policy(), "ledger": self.ledger, "workers": workers, "threads": 1}
        if stack:
            options["stack"] = stack
        runner = ENGINES[engine](people, net, algorithm, first, **options)
        self.fed = Federation(runner.registry, runner, algorithm, runner.context(-1), first, seed=1, rounds=1_000_000)
        self.algorithm, self.state, self.net = algorithm, algorithm.init(self.fed, first), net

    def round(self) -> None:
        """Execute one round and take its entries out of the ledger, as a run does after every round."""
        self.fed.begin(self.fed.round + 1)
        self.state = self.algorithm.round(self.state, self.fed)
        self.ledger.drain()


def main(name: str, folder: str, threads: str, engine: str, workers: str = "0") -> None:
    torch.set_num_threads(int(threads))
    setting = SETTINGS[name]
    ours = Ours(setting, population(setting, Path(folder)), engine, int(workers))
    serve(ours.round, parameters=ours.net.num_parameters())


if __name__ == "__main__":
    main(*sys.argv[1:])
