"""FedBuff: its oracle, equality with FedAvg where nobody is late, order of arrival, resume, and what it refuses."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from algorithms.test_blockwise import NORMED, federation, plainly
from experiment.test_resume import files, stopped
from oracles import fedbuff as oracle
from polyfed.algorithms.averaging.buffered import MODEL, Buffered
from polyfed.algorithms.averaging.fedbuff import FedBuff
from polyfed.core.errors import RecipeError, TooFewReplies
from polyfed.core.tree import SHARED, squared_distance
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import CheckpointSpec, EngineSpec
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.links.network import Network
from polyfed.federation.open_work import OpenWork, first_to_arrive
from polyfed.federation.replies import Replies
from polyfed.selection import DivFl, Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import algorithm, losing, played, recipe, same, through

ENGINES = ["sequential", "vectorised"]
SLOW = Network(channel="fixed", rate_up_bps=1e5, rate_down_bps=1e6, compute_flops_per_s=1e6, stragglers=0.4)
"""Two of the six clients compute ten times as slowly; a round of the others takes about a second."""


def made(engine: str = "sequential", net: Network | None = SLOW, encoders: Any = None, **options: Any) -> Recipe:
    options = {"train": Train(lr=0.1, batch_size=16, epochs=2), "buffer": 2} | options
    return replace(recipe(algorithm("fedbuff", **options), engine, encoders, network=net), rounds=6)


OTHER = {"buffer": 2, "exponent": 1.0, "server": ServerOptimiser(lr=0.7)}


@pytest.mark.parametrize(
    ("engine", "encoders", "options"),
    [
        ("sequential", None, {"buffer": 1}),
        ("vectorised", NORMED, {"buffer": 1}),
        ("sequential", NORMED, OTHER),
        ("vectorised", None, OTHER),
    ],
    ids=["one", "one-stacked-batchnorm", "two-batchnorm", "two-stacked"],
)
def test_it_equals_the_oracle(engine: str, encoders: Any, options: dict[str, Any]) -> None:
    parts = assemble(made(engine, encoders=encoders, **options))
    first, states = plainly(parts.initial), [parts.start()]
    buffers, began = [], []
    for round in range(1, 7):
        parts.fed.begin(round)
        states.append(parts.algorithm.round(states[-1], parts.fed))
        waiting = {work.client: work for work in states[-2].open}
        new = {row["client"] for row in parts.ledger.rows() if row["round"] == round}
        began.append(sorted(new))
        left = {work.client for work in states[-1].open}
        buffers.append(sorted((waiting.keys() | new) - left))
    fed = federation(parts, list(parts.ledger.rows()))
    fed.cohorts = began
    times = seconds_of(parts)
    rate, exponent = options.get("server", ServerOptimiser()).lr, options.get("exponent", 0.5)
    w, told, ends = oracle.fedbuff(fed, first, options["buffer"], times.__getitem__, rate, exponent)
    assert [[k for k, *_ in one] for one in told] == buffers
    assert [state.now_s for state in states[1:]] == pytest.approx(ends)
    torch.testing.assert_close(plainly(states[-1].params), w, rtol=1e-6, atol=1e-6)
    late = [taus for one in told for _, _, taus in one if max(taus.values())]
    assert len(late) >= 2, "replies of older models were used"
    if options["buffer"] == 1:
        assert any(len(set(taus.values())) > 1 for taus in late), "and their blocks differ in age"


def seconds_of(parts: Any) -> dict[int, float]:
    """How long each client works, from its bytes, its rows and the layers of its model."""
    net, links, clients = SLOW, parts.fed.clock.links, parts.fed.clients
    sent = {row["client"]: 0 for row in parts.ledger.rows()}
    down, up = dict(sent), dict(sent)
    for row in parts.ledger.rows():
        if row["round"] == min(one["round"] for one in parts.ledger.rows() if one["client"] == row["client"]):
            way = down if row["destination"] == "client" else up
            way[row["client"]] += row["bytes"]
    found = {}
    for k in sent:
        params = plainly(parts.initial)
        layers = sum(2 * v.numel() for n, v in params.items() if n.split(".")[0] in clients.owned(k) and v.dim() == 2)
        work = 3 * layers * 2 * int(clients.num_rows[k]) / float(links.compute_flops_per_s[k])
        found[k] = 8 * down[k] / net.rate_down_bps + 8 * up[k] / net.rate_up_bps + work
    return found


@pytest.mark.parametrize(("engine", "encoders"), [("sequential", NORMED), ("vectorised", None)])
def test_it_equals_fedavg_bit_for_bit_if_nobody_is_late_and_the_buffer_is_the_cohort(
    engine: str, encoders: Any
) -> None:
    full = replace(made(engine, encoders=encoders, buffer=1.0), rounds=3)
    plain = replace(full, algorithm=algorithm("fedavg", train=full.algorithm.train))  # type: ignore[attr-defined]
    (_, a, sent), (_, b, also) = played(full), played(plain)
    assert same(a.params, b.params)
    assert a.train_loss == b.train_loss
    assert sent == also
    assert same(played(replace(full, network=None))[1].params, a.params)


def test_a_run_has_the_same_rows_as_fedavg(tmp_path: Path) -> None:
    full = made(buffer=4)
    one = polyfed.run(full, tmp_path / "one")
    two = polyfed.run(replace(full, algorithm=algorithm("fedavg", train=full.algorithm.train)), tmp_path / "two")  # type: ignore[attr-defined]
    for key in ("train_loss", "bytes_up", "bytes_down", "cohort"):
        assert [row[key] for row in one.rounds] == [row[key] for row in two.rounds]
    seconds = [row["simulated_seconds"] for row in two.rounds]
    assert [row["simulated_seconds"] for row in one.rounds] == pytest.approx(seconds)
    assert "pending" not in one.rounds[-1]
    assert any("no reply came late" in text for text in one.result["concerns"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_run_goes_on_bit_for_bit_with_the_work_of_its_clients(engine: Any, tmp_path: Path) -> None:
    spec = replace(made(engine), checkpoint=CheckpointSpec(every=2))
    whole = polyfed.run(spec, tmp_path / "whole")
    assert whole.rounds[2]["pending"], "somebody worked while the third buffer was full"
    stopped(tmp_path / "cut", 5, spec)
    polyfed.run(spec, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_workers_and_engines_take_the_same_clients_into_each_buffer(tmp_path: Path) -> None:
    runs = {
        "one": polyfed.run(made(), tmp_path / "one"),
        "two": polyfed.run(replace(made(), engine=EngineSpec(name="sequential", workers=2)), tmp_path / "two"),
        "many": polyfed.run(made("vectorised"), tmp_path / "many"),
    }
    told = [[(row["cohort"], row["pending"], row["simulated_seconds"]) for row in run.rounds] for run in runs.values()]
    assert told[0] == told[1] == told[2]
    assert runs["one"].result["state_sha256"] == runs["two"].result["state_sha256"]


def work(client: int, arrives_s: float, round: int = 1) -> OpenWork:
    return OpenWork(client, round, 0, {}, arrives_s, None)


def test_who_arrives_first_is_taken_first_and_older_requests_before_newer_ones() -> None:
    works = [work(0, 3.0), work(1, 1.0), work(2, 2.0, 2), work(3, 2.0, 1), work(4, 9.0)]

    def taken(enough: int, **more: Any) -> tuple[list[int], float]:
        held = [replace(one, reply=reply(one.client)) for one in works]
        found = first_to_arrive(Replies([]), held, enough, **more)
        assert {*found.works} | {one.client for one in found.open} == {0, 1, 2, 3, 4}
        assert list(found.replies) == sorted(found.works)
        return sorted(found.works), found.now_s

    assert taken(1) == ([1], 1.0)
    assert taken(2) == ([1, 3], 2.0)
    assert taken(3) == ([1, 2, 3], 2.0)
    assert taken(5) == ([0, 1, 2, 3, 4], 9.0)
    assert taken(5, interval_s=2.5) == ([1, 2, 3], 2.5), "the deadline closes a buffer that is not full"
    assert taken(5, interval_s=0.5) == ([1], 1.0), "but one reply is waited for"
    assert taken(5, least=4, interval_s=0.5) == ([0, 1, 2, 3], 3.0)
    assert taken(2, interval_s=5.0, now_s=1.5) == ([1, 3], 2.0)


def reply(client: int) -> Any:
    from polyfed.algorithms.averaging import Update

    return Update({"shared.w": torch.full((2,), float(client))}, torch.tensor(1.0), torch.tensor(20))


def test_a_deadline_closes_a_round_and_late_replies_enter_the_next(tmp_path: Path) -> None:
    run = polyfed.run(made(buffer=1.0, interval_s=3.0), tmp_path / "run")
    waits = polyfed.run(made(buffer=1.0), tmp_path / "waits")
    assert run.result["simulated_seconds"] < waits.result["simulated_seconds"]
    assert all(row["simulated_seconds"] == pytest.approx(3.0) for row in run.rounds if "pending" in row)
    assert max(value for row in run.rounds for name, value in row["logged"].items() if "staleness" in name) > 0


def test_a_block_ages_only_if_it_changes() -> None:
    """One reply for each buffer: only the blocks of its client change."""
    parts = assemble(made(net=None, buffer=1))
    owned = {k: parts.fed.clients.owned(k) for k in range(6)}
    state, changes = parts.start(), dict.fromkeys((MODEL, SHARED, "a", "b"), 0)
    for round in range(1, 7):
        parts.fed.begin(round)
        before = state
        state = parts.algorithm.round(state, parts.fed)
        new = {row["client"] for row in parts.ledger.rows() if row["round"] == round}
        (client,) = ({one.client for one in before.open} | new) - {one.client for one in state.open}
        for name, value in state.params.items():
            block = name.split(".")[0]
            assert same({name: value}, {name: before.params[name]}) == (block not in (SHARED, *owned[client]))
        for block in (MODEL, SHARED, *owned[client]):
            changes[block] += 1
        assert state.changes == changes
    assert min(changes["a"], changes["b"]) < changes[SHARED] == changes[MODEL] == 6


@pytest.mark.parametrize("options", [{"staleness": "model"}, {"placebo": "shuffled"}, {"exponent": 0.0}], ids=str)
def test_controls_change_the_run(options: dict[str, Any]) -> None:
    spec = made(buffer=3) if options.get("placebo") else made(buffer=1)
    changed = replace(spec, algorithm=replace(spec.algorithm, **options))
    assert not same(through(assemble(spec), 6).params, through(assemble(changed), 6).params)


@dataclass(frozen=True, kw_only=True)
class Pulled(Buffered):
    """A method of one's own on the template: a proximal term."""

    mu: float = 1.0

    def loss(self, context: Any, w: Any, batch: Any, got: Any, local: Any) -> Any:
        return super().loss(context, w, batch, got, local) + self.mu / 2 * squared_distance(
            context.model.trainable(w), got.params
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_other_methods_use_the_template(engine: str) -> None:
    shared = {"train": Train(lr=0.1, batch_size=16, epochs=2), "selector": Uniform(participation=4)}
    spec = made(engine)
    spec = replace(spec, algorithm=Pulled(buffer=4, **shared))
    prox = replace(spec, algorithm=algorithm("fedprox", mu=1.0, **shared))
    assert same(through(assemble(spec), 3).params, through(assemble(prox), 3).params)
    late = replace(spec, algorithm=Pulled(buffer=2, **shared))
    assert not same(through(assemble(late), 3).params, through(assemble(made(engine)), 3).params)


def test_private_blocks_stay_with_clients_that_come_late() -> None:
    spec = made(private=("b",))
    parts, _, ledger = played(spec)
    assert not [row for row in ledger if row["block"] == "b"]
    assert any(name.startswith("@private") for tree in parts.engine.locals.values() for name in tree)


def test_a_client_that_fails_is_replaced_and_too_few_replies_end_the_run() -> None:
    parts = assemble(made())
    lost = losing(parts, "update", 0, 1)
    state = through(parts, 6)
    assert lost
    assert {0, 1}.isdisjoint(one.client for one in state.open)
    parts = assemble(replace(made(), engine=EngineSpec(name="sequential", min_replies=2)))
    losing(parts, "update", 0, 1, 2, 3, 4, 5)
    with refuses(TooFewReplies, "answered"):
        through(parts, 1)


def test_its_state_is_read_back(tmp_path: Path) -> None:
    parts = assemble(made())
    state = through(parts, 3)
    checkpoint.save(tmp_path, 3, {"state": state}, checkpoint.modules_of(parts.algorithm))
    loaded = checkpoint.load(tmp_path, checkpoint.modules_of(parts.algorithm))
    assert loaded is not None
    assert checkpoint.digest(loaded[1]["state"]) == checkpoint.digest(state)
    assert parts.algorithm.settled(state, 3) == min(one.round for one in state.open) - 1


def test_faults_of_its_options() -> None:
    for buffer in (0, 1.5, -1, 0.0):
        with refuses(RecipeError, "algorithm.buffer: fraction"):
            FedBuff(buffer=buffer)
    with refuses(RecipeError, "algorithm.buffer: full"):
        made(buffer=5)
    half = replace(made(), algorithm=algorithm("fedbuff", buffer=5, selector=Uniform(participation=0.5)))
    with refuses(RecipeError, "algorithm.buffer: full"):
        assemble(half).start()
    with refuses(RecipeError, "selection.name: uniformly"):
        made(selector=DivFl(participation=3))
    with refuses(RecipeError, "network.deadline_s: interval_s"):
        made(net=replace(SLOW, deadline_s=3.0))
