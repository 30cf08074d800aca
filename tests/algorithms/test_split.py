"""Split learning and SplitFed: compared with a cut in plain PyTorch, FedAvg and central SGD; what crosses the cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oracles import split as oracle
from polyfed.algorithms.split.cut import Cut
from polyfed.core import keys
from polyfed.core.errors import EgressError, RecipeError, TooFewReplies
from polyfed.data import ClientsSpec
from polyfed.experiment.checks.check import check
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.federation import Federation
from polyfed.model import ModelSpec
from polyfed.selection import PowD, Uniform
from polyfed.start import run
from polyfed.training.client_data import ORDER
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, PLAIN, algorithm, furthest, losing, played, recipe, same

ENGINES = ["sequential", "vectorised"]
CUT = {"server": ["parameters", "embeddings"]}
SHARED = {"server": ["parameters", "statistic"]}
WITH_LABELS = {"a": CUT, "b": CUT, "shared": SHARED, "labels": {"server": ["labels"]}}
WITHOUT_LABELS = {"a": CUT, "b": CUT, "shared": {"server": ["parameters", "embeddings", "statistic"]}}
DEEP = ModelSpec(embedding=6, encoders=PLAIN, head=(5,))
ONE = ClientsSpec(partition="iid", num=1)
ALL = Uniform(participation=1.0)


def split(name: str, engine: str = "sequential", *, u: bool = False, **changes: Any) -> Any:
    options = changes.pop("options", {})
    egress = WITHOUT_LABELS if u else WITH_LABELS
    return recipe(algorithm(name, u_shaped=u, **options), engine, egress=egress, **({"model": DEEP} | changes))


@pytest.mark.parametrize("u", [False, True], ids=["plain", "u-shaped"])
@pytest.mark.parametrize("engine", ENGINES)
def test_splitfed_v1_is_fedavg_of_the_unsplit_model(engine: str, u: bool) -> None:
    train = Train(lr=0.01, batch_size=16, epochs=2, optimiser="adam", weight_decay=1e-3)
    ours = played(split("splitfed", engine, u=u, options={"train": train}))[1]
    theirs = played(recipe(algorithm("fedavg", train=train), engine, model=DEEP))[1]
    assert furthest(theirs.params, ours.params) < 1e-4
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_splitfed_v1_is_fedavg_with_batch_statistics_too(engine: str) -> None:
    spec = ModelSpec(embedding=6, encoders=AWKWARD)
    everyone = ClientsSpec(partition="dirichlet", num=4, alpha=1.0)
    ours = played(split("splitfed", engine, model=spec, clients=everyone))[1]
    theirs = played(recipe(algorithm("fedavg"), engine, model=spec, clients=everyone))[1]
    assert furthest(theirs.params, ours.params) < 1e-4


@pytest.mark.parametrize("name", ["split-learning", "splitfed"])
@pytest.mark.parametrize("u", [False, True], ids=["plain", "u-shaped"])
def test_with_one_client_it_is_central_sgd(name: str, u: bool) -> None:
    options = {"selector": ALL, "train": Train(lr=0.1, batch_size=16, epochs=2)}
    ours = played(split(name, u=u, clients=ONE, options=options))[1]
    theirs = played(recipe(algorithm("fedavg", **options), clients=ONE, model=DEEP))[1]
    assert furthest(theirs.params, ours.params) < 1e-5


def test_splitfed_v2_with_one_client_is_split_learning() -> None:
    adam = Train(lr=0.01, batch_size=16, optimiser="adam")
    version = {"version": 2, "selector": ALL, "train": adam}
    ours = played(split("splitfed", clients=ONE, options=version))[1]
    theirs = played(split("split-learning", clients=ONE, options={"selector": ALL, "train": adam}))[1]
    assert furthest(theirs.params, ours.params) < 1e-6


@pytest.mark.parametrize("num", [1, 2, 3])
def test_u_shaped_splitfed_v2_serves_client_after_client_with_the_newest_server_half(num: int) -> None:
    lr, clients = 0.5, ClientsSpec(partition="iid", num=num)
    options = {"version": 2, "selector": ALL, "train": Train(lr=lr, batch_size=0)}
    made = split("splitfed", u=True, clients=clients, rounds=1, options=options)
    parts, state, _ = played(made)
    columns, index = parts.population.columns, parts.population.train
    first = {name: value.clone() for name, value in parts.initial.items()}
    upper = {name: first[name] for name in ("a.fusion.weight", "b.fusion.weight", "shared.bias")}
    lowers, total = [], 0
    for k in keys.permutation(keys.key(made.seed, "turns", 1), num).tolist():
        x, y = {m: columns.modalities[m].take(index[k]) for m in "ab"}, columns.label[index[k]]
        w = {name: value.clone().requires_grad_() for name, value in (first | upper).items()}
        joint = w["shared.bias"]
        for m in "ab":
            hidden = torch.relu(x[m] @ w[f"{m}.encoder.0.weight"].T + w[f"{m}.encoder.0.bias"])
            z = hidden @ w[f"{m}.encoder.2.weight"].T + w[f"{m}.encoder.2.bias"]
            joint = joint + z @ w[f"{m}.fusion.weight"].T
        logits = torch.relu(joint) @ w["shared.head.1.weight"].T + w["shared.head.1.bias"]
        nn.functional.cross_entropy(logits, y).backward()
        after = {name: (value - lr * value.grad).detach() for name, value in w.items()}
        upper = {name: after[name] for name in upper}
        lowers.append((len(y), after))
        total += len(y)
    lower = {n: sum(rows / total * after[n] for rows, after in lowers) for n in first if n not in upper}
    assert furthest(state.params, upper | lower) < 1e-5


def test_split_learning_equals_a_plain_cut_client_after_client() -> None:
    train = Train(lr=0.01, batch_size=16, epochs=2, optimiser="adam")
    clients = ClientsSpec(partition="dirichlet", num=3, alpha=1.0)
    options = {"selector": ALL, "train": train}
    made = split("split-learning", clients=clients, options=options, model=ModelSpec(embedding=6, encoders=PLAIN))
    parts, state, _ = played(made)
    w, sizes = parts.initial, {"a": (16, 12), "b": (24, 10)}
    lower, upper = oracle.Lower(sizes, 6), nn.Linear(12, 4)
    with torch.no_grad():
        for m in sizes:
            lower.towers[m].load_state_dict(
                {n.removeprefix(f"{m}.encoder."): v for n, v in w.items() if n.startswith(f"{m}.encoder.")}
            )
        upper.weight.copy_(torch.cat([w["a.fusion.weight"], w["b.fusion.weight"]], 1))
        upper.bias.copy_(w["shared.bias"])
    above = torch.optim.Adam(upper.parameters(), lr=train.lr)
    for round in (1, 2, 3):
        for k in keys.permutation(keys.key(made.seed, "turns", round), 3).tolist():
            rows = parts.population.train[k]
            below = torch.optim.Adam(lower.parameters(), lr=train.lr)
            order_key = keys.fold_in(keys.fold_in(keys.key(made.seed, "client", k, round), ORDER), 0)
            for epoch in range(2):
                order = rows[keys.permutation(keys.fold_in(order_key, epoch), len(rows))]
                for part in order.split(16):
                    x = {m: parts.population.columns.modalities[m].take(part) for m in sizes}
                    oracle.step(lower, upper, x, parts.population.columns.label[part], [above, below])
    fused = torch.cat([state.params["a.fusion.weight"], state.params["b.fusion.weight"]], 1)
    torch.testing.assert_close(fused, upper.weight.detach(), rtol=1e-3, atol=1e-4)
    for m in sizes:
        for n, v in lower.towers[m].state_dict().items():
            torch.testing.assert_close(state.params[f"{m}.encoder.{n}"], v, rtol=1e-3, atol=1e-4)


def test_the_gradient_at_the_cut_is_that_of_the_unsplit_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = split("split-learning", clients=ONE, options={"selector": ALL}, rounds=1)
    parts = assemble(made)
    sent: dict[str, Any] = {}
    original = Federation.ask

    def listen(self: Federation, task: Any, clients: Any, send: Any, **options: Any) -> Any:
        replies = original(self, task, clients, send, **options)
        sent.setdefault(f"to {task.__name__}", send)
        sent.setdefault(f"from {task.__name__}", replies)
        return replies

    monkeypatch.setattr(Federation, "ask", listen)
    parts.fed.begin(0)
    state = made.algorithm.init(parts.fed, parts.initial)
    parts.fed.begin(1)
    made.algorithm.round(state, parts.fed)
    model, smashed = parts.model, sent["from start"][0]
    order_key = keys.fold_in(keys.fold_in(keys.key(made.seed, "client", 0, 1), ORDER), 0)
    rows = parts.population.train[0]
    rows = rows[keys.permutation(keys.fold_in(order_key, 0), len(rows))][:16]
    x = {m: column.take(rows) for m, column in parts.population.columns.modalities.items()}
    batch = replace(model.zero_batch(16, "ab"), x=x, y=parts.population.columns.label[rows])
    z = {m: v.detach().requires_grad_() for m, v in model.features(parts.initial, batch).items()}
    nn.functional.cross_entropy(model.fuse(parts.initial, z, batch), batch.y).backward()  # type: ignore[no-untyped-call]
    for m in "ab":
        torch.testing.assert_close(smashed.activations[m], z[m].detach())
        torch.testing.assert_close(sent["to backward"][0].gradients[m], z[m].grad)


# what crosses


@pytest.mark.parametrize("name", ["split-learning", "splitfed"])
def test_where_labels_may_not_leave_plain_is_refused_by_name_and_u_shaped_passes(name: str) -> None:
    closed = {**WITHOUT_LABELS, "labels": {"server": []}}
    with refuses(EgressError, "labels of labels"):
        run(replace(split(name), egress=closed))
    done = run(replace(split(name, u=True), egress=closed))
    assert done.result["metrics"]["global"]["accuracy"] >= 0.0
    assert not [row for row in check(replace(split(name, u=True), egress=closed)).planned if row.kind == "labels"]


def test_u_shaped_sends_no_label_ever() -> None:
    _, _, rows = played(split("splitfed", u=True))
    assert {row["kind"] for row in rows} == {"parameters", "embeddings", "statistic"}


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_are_those_of_activations_gradients_and_labels(engine: str) -> None:
    parts, state, rows = played(split("splitfed", engine, options={"selector": ALL}))
    assert isinstance(parts.algorithm.cut, Cut)  # type: ignore[attr-defined]
    for k in range(6):
        n, owned = len(parts.population.train[k]), parts.population.modalities(k)
        mine = [r for r in rows if r["client"] == k and r["round"] == 2 and r["kind"] != "statistic"]
        up, down = (sum(r["bytes"] for r in mine if r["destination"] == d) for d in ("server", "client"))
        lower = sum(4 * v.numel() for n_, v in state.params.items() if ".encoder." in n_ and n_[0] in owned)
        cut = 2 * n * 6 * len(owned) * 4  # two epochs, E = 6 floats for each modality
        assert down == lower + cut
        assert up == lower + cut + 2 * n * 8  # labels are int64


def test_options_without_meaning_are_refused() -> None:
    with refuses(RecipeError, "algorithm.u_shaped: true needs"):
        played(split("splitfed", u=True, model=ModelSpec(embedding=6, encoders=PLAIN)))


@pytest.mark.parametrize("name", ["split-learning", "splitfed"])
@pytest.mark.parametrize("task", ["start", "backward", "finish"])
def test_the_round_continues_without_a_client_that_fails(name: str, task: str) -> None:
    parts = assemble(split(name, clients=ClientsSpec(partition="iid", num=4), options={"selector": ALL}))
    method = parts.recipe.algorithm
    parts.fed.begin(1)
    state = method.init(parts.fed, parts.initial)
    lost = losing(parts, f".{task}", 2)
    after = method.round(state, parts.fed)
    assert set(lost) == {2}
    assert not same(after.params, state.params)
    losing(parts, f".{task}", 0, 1, 3)
    with refuses(TooFewReplies, "0 of 4"):
        method.round(state, parts.fed)


@pytest.mark.parametrize("name", ["split-learning", "splitfed", "fedgkt", "creamfl", "fedproto"])
def test_selectors_that_need_a_global_model_are_refused_where_there_is_none(name: str) -> None:
    options = {"mode": "original"} if name == "fedproto" else {}
    with pytest.raises(RecipeError) as caught:
        recipe(algorithm(name, selector=PowD(participation=2, d=3), **options))
    assert caught.value.key == ("selection", "name")
