"""FedDyn, FedNova, Ditto, APFL, pFedMe, FedBN, FedRep, LG-FedAvg, FedAvg with fine-tuning: bare loops and edge cases.

The loops of `oracles/blockwise.py` play three rounds of six clients, of whom some lack a modality and four take part.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import blockwise as oracle
from polyfed.algorithms.averaging.private_blocks import PRIVATE_STREAM, TUNE_STREAM
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.personal.ditto import OWN_STREAM
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree, block_of
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from world import algorithm, played, recipe

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)
STREAMS = {0: 2, OWN_STREAM: 2, PRIVATE_STREAM: 1, TUNE_STREAM: 3}
"""The random streams of batches, with the epochs that the tests take on them."""


class Normed(nn.Module):
    """Linear, BatchNorm, ReLU, Linear."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape[0], 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, embedding)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


NORMED = {m: {"kind": "algorithms.test_blockwise:Normed"} for m in "ab"}
ENCODERS = {"plain": None, "batchnorm": NORMED}


def plainly(tree: Tree) -> oracle.Weights:
    """The tensors of a tree under the oracle's names."""
    found: oracle.Weights = {}
    for name, value in tree.items():
        block, *rest = name.split(".")
        place, last = rest[-2:] if len(rest) > 1 else ("", rest[-1])
        short = {"weight": "w", "bias": "b", "running_mean": "mean", "running_var": "var"}[last]
        if block == "shared":
            found["bias"] = value.clone()
        elif "fusion" in rest:
            found[f"{block}.top"] = value.clone()
        else:
            normed = "layers" in rest
            layer = {"0": "in", "1": "norm", "3": "out"} if normed else {"0": "in", "2": "out"}
            found[f"{block}.{layer[place]}.{short}"] = value.clone()
    return found


def federation(parts: Assembly, ledger: list[dict[str, Any]], **options: Any) -> oracle.Federation:
    """The clients in the form that the oracle reads, with the batches that `keys` determines."""
    columns, clients = parts.population.columns, []
    for client in range(len(parts.population.train)):
        rows, held = parts.population.train[client], parts.fed.clients.owned(client)
        steps: dict[int, list[list[Tensor]]] = {stream: [] for stream in STREAMS}
        for stream, epochs in STREAMS.items():
            for round in range(1, parts.recipe.rounds + 1):
                key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), stream)
                orders = [keys.permutation(keys.fold_in(key, epoch), len(rows)) for epoch in range(epochs)]
                steps[stream].append([part for order in orders for part in order.split(TRAIN.batch_size)])
        x = {m: columns.modalities[m].values[rows].float() for m in held}
        clients.append(oracle.Client(x, columns.label[rows], steps))
    assert not any(len(part) == 1 for c in clients for all_ in c.steps.values() for one in all_ for part in one)
    sent = {(row["round"], row["client"]) for row in ledger if row["destination"] == "server"}
    cohorts = [sorted(k for r, k in sent if r == round) for round in range(1, parts.recipe.rounds + 1)]
    return oracle.Federation(clients, cohorts, TRAIN.lr, **options)


def run(name: str, engine: str, encoders: Any, **options: Any) -> tuple[Assembly, Any, list[dict[str, Any]], Any]:
    """A run of three rounds, and the initial model for the oracle."""
    method = algorithm(name, **({"train": TRAIN} | options))
    parts, state, ledger = played(recipe(method, engine, ENCODERS[encoders]))
    return parts, state, ledger, plainly(assemble(parts.recipe).initial)


def models(parts: Assembly, state: Any) -> list[oracle.Weights]:
    """The personal model of each client that has one."""
    got = lambda k: Broadcast({n: v for n, v in state.params.items() if block_of(n) in parts.fed.clients[k].blocks})  # noqa: E731
    local = parts.engine.locals
    own = [parts.algorithm.own_params(got(k), local[k]) if k in local else None for k in range(6)]
    return [plainly(tree) if tree is not None else {} for tree in own]


def agree(parts: Assembly, state: Any, w: oracle.Weights, own: list[oracle.Weights] | None = None) -> None:
    """Compare the global model, and the personal models of clients that took part, with the oracle's."""
    torch.testing.assert_close(plainly(state.params), w, rtol=1e-6, atol=1e-6)
    if own is not None:
        pairs = [(mine, theirs) for mine, theirs in zip(models(parts, state), own, strict=True) if mine]
        assert len(pairs) > 3
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("encoders", ENCODERS)
@pytest.mark.parametrize("engine", ENGINES)
class TestOfTheLoops:
    def test_feddyn(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("feddyn", engine, encoders, alpha=0.5)
        agree(parts, state, oracle.feddyn(federation(parts, ledger, weighted=False), w, 0.5))

    @pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"mu": 0.5}], ids=str)
    def test_fednova(self, engine: str, encoders: str, options: dict[str, float]) -> None:
        train = Train(lr=0.1, batch_size=16, epochs=2, momentum=options.get("momentum", 0.0))
        parts, state, ledger, w = run("fednova", engine, encoders, train=train, mu=options.get("mu", 0.0))
        agree(parts, state, oracle.fednova(federation(parts, ledger), w, **options))

    def test_ditto(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("ditto", engine, encoders, lam=0.7)
        agree(parts, state, *oracle.ditto(federation(parts, ledger), w, 0.7, OWN_STREAM))

    def test_apfl(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("apfl", engine, encoders, alpha=0.4)
        after, own, weights = oracle.apfl(federation(parts, ledger), w, 0.4)
        agree(parts, state, after, own)
        found = {k: float(tree["@alpha"]) for k, tree in parts.engine.locals.items()}
        assert found == pytest.approx({k: weights[k] for k in found}, abs=1e-6)
        assert len(set(found.values())) > 3

    def test_pfedme(self, engine: str, encoders: str) -> None:
        server = ServerOptimiser(lr=0.8)
        parts, state, ledger, w = run("pfedme", engine, encoders, lam=3.0, inner_steps=4, inner_lr=0.1, server=server)
        agree(parts, state, *oracle.pfedme(federation(parts, ledger, weighted=False), w, 3.0, 4, 0.1, 0.8))

    def test_fedrep(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("fedrep", engine, encoders, private_epochs=1)
        keeps = lambda n: n == "bias" or n.endswith("top")  # noqa: E731
        agree(parts, state, *oracle.private(federation(parts, ledger), w, keeps, first=PRIVATE_STREAM))

    def test_lg_fedavg(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("lg-fedavg", engine, encoders)
        keeps = lambda n: n != "bias" and not n.endswith("top")  # noqa: E731
        agree(parts, state, *oracle.private(federation(parts, ledger), w, keeps))

    def test_fedbn(self, engine: str, encoders: str) -> None:
        if encoders == "plain":
            with pytest.raises(RecipeError, match="no layer of the model normalises"):
                run("fedbn", engine, encoders)
            return
        parts, state, ledger, w = run("fedbn", engine, encoders)
        agree(parts, state, *oracle.private(federation(parts, ledger), w, lambda n: ".norm." in n))

    def test_fedavg_ft(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("fedavg-ft", engine, encoders, fine_tune=3)
        rows = list(ledger)
        parts.algorithm.evaluate(state, parts.fed)
        agree(parts, state, *oracle.private(federation(parts, rows), w, lambda n: False, tune=TUNE_STREAM))
