"""`[engine] combine = "nodes"`: replies are summed where their clients ran, and nothing else changes."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_work import alone, played

import polyfed
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import Averaging
from polyfed.algorithms.averaging.scaffold import Scaffold
from polyfed.algorithms.averaging.template import Update
from polyfed.core.errors import RecipeError
from polyfed.core.tree import size_bytes
from polyfed.data import ClientsSpec
from polyfed.engines.workers.pool import BUNDLES, subtrees
from polyfed.experiment.recipes.recipe import EngineSpec, Recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.combined import Combined, CombinedReplies, Combining, halves, summed
from polyfed.federation.replies import Replies, ReplyStack
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, furthest, recipe, same, through

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="worker processes need Linux"),
    pytest.mark.usefixtures("everything_is_worth_sharing"),
]

ALONE = [
    "centralized",
    "creamfl",
    "fedamp",
    "fedbuff",
    "fedfomo",
    "fedgkt",
    "fedmchain",
    "fedmsplit",
    "fedproto",
    "hfm",
    "local",
    "partialfl",
    "pepsy",
    "pfmml",
    "pmcmfl",
    "split-learning",
    "splitfed",
    "vfl",
]
"""Methods whose server reads more than sums."""


def combining(made: Recipe, workers: int = 1, **options: Any) -> Recipe:
    return replace(made, engine=EngineSpec(name=made.engine.name, workers=workers, combine="nodes", **options))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_method_gives_the_same_result_up_to_rounding_or_is_refused(name: str) -> None:
    made = replace(world(name, "sequential", AWKWARD), rounds=2)
    if name in ALONE:
        with refuses(RecipeError, "engine.combine: with [algorithm] name"):
            combining(made)
        return
    other = combining(made)
    one, state, ledger = played(alone(made))
    parts, again, rows = played(other)
    assert rows == ledger
    assert parts.engine.locals.keys() == one.engine.locals.keys()
    assert furthest(state.params, again.params) < 1e-5
    assert again.train_loss == pytest.approx(state.train_loss, rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("scaffold", "sequential"), ("fedavg", "vectorised")])
def test_the_number_of_workers_changes_no_bit_of_a_sum(name: str, kind: str) -> None:
    made = replace(world(name, kind, AWKWARD), rounds=2)
    one, state, ledger = played(combining(made))
    for num in (2, 3):
        parts, again, rows = played(combining(made, num))
        assert parts.engine.pool.returned > 0
        assert rows == ledger
        assert all(same(tree, one.engine.locals[client]) for client, tree in parts.engine.locals.items())
        assert same(again.params, state.params)
        assert again.train_loss == state.train_loss


def crowd(clients: int) -> Recipe:
    made = recipe(algorithm("fedavg", selector=Uniform()), "sequential", rounds=1)
    return replace(made, clients=ClientsSpec(partition="iid", num=clients), data=replace(made.data, rows=40 * clients))


def test_what_travels_does_not_grow_with_the_clients() -> None:
    sent = {}
    for clients in (24, 96):
        made = crowd(clients)
        parts, state, _ = played(combining(made, 2))
        sent[clients] = parts.engine.pool.received / (2 * size_bytes(state.params))  # sums are float64
    assert sent[24] == sent[96] <= 2 * BUNDLES


def test_subtrees_cover_the_units_once_and_their_sum_has_the_bits_of_the_whole() -> None:
    units = [[number] for number in range(37)]
    work = {number: 1.0 + number % 5 for number in range(37)}
    values = {
        number: torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) for number in work
    }

    def leaf(span: tuple[int, int]) -> Combined | None:
        place, end = span
        return None if end - place > 1 else Combined({place: ()}, sums={("params", "w"): values[place].clone()})

    whole = summed((0, 37), leaf)
    for most in (1, 2, 3, 8, 64):
        spans = subtrees(units, work, most)
        assert sorted(place for a, b in spans for place in range(a, b)) == list(range(37))
        parts = {span: summed(span, leaf) for span in spans}
        assert torch.equal(summed((0, 37), parts.get).sums["params", "w"], whole.sums["params", "w"])
    with pytest.raises(AssertionError):
        whole.plus(Combined({3: ()}))
    assert halves((0, 3)) == ((0, 1), (1, 3))


@pytest.mark.parametrize("stacked", [1, 7, 50])
def test_a_sum_differs_from_the_servers_mean_by_the_rounding_of_a_float32_sum(stacked: int) -> None:
    parts = assemble(replace(crowd(50), model=replace(crowd(50).model, encoders=AWKWARD)))
    engine: Any = parts.engine
    draw = torch.Generator().manual_seed(3)
    params = {
        name: torch.randn(50, *value.shape, generator=draw) * 10.0 ** torch.randint(-3, 3, (50,) + (1,) * value.dim())
        if value.is_floating_point()
        else torch.randint(0, 9, (50, *value.shape), generator=draw)
        for name, value in parts.initial.items()
    }
    params = {name: value.abs() if name.endswith("var") else value for name, value in params.items()}  # a variance
    rows = torch.tensor([engine.registry.rows_of([client])[client] for client in range(50)])
    stacks = [
        ReplyStack(tuple(own), Update({n: v[own] for n, v in params.items()}, rows[own].float(), rows[own]))
        for start in range(0, 50, stacked)
        for own in [list(range(start, min(50, start + stacked)))]
    ]
    how = Combining.of(Update, parts.recipe.algorithm, parts.initial, compared=False)
    assert how is not None
    units = [list(stack.clients) for stack in stacks]
    total = how.total(engine, Update, units, stacks, Update({}, rows, rows))
    replies = CombinedReplies.of(total, how, parts.initial, engine.registry, {})
    weights = engine.registry.rows_of(range(50))
    mean, usual = replies.mean("params", weights), Replies(stacks).mean("params", weights)
    share = rows.double() / rows.sum()
    for name, value in params.items():
        if not value.is_floating_point():
            assert torch.equal(mean[name], value.amax(0))
            continue
        terms = value.double() * share.view(-1, *(1 for _ in value.shape[1:]))
        exact, size = terms.sum(0), terms.abs().sum(0)
        assert bool(((mean[name] - exact).abs() <= 2**-24 * exact.abs() + 2**-45 * size).all()), "the nearest float32"
        assert bool(((mean[name] - usual[name]).abs() <= 52 * 2**-24 * size).all())
    assert replies.mean_number("loss", weights) == Replies(stacks).mean_number("loss", weights)
    with refuses(RecipeError, "combine = 'nodes'"):
        replies[3]
    with refuses(RecipeError, "combine = 'nodes'"):
        replies.mean("params", {client: 1.0 + client for client in range(50)})


@dataclass(frozen=True, kw_only=True)
class Faulty(Scaffold):
    """SCAFFOLD in whose second round the client with so many rows does what a test asks for."""

    rows: int = 0
    fault: str = ""
    file: str = ""
    deaths: int = 0

    def reply(self, context: Any, data: Any, fit: Any, got: Any, local: Any) -> Any:
        answer, local = super().reply(context, data, fit, got, local)
        if int(data.num_rows) != self.rows or data.round != 2:
            return answer, local
        if self.deaths and (died := Path(self.file).read_text().count("died")) < self.deaths:
            Path(self.file).write_text("died " * (died + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        factor = {"": 1.0, "nan": float("nan"), "large": 1e6}[self.fault]
        return replace(answer, params={name: value * factor for name, value in answer.params.items()}), local


def faulty(kind: str = "sequential", **options: Any) -> Recipe:
    made = recipe(algorithm("scaffold", selector=Uniform()), kind, rounds=3)
    rows = assemble(made).fed.clients.num_rows
    assert (rows == rows[2]).sum() == 1
    train = Train(lr=0.1, batch_size=16)
    return replace(made, algorithm=Faulty(train=train, rows=int(rows[2]), selector=Uniform(), **options))


def run(made: Recipe) -> tuple[Any, list[str]]:
    notes: list[str] = []
    ran = polyfed.run(made, listeners=[lambda event, **facts: notes.append(facts["text"]) if event == "note" else None])
    return ran, notes


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_costs_a_repeat_and_no_client_counts_twice(deaths: int, tmp_path: Path) -> None:
    whole, _ = run(combining(faulty()))
    (tmp_path / "deaths").write_text("")
    again, notes = run(combining(faulty(file=str(tmp_path / "deaths"), deaths=deaths), 2))
    assert any("SIGKILL" in note for note in notes)
    if deaths == 1:
        assert again.result["state_sha256"] == whole.result["state_sha256"]
        return
    assert "SIGKILL, 2 times" in again.rounds[1]["missing"]["2"]
    assert again.rounds[2]["missing"] == {}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("fault", "reason"), [("nan", "is not finite"), ("large", "is too large")])
def test_a_bad_reply_is_left_out_for_the_same_reason(fault: str, reason: str, workers: int) -> None:
    made = faulty(fault=fault)
    usual, _ = run(alone(made))
    ran, notes = run(combining(made, workers))
    assert ran.rounds[1]["missing"].keys() == {"2"}
    assert reason in ran.rounds[1]["missing"]["2"]
    assert [row["missing"] for row in ran.rounds] == [row["missing"] for row in usual.rounds]
    assert any("far larger" in note for note in notes) == (fault == "large")


def test_a_request_that_runs_again_leaves_states_and_ledger_as_if_it_had_run_once() -> None:
    made = faulty(fault="large")
    one, state, ledger = played(alone(made))
    for workers in (1, 2):
        parts, again, rows = played(combining(made, workers))
        assert rows == ledger
        assert furthest(state.params, again.params) < 1e-5
        for client, tree in one.engine.locals.items():
            assert furthest(tree, parts.engine.locals[client]) < 1e-4


def test_replies_of_which_the_server_reads_more_than_the_sum_are_named() -> None:
    parts = assemble(combining(replace(world("mfedmc"), rounds=1)))
    notes: list[str] = []
    parts.fed.emit = lambda name, **facts: notes.append(facts["text"]) if name == "note" else None
    through(parts, 1)
    assert any("replies to send travel one by one" in note for note in notes)


def test_check_rehearses_a_recipe_that_combines() -> None:
    assert polyfed.check(combining(recipe(algorithm("scaffold")))).exit_code == 0


@dataclass(frozen=True, kw_only=True)
class Reading(Averaging):
    """Reads a single reply, and does not say so."""

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        assert replies[0].params
        return super().merge(state, replies, fed)


def test_a_method_that_reads_a_single_reply_is_refused() -> None:
    made = recipe(algorithm("fedavg", selector=Uniform()))
    with refuses(RecipeError, "combine = 'nodes'"):
        run(combining(replace(made, algorithm=Reading(train=made.algorithm.train))))
