"""HFM and its controls: the invariants and edge cases of docs/algorithms/hfm.md."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import polyfed
from algorithms.silo_world import OPEN, Silos, silo_model
from oracles.hfm import Settings, centralised, encode, hfm, top, vfl
from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.hfm import check_aligned
from polyfed.core.errors import DataError, EgressError, PolyfedWarning, RecipeError, TooFewReplies
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.federation.links.network import Network
from polyfed.federation.replies import Answer
from polyfed.model import Model, ModelSpec
from polyfed.privacy.egress.gate import EgressGate
from polyfed.privacy.egress.policy import Policy
from polyfed.training import SingleClientData
from polyfed.training.client_data import Loss
from polyfed.training.optimisers import Train
from refusals import refuses, warned
from world import furthest, played, recipe, same

ENGINES = ("sequential", "vectorised")
TWO = [["a"], ["b"]]
UNEQUAL = Silos([40, 23, 17], [TWO, TWO, TWO])
LACKING = Silos([30, 24], [TWO, [["a"]]])


def method(name: str = "hfm", **options: Any) -> Any:
    """Exactly determined: every local round is one step on all rows of the silo."""
    plain = {"train": Train(lr=0.1), "local_unit": "step", "batch_fraction": 1.0, "local_rounds": 3, "exchanges": 2}
    return ALGORITHMS[name](**(plain | options))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, Settings(q=3, r=2)),
        ({"mu": 0.5}, Settings(q=3, r=2, mu=0.5)),
        ({"head_update": "server"}, Settings(q=3, r=2, head_at_edge=True)),
        ({"head_update": "server", "mu": 0.5, "exchanges": 1}, Settings(q=3, r=1, mu=0.5, head_at_edge=True)),
        ({"local_unit": "epoch", "inner_batch": 64}, Settings(q=3, r=2)),
        ({"resample": False}, Settings(q=3, r=2)),
    ],
    ids=["plain", "fedprox", "c-vfl", "c-vfl-fedprox", "an-epoch-of-one-batch-is-a-step", "fixed-batch"],
)
@pytest.mark.parametrize("world", [UNEQUAL, LACKING], ids=["unequal", "a-silo-without-b"])
def test_the_timeline_equals_an_independent_one(
    world: Silos, options: dict[str, Any], how: Settings, engine: str
) -> None:
    state, _, _ = world.play(method(**options), engine=engine)
    assert furthest(state.params, hfm(world.data(), world.initial, 2, how)) < 2e-5


def test_every_exchange_draws_its_own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    minimise = SingleClientData.minimise

    def noted(view: SingleClientData, loss: Loss, params: Tree, **options: Any) -> Any:
        return minimise(view, lambda w, batch: drawn.append(batch.key) or loss(w, batch), params, **options)

    monkeypatch.setattr(SingleClientData, "minimise", noted)
    Silos([40], [TWO]).play(method(local_rounds=4, exchanges=3), rounds=2)
    assert len(drawn) == len(set(drawn)) == 2 * 4 * 3 * 2  # devices, local rounds, exchanges, rounds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("head", ["device_average", "server"])
def test_one_silo_equals_vfl_bit_for_bit(head: str, engine: str) -> None:
    options = {"head_update": head, "local_unit": "epoch", "inner_batch": 8, "batch_fraction": 0.5}
    one = Silos([40], [TWO])
    whole, _, _ = one.play(method(**options), engine=engine, rounds=3)
    alone, runs, _ = one.play(method("vfl", **options), engine=engine, rounds=3)
    assert same(whole.params, {name: silo_model(alone, runs, 0)[name] for name in whole.params})


@pytest.mark.parametrize("head", ["device_average", "server"])
def test_the_proximal_term_of_vfl_holds_the_head_to_the_one_last_sent(head: str) -> None:
    state, runs, _ = UNEQUAL.play(method("vfl", mu=0.5, head_update=head))
    how = Settings(q=3, r=1, mu=0.5, head_at_edge=head == "server")
    for silo, data in enumerate(UNEQUAL.data()):
        assert furthest(silo_model(state, runs, silo), vfl(data, UNEQUAL.initial, 4, how)) < 2e-5


@pytest.mark.parametrize("head", ["device_average", "server"])
def test_fresh_embeddings_make_one_step_of_centralised_sgd(head: str) -> None:
    one = Silos([40], [TWO])
    state, _, _ = one.play(method(local_rounds=1, exchanges=4, head_update=head))
    assert furthest(state.params, centralised(one.data()[0], one.initial, 8, 0.1)) < 1e-5


def test_fresh_embeddings_and_equal_silos_make_centralised_sgd_on_the_union() -> None:
    world = Silos([30, 30, 30], [TWO] * 3)
    parts = world.data()
    union = replace(
        parts[0],
        x={m: torch.cat([part.x[m] for part in parts]) for m in "ab"},
        y=torch.cat([part.y for part in parts]),
    )
    state, _, _ = world.play(method(local_rounds=1, exchanges=1), rounds=3)
    assert furthest(state.params, centralised(union, world.initial, 3, 0.1)) < 1e-5


def test_embeddings_with_batch_statistics_are_those_of_the_step() -> None:
    """With Q = 1 and all rows in a batch, the two devices' head copies then see the same logits, so they agree."""
    norm = Silos([40], [TWO], encoders={"a": ENCODER_NORM, "b": ENCODER_NORM})
    for eval_mode, agree in ((False, True), (True, False)):
        algorithm = method(local_rounds=1, exchanges=1, eval_embeddings=eval_mode)
        fed, _ = norm.federation(algorithm)
        fed.begin(0)
        state = algorithm.init(fed, norm.initial)
        seen = spied(fed)
        fed.begin(1)
        algorithm.round(state, fed)
        copies = [reply.head for reply in seen["practise"].values()]
        assert (furthest(*copies) < 1e-5) is agree


ENCODER_NORM = {"kind": "algorithms.test_hfm:Norm"}


class Norm(torch.nn.Sequential):
    """Linear, BatchNorm, ReLU, Linear."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        linear = torch.nn.Linear
        super().__init__(linear(shape[0], 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), linear(8, embedding))


def spied(fed: Any) -> dict[str, Any]:
    """Replies of the requests to come, by task; what was sent under `to `."""
    seen: dict[str, Any] = {}
    ask = fed.ask

    def listening(task: Any, clients: Any, send: Any, **how: Any) -> Any:
        seen[task.__name__] = ask(task, clients, send, **how)
        seen["to " + task.__name__] = send
        return seen[task.__name__]

    fed.ask = listening
    return seen


def test_learning_rate_zero_changes_nothing() -> None:
    state, runs, _ = UNEQUAL.play(method(train=Train(lr=0.0)))
    assert furthest(state.params, UNEQUAL.initial) < 1e-6
    for client in range(6):
        assert furthest(runs.locals[client], {n: UNEQUAL.initial[n] for n in runs.locals[client]}) < 1e-6
    assert state.drift == 0.0


def test_without_mu_there_is_no_proximal_term() -> None:
    plain, _, _ = UNEQUAL.play(method())
    off, _, _ = UNEQUAL.play(method(mu=0.0))
    pulled, _, _ = UNEQUAL.play(method(mu=5.0))
    assert same(plain.params, off.params)
    assert furthest(pulled.params, UNEQUAL.initial) < furthest(plain.params, UNEQUAL.initial)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_proximal_term_leaves_batch_statistics_out(engine: str) -> None:
    """Right after an adoption, with nothing learned, parameters are at their anchors while BatchNorm's buffers move."""
    norm = Silos([40], [TWO], encoders={"a": ENCODER_NORM, "b": ENCODER_NORM})
    told = []
    for mu in (0.0, 1.0):
        state, runs, _ = norm.play(method(train=Train(lr=0.0), mu=mu), rounds=2, engine=engine)
        told.append(state.train_loss)
        buffer = "a.encoder.1.running_mean"
        assert furthest({buffer: runs.locals[0][buffer]}, {buffer: norm.initial[buffer]}) > 0.01
    assert told[1] == pytest.approx(told[0], rel=1e-6)


@pytest.mark.parametrize(("mu", "twin"), [(0.0, "fedavg"), (0.3, "fedprox")])
def test_hfl_is_fedavg_or_fedprox_on_stacked_input(mu: float, twin: str) -> None:
    world = {"clients": ClientsSpec(partition="silos", silos=4), "stack": {"all": ["a", "b"]}}
    model = ModelSpec(embedding=6, encoders={"all": {"kind": "mlp", "hidden": [8]}})
    train = Train(lr=0.1, batch_size=16)
    options = {"mu": mu} if mu else {}
    ours = recipe(ALGORITHMS["hfl"](train=train, **options), model=model, **world)
    theirs = recipe(ALGORITHMS[twin](train=train, **options), model=model, **world)
    assert same(played(ours)[1].params, played(theirs)[1].params)


def test_hfl_without_stacked_modalities_is_refused_with_the_line_to_write() -> None:
    with refuses(RecipeError, "data.stack: stacked modalities"):
        played(recipe(ALGORITHMS["hfl"]()))


# what crosses


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_traffic_is_that_of_the_formulas(mu: float) -> None:
    q, r, rows = 3, 2, {0: 16, 1: 9, 2: 7}  # 0.4 of 40, 23 and 17
    world = UNEQUAL
    state, runs, _ = world.play(method(batch_fraction=0.4, local_rounds=q, exchanges=r, mu=mu), rounds=1)
    entries = list(runs.ledger.rows())
    head = 4 * (2 * 4 * 3 + 4)  # two maps (4, 3) and a bias (4,), float32
    encoders = {0: 4 * (7 * 6 + 7 + 3 * 7 + 3), 1: 4 * (5 * 9 + 5 + 3 * 5 + 3)}

    def total(message: str, field: str, client: int, places: tuple[str, ...]) -> int:
        picked = [e for e in entries if (e["message"], e["field"], e["client"]) == (message, field, client)]
        assert {e["destination"] for e in picked} <= set(places)
        return sum(e["bytes"] for e in picked)

    for client in range(6):
        batch, modality = rows[client // 2], client % 2
        assert total("Embedded", "embeddings", client, ("silo",)) == r * batch * 3 * 4
        assert total("Copy", "head", client, ("silo",)) == r * head
        assert total("Exchange", "head", client, ("client",)) == r * head
        assert total("Exchange", "embeddings", client, ("client",)) == r * 2 * batch * 3 * 4
        assert total("Adopt", "params", client, ("client",)) == encoders[modality]
        assert total("Adopt", "head", client, ("client",)) == (head if mu else 0)
        up = encoders[modality] + (head if modality == 0 else 0)  # the first device forwards the edge's head
        assert total("Upload", "params", client, ("server",)) == up
    inside = ("Embedded", "Copy", "Exchange", "Sample", "Forward")
    assert state.silo_bytes == sum(e["bytes"] for e in entries if e["message"] in inside)
    assert state.server_bytes == sum(e["bytes"] for e in entries if e["message"] in ("Adopt", "Adopted", "Upload"))


def test_raw_data_and_labels_never_cross_and_embeddings_stop_at_the_edge() -> None:
    canary = 1234.5
    world = Silos([40, 23], [TWO, TWO])
    for column in world.columns.modalities.values():
        column.values[:, 0] = canary
    algorithm = method(train=Train(lr=1e-6))
    fed, runs = world.federation(algorithm)
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    sent: list[torch.Tensor] = []
    answer = runs.answer

    def listening(*asked: Any) -> Any:
        got = answer(*asked)
        for part in got.parts:
            for name in part.message.kinds:
                value = getattr(part.message, name)
                sent.extend([value] if isinstance(value, torch.Tensor) else value.values())
        return got

    runs.answer = listening
    fed.begin(1)
    algorithm.round(state, fed)
    assert sent
    assert not any(bool((value == canary).any()) for value in sent)
    rows = list(runs.ledger.rows())
    assert {row["kind"] for row in rows if row["destination"] == "server"} <= {"parameters", "statistic"}
    assert {row["kind"] for row in rows if row["destination"] == "silo"} == {
        "parameters", "embeddings", "ids", "statistic",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        ({}, "ids of shared"),
        ({"shared": {"silo": ["ids", "statistic"]}}, "embeddings of a"),
    ],
)
def test_a_policy_that_keeps_embeddings_or_ids_is_obeyed(closed: dict[str, Any], words: str) -> None:
    with refuses(EgressError, words):
        UNEQUAL.play(method(), policy=Policy.parse(closed, ("a", "b")))


def test_a_head_that_may_not_reach_the_server_stops_hfm_but_not_vfl() -> None:
    inside = Policy({**OPEN.rules, ("shared", "server"): frozenset({"statistic"})})
    with warned("reach the server"):
        UNEQUAL.play(method("vfl"), policy=inside)
    with refuses(EgressError, "parameters of shared"):
        UNEQUAL.play(method(), policy=inside)


INSIDE = {m: {"silo": ["parameters", "embeddings"]} for m in "ab"} | {
    "shared": {"silo": ["parameters", "statistic", "ids"]}
}
"""`OPEN` as a recipe says it."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What leaves devices, by destination; the bias in `shared` starts at the canary."""
    seen: dict[str, list[Any]] = {"server": [], "silo": []}
    init, release = Model.init, EgressGate.release

    def with_canary(self: Any, key: int) -> Any:
        return {n: torch.full_like(v, CANARY) if n == "shared.bias" else v for n, v in init(self, key).items()}

    def listening(self: Any, request: Any, reply: Any, **how: Any) -> Any:
        if not self.on_server:
            values = [getattr(reply, name) for name in reply.kinds]
            seen[request.scope] += [t for v in values for t in ([v] if isinstance(v, torch.Tensor) else v.values())]
        return release(self, request, reply, **how)

    monkeypatch.setattr(Model, "init", with_canary)
    monkeypatch.setattr(EgressGate, "release", listening)
    return seen


CANARY = 1234.5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("closed", "words", "own_test"),
    [
        ({"shared": {"server": ["statistic"]}}, "metrics.global", None),
        ({"a": {"server": ["statistic"]}}, "metrics.global", None),
        ({"shared": {"server": []}}, "metrics.global", 0.3),
    ],
    ids=["shared", "an-encoder", "nothing-of-shared"],
)
def test_vfl_runs_under_a_policy_that_keeps_its_models_from_the_server(
    closed: dict[str, Any], words: str, own_test: Any, engine: str, sent: dict[str, list[Any]], tmp_path: Any
) -> None:
    rules = {block: row | closed.get(block, {}) for block, row in INSIDE.items()}
    still = method("vfl", train=Train(lr=0.0), evaluation=Evaluation(every=1))
    clients = ClientsSpec(partition="silos", silos=2, personal_test=own_test)
    made = recipe(still, engine, clients=clients, egress=rules)
    with warned(words):
        run = polyfed.run(made, tmp_path)
    assert run.result["metrics"] == {}
    assert sent["server"] == []
    assert any(bool((value == CANARY).all()) for value in sent["silo"])
    with refuses(EgressError, "the policy forbids"):
        polyfed.run(replace(made, algorithm=method()))


@pytest.mark.parametrize("engine", ENGINES)
def test_silos_judge_themselves_on_their_own_test_rows(engine: str, sent: dict[str, list[Any]]) -> None:
    inside = {**INSIDE, "shared": {**INSIDE["shared"], "server": ["statistic"], "accept": ["parameters"]}}
    clients = ClientsSpec(partition="silos", silos=3, personal_test=0.3)
    made = recipe(method("vfl", evaluation=Evaluation(every=0)), engine, clients=clients, egress=inside)
    with warned("silos evaluate"):
        run = polyfed.run(made)
    assert set(run.result["metrics"]) == {"personal"}
    assert {value.dim() for value in sent["server"]} <= {0, 1}, "more than a number a device, or a stack of these"
    assert not any(bool((value > 1000).any()) for value in sent["server"])
    told = run.rounds[-1]["personal_accuracy"]
    whole = polyfed.run(replace(made, egress=INSIDE))
    assert set(whole.result["metrics"]) == {"global", "unimodal", "personal"}
    assert whole.rounds[-1]["personal_accuracy"] == told
    with pytest.warns(PolyfedWarning):
        parts, state, _ = played(made)
    own = parts.population.test
    assert own is not None
    for silo in range(3):
        rows = own[2 * silo]
        w = silo_model(state, parts.engine, silo)
        x = {name: column.take(rows) for name, column in parts.population.columns.modalities.items()}
        guess = top(w, {name: encode(w, name, value) for name, value in x.items()}).argmax(1)
        right = float((guess == parts.population.columns.label[rows]).float().mean())
        assert told[str(2 * silo)] == pytest.approx(right, abs=1e-6)


def test_a_silo_of_which_a_device_does_not_answer_is_not_judged() -> None:
    algorithm = method("vfl")
    state, _, fed = UNEQUAL.play(algorithm, lost={("upload", 3), ("embed_own", 3)})
    whole = algorithm.evaluate(state, fed).metrics["global"]
    fed.engine.lost = {("upload", 2), ("upload", 3)}  # type: ignore[attr-defined]
    assert algorithm.evaluate(state, fed).metrics["global"] == whole
    fed.engine.lost = {("upload", client) for client in (0, 2, 4)}  # type: ignore[attr-defined]
    assert algorithm.evaluate(state, fed).metrics == {}


# edge cases of 3.6


def test_a_device_missing_in_an_exchange_counts_as_zeros_or_as_what_it_sent_for_the_same_rows() -> None:
    world = Silos([40], [TWO])
    for resample in (True, False):
        algorithm = method(resample=resample, batch_fraction=0.5, exchanges=1)
        fed, _ = world.federation(algorithm, lost={("none", 0)})
        fed.begin(0)
        state = algorithm.init(fed, world.initial)
        fed.begin(1)
        state = algorithm.round(state, fed)
        fed.engine.lost = {("embed", 1)}  # type: ignore[attr-defined]
        seen = spied(fed)
        fed.begin(2)
        algorithm.round(state, fed)
        phi = seen["to practise"]
        assert set(phi) == {0}
        assert set(phi[0].embeddings) == ({"a"} if resample else {"a", "b"})


@dataclass
class Unreached:
    """An engine whose asks of this task do not reach some devices in the set-up and in round 1."""

    engine: Any
    task: str
    devices: set[int]

    def answer(self, request: Any, clients: Any, send: Any) -> Answer:
        gone = {
            c: "unreached" for c in clients if c in self.devices and request.name == self.task and request.round < 2
        }
        left = [c for c in clients if c not in gone]
        answer = self.engine.answer(request, left, send) if left else Answer([], {})
        return Answer(answer.parts, answer.missing | gone)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"mu": 0.5}, {"mu": 0.5, "head_update": "server"}], ids=["", "mu", "c-vfl"])
@pytest.mark.parametrize(("lost", "left"), [({2}, ["b"]), ({3}, ["a"]), ({2, 3}, [])], ids=["a", "b", "all"])
def test_a_device_that_missed_the_broadcast_sits_the_round_out(
    lost: set[int], left: list[str], options: dict[str, Any], engine: str
) -> None:
    algorithm = method(**options)
    fed, runs = UNEQUAL.federation(algorithm, engine)
    fed.engine = Unreached(runs, "adopt", lost)  # type: ignore[assignment]
    fed.begin(0)
    state = algorithm.init(fed, UNEQUAL.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    for client in lost:
        assert same(runs.locals[client], algorithm.local(runs.context(client), 0))
    silos = UNEQUAL.data()
    how = Settings(q=3, r=2, mu=options.get("mu", 0.0), head_at_edge="head_update" in options)
    silos[1] = replace(silos[1], x={name: silos[1].x[name] for name in left})
    first = hfm([silo for silo in silos if silo.x], UNEQUAL.initial, 1, how)
    assert furthest(state.params, first) < 2e-5
    fed.begin(2)
    assert furthest(algorithm.round(state, fed).params, hfm(UNEQUAL.data(), first, 1, how)) < 2e-5


def test_parts_of_the_head_that_no_loss_reaches_do_not_decay() -> None:
    world = Silos([40], [TWO])
    algorithm = method(train=Train(lr=0.1, weight_decay=0.5), exchanges=1)
    fed, _ = world.federation(algorithm, lost={("embed", 1)})
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    fed.begin(1)
    state = algorithm.round(state, fed)
    assert torch.equal(state.params["b.fusion.weight"], world.initial["b.fusion.weight"])
    assert not torch.equal(state.params["a.fusion.weight"], world.initial["a.fusion.weight"])


def test_a_silo_whose_devices_are_all_missing_keeps_its_head() -> None:
    world = Silos([40, 23], [TWO, TWO])
    algorithm = method("vfl")
    state, _, _ = world.play(algorithm, rounds=1, lost={("embed", 2), ("embed", 3)})
    assert same(state.heads[1], {name: world.initial[name] for name in state.heads[1]})
    assert not same(state.heads[0], state.heads[1])


def test_a_silo_of_one_device_trains_as_usual() -> None:
    world = Silos([40], [[["a", "b"]]])
    state, _, _ = world.play(method(local_rounds=3, exchanges=2))
    assert furthest(state.params, centralised(world.data()[0], world.initial, 12, 0.1)) < 1e-5


def test_silos_without_rows_are_left_out() -> None:
    some = Silos([40, 0], [TWO, TWO])
    alone = Silos([40], [TWO])
    state, _, _ = some.play(method())
    assert sorted(state.heads) == [0]
    assert same(state.params, alone.play(method())[0].params)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({1: list(range(1, 40))}, "ids none"),
        ({1: [1, 0, *range(2, 40)]}, "another order"),
        ({1: [0, 0, *range(2, 40)]}, "ids none"),
    ],
    ids=["one-missing", "another-order", "one-twice"],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_misaligned_silos_are_refused_with_the_ids(ids: dict[int, list[int]], words: str, engine: str) -> None:
    with refuses(DataError, words):
        Silos([40], [TWO], ids=ids).play(method(), engine=engine)


def test_an_alignment_error_names_five_ids_and_counts_the_rest() -> None:
    with refuses(DataError, "ids 8"):
        check_aligned(2, {4: torch.arange(8), 7: torch.tensor([8])})


def test_a_silo_of_which_no_device_answers_is_told() -> None:
    with refuses(TooFewReplies, "none of its"):
        check_aligned(2, {})


def test_wrong_arrangements_and_settings_are_refused() -> None:
    with refuses(RecipeError, "clients.partition: algorithm needs"):
        played(recipe(method()))
    with refuses(RecipeError, "clients.holdings: modality twice"):
        Silos([40], [[["a", "b"], ["b"]]]).play(method())
    for wrong in ({"local_rounds": 0}, {"batch_fraction": 0.0}, {"mu": -1.0}):
        with refuses(RecipeError, f"algorithm.{next(iter(wrong))}: must be"):
            method(**wrong)


# judging and numbers


def test_vfl_reports_the_mean_over_silos() -> None:
    world = UNEQUAL
    algorithm = method("vfl")
    state, runs, fed = world.play(algorithm)
    measured = algorithm.evaluate(state, fed).metrics["global"]
    rows = world.columns.rows(1)
    x = {name: column.take(rows) for name, column in world.columns.modalities.items()}
    hits = []
    for silo in range(3):
        w = silo_model(state, runs, silo)
        logits = top(w, {name: encode(w, name, value) for name, value in x.items()})
        hits.append(float((logits.argmax(1) == world.columns.label[rows]).float().mean()))
    assert measured["accuracy"] == pytest.approx(sum(hits) / 3, abs=1e-6)


def test_staleness_is_how_far_embeddings_moved_within_an_exchange() -> None:
    world = Silos([40], [TWO])
    algorithm = method(local_rounds=3, exchanges=1)
    fed, runs = world.federation(algorithm)
    fed.begin(0)
    state = algorithm.init(fed, world.initial)
    seen = spied(fed)
    fed.begin(1)
    state = algorithm.round(state, fed)
    moved = []
    for client, name in enumerate("ab"):
        x = world.columns.modalities[name].take(world.rows[0][seen["to practise"][0].rows])
        before, after = (encode(w, name, x) for w in (world.initial, runs.locals[client]))
        moved.append(float((after - before).norm() / before.norm()))
    assert algorithm.observe(state)["staleness"] == pytest.approx(sum(moved) / 2, rel=1e-4)
    assert algorithm.observe(state)["local_rounds"] == 3


def test_work_is_counted_for_a_devices_own_modalities_and_its_mini_batch_only() -> None:
    clients = ClientsSpec(partition="silos", silos=2)
    rules = {m: {"silo": ["parameters", "embeddings"]} for m in "ab"} | {
        "shared": {"silo": ["parameters", "statistic", "ids"]}
    }
    chosen = method(local_rounds=3, exchanges=2, batch_fraction=0.5)
    timed = recipe(chosen, clients=clients, egress=rules, network=Network(), rounds=1)
    parts, _, _ = played(timed)
    assert parts.fed.clock is not None
    noted: dict[int, float] = {}
    flops = {block: parts.model.flops(block) for block in ("a", "b", "shared")}
    for request in parts.fed.clock.spent_flops.values():
        for client, count in request.items():
            noted[client] = noted.get(client, 0.0) + count
    rows = int(parts.fed.clients.num_rows[0])
    batch = max(1, round(0.5 * rows))
    # an exchange: embeddings before and after, and 3 steps at three passes each, these through the whole first layer
    for client, (modality, other) in enumerate(("ab", "ba")):
        own = flops[modality] + flops["shared"]
        assert noted[client] == pytest.approx(2 * batch * (2 * own + 3 * 3 * (own + parts.model.part_flops(other))))


@pytest.mark.parametrize("world", [UNEQUAL, LACKING], ids=["unequal", "a-silo-without-b"])
@pytest.mark.parametrize("options", [{}, {"head_update": "server", "mu": 0.1}], ids=["plain", "c-vfl-fedprox"])
def test_engines_agree_on_unequal_silos(world: Silos, options: dict[str, Any]) -> None:
    small = {"local_unit": "epoch", "inner_batch": 5, "batch_fraction": 0.4}
    one, runs_one, _ = world.play(method(**small, **options))
    many, runs_many, _ = world.play(method(**small, **options), engine="vectorised")
    assert furthest(one.params, many.params) < 1e-5
    assert list(runs_one.ledger.rows()) == list(runs_many.ledger.rows())


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_kept_optimiser_goes_on_where_the_last_exchange_stopped(unit: str) -> None:
    # one silo of one device trains alone: with kept momentum, two exchanges of one step are one of two
    alone = Silos([20], [[["a"]]])
    plain: dict[str, Any] = {"train": Train(lr=0.1, momentum=0.9), "local_unit": unit, "inner_batch": 64}
    split = method(local_rounds=1, exchanges=4, keep_optimiser=True, **plain)
    joined = method(local_rounds=4, exchanges=1, **plain)
    fresh = method(local_rounds=1, exchanges=4, **plain)
    one, two, three = (alone.play(m, rounds=1)[0].params for m in (split, joined, fresh))
    assert furthest(one, two) < 1e-5
    assert furthest(one, three) > 1e-3


@pytest.mark.parametrize("name", ["hfm", "vfl"])
def test_a_kept_optimiser_agrees_on_both_engines_and_lives_over_rounds(name: str) -> None:
    own = method(name, train=Train(lr=0.05, momentum=0.9), keep_optimiser=True, mu=0.1)
    found = [UNEQUAL.play(own, engine=engine) for engine in ENGINES]
    assert furthest(found[0][0].params, found[1][0].params) < 1e-5
    steps = [int(local["steps"]) for local in found[0][1].locals.values()]
    assert steps == [2 * 3 * 2] * len(steps)


def test_a_kept_optimiser_needs_devices_that_train_the_head() -> None:
    with refuses(RecipeError, "algorithm.keep_optimiser: head_update"):
        method(keep_optimiser=True, head_update="server")
