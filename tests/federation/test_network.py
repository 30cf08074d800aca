"""Links, rates, simulated time: against formulas written out by hand and against what the channel should look like."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laws.test_laws import NAMES
from laws.test_laws import world as law_world
from oracles.pfmml import rate_bps
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Algorithm, Broadcast
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Crossing
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.engines.work_count import MeteredClientData
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.clock import Clock, Timetable
from polyfed.federation.links.network import Network
from polyfed.model import Model
from polyfed.privacy.egress.ledger import TO_CLIENT, Entry, Ledger
from polyfed.selection import Uniform
from polyfed.start import run
from polyfed.training import ClientData
from polyfed.training.losses import cross_entropy
from polyfed.training.optimisers import Train
from polyfed.training.step_plan import rows_trained, steps_trained
from refusals import refuses
from world import algorithm, played, recipe, same


def crossing(size: int) -> Crossing:
    return Crossing("params", "parameters", "a", "float32", (size // 4,), size)


def test_calibration_of_the_paper() -> None:
    # algorithms.md 4.5, W9: 21.7 Mbit/s at 25 m with the channel at its mean
    near = replace(Network(fading=False).links(1, 0), distance_m=torch.tensor([25.0]).double())
    assert float(near.rates(1).up_bps) == pytest.approx(21.7e6, rel=2e-3)


def test_rates_are_shannons() -> None:
    net = Network(power_down_w=0.4)
    links = net.links(6, 3)
    mean = 10 ** (-net.path_loss_db(links.distance_m) / 20)
    for k in range(6):
        unit = float(links.gains(2)[k] / mean[k])
        for power, found in ((0.1, links.rates(2).up_bps), (0.4, links.rates(2).down_bps)):
            by_hand = rate_bps(float(links.distance_m[k]), unit, power, 1e6, -174.0)
            assert float(found[k]) == pytest.approx(by_hand, rel=1e-9)


def test_fading_is_rayleigh_of_the_right_mean() -> None:
    links = Network().links(20_000, 1)
    unit = (links.gains(1) / 10 ** (-links.network.path_loss_db(links.distance_m) / 20)).numpy()
    assert unit.mean() == pytest.approx(1.0, abs=0.01)
    for level in (0.3, 1.0, 2.0):  # distribution function 1 - exp(-pi x^2 / 4) for unit mean
        assert (unit < level).mean() == pytest.approx(1 - math.exp(-math.pi * level**2 / 4), abs=0.01)
    assert np.corrcoef(links.gains(1), links.gains(2))[0, 1] < 0.9


def test_devices_are_uniform_in_the_disc() -> None:
    distance = Network(cell_radius_m=50.0).links(20_000, 1).distance_m.numpy()
    assert distance.min() >= 1.0
    assert distance.max() <= 50.0
    assert (distance < 25).mean() == pytest.approx(0.25, abs=0.01)


def test_a_device_keeps_its_draws_when_others_join() -> None:
    few, many = Network().links(5, 7), Network().links(50, 7)
    assert torch.equal(few.distance_m, many.distance_m[:5])
    assert torch.equal(few.rates(4).up_bps, many.rates(4).up_bps[:5])


def test_stragglers_are_a_share_of_the_devices() -> None:
    speed = Network(stragglers=0.3, straggler_slowdown=4.0, compute_flops_per_s=8.0).links(10, 1).compute_flops_per_s
    assert sorted(speed.tolist()) == [2.0] * 3 + [8.0] * 7


def test_clock_adds_download_work_and_upload_and_leaves_out_what_was_refused() -> None:
    net = Network(channel="fixed", rate_up_bps=10.0, rate_down_bps=40.0, latency_s=0.5, compute_flops_per_s=100.0)
    ledger = Ledger("r")
    clock = Clock(net.links(3, 0), ledger)
    clock.begin(1)
    ledger.book(Entry(1, 0, (0, 2), "M", (crossing(20),), TO_CLIENT, (True,)))
    ledger.book(Entry(1, 0, (0, 2), "M", (crossing(40), crossing(4)), "server", (True, False)))
    ledger.book(Entry(1, 1, (2,), "M", (crossing(8),), "silo", (True,)))
    ledger.book(Entry(2, 0, (1,), "M", (crossing(8),), "server", (True,)))  # another round
    clock.counter(0, (0, 2))(30.0, [5.0, 10.0])
    clock.counter(1, (0, 2))(1e9, [1.0, 1.0])
    clock.forget(1, (0, 2))
    times = clock.times()
    down, up = 0.5 + 160 / 40, 0.5 + 320 / 10
    assert times.seconds == {0: {0: down + up + 1.5, 2: down + up + 3.0}, 1: {2: pytest.approx(0.5 + 6.4)}}
    assert times.barriers() == pytest.approx(down + up + 3.0 + 6.9)
    assert times.chains([0]) == pytest.approx(down + up + 1.5)
    assert times.chains([]) == 0.0
    assert clock.finish() == times
    assert clock.spent_flops == {}


@pytest.mark.parametrize("enough", [None, 2])
def test_each_entry_of_a_round_is_timed_once_and_the_times_stay_the_same(
    enough: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, net = Ledger("x-1"), Network(deadline_s=1e9, compute_flops_per_s=10.0)
    clock, num = Clock(net.links(4, 0), ledger), 30
    ledger.book(Entry(0, 0, (0, 1), "M", (crossing(16),), TO_CLIENT, (True,)))  # of the set-up
    clock.begin(1)
    read: list[tuple[int, int]] = []
    size = Entry.bytes_each.fget
    assert size is not None
    monkeypatch.setattr(Entry, "bytes_each", property(lambda e: read.append((e.round, e.request)) or size(e)))
    for request in range(num):
        clients = (request % 4, (request + 1) % 4, (request + 2) % 4)
        ledger.book(Entry(1, request, clients, "M", (crossing(4 * request + 4),), TO_CLIENT, (True,)))
        clock.counter(request, clients)(1.0, [1.0, 2.0, 3.0])
        ledger.book(Entry(1, request, clients, "M", (crossing(8),), "server", (True,)))
        assert clock.late(request, clients) == {}
        if enough is not None:
            assert len(clock.closed_before(request, clients, enough)) == 1
    assert len([entry for entry in read if entry[0] == 1]) <= num * 8  # two entries, booked once, timed three times
    again = Clock(clock.links, ledger)
    again.begin(1)
    again.spent_flops, again.unawaited = clock.spent_flops, clock.unawaited
    assert clock.times() == again.times()
    assert [*clock.times().seconds] == [*range(num)]


def test_a_deadline_ends_the_wait() -> None:
    times = Timetable({0: {0: 1.0, 1: 9.0}, 1: {0: 1.0}}, deadline_s=4.0)
    assert times.barriers() == 4.0 + 1.0, "client 0 has spent only 2 s, so its second reply is in time"
    assert times.chains([0, 1]) == 4.0
    assert times.chains([0]) == 2.0
    again = Timetable({0: {0: 3.0}, 1: {0: 3.0}, 2: {0: 3.0}}, deadline_s=4.0)
    assert again.barriers() == again.chains([0]) == 4.0, "the server waits for one client no longer than the deadline"


@pytest.mark.filterwarnings("ignore:.*measures nothing")
@pytest.mark.parametrize("name", ["split-learning", "cmsfed"])
def test_a_deadline_that_nobody_misses_changes_no_simulated_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slowest: list[float] = []
    finish = Clock.finish

    def watched(clock: Clock) -> Timetable:
        times = finish(clock)
        slowest.append(max(times.by_client().values()))
        return times

    monkeypatch.setattr(Clock, "finish", watched)
    net = Network(channel="fixed", stragglers=0.3, compute_flops_per_s=1e7)
    sent = {m: {"server": ["parameters", "gradients", "embeddings", "prototypes", "statistic"]} for m in "ab"}
    made = recipe(algorithm(name), network=net, egress={**sent, "labels": {"server": ["labels"]}})
    free = run(made)
    deadline = 1.01 * max(slowest)
    tight = run(replace(made, network=replace(net, deadline_s=deadline)))
    assert not any(row["missing"] for row in tight.rounds)
    assert max(row["simulated_seconds"] for row in free.rounds) > deadline
    for row, as_before in zip(tight.rounds, free.rounds, strict=True):
        assert row["simulated_seconds"] == pytest.approx(as_before["simulated_seconds"], rel=1e-9)


@given(n=st.integers(0, 40), size=st.integers(0, 9), steps=st.none() | st.integers(0, 30), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_and_steps_are_those_of_a_loop(n: int, size: int, steps: int | None, skip: bool) -> None:
    train = Train(batch_size=size, steps=steps, epochs=2)
    rows = done = 0
    for _ in range(2 if steps is None else 31):
        for start in range(0, n, size or max(n, 1)):
            batch = min(size or n, n - start)
            if (skip and batch == 1) or (steps is not None and done == steps):
                continue
            rows, done = rows + batch, done + 1
    assert rows_trained(n, train, skip_single=skip) == rows
    assert steps_trained(n, train, skip_single=skip) == done


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_any_algorithm_can_be_timed_and_timing_changes_nothing_else(engine: str) -> None:
    method = algorithm("fedavg", selector=Uniform(participation=1.0))
    clients = ClientsSpec(partition="dirichlet", num=5, alpha=1.0, holdings=[["a", "b"], ["a"]])
    net = Network(bandwidth_hz=1e5, compute_flops_per_s=1e7)
    parts, state, ledger = played(recipe(method, engine, clients=clients, network=net))
    _, plain, plain_ledger = played(recipe(method, engine, clients=clients))
    assert same(state.params, plain.params)
    assert ledger == plain_ledger
    clock = parts.fed.clock
    assert clock is not None
    rates, seconds = clock.links.rates(3), []
    for k in parts.fed.clients:
        rows = [row for row in ledger if row["client"] == k and row["round"] == 3]
        down = 8 * sum(row["bytes"] for row in rows if row["destination"] == "client")
        up = 8 * sum(row["bytes"] for row in rows if row["destination"] == "server")
        flops = sum(parts.fed.context.model.flops(b) for b in (*parts.fed.clients[k].modalities, "shared"))
        work = 3 * 2 * int(parts.fed.clients.num_rows[k]) * flops
        seconds.append(down / float(rates.down_bps[k]) + up / float(rates.up_bps[k]) + work / 1e7)
    assert parts.algorithm.simulated_seconds(state, clock.finish()) == pytest.approx(max(seconds), rel=1e-9)


def test_late_clients_are_dropped_with_a_reason_and_the_round_goes_on() -> None:
    method = algorithm("fedavg", selector=Uniform(participation=1.0))
    slow = Network(channel="fixed", stragglers=0.34, straggler_slowdown=1e6, compute_flops_per_s=1e9, deadline_s=1.0)
    events: list[dict[str, Any]] = []
    made = recipe(method, network=slow, clients=ClientsSpec(partition="iid", num=6, personal_test=0.2))
    done = run(made, listeners=[lambda name, **facts: events.append({"event": name, **facts})])
    for row in done.rounds:
        assert len(row["missing"]) == 2
        assert all(why.startswith("late: ") and "deadline_s = 1" in why for why in row["missing"].values())
        assert row["simulated_seconds"] == 1.0
    assert len(done.rounds[-1]["personal_accuracy"]) == 6, "evaluation knows no deadline"
    assert done.result["simulated_seconds"] == 3.0


@pytest.mark.filterwarnings("ignore:.*measures nothing")  # time is counted here, nothing else
def test_a_resumed_run_counts_the_same_seconds(tmp_path: Path) -> None:
    made = recipe(algorithm("pfmml", uploads=2), network=Network())
    whole = run(made)

    def stop(event: str, **facts: Any) -> None:
        if event == "round-started" and facts["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path, listeners=[stop])
    again = run(made, tmp_path, resume=True).result
    assert again["simulated_seconds"] == whole.result["simulated_seconds"] > 0
    assert again["state_sha256"] == whole.result["state_sha256"]


@pytest.mark.parametrize(
    "wrong",
    [{"bandwidth_hz": 0.0}, {"stragglers": 1.5}, {"log_base": 1.0}, {"deadline_s": 0.0}, {"latency_s": -1.0}],
)
def test_meaningless_networks_are_refused(wrong: dict[str, Any]) -> None:
    with refuses(RecipeError, f"network.{next(iter(wrong))}: must be"):
        Network(**wrong)


@dataclass(frozen=True, kw_only=True)
class Only(Averaging):
    """Trains some blocks; `branches` makes `vmap` give up."""

    blocks: tuple[str, ...] = ("a", "b", "shared")
    branches: bool = False

    @task()
    def update(self, context: Any, data: ClientData, local: Tree, got: Broadcast) -> tuple[Update, Tree]:  # type: ignore[override]
        def loss(w: Tree, batch: Any) -> Any:
            return cross_entropy(context.model.logits(w, batch), batch)

        fit = data.minimise(loss, got.params, train=self.train, only=self.blocks)
        if self.branches and float(fit.loss) < 0:
            raise AssertionError
        return Update(fit.params, fit.loss, data.num_rows), local


def spent(method: Algorithm, engine: str, **options: Any) -> dict[int, dict[int, float]]:
    """Operations by ask and client in a first round."""
    net = Network(channel="fixed", compute_flops_per_s=1e3)
    parts = assemble(recipe(method, engine, network=net, **options))
    fed = parts.fed
    fed.begin(0)
    state = method.init(fed, parts.initial)
    fed.begin(1)
    method.round(state, fed)
    return fed.clock.spent_flops


def test_work_is_that_of_the_blocks_trained() -> None:
    clients = ClientsSpec(partition="iid", num=2)
    train = Train(lr=0.1, batch_size=16)
    whole, *parts = (
        spent(Only(train=train, blocks=blocks), "vectorised", clients=clients)[0]
        for blocks in (("a", "b", "shared"), ("a",), ("b",), ("shared",))
    )
    assert all(sum(part[client] for part in parts) == whole[client] for client in whole)
    assert all(0 < part[client] < whole[client] for part in parts[:2] for client in whole)
    assert not any(parts[2].values()), "a sum of one linear layer a modality: what is shared is a bias"


def test_a_stack_that_gives_up_does_not_count_its_work_twice() -> None:
    method = Only(train=Train(lr=0.1, batch_size=16), branches=True)
    assert spent(method, "vectorised") == spent(method, "sequential")


def test_the_local_model_of_partialfl_costs_what_its_width_asks() -> None:
    egress = {"b": {"server": ["parameters", "embeddings"]}, "shared": {"server": ["parameters", "statistic"]}}

    def work(width: int, engine: str) -> float:
        method = algorithm("partialfl", beta=0.1, local_hidden=(width,), server_hidden=(12,))
        holds = ClientsSpec(partition="iid", num=4, holdings=[["a", "b"], ["a"]])
        found = spent(method, engine, egress=egress, clients=holds)
        return sum(sum(of.values()) for of in found.values())

    assert work(512, "sequential") > 2 * work(8, "sequential")
    assert work(8, "vectorised") == work(8, "sequential")


BYTES, LABEL, COUNT = 4, 8, 8  # float32, int64, int64
CODERS = {"a": 2 * (16 * 12 + 12 * 6), "b": 2 * (24 * 10 + 10 * 6)}
"""Multiply-adds, times two, of an encoder for one row; the weights and biases are a half and the biases more."""
WEIGHTS = {"a": 16 * 12 + 12 + 12 * 6 + 6, "b": 24 * 10 + 10 + 10 * 6 + 6}


CUT = ("centralized", "split-learning", "splitfed")
"""Methods whose clients do not train, or on given batches; for these, a clock by hand is below."""


HEADS = 2 * 6 * 4
"""The same of a modality's part of the head: four classes from an embedding of six."""


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize(
    ("method", "whole", "encoders"),
    [
        (algorithm("fedavg"), 3, 0),
        (algorithm("fedprox", mu=0.1), 3, 0),
        (algorithm("moon", projection=0), 3, 2),  # the received and the previous model give features
        (algorithm("apfl"), 6, 0),  # the global model and the mixture are trained
        (algorithm("pfedme", lam=5.0, inner_steps=1), 4, 0),
        (algorithm("pfedme", lam=5.0, inner_steps=4), 13, 0),  # four inner steps, and the loss of what they give
    ],
    ids=["fedavg", "fedprox", "moon", "apfl", "pfedme 1", "pfedme 4"],
)
def test_a_step_costs_every_model_that_it_computes(method: Algorithm, whole: int, encoders: int, engine: str) -> None:
    made = replace(method, selector=Uniform(participation=1.0))
    population = assemble(recipe(made)).population
    (found,) = spent(made, engine).values()
    for client, flops in found.items():
        owned = population.modalities(client)
        a_row = sum(whole * (CODERS[m] + HEADS) + encoders * CODERS[m] for m in owned)
        assert flops == 2 * len(population.train[client]) * a_row  # two epochs


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CUT])
def test_every_method_declares_what_its_loss_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of the model in the loss, by hand: three passes if a gradient flows back through it, else one."""
    counted: list[tuple[float, float]] = []
    minimise, features, over = MeteredClientData.minimise, Model._features, Model._over
    spent: list[float] = []

    def seen(self: Model, batch: Any) -> Any:
        found = features(self, batch)
        if batch.key is None and len(batch.rows) == 1:  # the model counts its own operations
            return found
        for m, z in found.items():
            spent.append((3 if z.requires_grad else 1) * (self.flops(m) - self.part_flops(m)))
        return found

    def fused(self: Model, call: Any, z: Any, batch: Any) -> Any:
        logits = found = over(self, call, z, batch)
        logits = logits["logits"] if isinstance(logits, dict) else logits
        if batch.key is None and len(batch.rows) == 1:
            return logits
        flops = self.flops("shared") + sum(self.part_flops(m) for m in z)
        spent.append((3 if logits.requires_grad else 1) * flops)
        return found

    def watched(self: MeteredClientData, loss: Any, params: Tree, **options: Any) -> Any:
        rows: list[float] = []
        count, self._count = self._count, lambda row, of: rows.append(row)

        def once(w: Tree, batch: Any) -> Any:
            spent.clear()
            found = loss(w, batch)
            steps.append(sum(spent))
            return found

        steps: list[float] = []
        try:
            return minimise(self, once, params, **options)
        finally:
            self._count = count
            if rows and steps:
                counted.append((rows[0], steps[0]))

    made = law_world(name, "sequential")
    net = Network(channel="fixed", compute_flops_per_s=1e3)
    monkeypatch.setattr(Model, "_features", seen)
    monkeypatch.setattr(Model, "_over", fused)
    monkeypatch.setattr(MeteredClientData, "minimise", watched)
    played(replace(made, network=net, rounds=2))
    assert counted
    assert [declared for declared, _ in counted] == pytest.approx([computed for _, computed in counted], rel=1e-9)


def of_a_cut_client(rows: int, owned: str, net: Network) -> list[float]:
    """Seconds of each message pair of a client whose model is cut: the half, the steps of two epochs, the half."""
    sizes = [min(16, rows - start) for _ in range(2) for start in range(0, rows, 16)]
    half = sum(BYTES * WEIGHTS[m] for m in owned)
    up = [n * (BYTES * 6 * len(owned) + LABEL) + COUNT for n in sizes] + [half]
    down = [half] + [n * BYTES * 6 * len(owned) + 2 * COUNT for n in sizes]
    work = [0] + [3 * n * sum(CODERS[m] for m in owned) for n in sizes]  # forward, and twice as much backward
    links = zip(down, work, up, strict=True)
    return [
        2 * net.latency_s + 8 * d / net.rate_down_bps + w / net.compute_flops_per_s + 8 * u / net.rate_up_bps
        for d, w, u in links
    ]


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ["split-learning", "splitfed 1", "splitfed 2"])
def test_the_time_of_cut_models_equals_a_clock_by_hand(name: str, engine: str) -> None:
    net = Network(channel="fixed", rate_up_bps=1e6, rate_down_bps=2e6, latency_s=0.01, compute_flops_per_s=1e7)
    method, _, version = name.partition(" ")
    options: dict[str, Any] = {"version": int(version)} if version else {}
    made = recipe(algorithm(method, selector=Uniform(participation=1.0), **options), engine)
    cut = {"server": ["parameters", "embeddings"]}
    egress = {"a": cut, "b": cut, "labels": {"server": ["labels"]}, "shared": {"server": ["parameters", "statistic"]}}
    done = run(replace(made, network=net, egress=egress, rounds=1))
    population = assemble(replace(made, egress=egress)).population
    of = [
        of_a_cut_client(len(population.train[k]), "".join(population.modalities(k)), net)
        for k in range(population.num_clients)
    ]
    if name == "split-learning":
        seconds = sum(map(sum, of))
    elif name == "splitfed 1":
        seconds = max(map(sum, of))
    else:  # each step waits for its slowest client, and so does the end
        steps = max(map(len, of)) - 1
        seconds = sum(max(one[step] for one in of if step < len(one) - 1) for step in range(steps))
        seconds += max(one[-1] for one in of)
    assert done.rounds[0]["simulated_seconds"] == pytest.approx(seconds, rel=1e-9)
