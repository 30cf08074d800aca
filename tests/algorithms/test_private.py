"""Private blocks of averaging methods: kept at the client, never sent, part of the client's own model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from ended_runs import samples
from laws.rows import ROWS
from polyfed.algorithms import ALGORITHMS, Averaging, FedAvg
from polyfed.algorithms.averaging import Update
from polyfed.algorithms.averaging.private_blocks import PRIVATE
from polyfed.core.batch import Batch
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.tree import Tree, block_of, under
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.results.records import Records
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble, population_of
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, furthest, played, recipe, same, through

WORDS = {
    "shared": lambda n: block_of(n) == "shared",
    "a": lambda n: block_of(n) == "a",
    "head": lambda n: block_of(n) == "shared" or ".fusion." in n,
    "encoders": lambda n: ".encoder." in n,
}


def made(word: str, name: str = "fedavg", engine: str = "sequential", **options: Any) -> Recipe:
    if name == "moon":
        options |= {"projection": 0}
    method = algorithm(name, private=(word,), **options)
    base = recipe(method, engine, AWKWARD)
    return replace(base, clients=replace(base.clients, personal_test=0.3))


@pytest.mark.parametrize("word", WORDS)
def test_a_private_block_never_crosses_and_differs_between_clients(word: str) -> None:
    parts, state, ledger = played(made(word))
    names = parts.model.names(parts.model.modalities)
    private = {n for n in names if WORDS[word](n)}
    assert private == parts.algorithm.private_names(parts.model)
    assert set(state.params) == set(names) - private
    trained = [under(PRIVATE, tree) for tree in parts.engine.locals.values()]
    assert all(set(tree) <= private for tree in trained)
    name = next(n for n in sorted(private) if n.endswith(("weight", "bias")))
    values = [tree[name] for tree in trained if name in tree]
    assert len(values) > 2
    assert all(not torch.equal(values[0], other) for other in values[1:])
    sent = [row for row in ledger if row["kind"] == "parameters"]
    whole = {block_of(n) for n in names} - {block_of(n) for n in names if n not in private}
    assert not [row for row in sent if row["block"] in whole]
    sizes = {
        b: sum(4 * v.numel() for n, v in parts.initial.items() if block_of(n) == b and n not in private) for b in "ab"
    }
    assert all(row["bytes"] == sizes[row["block"]] for row in sent if row["block"] in sizes)


@pytest.mark.parametrize("word", ["shared", "encoders"])
def test_check_announces_nothing_of_a_private_block(word: str) -> None:
    planned = [row for row in check(made(word)).planned if row.kind == "parameters"]
    names = assemble(made(word)).initial
    kept = {block_of(n) for n in names} - {block_of(n) for n in names if not WORDS[word](n)}
    assert {row.block for row in planned} == {"a", "b", "shared"} - kept
    assert check(made(word)).private.keys() == {block_of(n) for n in names if WORDS[word](n)}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "moon", "fedogm"])
def test_engines_agree(name: str) -> None:
    options: dict[str, Any] = {"scale_params": "all_weights"} if name == "fedogm" else {}
    options |= {"private_epochs": 1, "fine_tune": 1}
    ended = []
    for engine in ("sequential", "vectorised"):
        parts, state, ledger = played(made("head", name, engine, **options))
        parts.fed.begin(3)
        measured = parts.algorithm.evaluate(state, parts.fed)
        ended.append((state.params, dict(sorted(parts.engine.locals.items())), ledger, measured.personal))
    (one, own, rows, scores), (many, theirs, others, same_scores) = ended
    assert furthest(one, many) < 1e-4
    assert own.keys() == theirs.keys()
    assert all(furthest(own[k], theirs[k]) < 1e-3 for k in own)
    assert rows == others
    assert scores == pytest.approx(same_scores)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_resumed_run_is_exact(engine: str, tmp_path: Path) -> None:
    whole = made("head", engine=engine, private_epochs=1)
    parts, state, _ = played(whole)
    half, before, _ = played(replace(whole, rounds=2))
    modules = checkpoint.modules_of(whole.algorithm)
    checkpoint.save(tmp_path, 2, {"state": before, "locals": half.engine.locals}, modules)
    found = checkpoint.load(tmp_path, modules)
    assert found is not None
    again = assemble(whole)
    again.engine.locals, before = found[1]["locals"], found[1]["state"]
    again.fed.template = before.params
    again.fed.begin(3)
    assert checkpoint.digest(whole.algorithm.round(before, again.fed)) == checkpoint.digest(state)
    assert all(same(again.engine.locals[k], tree) for k, tree in parts.engine.locals.items())


@pytest.mark.parametrize("options", [{}, {"fine_tune": 2}], ids=["as-trained", "fine-tuned"])
def test_predictions_and_exports_are_of_the_personal_model(options: dict[str, int], tmp_path: Path) -> None:
    told = made("head", evaluation=Evaluation(every=1), **options)
    run, parts = polyfed.run(told, tmp_path / "run"), assemble(told)
    columns = parts.population.columns
    assert "global" not in run.result["metrics"]
    with refuses(RecipeError, "no global model"):
        run.params  # noqa: B018
    hits = {}
    back = polyfed.load_model(run.export(tmp_path / "model"), imports=["polyfed.laws.federation.*", "world.*"])
    later = polyfed.load_run(tmp_path / "run")
    for client in parts.fed.clients.tested:
        rows = parts.population.test[client]
        held = parts.fed.clients.owned(client)
        x = {m: v for m, v in samples(columns, rows).items() if m in held}
        logits = run.predict(x, client=client)
        assert torch.equal(logits, back.predict(x, client=client))
        assert torch.equal(logits, later.predict(x, client=client))
        hits[str(client)] = float((logits.argmax(1) == columns.label[rows]).float().mean())
    assert hits == pytest.approx(run.rounds[-1]["personal_accuracy"])


def test_fine_tuning_alone_keeps_the_global_model() -> None:
    base = made("head")
    plain = replace(base, algorithm=replace(base.algorithm, private=()))
    tuned = replace(base, algorithm=replace(base.algorithm, private=(), fine_tune=2))
    one, two = polyfed.run(plain), polyfed.run(tuned)
    assert same(one.params, two.params)
    assert one.result["metrics"]["global"] == two.result["metrics"]["global"]
    assert not same(two.personal[0], {n: two.params[n] for n in two.personal[0]})
    assert one.result["bytes_up"] == two.result["bytes_up"]


def test_fedrep_trains_the_head_alone_first() -> None:
    """Against plain loops: the private part of the model first, with the rest fixed, then the rest."""
    told = made("head", private_epochs=1, train=Train(lr=0.1, batch_size=0, epochs=1))
    told = replace(told, rounds=1, model=recipe(told.algorithm).model)
    parts, state, _ = played(told)
    client = min(parts.engine.locals)
    rows, held = parts.population.train[client], parts.fed.clients.owned(client)
    columns, model = parts.population.columns, parts.model
    w = {n: v.clone().requires_grad_() for n, v in parts.initial.items() if block_of(n) in {*held, "shared"}}
    batch = Batch(
        {m: columns.modalities[m].take(rows) for m in held}, columns.label[rows], torch.arange(len(rows)), key=1
    )
    for part in (lambda n: WORDS["head"](n), lambda n: not WORDS["head"](n)):
        loss = torch.nn.functional.cross_entropy(model.logits(w, batch), batch.y)
        names = [n for n in w if part(n)]
        grads = torch.autograd.grad(loss, [w[n] for n in names])
        for n, g in zip(names, grads, strict=True):
            w[n] = (w[n] - 0.1 * g).detach().requires_grad_()
    kept = under(PRIVATE, parts.engine.locals[client])
    assert furthest({n: w[n].detach() for n in kept}, kept) < 1e-5
    assert state.train_loss > 0


@pytest.mark.parametrize("name", sorted(n for n, c in ALGORITHMS.items() if issubclass(c, Averaging)))
def test_every_averaging_method_keeps_private_blocks_or_says_why_not(name: str) -> None:
    alone = {"anchor": False, "own": False, "adapted": 0, "unimodal": False}
    options = ROWS[name].options | {"moon": {"projection": 0}, "fedcouncil": alone}.get(name, {})
    try:
        method = algorithm(name, private=("shared",), **options)
    except RecipeError as error:
        assert "replaces" in str(error) or "fedproto" in str(error)  # noqa: PT017
        assert name in (
            "apfl", "cmsfed", "ditto", "fedmac", "fedmchain", "fedmsplit", "fedpmr", "fedproto", "mfedmc", "partialfl",
            "pepsy", "pfedme", "pmcmfl",
        )  # fmt: skip
        return
    if name == "hfl":
        return  # one modality; its laws are those of fedavg
    _, state, ledger = played(replace(recipe(method), rounds=1))
    assert not [n for n in state.params if block_of(n) == "shared"]
    assert not [row for row in ledger if row["block"] == "shared" and row["kind"] == "parameters"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"private": ("vision",)}, "algorithm.private: no such block"),
        ({"private": ("a", "b", "shared")}, "algorithm.private: block is private"),
        ({"private": ("head", "encoders")}, "algorithm.private: block is private"),
    ],
)
def test_a_block_that_is_not_there_is_refused_by_check(options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        check(recipe(algorithm("fedavg", **options)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"private_epochs": 1}, "algorithm.private_epochs: private_epochs trains"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        algorithm("fedavg", **options)


def test_moon_with_a_projection_head_is_refused() -> None:
    with refuses(RecipeError, "algorithm.private: projection = 0"):
        algorithm("moon", private=("shared",))


class Leaky(FedAvg):
    """Sends what it should keep."""

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Tree) -> Any:
        return Update(
            fit.params | {"a.fusion.weight": context.initial["a.fusion.weight"]}, fit.loss, data.num_rows
        ), local

    def private_names(self, model: Any) -> frozenset[str]:
        return super().private_names(model) | {n for n in model.names(["a"]) if n.startswith("a.fusion.")}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_gate_refuses_a_private_parameter_by_name(engine: str) -> None:
    method = Leaky(train=Train(lr=0.1), evaluation=Evaluation(every=0))
    base = recipe(method, engine)
    parts = assemble(replace(base, clients=replace(base.clients, holdings=None)))
    with refuses(EgressError, "private keeps"):
        through(parts, 1)
    assert {row["verdict"] for row in parts.ledger.rows() if row["destination"] != "client"} == {"refused"}


def test_over_flower_the_clients_keep_their_private_blocks(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.direct import HubTransport, hub_of
    from polyfed.deploy.server.server import engine_by

    alone = replace(made("head", fine_tune=1, evaluation=Evaluation(every=1)), rounds=2)
    alone = replace(alone, model=recipe(alone.algorithm).model)
    told = replace(alone, engine=EngineSpec(name="flower"))
    hub = hub_of(told, tmp_path / "nodes")
    transport = HubTransport(hub)
    assert len(transport.enrol(hub.clients, 30)) == hub.clients
    run = execute(
        told,
        Records(tmp_path / "run", resume=False),
        Emitter([]),
        population=population_of(told),
        engine=engine_by(transport, told),
    )
    there = polyfed.run(alone)
    assert run.result["state_sha256"] == there.result["state_sha256"]
    assert run.rounds[-1]["personal_accuracy"] == there.rounds[-1]["personal_accuracy"]
    with refuses(RecipeError, "keep these models"):
        run.predict({"a": torch.zeros(1, 16)}, client=0)
