"""Power-of-choice and DivFL: which clients they choose, what that costs, and what they refuse."""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from oracles import averaging as oracle
from oracles.baselines import mean_loss
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.tree import size_bytes
from polyfed.data import ClientsSpec
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.selection import SELECTORS, DivFl, PowD, Selector, Uniform
from polyfed.selection.submodular import Similarity, greedy, lazy_greedy, stochastic_greedy
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, furthest, played, recipe, same

CLIENTS = ClientsSpec(partition="dirichlet", num=8, alpha=0.7)
ENGINES = ["sequential", "vectorised"]


def made(selector: Selector, engine: str = "sequential", clients: ClientsSpec = CLIENTS, **options: Any) -> Any:
    return recipe(algorithm("fedavg", selector=selector, **options), engine, clients=clients)


def chosen(case: Any) -> tuple[list[int], Assembly]:
    parts = assemble(case)
    parts.fed.begin(1)
    selector = case.algorithm.selector
    cohort, _ = selector.choose(selector.start(parts.initial), parts.initial, parts.fed)
    return cohort, parts


def losses(parts: Assembly) -> list[float]:
    """Every client's loss at the initial model, with layers built afresh."""
    w, found = parts.initial, []
    model = oracle.LateFusion({"a": (16, 12), "b": (24, 10)}, 6, 4)
    with torch.no_grad():
        for name, tower in zip("ab", model.towers, strict=True):
            layers = [n for n in w if n.startswith(f"{name}.encoder.")]
            for parameter, source in zip(tower.parameters(), layers, strict=True):
                parameter.copy_(w[source])
        model.top.weight.copy_(torch.cat([w["a.fusion.weight"], w["b.fusion.weight"]], 1))
        model.top.bias.copy_(next(v for n, v in w.items() if n.startswith("shared.")))
    columns = parts.population.columns
    for rows in parts.population.train:
        x = {m: c.values[rows].float() for m, c in columns.modalities.items()}
        logits = model(x)
        found.append(mean_loss(lambda *_, logits=logits: logits, [], columns.label[rows]))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_all_as_candidates_gives_the_largest_losses(engine: str) -> None:
    cohort, parts = chosen(made(PowD(participation=3, d=8), engine))
    worst = sorted(range(8), key=lambda client: -losses(parts)[client])[:3]
    assert cohort == sorted(worst)


def test_as_many_candidates_as_places_is_a_random_draw_by_rows() -> None:
    case = made(PowD(participation=1, d=1))
    parts = assemble(case)
    counts: Counter[int] = Counter()
    for round in range(1, 1501):
        parts.fed.begin(round)
        drawn = case.algorithm.selector._draw(list(range(8)), parts.fed)
        counts.update(drawn)
    share = parts.population.train.sizes.numpy() / parts.population.train.sizes.sum().item()
    found = np.array([counts[c] for c in range(8)]) / 1500
    assert np.abs(found - share).max() < 4 * np.sqrt(share * (1 - share) / 1500).max()


def test_candidates_cost_a_model_down_and_a_number_up() -> None:
    parts, state, rows = played(made(PowD(participation=3, d=5), "vectorised"))
    asked = [row for row in rows if row["round"] == 1 and row["message"] in ("Candidate", "OwnLoss")]
    down = sum(row["bytes"] for row in asked if row["destination"] == "client")
    up = sum(row["bytes"] for row in asked if row["destination"] == "server")
    assert down == 5 * size_bytes(state.params)
    assert up == 5 * 4
    assert parts.fed.round == 3


def test_reported_losses_cost_nothing_and_put_new_clients_first() -> None:
    selector = PowD(participation=2, d=8, variant="reported")
    parts, _, rows = played(made(selector, "vectorised"))
    assert {row["message"] for row in rows} == {"Broadcast", "Update"}
    parts.fed.begin(9)
    memory = {0: 0.5, 1: 3.0, 2: 1.0, 3: 9.0}
    assert selector.choose(memory, {}, parts.fed)[0] == [4, 5]
    memory |= {4: 2.0, 5: 0.1, 6: 0.2, 7: 3.0}
    assert selector.choose(memory, {}, parts.fed)[0] == [1, 3]


@pytest.mark.parametrize("variant", ["full", "batch", "reported"])
def test_engines_agree_on_every_variant(variant: str) -> None:
    selector = PowD(participation=3, d=6, variant=variant, batch_size=8)  # type: ignore[arg-type]
    (_, one, ledger_one), (_, many, ledger_many) = (played(made(selector, engine)) for engine in ENGINES)
    assert furthest(one.params, many.params) < 1e-5
    assert ledger_one == ledger_many


def test_pow_d_refuses_what_has_no_meaning() -> None:
    with refuses(RecipeError, "selection.d: training"):
        chosen(made(PowD(participation=4, d=3)))
    with refuses(RecipeError, "selection.d: must be"):
        chosen(made(PowD(participation=4, d=9)))
    mixed = ClientsSpec(partition="iid", num=8, keep_both=0.5)
    with refuses(RecipeError, "selection.allow_incongruent: comparable"):
        chosen(made(PowD(participation=4, d=6), clients=mixed))
    cohort, _ = chosen(made(PowD(participation=4, d=6, allow_incongruent=True), clients=mixed))
    assert len(cohort) == 4


@pytest.mark.parametrize("grad", ["delta", "at_global"])
@pytest.mark.parametrize("greedy", ["stochastic", "lazy", "full"])
def test_divfl_engines_agree(grad: str, greedy: str) -> None:
    selector = DivFl(participation=3, grad=grad, greedy=greedy, train=Train(lr=0.1, batch_size=16, epochs=2))  # type: ignore[arg-type]
    (_, one, ledger_one), (_, many, ledger_many) = (played(made(selector, engine)) for engine in ENGINES)
    assert furthest(one.params, many.params) < 1e-5
    assert ledger_one == ledger_many


def test_lazy_and_full_choose_alike_over_a_whole_run() -> None:
    (_, lazy, _), (_, full, _) = (played(made(DivFl(participation=3, greedy=g))) for g in ("lazy", "full"))  # type: ignore[arg-type]
    assert same(lazy.params, full.params)


def test_at_global_is_the_gradient_over_all_rows() -> None:
    case = made(DivFl(participation=2, grad="at_global"))
    parts = assemble(case)
    parts.fed.begin(1)
    selector = case.algorithm.selector
    from polyfed.selection.divfl import GlobalModel

    reply = parts.fed.ask(selector.gradient, [0, 3], GlobalModel(parts.initial))[3]
    rows, columns = parts.population.train[3], parts.population.columns
    w = {n: v.clone().requires_grad_() for n, v in parts.initial.items()}
    z = {}
    for m in "ab":
        names = [n for n in w if n.startswith(f"{m}.encoder.")]
        hidden = torch.relu(columns.modalities[m].values[rows].float() @ w[names[0]].T + w[names[1]])
        z[m] = hidden @ w[names[2]].T + w[names[3]]
    bias = next(n for n in w if n.startswith("shared."))
    logits = sum(z[m] @ w[f"{m}.fusion.weight"].T for m in "ab") + w[bias]
    loss = -torch.log_softmax(logits, 1)[torch.arange(len(rows)), columns.label[rows]].mean()
    for name, grad in zip(w, torch.autograd.grad(loss, list(w.values())), strict=True):
        assert torch.allclose(reply.gradient[name], grad, atol=1e-5), name


def test_only_the_cohort_is_refreshed_and_missing_blocks_are_zero() -> None:
    mixed = ClientsSpec(partition="iid", num=6, keep_both=0.5)
    parts, state, _ = played(made(DivFl(participation=2), clients=mixed, engine="vectorised"))
    memory = state.memory
    assert len(memory.chosen) == 2
    assert bool(memory.similarity.known.all())
    again = memory.similarity.refreshed({memory.chosen[0]: torch.zeros_like(memory.similarity.vectors[0])})
    idle = [c for c in range(6) if c != memory.chosen[0]]
    assert torch.equal(again.distance[idle][:, idle], memory.similarity.distance[idle][:, idle])
    holds = parts.population.holds
    for client in range(6):
        assert (memory.similarity.vectors[client] == 0).any() == (not bool(holds[client].all()))


def test_cluster_weights_count_the_clients_that_each_one_represents() -> None:
    points = {c: torch.tensor([float(x)]) for c, x in enumerate([0, 1, 2, 50, 51, 90])}
    distance = Similarity.empty(6, 1).refreshed(points).distance
    memory = replace(DivFl(participation=2).start({}), chosen=[1, 3], distance=distance[:, [1, 3]])
    plain = {1: 7.0, 3: 9.0}
    assert DivFl(weights="clusters").weigh(memory, plain) == {1: 3.0, 3: 3.0}
    assert DivFl(weights="clusters").weigh(memory, {3: 9.0}) == {3: 6.0}  # client 1 has not answered
    assert DivFl(weights="samples").weigh(replace(memory, distance=None), plain) == plain
    assert Uniform().weigh({}, plain) == plain


@pytest.mark.parametrize("grad", ["delta", "at_global"])
def test_cluster_weights_come_from_the_distances_that_chose_the_cohort(
    grad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Similarity] = []
    greedy = DivFl._greedy

    def remembered(self: DivFl, similarity: Similarity, fed: Any) -> list[int]:
        before.append(similarity)
        return greedy(self, similarity, fed)

    found: list[dict[int, float]] = []
    weigh = DivFl.weigh

    def seen(self: DivFl, memory: Any, weights: Any) -> Any:
        found.append(dict(weigh(self, memory, weights)))
        return found[-1]

    monkeypatch.setattr(DivFl, "_greedy", remembered)
    monkeypatch.setattr(DivFl, "weigh", seen)
    played(made(DivFl(participation=3, weights="clusters", grad=grad)))
    assert len(found) == len(before) > 1
    for sizes, similarity in zip(found, before, strict=True):
        chosen = sorted(sizes)
        nearest = similarity.distance[:, chosen].argmin(1)
        assert sizes == {c: float((nearest == i).sum()) for i, c in enumerate(chosen)}


@pytest.mark.parametrize("choose", [greedy, lazy_greedy, partial(stochastic_greedy, of=2, key=3)])
def test_clients_without_a_vector_are_chosen_last(choose: Any) -> None:
    points = {c: torch.tensor([float(c)]) for c in range(20) if c % 4 == 0}
    chosen = choose(Similarity.empty(20, 1).refreshed(points), 7, range(20))
    assert {*chosen[:5]} == {*points}
    assert len({*chosen}) == 7


def test_cluster_weights_reach_the_mean() -> None:
    (_, clusters, _), (_, samples, _) = (
        played(made(DivFl(participation=3, weights=w), "vectorised"))  # type: ignore[arg-type]
        for w in ("clusters", "samples")
    )
    assert not same(clusters.params, samples.params)


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "moon"])
@pytest.mark.parametrize("selector", [PowD(participation=3, d=6), DivFl(participation=3)], ids=["pow-d", "divfl"])
def test_selectors_combine_with_other_algorithms(name: str, selector: Selector) -> None:
    method = algorithm(name, selector=selector)
    _, state, _ = played(recipe(method, "vectorised", clients=CLIENTS, rounds=2))
    assert all(bool(torch.isfinite(v).all()) for v in state.params.values())


def test_recipes_reach_every_option_and_pass_the_train_section() -> None:
    table = {
        "data": {"name": "toy"},
        "clients": {"num": 4, "partition": "iid", "participation": 2},
        "model": {"encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
        "algorithm": {"name": "fedavg"},
        "train": {"lr": 0.3},
    }
    wanted = {"grad": "at_global", "greedy": "lazy", "weights": "clusters", "sketch": 10}
    built = parse_recipe(table | {"selection": {"name": "divfl", **wanted}})
    found = built.algorithm.selector  # type: ignore[attr-defined]
    assert found == DivFl(participation=2, train=Train(lr=0.3), **wanted)  # type: ignore[arg-type]
    assert built.table()["selection"] == {"name": "divfl", **wanted}
    wanted = {"d": 3, "candidates": "uniform", "variant": "batch", "batch_size": 5, "allow_incongruent": True}
    built = parse_recipe(table | {"selection": {"name": "pow-d", **wanted}})
    assert built.algorithm.selector == PowD(participation=2, **wanted)  # type: ignore[attr-defined, arg-type]
    assert set(SELECTORS) == {"uniform", "pow-d", "divfl"}


def test_draws_come_from_a_stream_of_their_own() -> None:
    assert keys.key(1, "candidates", 1) != keys.key(1, "cohort", 1)


def test_a_seed_of_their_own_keeps_the_clients_while_the_run_draws_anew() -> None:
    def dealt(seed: int, own: int | None) -> Assembly:
        return assemble(replace(made(Uniform(), clients=replace(CLIENTS, seed=own)), seed=seed))

    rows = [dealt(*seeds).population.train.rows.tolist() for seeds in ((1, 8), (2, 8), (1, None), (2, None), (8, None))]
    assert rows[0] == rows[1] == rows[4], "the same seed, the same clients"
    assert rows[2] != rows[3]
    one, other = dealt(1, 8), dealt(2, 8)
    assert not same(one.initial, other.initial), "the model still follows the run's seed"


def test_a_huge_loss_is_dropped_and_a_plausible_one_fills_the_cohort_with_liars() -> None:
    def cohort(lie: float) -> tuple[list[int], list[str]]:
        case = made(PowD(participation=3, d=8))
        parts = assemble(case)
        answer, reasons = parts.fed.engine.answer, list[str]()

        def lying(request: Any, clients: Any, send: Any) -> Any:
            got = answer(request, clients, send)
            for part in got.parts:
                for place, client in enumerate(part.clients):
                    if client in (0, 1):
                        part.message.loss[place] = lie
            return got

        parts.fed.engine.answer = lying  # type: ignore[method-assign]
        parts.fed.emit = lambda kind, **facts: reasons.append(facts["reason"])  # type: ignore[method-assign]
        parts.fed.begin(1)
        selector = case.algorithm.selector
        return selector.choose(selector.start(parts.initial), parts.initial, parts.fed)[0], reasons

    for lie in (3e38, 1e12):
        found, reasons = cohort(lie)
        assert not {0, 1} & {*found}
        assert len(reasons) == 2
        assert all(why.startswith("loss is too large: it is") for why in reasons)
    largest = max(losses(assemble(made(PowD(participation=3, d=8)))))
    found, reasons = cohort(1.01 * largest)
    assert {0, 1} < {*found}, "two of eight candidates are two of three in the cohort: docs/robustness.md says so"
    assert not reasons
