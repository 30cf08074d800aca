"""FedCouncil: against a bare loop with missing rows, its promise, its contents, its refusals, and what leaves."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from algorithms.test_blockwise import plainly
from oracles import blockwise
from oracles import fedcouncil as oracle
from oracles.mfedmc import Client
from polyfed.algorithms.averaging.private_blocks import TUNE_STREAM, TUNED
from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.personal.fedcouncil import (
    ADAPTED,
    ADAPTED_ANCHOR,
    ANCHOR,
    OWN,
    TEMPERATURES,
    WEIGHTS,
    BothModels,
    Council,
    Experts,
    class_frequencies,
)
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import RecipeError
from polyfed.core.messages import cut
from polyfed.core.tree import under
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
TRAIN = Train(lr=0.1, batch_size=16, epochs=2)
CLIENTS = ClientsSpec(
    partition="dirichlet", num=6, alpha=1.0, holdings=[["a", "b"], ["a"], ["a", "b"], ["b"]], validation=0.25
)
NOTHING = {"momentum": 0.0, "own": False, "adapted": 0, "unimodal": False}


def council(engine: str = "sequential", encoders: Any = None, clients: ClientsSpec = CLIENTS, **options: Any) -> Any:
    return recipe(algorithm("fedcouncil", **({"train": TRAIN} | options)), engine, encoders, clients=clients)


# ---- the oracle


def rows_of(parts: Assembly, rows: torch.Tensor, held: tuple[str, ...]) -> oracle.Rows:
    columns = parts.population.columns
    x = {m: columns.modalities[m].values[rows].float() for m in held}
    return x, columns.label[rows], {m: there[rows] for m, there in columns.present.items() if m in held}


def federation(parts: Assembly, ledger: list[dict[str, Any]], adapted: int) -> blockwise.Federation:
    clients = []
    for client in range(len(parts.population.train)):
        rows = parts.population.train[client]
        x, y, has = rows_of(parts, rows, parts.fed.clients.owned(client))
        steps: dict[int, list[list[torch.Tensor]]] = {0: [], TUNE_STREAM: []}
        for stream, epochs in ((0, TRAIN.epochs), (TUNE_STREAM, adapted)):
            for round in range(1, parts.recipe.rounds + 1):
                key = keys.fold_in(keys.fold_in(keys.key(parts.recipe.seed, "client", client, round), ORDER), stream)
                orders = [keys.permutation(keys.fold_in(key, epoch), len(rows)) for epoch in range(epochs)]
                steps[stream].append([part for order in orders for part in order.split(TRAIN.batch_size)])
        clients.append(Client(x, y, steps, has))
    sent = {(r["round"], r["client"]) for r in ledger if r["message"] == "BothTrained" and r["destination"] == "server"}
    cohorts = [sorted(k for r, k in sent if r == round) for round in range(1, parts.recipe.rounds + 1)]
    return blockwise.Federation(clients, cohorts, TRAIN.lr)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "options", [{}, {"modality_loss": 0.7, "modulation": 0.6, "momentum": 0.5, "prior": "global"}], ids=str
)
def test_three_rounds_equal_a_bare_loop_with_missing_rows(engine: str, options: dict[str, Any]) -> None:
    clients = replace(CLIENTS, missing_rows={"a": 0.2, "b": 0.4})
    parts, state, ledger = played(council(engine, clients=clients, **options))
    told = parts.algorithm
    wanted = oracle.Options(told.momentum, told.momentum_lr, told.modality_loss, told.modulation, TUNE_STREAM)
    initial = plainly(assemble(parts.recipe).initial)
    w, anchor, models = oracle.fedcouncil(federation(parts, ledger, told.adapted), initial, wanted)
    torch.testing.assert_close(plainly(state.params), w, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(plainly(state.anchor), anchor, rtol=1e-6, atol=1e-6)
    mixed = 0
    for client, local in parts.engine.locals.items():
        for prefix, name in ((OWN, "own"), (ADAPTED, "adapted composed"), (ADAPTED_ANCHOR, "adapted anchor")):
            torch.testing.assert_close(plainly(under(prefix, local)), models[client][name], rtol=1e-6, atol=1e-6)
        mixed += compare(parts, state, client, local, models[client])
    assert mixed >= 6, "subsets with held-out rows"


def compare(parts: Assembly, state: Any, client: int, local: Any, models: dict[str, oracle.Weights]) -> int:
    """Compare a client's predictions from each subset with the oracle's; return how many had held-out rows."""
    held, model, towards = parts.fed.clients.owned(client), parts.fed.context.model, parts.algorithm.prior
    got = cut(BothModels(state.params, state.anchor), parts.fed.clients[client].blocks)
    tree, mixed = parts.algorithm.own_params(got, local), 0
    kept = rows_of(parts, parts.population.own_validation[client], held)  # type: ignore[index]
    x, y, _ = rows_of(parts, parts.population.train[client][:9], held)
    for size in range(1, len(held) + 1):
        for subset in itertools.combinations(held, size):
            expected = oracle.mixture(models, kept, (x, y, {}), subset, TEMPERATURES, towards)
            batch = Batch({m: x[m] for m in subset}, y, torch.arange(len(y)))
            found = parts.algorithm.predictor.logits(model, tree, batch).exp()
            torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
            mixed += oracle.weighed(models, kept, subset, TEMPERATURES, towards) is not None
    return mixed


# ---- what it contains


@pytest.mark.parametrize("engine", ENGINES)
def test_its_models_are_those_of_fedavg_fedavgm_local_and_fine_tuning_bit_for_bit(engine: str) -> None:
    parts, state, _ = played(council(engine, AWKWARD))
    others: dict[str, dict[str, Any]] = {
        "fedavg": {},
        "fedavgm": {"server": ServerOptimiser(optimiser="avgm", momentum=0.9, lr=0.3)},
        "local": {"evaluation": Evaluation(every=0)},
        "fedavg-ft": {},
    }
    found = {}
    for name, options in others.items():
        method = algorithm(name.replace("fedavgm", "fedavg"), **({"train": TRAIN} | options))
        other, after, _ = played(recipe(method, engine, AWKWARD, clients=CLIENTS))
        found[name] = after.params
        if name == "local":
            assert all(same(under(OWN, parts.engine.locals[k]), own) for k, own in other.engine.locals.items())
        if name == "fedavg-ft":
            other.fed.ask(other.algorithm.tune, list(parts.fed.clients.validated), Broadcast(after.params))
            tuned = {k: under(TUNED, own) for k, own in other.engine.locals.items()}
            assert all(same(under(ADAPTED_ANCHOR, own), tuned[k]) for k, own in parts.engine.locals.items())
    assert same(state.anchor, found["fedavg"])
    assert same(state.params, found["fedavgm"])


@pytest.mark.parametrize("engine", ENGINES)
def test_with_everything_off_it_is_fedavg_bit_for_bit(engine: str) -> None:
    clients = replace(CLIENTS, personal_test=0.2)
    found = []
    for name, options in (("fedavg", {}), ("fedcouncil", NOTHING)):
        method = algorithm(name, train=TRAIN, **options)
        parts, state, _ = played(recipe(method, engine, AWKWARD, clients=clients))
        sizes = sum(r["bytes"] for r in parts.ledger.rows())
        found.append((state.params, parts.algorithm.evaluate(state, parts.fed).metrics, sizes))
    (theirs, scores, sizes), (ours, own_scores, own_sizes) = found
    assert same(theirs, ours)
    assert scores == own_scores
    assert sizes == own_sizes


def test_with_server_momentum_alone_it_is_fedavgm_bit_for_bit() -> None:
    _, state, _ = played(council(**NOTHING | {"momentum": 0.9, "momentum_lr": 0.5, "anchor": False}))
    server = ServerOptimiser(optimiser="avgm", momentum=0.9, lr=0.5)
    _, after, _ = played(recipe(algorithm("fedavg", train=TRAIN, server=server), clients=CLIENTS))
    assert same(state.params, after.params)
    assert not state.anchor


# ---- its promise


@pytest.mark.parametrize("towards", ["flat", "global"])
def test_the_weights_promise_the_best_experts_loss_up_to_the_prior_over_the_rows(towards: Any) -> None:
    """A thousand draws of n held-out rows from a known distribution: the exact risk of the mixture, on average."""
    draw = torch.Generator().manual_seed(1)
    experts = Experts(num_models=3, num_global=1, num_views=1, num_temperatures=1)
    tables = torch.rand(3, 6, generator=draw).double().clamp(min=0.02)  # p(true class) of 3 models in 6 kinds of rows
    kinds = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.05, 0.05], dtype=torch.float64)
    atoms = tables.log().t().reshape(6, 3, 1, 1)
    each, prior = experts.log_likelihoods(atoms), experts.prior([], towards)
    risks = -(kinds @ each)
    for n in (1, 4, 20):
        rows = torch.multinomial(kinds.expand(4000, 6), n, replacement=True, generator=draw)
        posterior = (prior.log() + each[rows].cumsum(1)).softmax(-1)
        weights = (prior + posterior.sum(1)) / (n + 1)
        risk = -((weights @ each.exp().t()).log() @ kinds)
        bound = (risks - prior.log() / (n + 1)).min()
        error = 3 * float(risk.std()) / math.sqrt(len(risk))
        assert float(risk.mean()) <= float(bound) + error
        assert float(risk.mean()) > float(risks.min()) - 1.0, "the bound is about this risk"
    assert prior.sum() == pytest.approx(1.0)
    assert prior[0] == pytest.approx({"flat": 1 / 7, "global": 0.5}[towards])


def test_on_rows_like_the_held_out_ones_it_is_as_good_as_the_best_of_its_models() -> None:
    """The mean log loss of all clients' mixtures on new rows, beside that of each model and of the bound."""
    spec = ClientsSpec(partition="classes-per-client", num=8, classes_per_client=2, validation=0.25, personal_test=0.25)
    data = Toy(rows=800, classes=4, seed=5)
    parts, state, _ = played(replace(council("vectorised", clients=spec), data=data))
    model, losses, bound = parts.fed.context.model, [], []
    for client, local in parts.engine.locals.items():
        tree = parts.algorithm.own_params(BothModels(state.params, state.anchor), local)
        x, y, _ = rows_of(parts, parts.population.test[client], ("a", "b"))  # type: ignore[index]
        batch, places = Batch(x, y, torch.arange(len(y))), torch.arange(len(y))
        log_p = [parts.algorithm.predictor.logits(model, tree, batch)]
        log_p += [model.logits(one, batch).log_softmax(1) for one in Council().members(tree)]
        losses.append([-float(one[places, y].mean()) for one in log_p])
        bound.append(math.log(123) / (len(parts.population.own_validation[client]) + 1))  # type: ignore[index]
    mixture, anchor, composed, *_, own = torch.tensor(losses).mean(0).tolist()
    assert mixture <= min(anchor, composed) + sum(bound) / len(bound)
    assert mixture <= own + sum(bound) / len(bound)
    assert max(anchor, composed, own) > 1.3 * min(anchor, composed, own), "there is something to choose"


def test_without_held_out_rows_a_client_predicts_as_fedavg() -> None:
    parts, *_ = played(council(clients=replace(CLIENTS, validation=0.02)))
    rows = parts.population.own_validation
    assert rows is not None
    bare = [k for k in parts.engine.locals if not len(rows[k])]
    assert bare
    for client in bare:
        table = parts.engine.locals[client][WEIGHTS]
        assert torch.equal(table[..., 0, 0, 0], torch.ones(4))
        assert float(table.sum()) == 4.0


def test_each_subset_has_its_own_weights_and_they_add_up_to_one() -> None:
    parts, _, _ = played(council("vectorised"))
    table = parts.engine.locals[0][WEIGHTS]
    torch.testing.assert_close(table.sum((1, 2, 3)), torch.ones(4))
    assert not torch.allclose(table[1], table[3])
    assert float(table[1][:, 1:].sum()) == 0.0, "a single modality has no further single modality beside it"
    assert float(table[3][:, 1:].sum()) > 0.0


def test_a_model_with_infinite_parameters_gets_no_weight() -> None:
    parts, state, _ = played(council())
    broken = {n: torch.full_like(v, torch.nan) for n, v in state.params.items()}
    # the server would refuse to send it, so the client is asked directly
    context, local = parts.engine.context(0), dict(parts.engine.locals[0])
    tree = parts.algorithm.own_params(BothModels(broken, state.anchor), local)
    x, y, _ = rows_of(parts, parts.population.train[0], ("a", "b"))
    batch = Batch(x, y, torch.arange(len(y)))

    class Held:
        num_rows = torch.tensor(len(y))

        def fold(self, step: Any, carry: Any, **_: Any) -> Any:
            return step(carry, batch)

    table = Council().weighed(context, tree, Held())  # type: ignore[arg-type]
    assert float(table[3, 1].sum()) < 1 / len(y)
    assert bool(torch.isfinite(table).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_composed_model_that_diverges_leaves_the_others_as_they_are(engine: str) -> None:
    _, state, _ = played(council(engine, modality_loss=1e38))
    _, after, _ = played(recipe(algorithm("fedavg", train=TRAIN), engine, clients=CLIENTS))
    assert same(state.anchor, after.params)
    assert all(bool(torch.isfinite(v).all()) for v in state.params.values())
    assert math.isfinite(state.train_loss)


# ---- the placebo of each ingredient

BOTH = ClientsSpec(partition="iid", num=4, validation=0.25)


def test_the_momentums_placebo_is_a_second_model_of_fedavg_from_other_batches() -> None:
    _, state, _ = played(council(placebo="momentum"))
    _, after, _ = played(recipe(algorithm("fedavg", train=TRAIN), clients=CLIENTS))
    assert same(state.params, after.params)
    assert 0 < furthest(state.params, state.anchor) < 1


@pytest.mark.parametrize(("placebo", "changed"), [("own", {OWN}), ("adapted", {ADAPTED, ADAPTED_ANCHOR})])
def test_a_model_replaced_by_its_placebo_leaves_the_others_as_they_are(placebo: str, changed: set[str]) -> None:
    parts, state, _ = played(council())
    control, other, _ = played(council(placebo=placebo))
    assert same(state.params, other.params)
    assert same(state.anchor, other.anchor)
    pairs = [(parts.engine.locals[client], own) for client, own in control.engine.locals.items()]
    for prefix in (OWN, ADAPTED, ADAPTED_ANCHOR):
        equal = [same(under(prefix, one), under(prefix, two)) for one, two in pairs]
        assert any(equal) != (prefix in changed)
        assert all(equal) != (prefix in changed)


def test_class_frequencies_are_the_mean_loss_over_all_orders_of_the_labels() -> None:
    parts = assemble(council())
    context, w = parts.engine.context(0), parts.initial
    x, _, _ = rows_of(parts, parts.population.train[0][:6], ("a", "b"))
    y = torch.tensor([0, 1, 1, 1, 0, 0])
    batch = Batch(x, y, torch.arange(6), ok=torch.arange(6) < 4)  # two rows are padding
    orders = [torch.cat([y[list(order)], y[4:]]) for order in itertools.permutations(range(4))]
    expected = torch.stack([context.loss(w, replace(batch, y=order)) for order in orders]).mean()
    torch.testing.assert_close(class_frequencies(context, w, batch), expected)


def test_blind_predictions_from_a_single_modality_are_the_same_for_all_rows() -> None:
    parts, state, _ = played(council(placebo="unimodal"))
    predictor, model = parts.algorithm.predictor, parts.fed.context.model
    x, y, _ = rows_of(parts, parts.population.train[0], ("a", "b"))
    batch = Batch(x, y, torch.arange(len(y)))
    for found, blind in ((predictor, True), (replace(predictor, blind=False), False)):
        logits = found.singly(model, [state.params], [model.features(state.params, batch)], batch)
        assert logits.shape[2] == 2
        assert torch.equal(logits, logits[:1].expand_as(logits)) == blind


def test_the_loss_placebo_counts_the_loss_of_all_modalities_again() -> None:
    """With plain SGD, that is a larger learning rate of the composed model."""
    options = {"momentum": 0.0, "own": False, "adapted": 0, "clients": BOTH, "modality_loss": 0.5}
    _, state, _ = played(council(placebo="modality_loss", **options))
    larger = algorithm("fedavg", train=replace(TRAIN, lr=1.5 * TRAIN.lr))
    _, after, _ = played(recipe(larger, clients=BOTH))
    torch.testing.assert_close(dict(state.params), dict(after.params), rtol=1e-5, atol=1e-6)
    _, real, _ = played(council(**options))
    assert furthest(real.params, after.params) > 1e-3


def test_the_modulations_placebo_scales_all_encoders_by_the_mean_factor() -> None:
    factors = {}
    for placebo in ("none", "modulation"):
        parts = assemble(council(modulation=0.8, placebo=placebo))
        got = BothModels(parts.initial, parts.initial)
        directed = parts.algorithm.direction(parts.engine.context(0), None, got, {})
        grads = {n: torch.ones_like(v) for n, v in parts.initial.items()}
        out, _ = directed[0](grads, {}, {"a": torch.tensor(3.0), "b": torch.tensor(1.0)}, {})
        scaled = {m: [float(v.mean()) for n, v in out.items() if n.startswith(f"{m}.") and v.dim() > 1] for m in "ab"}
        factors[placebo] = {m: values[0] for m, values in scaled.items()}
    mean = sum(factors["none"].values()) / 2
    assert factors["none"]["a"] < factors["none"]["b"] == 1.0
    assert factors["modulation"] == pytest.approx({"a": mean, "b": mean})


def test_the_dropouts_placebo_leaves_out_whole_rows_as_often() -> None:
    method = algorithm("fedcouncil", dropout=0.3, placebo="dropout", train=TRAIN)
    assert method.local_train.modality_dropout == 0.0
    rows = torch.arange(2000)
    ok = rows < 1000
    kept = method._without_rows(Batch({}, torch.zeros(2000, dtype=torch.int64), rows, ok=ok, key=7)).ok
    assert not kept[1000:].any()
    assert float(kept[:1000].float().mean()) == pytest.approx(0.7, abs=0.05)


# ---- what leaves, what is refused, how it is used


def test_nothing_but_the_two_models_leaves_and_the_anchor_only_if_it_is_trained() -> None:
    for options, fields in (({}, {"params", "anchor"}), ({"anchor": False}, {"params"})):
        _, _, ledger = played(council("vectorised", **options))
        up = [r for r in ledger if r["destination"] == "server"]
        assert {r["field"] for r in up if r["kind"] == "parameters"} == fields
        assert {r["field"] for r in up} == fields | {"loss", "num_rows"}
        assert {r["kind"] for r in up} == {"parameters", "statistic"}


@pytest.mark.parametrize("engine", ENGINES)
def test_private_blocks_stay_on_the_client_and_need_the_anchor_off(engine: str) -> None:
    with refuses(RecipeError, "algorithm.private: anchor = false"):
        algorithm("fedcouncil", private=("b",))
    made = council(engine, private=("b",), anchor=False)
    parts, state, ledger = played(made)
    assert not any(n.startswith("b.") for n in state.params)
    assert not any(r["block"] == "b" and r["kind"] == "parameters" for r in ledger)
    assert parts.algorithm.global_params(state) is None
    tree = parts.algorithm.own_params(BothModels(state.params, {}), parts.engine.locals[0])
    assert any(n.startswith("b.") for n in Council().members(tree)[0])


def test_what_has_no_effect_or_cannot_be_is_refused() -> None:
    with refuses(RecipeError, "clients.validation: weighs") as refused:
        assemble(council(clients=replace(CLIENTS, validation=0.0)))
    assert refused.value.key == ("clients", "validation")
    with refuses(RecipeError, "evaluate.conformal: mixtures"):
        council(evaluation=Evaluation(every=0, conformal="split"))
    parts = assemble(council(**NOTHING))
    assert set(parts.algorithm.idle_options(parts.fed)) >= {"anchor", "calibrated", "prior", "placebo", "momentum_lr"}
    without = assemble(council(own=False, placebo="own"))
    assert "placebo" in without.algorithm.idle_options(without.fed)
    single = assemble(council(clients=replace(CLIENTS, holdings=[["a"], ["b"]])))
    assert set(single.algorithm.idle_options(single.fed)) >= {"modality_loss", "modulation", "dropout", "unimodal"}


def test_the_servers_validation_rows_choose_the_global_model() -> None:
    parts, state, _ = played(council(evaluation=Evaluation(every=1)))
    scores = {}
    for name, tree in (("anchor", state.anchor), ("composed", state.params)):
        scores[name] = parts.algorithm.evaluate_globally(tree, parts.fed).metrics["validation"]["macro_f1"]
    assert state.anchor_leads == (scores["anchor"] > scores["composed"])
    leader = state.anchor if state.anchor_leads else state.params
    assert same(parts.algorithm.global_params(state), leader)


def test_a_saved_and_an_exported_client_predict_as_the_run(tmp_path: Path) -> None:
    made = replace(council("vectorised", clients=replace(CLIENTS, personal_test=0.2)), rounds=2)
    run = polyfed.run(made, out=tmp_path / "run")
    parts = assemble(made)
    rows = parts.population.test[0]  # type: ignore[index]
    x = {m: parts.population.columns.modalities[m].raw(rows) for m in ("a", "b")}
    run.export(tmp_path / "model")
    for given in (x, {"a": x["a"]}):
        expected = run.predict(given, client=0)
        torch.testing.assert_close(expected.exp().sum(1), torch.ones(len(rows)))
        for found in (polyfed.load_run(tmp_path / "run"), polyfed.load_model(tmp_path / "model")):
            assert torch.equal(found.predict(given, client=0), expected)
    assert ANCHOR in {n.partition(".")[0] for n in run.personal[0]}


def test_an_early_stop_adapts_and_weighs_again() -> None:
    made = council("vectorised", evaluation=Evaluation(every=2))
    parts = assemble(made)
    state = parts.start()
    parts.fed.begin(1)
    state = parts.algorithm.round(state, parts.fed)
    assert state.weighed == 0
    before = {k: dict(own) for k, own in parts.engine.locals.items()}
    parts.fed.end_after(1)
    parts.algorithm.evaluate(state, parts.fed)
    after = parts.engine.locals
    client = next(k for k in before)
    assert not same(under(ADAPTED, before[client]), under(ADAPTED, after[client]))
    assert not torch.equal(before[client][WEIGHTS], after[client][WEIGHTS])
