"""FedDyn, FedNova, Ditto, APFL, pFedMe, FedBN, FedRep, LG-FedAvg, FedAvg with fine-tuning: bare loops and edge cases.

The loops of `oracles/blockwise.py` play three rounds of six clients, of whom some lack a modality and four take part.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracles import blockwise as oracle
from polyfed.algorithms.averaging.fednova import update_length
from polyfed.algorithms.averaging.private_blocks import PRIVATE_STREAM, TUNE_STREAM
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.personal.ditto import OWN_STREAM
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.tree import Tree, block_of, under
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.selection import Uniform
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, furthest, played, recipe, same

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
            with refuses(RecipeError, "algorithm.private: normalises"):
                run("fedbn", engine, encoders)
            return
        parts, state, ledger, w = run("fedbn", engine, encoders)
        agree(parts, state, *oracle.private(federation(parts, ledger), w, lambda n: ".norm." in n))

    def test_fedavg_ft(self, engine: str, encoders: str) -> None:
        parts, state, ledger, w = run("fedavg-ft", engine, encoders, fine_tune=3)
        rows = list(ledger)
        parts.algorithm.evaluate(state, parts.fed)
        agree(parts, state, *oracle.private(federation(parts, rows), w, lambda n: False, tune=TUNE_STREAM))


def test_the_length_of_an_update_is_the_sum_of_its_factors() -> None:
    steps = torch.arange(0.0, 8.0, dtype=torch.float64)
    assert torch.equal(update_length(steps, Train(), 0.0), steps)
    for tau, found in enumerate(update_length(steps, Train(momentum=0.9), 0.0).tolist()):
        assert found == pytest.approx(sum((1 - 0.9 ** (tau - i)) / 0.1 for i in range(tau)), abs=1e-12)
    for tau, found in enumerate(update_length(steps, Train(), 0.05).tolist()):
        assert found == pytest.approx(sum(0.95 ** (tau - 1 - i) for i in range(tau)), abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_fednova_with_equally_many_steps_is_fedavg_and_says_so(engine: str) -> None:
    train = Train(lr=0.1, batch_size=16, epochs=0, steps=4)
    _, nova, _ = played(recipe(algorithm("fednova", train=train), engine))
    _, plain, _ = played(recipe(algorithm("fedavg", train=train), engine))
    assert furthest(nova.params, plain.params) < 1e-6
    method = algorithm("fednova", train=train)
    assert method.observe(nova) == {"effective_steps": 4.0, "length_ratio": 1.0}
    (text,) = method.concerns([method.observe(nova)])
    assert "equally many steps" in text
    assert method.concerns([{"effective_steps": 4.0, "length_ratio": 1.5}, {}]) == []
    assert method.concerns([]) == []


def test_fednova_takes_the_numbers_of_steps_from_the_registry_and_not_from_replies() -> None:
    method = algorithm("fednova", train=TRAIN)
    parts, before, _ = played(recipe(method, rounds=1))
    parts.fed.begin(2)
    replies = parts.fed.ask(method.update, [0, 2, 4], method.outgoing(before, [0, 2, 4], parts.fed))
    honest = method.merge(before, replies, parts.fed)
    for part in replies.parts:
        part.message.num_rows.fill_(10**9)
    assert same(method.merge(before, replies, parts.fed).params, honest.params)


@pytest.mark.parametrize("engine", ENGINES)
def test_ditto_without_a_pull_trains_personal_models_alone(engine: str) -> None:
    parts, state, ledger, w = run("ditto", engine, "plain", lam=0.0)
    fed = federation(parts, ledger)
    for k, own in enumerate(models(parts, state)):
        alone = oracle.part_of(w, fed.clients[k])
        for t, cohort in enumerate(fed.cohorts):
            alone = oracle.sgd(alone, fed.clients[k], fed.clients[k].steps[OWN_STREAM][t] if k in cohort else [], 0.1)
        if own:
            torch.testing.assert_close(own, alone, rtol=1e-6, atol=1e-6)
    plain = played(recipe(algorithm("fedavg", train=TRAIN), engine))[1]
    assert same(plain.params, state.params), "the global model is that of fedavg"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_ends_of_apfl_are_the_global_model_and_a_model_trained_alone(engine: str) -> None:
    plain = played(recipe(algorithm("fedavg", train=TRAIN), engine))[1]
    parts, state, _, _ = run("apfl", engine, "plain", alpha=0.0, adaptive=False)
    assert furthest(plain.params, state.params) < 1e-6
    for own in filter(None, models(parts, state)):
        torch.testing.assert_close(own, {n: plainly(plain.params)[n] for n in own}, rtol=1e-6, atol=1e-6)
    parts, state, ledger, w = run("apfl", engine, "plain", alpha=1.0, adaptive=False)
    fed = federation(parts, ledger)
    k = fed.cohorts[0][0]
    alone = oracle.part_of(w, fed.clients[k])
    for t, cohort in enumerate(fed.cohorts):
        alone = oracle.sgd(alone, fed.clients[k], fed.clients[k].steps[0][t] if k in cohort else [], 0.1)
    torch.testing.assert_close(models(parts, state)[k], alone, rtol=1e-6, atol=1e-6)


def test_pfedme_with_one_inner_step_is_fedavg_with_a_scaled_rate() -> None:
    """theta = w - inner_lr g, so w moves by lr lam inner_lr g."""
    method = algorithm("pfedme", train=TRAIN, lam=4.0, inner_steps=1, inner_lr=0.25)
    found = played(recipe(method))[1]
    plain = played(recipe(algorithm("fedavg", train=TRAIN, aggregation="uniform")))[1]
    assert furthest(found.params, plain.params) < 1e-5


def test_feddyn_in_the_first_round_is_fedprox_and_a_step_of_the_server() -> None:
    """With full participation h is -alpha times the mean change, so the server takes this change twice."""
    all_ = Uniform(participation=1.0)
    parts, state, _ = played(recipe(algorithm("feddyn", alpha=0.2, selector=all_), rounds=1))
    prox = algorithm("fedprox", mu=0.2, aggregation="uniform", selector=all_)
    plain = played(recipe(prox, rounds=1))[1]
    twice = {n: 2 * v - parts.initial[n] for n, v in plain.params.items()}
    assert furthest(state.params, twice) < 1e-5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("feddyn", {"alpha": 0.0}, "algorithm.alpha: above 0"),
        ("apfl", {"alpha": 1.5}, "algorithm.alpha: must be"),
        ("pfedme", {"lam": 20.0, "inner_lr": 0.1}, "algorithm.inner_lr: diverges"),
        ("fedrep", {"private": ()}, "algorithm.private: FedRep"),
        ("fedbn", {"private": ()}, "algorithm.private: FedBn"),
        ("lg-fedavg", {"private": ()}, "algorithm.private: LgFedAvg"),
        ("fedavg-ft", {"fine_tune": 0}, "algorithm.fine_tune: fine-tuning"),
        ("ditto", {"private": ("head",)}, "algorithm.private: replaces own_params"),
        ("apfl", {"fine_tune": 1}, "algorithm.fine_tune: replaces update"),
    ],
)
def test_what_does_not_go_together_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        algorithm(name, **options)


class Kinds(nn.Module):
    """One layer of each norm of PyTorch, a frozen one, and a class whose name only sounds like one."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.inside = nn.Linear(shape[0], 8)
        self.batch, self.layer, self.rms = nn.BatchNorm1d(8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.group, self.still = nn.GroupNorm(2, 8), nn.LayerNorm(8).requires_grad_(False)
        self.NormAlike, self.out = nn.Linear(8, 8), nn.Linear(8, embedding)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.inside, self.batch, self.layer, self.rms, self.group, self.still, self.NormAlike):
            x = layer(x)
        out: Tensor = self.out(x)
        return out


def test_which_layers_count_as_norms() -> None:
    encoders = {m: {"kind": "algorithms.test_blockwise:Kinds"} for m in "ab"}
    parts = assemble(recipe(algorithm("fedbn"), encoders=encoders))
    names = parts.algorithm.private_names(parts.model)
    found = {name.removeprefix("a.encoder.") for name in names if name.startswith("a.")}
    assert found == {
        "batch.weight", "batch.bias", "batch.running_mean", "batch.running_var", "layer.weight", "layer.bias",
        "rms.weight", "group.weight", "group.bias",
    }  # fmt: skip


def test_the_placebo_of_fedbn_keeps_as_many_other_layers() -> None:
    found = {}
    for placebo in ("none", "random"):
        parts = assemble(recipe(algorithm("fedbn", placebo=placebo), encoders=NORMED))
        found[placebo] = {name.rpartition(".")[0] for name in parts.algorithm.private_names(parts.model)}
    assert len(found["none"]) == len(found["random"]) == 2
    assert not found["none"] & found["random"]


def test_the_placebo_of_feddyn_keeps_the_length_of_the_linear_term() -> None:
    g = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    turned = algorithm("feddyn", placebo="random")._direction("a.fusion.weight", g)
    assert torch.equal(turned.abs(), g.abs())
    assert not torch.equal(turned, g)
    assert math.isclose(float(algorithm("feddyn")._direction("a.fusion.weight", g).norm()), float(g.norm()))


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme", "fedrep", "lg-fedavg", "fedbn"])
def test_nothing_personal_leaves_a_client(name: str) -> None:
    parts, _, ledger, _ = run(name, "vectorised", "batchnorm")
    kept = parts.algorithm.private_names(parts.model)
    sent = {b: sum(4 * v.numel() for n, v in parts.initial.items() if block_of(n) == b and n not in kept) for b in "ab"}
    rows = [row for row in ledger if row["destination"] == "server" and row["block"] in sent]
    assert rows
    assert {(row["kind"], row["bytes"]) for row in rows} <= {("parameters", size) for size in sent.values()}
    assert all(under("@own", tree) or under("@private", tree) for tree in parts.engine.locals.values())
