"""Silos made by hand: unequal, lacking modalities, misaligned; and a way to lose a device's reply."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracles.hfm import Silo
from polyfed.algorithms.base import Algorithm
from polyfed.core import keys
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree
from polyfed.data import Columns, Population
from polyfed.data.partitions.shards import Shards
from polyfed.data.sources import Toy
from polyfed.engines import Sequential, Vectorised
from polyfed.federation.client_registry import TEST
from polyfed.federation.federation import Federation
from polyfed.federation.replies import Answer
from polyfed.model import Model, ModelSpec, build_model
from polyfed.privacy.egress.ledger import Ledger
from polyfed.privacy.egress.policy import Policy

OPEN = Policy.parse(
    {
        "a": {"silo": ["parameters", "embeddings"]},
        "b": {"silo": ["parameters", "embeddings"]},
        "shared": {"silo": ["parameters", "statistic", "ids"]},
    },
    ("a", "b"),
)
"""What HFM needs beyond the default."""

ENCODERS = {"a": {"kind": "mlp", "hidden": [7]}, "b": {"kind": "mlp", "hidden": [5]}}


@dataclass
class Lossy:
    """An engine that loses what some devices say in some tasks: {(task, device)}."""

    engine: Any
    lost: set[tuple[str, int]]

    def answer(self, request: Request, clients: Sequence[int], send: Send) -> Answer:
        answer = self.engine.answer(request, clients, send)
        gone = {client: "lost" for task, client in self.lost if task == request.name and client in clients}
        parts = [rest for part in answer.parts if (rest := part.without(gone)) is not None]
        return Answer(parts, answer.missing | gone)


@dataclass
class Silos:
    """A population of silos and what it takes to play it.

    Attributes:
        sizes: rows of each silo.
        devices: modalities of the devices of each silo.
        ids: rows of each device, where they differ from the silo's.
    """

    sizes: Sequence[int]
    devices: Sequence[Sequence[str]]
    encoders: dict[str, Any] = field(default_factory=lambda: ENCODERS)
    ids: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns: Columns = Toy(rows=260, classes=4, shapes={"a": (6,), "b": (9,)}, seed=2).load()
        train = self.columns.rows(0)
        ends = np.cumsum([0, *self.sizes])
        self.rows = [train[start:end] for start, end in pairwise(ends)]
        owners = [(silo, held) for silo, all_held in enumerate(self.devices) for held in all_held]
        shards = [self.rows[silo] for silo, _ in owners]
        for device, places in self.ids.items():
            shards[device] = shards[device][places]
        self.population = Population(
            columns=self.columns,
            train=Shards.of([shard.numpy() for shard in shards]),
            test=None,
            holds=torch.tensor([[name in held for name in ("a", "b")] for _, held in owners]),
            silo=torch.tensor([silo for silo, _ in owners]),
            test_rows=self.columns.rows(1),
            validation_rows=torch.zeros(0, dtype=torch.int64),
        )
        shapes = {name: column.shape for name, column in self.columns.modalities.items()}
        self.model: Model = build_model(ModelSpec(embedding=3, encoders=self.encoders), shapes, 4)
        self.initial: Tree = self.model.init(keys.key(1, "init"))

    def data(self) -> list[Silo]:
        """The same silos for the oracle."""
        found = []
        for rows, held in zip(self.rows, self.devices, strict=True):
            names = sorted(name for names in held for name in names)
            x = {name: self.columns.modalities[name].take(rows) for name in names}
            found.append(Silo(x, self.columns.label[rows]))
        return found

    def federation(
        self,
        method: Algorithm,
        engine: str = "sequential",
        policy: Policy = OPEN,
        lost: set[tuple[str, int]] | None = None,
    ) -> tuple[Federation, Any]:
        """The server's view, and the engine behind it."""
        runs = {"sequential": Sequential, "vectorised": Vectorised}[engine](
            self.population, self.model, method, self.initial, policy=policy, ledger=Ledger("r"), debug=True
        )
        fed = Federation(
            clients=runs.registry,
            engine=Lossy(runs, lost) if lost else runs,  # type: ignore[arg-type]
            owner=method,
            context=runs.context(TEST),
            template=self.initial,
            seed=1,
            rounds=3,
            evaluation_clients=runs.evaluation_clients,
        )
        return fed, runs

    def play(self, method: Algorithm, rounds: int = 2, **how: Any) -> tuple[Any, Any, Federation]:
        """Some rounds: state, engine, federation."""
        fed, runs = self.federation(method, **how)
        fed.begin(0)
        state = method.init(fed, self.initial)
        for round in range(1, rounds + 1):
            fed.begin(round)
            state = method.round(state, fed)
        return state, runs, fed


def silo_model(state: Any, runs: Any, silo: int) -> dict[str, Tensor]:
    """What a silo's devices and its edge hold together, in VFL."""
    found = dict(state.heads[silo])
    for client in range(len(runs.registry)):
        if int(runs.registry.silo[client]) == silo:
            found |= {name: value for name, value in runs.locals[client].items() if not name.startswith("anchor.")}
    return found
