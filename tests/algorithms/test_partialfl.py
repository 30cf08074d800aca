"""PartialFL: its loss by hand, all three models against plain loops, what crosses, and its reductions."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from oracles import partialfl as oracle
from polyfed.algorithms.partialfl import teacher_rows
from polyfed.algorithms.partialfl.partialfl import PartialFL
from polyfed.core import keys
from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError, RecipeError
from polyfed.data import ClientsSpec
from polyfed.data.sources import Toy
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.model import ModelSpec
from polyfed.selection import Uniform
from polyfed.training.client_data import ORDER
from polyfed.training.losses import contrastive
from polyfed.training.optimisers import Train
from refusals import refuses
from world import PLAIN, algorithm, furthest, played, recipe, same

ENGINES = ["sequential", "vectorised"]
SHARED = {"shared": {"server": ["parameters", "statistic"]}}
SHARES_B = {"b": {"server": ["parameters", "embeddings"]}} | SHARED
ADAM = Train(lr=0.01, batch_size=16, epochs=2, optimiser="adam")
SMALL: dict[str, Any] = {"local_hidden": (8,), "server_hidden": (12,), "selector": Uniform(participation=1.0)}


def some_own_b() -> ClientsSpec:
    """Five unequal clients; every other one lacks the shareable modality `b`."""
    return ClientsSpec(partition="dirichlet", num=5, alpha=1.0, holdings=[["a", "b"], ["a"]])


def partial(engine: str = "sequential", clients: ClientsSpec | None = None, **options: Any) -> Any:
    method = algorithm("partialfl", **(SMALL | {"train": ADAM} | options))
    return recipe(method, engine, egress=SHARES_B, clients=clients or some_own_b())


# the loss


def test_contrastive_loss_of_the_identity_is_ln_of_one_plus_e_to_minus_one() -> None:
    rows = torch.eye(2)
    assert float(contrastive(rows, rows, None, temperature=1.0)) == pytest.approx(0.3132616875, abs=1e-6)


def test_contrastive_loss_of_equal_students_by_hand() -> None:
    u, v = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.eye(2)
    mean = (0.6931471806 + 2.1269280110) / 2
    assert float(contrastive(u, v, None, temperature=0.5)) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("negatives", ["intra", "inter", "both"])
def test_contrastive_loss_equals_the_formula_row_by_row(negatives: Any) -> None:
    u, v = np.random.default_rng(0).normal(size=(2, 7, 5))
    ours = contrastive(torch.tensor(u), torch.tensor(v), None, temperature=0.7, negatives=negatives, normalise=False)
    assert float(ours) == pytest.approx(oracle.contrastive(u, v, 0.7, negatives), rel=1e-10)


def test_contrastive_loss_is_unmoved_by_row_order_and_by_a_common_rotation() -> None:
    u, v = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    base = contrastive(u, v, None, temperature=0.1)
    assert torch.allclose(base, contrastive(u[order], v[order], None, temperature=0.1))
    assert torch.allclose(base, contrastive(u @ turn, v @ turn, None, temperature=0.1))


def test_contrastive_loss_tends_to_ln_b_as_the_temperature_grows() -> None:
    u, v = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(1))
    assert float(contrastive(u, v, None, temperature=1e6)) == pytest.approx(math.log(9), abs=1e-4)


def test_a_batch_of_one_row_costs_nothing_and_moves_nothing() -> None:
    u = torch.randn(1, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    loss = contrastive(u, torch.ones(1, 4), None, temperature=0.05)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert u.grad is not None
    assert torch.equal(u.grad, torch.zeros_like(u))


def test_padding_is_neither_anchor_nor_negative() -> None:
    u, v = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    ok = torch.tensor([True, True, False, True, False, True])
    u[~ok] = float("inf")
    masked = contrastive(u, v, ok, temperature=0.2, normalise=False)
    assert torch.allclose(masked, contrastive(u[ok], v[ok], None, temperature=0.2, normalise=False))


def test_the_small_temperature_of_the_paper_does_not_overflow_on_raw_embeddings() -> None:
    u = (100 * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))).requires_grad_()
    contrastive(u, u.detach() * 2, None, temperature=0.05, normalise=False).backward()  # type: ignore[no-untyped-call]
    assert u.grad is not None
    assert bool(u.grad.isfinite().all())


def test_the_teacher_is_a_constant() -> None:
    u, v = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    v.requires_grad_()
    contrastive(u.requires_grad_(), v, None, temperature=0.1).backward()  # type: ignore[no-untyped-call]
    assert v.grad is None


# the whole method


def batches(key: Any, rows: int, train: Train) -> list[Tensor]:
    order_key = keys.fold_in(keys.fold_in(key, ORDER), 0)
    orders = [keys.permutation(keys.fold_in(order_key, epoch), rows) for epoch in range(train.epochs)]
    return [part for order in orders for part in order.split(train.batch_size)]


def filled(tower: nn.Module, tree: dict[str, Tensor]) -> Any:
    """Numbers of a tree in a plain module, matched by order: body then top, weight then bias."""
    values = [tree[n] for n in sorted(tree, key=lambda n: (".encoder." not in n, "shared" in n, n))]
    pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
    for layer, pair in zip((m for m in tower.modules() if isinstance(m, nn.Linear)), pairs, strict=True):
        for value in pair:
            (layer.weight if value.dim() == 2 else layer.bias).data.copy_(value)
    return tower


def oracle_devices(parts: Assembly, rounds: int, train: Train) -> list[oracle.Device]:
    columns, seed = parts.population.columns, parts.recipe.seed
    devices = []
    for k in range(parts.population.num_clients):
        rows = parts.population.train[k]
        owns = "b" in parts.population.modalities(k)
        x = {m: column.take(rows) for m, column in columns.modalities.items()}
        once = replace(train, epochs=1)
        devices.append(
            oracle.Device(
                private=x["a"],
                shared=x["b"] if owns else None,
                y=columns.label[rows],
                steps=[batches(keys.key(seed, "client", k, t), len(rows), train) for t in range(1, rounds + 1)],
                server_steps=[batches(keys.key(seed, "server", k, t), len(rows), once) for t in range(1, rounds + 1)],
            )
        )
    return devices


@pytest.mark.parametrize("engine", ENGINES)
def test_global_local_and_server_models_equal_plain_loops(engine: str) -> None:
    made = partial(engine, beta=0.3, temperature=0.2, mu=0.05)
    parts = assemble(made)
    devices = oracle_devices(parts, made.rounds, ADAM)
    model = filled(oracle.Tower(16, 12, 6, 4), parts.initial)
    for k, device in enumerate(devices):
        if device.shared is not None:
            start = made.algorithm.local(parts.engine.context(k), keys.key(made.seed, "local", k))
            device.local = filled(oracle.Tower(24, 8, 6, 4), start)
    parts.fed.begin(0)
    first = made.algorithm.init(parts.fed, parts.initial)
    server = filled(nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 6)), first.tower)
    oracle.run(model, server, devices, oracle.Setting(beta=0.3, temperature=0.2, mu=0.05, lr=ADAM.lr))
    done, state, _ = played(made)
    again = filled(oracle.Tower(16, 12, 6, 4), state.params)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    tower = filled(nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 6)), state.tower)
    for ours, theirs in zip(tower.parameters(), server.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    for k, device in enumerate(devices):
        if device.local is not None:
            mine = filled(oracle.Tower(24, 8, 6, 4), done.engine.locals[k])
            for ours, theirs in zip(mine.parameters(), device.local.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def private_only(name: str, engine: str, clients: ClientsSpec, **options: Any) -> Any:
    """A federated baseline that has never heard of the shareable modality."""
    made = recipe(algorithm(name, **options), engine, {"a": PLAIN["a"]}, clients=clients)
    return replace(made, data=Toy(rows=330, classes=4, seed=3, shapes={"a": (16,)}, snr={"a": 3.0}))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("baseline", "mu"), [("fedavg", 0.0), ("fedprox", 0.1)])
def test_without_beta_it_is_the_baseline_bit_for_bit(engine: str, baseline: str, mu: float) -> None:
    common: dict[str, Any] = {"train": ADAM, "selector": Uniform(participation=3), "aggregation": "uniform"}
    everyone = ClientsSpec(partition="dirichlet", num=5, alpha=1.0)
    _, ours, _ = played(partial(engine, everyone, beta=0.0, mu=mu, **common))
    options = {"mu": mu} if baseline == "fedprox" else {}
    _, theirs, _ = played(private_only(baseline, engine, everyone, **common, **options))
    assert same(ours.params, theirs.params)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("baseline", "mu"), [("fedavg", 0.0), ("fedprox", 0.1)])
@pytest.mark.filterwarnings("ignore:no client has training rows")
def test_without_owners_of_the_shareable_modality_it_is_the_baseline_bit_for_bit(
    engine: str, baseline: str, mu: float
) -> None:
    common: dict[str, Any] = {"train": ADAM, "selector": Uniform(participation=3), "aggregation": "uniform"}
    nobody = ClientsSpec(partition="dirichlet", num=5, alpha=1.0, missing={"b": 1.0})
    _, ours, rows = played(partial(engine, nobody, beta=5.0, mu=mu, **common))
    options = {"mu": mu} if baseline == "fedprox" else {}
    alone = replace(nobody, missing={})
    _, theirs, _ = played(private_only(baseline, engine, alone, **common, **options))
    assert same(ours.params, theirs.params)
    assert not [row for row in rows if row["kind"] == "embeddings"]


def test_the_contrastive_terms_matter_where_beta_is_not_zero() -> None:
    assert not same(played(partial(beta=0.0))[1].params, played(partial(beta=0.5))[1].params)


def test_who_is_not_drawn_keeps_its_local_model() -> None:
    made = partial(selector=Uniform(participation=2))
    parts = assemble(made)
    fed = parts.fed
    fed.begin(0)
    state = made.algorithm.init(fed, parts.initial)
    fed.begin(1)
    made.algorithm.round(state, fed)
    drawn = {row["client"] for row in parts.ledger.rows() if row["round"] == 1}
    for k in range(5):
        start = made.algorithm.local(parts.engine.context(k), keys.key(made.seed, "local", k))
        if "b" in parts.population.modalities(k) and k in parts.engine.locals:
            assert same(parts.engine.locals[k], start) == (k not in drawn)


def test_teachers_are_those_of_the_tower_as_it_is_when_they_are_sent() -> None:
    parts, state, _ = played(partial())
    parts.fed.begin(4)
    sent = parts.algorithm.outgoing(state, [0], parts.fed)[0]
    tower = filled(nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 6)), state.tower)
    x = parts.population.columns.modalities["b"].take(parts.population.train[0])
    torch.testing.assert_close(sent.teacher["b"], tower(x).detach())
    assert not sent.teacher["b"].requires_grad


# what crosses


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_follow_the_formula(engine: str) -> None:
    _, state, rows = played(partial(engine, beta=0.1))
    parts = assemble(partial(engine))
    model = 4 * sum(v.numel() for v in state.params.values())
    for k in range(5):
        n, owns = len(parts.population.train[k]), "b" in parts.population.modalities(k)
        mine = [row for row in rows if row["client"] == k and row["kind"] != "statistic"]
        once = sum(row["bytes"] for row in mine if row["round"] == 0)
        down = sum(row["bytes"] for row in mine if row["round"] == 2 and row["destination"] == "client")
        up = sum(row["bytes"] for row in mine if row["round"] == 2 and row["destination"] == "server")
        assert once == (4 * 24 * n if owns else 0)
        assert up == down == model + (4 * n * 6 if owns else 0)


def test_neither_labels_nor_local_parameters_nor_private_samples_ever_cross() -> None:
    seen: list[tuple[str, Tensor]] = []
    parts = assemble(partial(beta=0.1))
    asked = parts.engine.answer

    def listen(request: Any, clients: Any, send: Any) -> Any:
        answer = asked(request, clients, send)
        for part in answer.parts:
            for name in part.message.kinds:
                value = getattr(part.message, name)
                seen.extend([(name, value)] if isinstance(value, Tensor) else value.items())
        return answer

    parts.engine.answer = listen  # type: ignore[method-assign]
    parts.fed.begin(0)
    state = parts.algorithm.init(parts.fed, parts.initial)
    for round in (1, 2):
        parts.fed.begin(round)
        state = parts.algorithm.round(state, parts.fed)
    locals_ = [value for tree in parts.engine.locals.values() for value in tree.values()]
    private = parts.population.columns.modalities["a"].values.float()
    labels = [parts.population.columns.label[parts.population.train[k]] for k in range(5)]
    for name, sent in seen:
        flat = sent.reshape(-1)
        for secret in (*locals_, *labels):
            assert not (flat.numel() == secret.numel() and torch.equal(flat.float(), secret.reshape(-1).float())), name
        if sent.dim() == 3 and sent.shape[-1] == 16:
            assert not torch.isin(sent, private).any(), name


def test_other_labels_on_a_device_change_only_its_model_and_its_embeddings() -> None:
    made = partial(beta=0.1)

    def first_reply(flip: bool) -> tuple[Any, Any]:
        parts = assemble(made)
        label = parts.engine.columns.label
        rows = parts.population.train[0]
        label[rows] = label[rows].flip(0) if flip else label[rows]
        parts.fed.begin(0)
        state = parts.algorithm.init(parts.fed, parts.initial)
        parts.fed.begin(1)
        sent = parts.algorithm.outgoing(state, [0], parts.fed)
        return state, parts.fed.ask(parts.algorithm.client_train, [0], sent)[0]

    (state, plain), (other_state, flipped) = first_reply(False), first_reply(True)
    assert same(state.deposits[0], other_state.deposits[0])
    assert same(state.tower, other_state.tower)
    assert not same(plain.params, flipped.params)
    assert not same(plain.student, flipped.student)
    assert plain.num_rows == flipped.num_rows


def test_check_announces_embeddings_of_the_shareable_modality_alone_and_no_labels() -> None:
    planned = check(partial()).planned
    assert {(row.kind, row.block) for row in planned} == {
        ("embeddings", "b"),
        ("parameters", "a"),
        ("parameters", "shared"),
        ("statistic", "shared"),
    }
    assert all(row.allowed for row in planned)


def test_a_policy_that_is_wide_for_shared_changes_nothing() -> None:
    wide = {"shared": {"server": ["parameters", "statistic", "embeddings", "raw"]}}
    made = partial()
    _, state, rows = played(made)
    _, again, same_rows = played(replace(made, egress={**SHARES_B, **wide}))
    assert same(state.params, again.params)
    assert rows == same_rows


def test_raw_inputs_need_a_policy_that_lets_samples_go() -> None:
    with refuses(RecipeError, "egress: raw"):
        assemble(partial(inputs="raw"))
    shared = {"b": {"server": ["parameters", "embeddings", "raw"]}} | SHARED
    _, _, rows = played(replace(partial(inputs="raw"), egress=shared))
    assert {row["field"] for row in rows if row["kind"] == "raw"} == {"samples"}


# switches and refusals


def test_a_policy_that_shares_nothing_is_refused_with_the_line_that_would_help() -> None:
    with refuses(RecipeError, "egress: [egress.b] server = "):
        assemble(replace(partial(), egress={}))


def test_a_policy_that_shares_everything_leaves_no_private_modality() -> None:
    with refuses(RecipeError, "algorithm.global_model: nothing private"):
        assemble(replace(partial(), egress={m: {"server": ["parameters", "embeddings"]} for m in "ab"}))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_any_modality_of_the_global_model_trains_its_local_model_alone(engine: str) -> None:
    clients = ClientsSpec(partition="iid", num=4, holdings=[["a", "b"], ["b"]])
    parts, state, rows = played(partial(engine, clients, beta=0.2))
    sent = {(r["field"], r["block"]) for r in rows if r["client"] == 1 and r["destination"] == "server"}
    assert ("student", "b") in sent
    assert ("vectors", "b") in sent
    assert not {field for field, _ in sent} & {"params"}
    start = parts.algorithm.local(parts.engine.context(1), keys.key(parts.recipe.seed, "local", 1))
    assert not same(start, parts.engine.locals[1])
    alone = replace(clients, holdings=[["a", "b"], ["a"]])
    assert state.params.keys() == played(partial(engine, alone, beta=0.2))[1].params.keys()
    assert all(bool(torch.isfinite(v).all()) for v in state.params.values())


def lacking(made: Any, share: int) -> Assembly:
    """The same run on data in which every `share`-th row lacks the shareable modality, its content being garbage."""
    source = replace(made.data)
    columns = source.load()
    there = torch.arange(len(columns.label)) % share != 0
    values = columns.modalities["b"].values.clone()
    values[~there] = 1e6
    changed = replace(columns.modalities["b"], values=values)
    columns = replace(columns, modalities=columns.modalities | {"b": changed}, present={"b": there})
    return assemble(replace(made, data=Given(columns)))


@dataclass(frozen=True)
class Given(Toy):
    """Columns that a test made."""

    columns: Any = None

    def load(self) -> Any:
        return self.columns


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_without_the_shareable_modality_have_no_teacher_and_do_not_leave(engine: str) -> None:
    made = replace(partial(engine, ClientsSpec(partition="iid", num=4), beta=0.3, probe=True), rounds=2)
    parts = lacking(made, 3)
    states = []
    parts.fed.begin(0)
    states.append(parts.algorithm.init(parts.fed, parts.initial))
    for k, rows in states[0].deposits.items():
        there = parts.population.columns.present["b"][parts.population.train[k]]
        assert torch.equal(rows["present.b"].bool(), there)
        assert not rows["b"][~there].any()
    for round in (1, 2):
        parts.fed.begin(round)
        states.append(parts.algorithm.round(states[-1], parts.fed))
    last = states[-1]
    everything = (
        *last.params.values(),
        *last.tower.values(),
        *(v for t in parts.engine.locals.values() for v in t.values()),
    )
    assert all(float(v.abs().max()) < 100 for v in everything)  # the garbage of absent rows has reached no model
    assert 0 < last.logged["teacher_accuracy"] <= 1


def test_absent_rows_change_neither_losses_nor_alignment() -> None:
    model_rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    z_T = {"b": torch.randn(6, 4, generator=torch.Generator().manual_seed(3))}
    there = torch.tensor([True, False, True, True, False, True])
    y = torch.arange(6) % 2
    part = Batch(x={"b": model_rows}, y=y, rows=torch.arange(6), present={"b": there})
    whole = Batch(x={"b": model_rows[there]}, y=y[there], rows=torch.arange(6)[there])
    method = PartialFL(same_class_negatives=False)
    for labels in (None, y):
        ours = method.contrast({"b": model_rows}, z_T, part, labels)
        theirs = method.contrast({"b": model_rows[there]}, z_T, whole, None if labels is None else labels[there])
        torch.testing.assert_close(ours, theirs)
    near = {"b": torch.arange(6.0)}
    assert float(teacher_rows.mean_alignment(near, part, None)) == pytest.approx(float(near["b"][there].mean()))


def test_same_class_rows_can_be_left_out_of_the_negatives() -> None:
    u, v = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    classes = torch.tensor([0, 0, 1, 1, 2])
    ours = contrastive(u, v, None, temperature=0.5, classes_B=classes)
    a, b = nn.functional.normalize(u, dim=1), nn.functional.normalize(v, dim=1)
    wanted = 0.0
    for i in range(5):
        below = sum(math.exp(float(a[i] @ a[j]) / 0.5) for j in range(5) if classes[j] != classes[i])
        positive = math.exp(float(a[i] @ b[i]) / 0.5)
        wanted -= math.log(positive / (positive + below)) / 5
    assert float(ours) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"beta_local": 0.9},
        {"same_class_negatives": False},
        {"server_epochs": 3},
        {"keep_server_optimiser": False},
        {"keep_local_optimiser": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_the_paper_leaves_open_change_the_run_and_engines_agree(options: dict[str, Any]) -> None:
    plain = played(partial("vectorised", beta=0.3))[1]
    one, state, ledger = played(partial("sequential", beta=0.3, **options))
    many, other, ledger_many = played(partial("vectorised", beta=0.3, **options))
    assert not same(plain.params | plain.tower, other.params | other.tower)
    assert furthest(state.params, other.params) < 1e-3
    assert ledger == ledger_many
    assert one.engine.locals.keys() == many.engine.locals.keys()


def test_a_kept_local_optimiser_equals_one_uninterrupted_optimiser() -> None:
    made = partial(beta=0.0, keep_local_optimiser=True, clients=ClientsSpec(partition="iid", num=2))
    parts, _, _ = played(made)
    rows = parts.population.train[0]
    columns = parts.population.columns
    local_model = made.algorithm.local_model(parts.fed.context.model, ("b",))
    tower = filled(oracle.Tower(24, 8, 6, 4), local_model.init(keys.key(made.seed, "local", 0)))
    optimiser = torch.optim.Adam(tower.parameters(), lr=ADAM.lr)
    for t in range(1, made.rounds + 1):
        for at in batches(keys.key(made.seed, "client", 0, t), len(rows), ADAM):
            x, y = columns.modalities["b"].take(rows)[at], columns.label[rows][at]
            oracle.step(optimiser, nn.functional.cross_entropy(tower.top(tower.body(x)), y))
    mine = {n: v for n, v in parts.engine.locals[0].items() if not n.startswith("moment.") and n != "steps"}
    again = filled(oracle.Tower(24, 8, 6, 4), mine)
    for ours, theirs in zip(again.parameters(), tower.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_probe_reads_how_well_class_means_of_the_teacher_tell_the_classes() -> None:
    _, state, rows = played(partial(beta=0.1, probe=True))
    assert 0 < state.logged["teacher_accuracy"] <= 1
    assert "teacher_accuracy" not in played(partial(beta=0.1))[1].logged
    assert {r["block"] for r in rows if r["field"] == "probe"} == {"shared"}
    parts = assemble(partial())
    data = parts.fed.server_data({"b": torch.zeros(8, 24)}, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    z = nn.functional.one_hot(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), 4).float()
    assert float(teacher_rows.nearest_mean_accuracy({"b": z}, data, 4)) == 1.0
    wrong = z.roll(1, 0)
    assert float(teacher_rows.nearest_mean_accuracy({"b": wrong}, data, 4)) == 0.0


def test_what_has_no_effect_is_told() -> None:
    method = PartialFL(beta=0.1)
    assert "have not aligned" in method.concerns([{"alignment": 0.01}, {"alignment": 0.03}])[0]
    assert method.concerns([{"alignment": 0.01}, {"alignment": 0.2}]) == []
    assert "no teacher" in method.concerns([{}, {}])[0]
    assert PartialFL(beta=0.0).concerns([{}]) == []


def test_a_multimodal_global_model_needs_a_joint_embedding() -> None:
    with refuses(RecipeError, "model.head: ties together"):
        played(partial(global_model="all"))


@pytest.mark.parametrize("model", [{"head": (6,)}, {"fusion": "sum"}, {"fusion": "gated", "head": (5,)}])
def test_the_multimodal_global_model_trains_all_blocks_on_both_engines(model: Any) -> None:
    spec = ModelSpec(embedding=6, encoders=PLAIN, **model)
    clients = ClientsSpec(partition="dirichlet", num=5, alpha=1.0, holdings=[["a", "b"], ["a"], ["b"]])
    found = []
    for engine in ENGINES:
        made = replace(partial(engine, clients, global_model="all", beta=0.2), model=spec)
        parts, state, _ = played(made)
        found.append(state)
        moved = {n for n in state.params if not torch.equal(state.params[n], parts.initial[n])}
        assert {n.split(".")[0] for n in moved} == {"a", "b", "shared"}
    assert furthest(found[0].params, found[1].params) < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_several_shareable_modalities_and_one_private(engine: str) -> None:
    shapes, encoders = {m: (5,) for m in "pqr"}, {m: {"kind": "mlp"} for m in "pqr"}
    egress = {m: {"server": ["parameters", "embeddings"]} for m in "qr"} | SHARED
    clients = ClientsSpec(partition="iid", num=4, holdings=[["p", "q", "r"], ["p", "q"], ["p", "r"], ["p"]])
    made = replace(partial(engine, clients), data=Toy(rows=200, shapes=shapes, snr={}, classes=3), egress=egress)
    made = replace(made, model=ModelSpec(embedding=4, encoders=encoders))
    _, state, rows = played(made)
    assert {m.split(".")[0] for m in state.tower} == {"q", "r"}
    sent = {(r["client"], r["block"]) for r in rows if r["kind"] == "embeddings" and r["destination"] == "server"}
    assert sent == {(0, "q"), (0, "r"), (1, "q"), (2, "r")}


@pytest.mark.parametrize("inputs", ["images", "series"])
def test_towers_and_local_models_read_images_and_series(inputs: str) -> None:
    """Not MLPs alone: a convolution reads the shape of a sample, and both engines agree."""
    image = {"kind": "resnet18", "stem": "cifar", "widths": [4, 4, 4, 4], "norm": "group"}
    entry, shape = (image, (1, 8, 8)) if inputs == "images" else ({"kind": "conv2d-gru", "hidden": 5}, (9, 6))
    found = []
    for engine in ENGINES:
        # small steps of SGD: with large ones, or with Adam, the rounding of the first steps grows
        plain = Train(lr=0.003, batch_size=16)
        made = partial(engine, local_encoders={"b": entry}, server_encoders={"b": entry}, beta=0.5, train=plain)
        made = replace(
            made,
            data=Toy(rows=150, classes=4, shapes={"a": (6,), "b": shape}, seed=2),
            model=ModelSpec(embedding=6, encoders={"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}),
            rounds=1,
        )
        parts, state, _ = played(made)
        assert any(value.dim() == 4 for value in state.tower.values())
        owners = [local for local in parts.engine.locals.values() if local]
        assert owners
        assert all(any(value.dim() == 4 for value in local.values()) for local in owners)
        found.append(state)
    assert furthest(found[0].params, found[1].params) < 1e-4
    assert furthest(found[0].tower, found[1].tower) < 1e-3, "biases that start at zero are still small"


def test_encoders_of_local_models_are_checked() -> None:
    with refuses(ModelError, "b.kind"):
        partial(server_encoders={"b": {"kind": "mpl"}})
    with refuses(RecipeError, "algorithm.local_encoders: policy"):
        played(partial(local_encoders={"a": {"kind": "mlp"}}))


def test_a_recipe_names_the_encoders_of_the_tower() -> None:
    table: dict[str, Any] = {
        "data": {"name": "toy"},
        "clients": {"num": 4, "partition": "iid"},
        "model": {"head": [4], "encoders": {"a": {"kind": "mlp"}, "b": {"kind": "mlp"}}},
        "algorithm": {"name": "partialfl", "server_encoders": {"b": {"kind": "mlp", "hidden": [7]}}},
        "egress": {"b": {"server": ["parameters", "embeddings"]}},
    }
    made = parse_recipe(table).algorithm
    assert made.server_encoders == {"b": {"kind": "mlp", "hidden": [7]}}


def test_options_without_meaning_are_refused() -> None:
    for options in ({"temperature": 0.0}, {"beta": -1.0}, {"mu": -0.1}):
        with pytest.raises(RecipeError):
            PartialFL(**options)  # type: ignore[arg-type]
